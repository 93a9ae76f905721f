"""Conversion to and from torch's DTensor, its checkpoints, and its state-dict functions.

torch's DTensor is imported when one of these is first called.

Note [Trusted input]
torch.distributed.checkpoint keeps its metadata in a pickle, and loading a pickle can run arbitrary
code. So loading such a checkpoint needs `trusted=True`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch.c10d import strided_shard
from shardwise._torch.functions import tree_map
from shardwise.comm.watch import implicit_replication
from shardwise.core.layout import Layout, make_layout, normalize
from shardwise.core.mesh import Grid, grid_of
from shardwise.core.placements import (
    NormPartial,
    Partial,
    Placement,
    Replicate,
    Shard,
    plain,
    short,
)
from shardwise.core.world import current_world
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, UnsupportedError
from shardwise.simulation.local_tensor import resolved
from shardwise.simulation.ranks import is_per_rank, plain_if_equal, plays_all

__all__ = [
    "from_torch",
    "load_torch_checkpoint",
    "save_torch_checkpoint",
    "state_dict_from_torch",
    "state_dict_to_torch",
    "to_torch",
]


def to_torch(tensor: DTensor) -> Any:
    """The same tensor as torch's DTensor; both share their memory."""
    from torch.distributed.tensor import DTensor as TorchDTensor

    layout, local = tensor._layout, tensor.detach()._local  # type: ignore[attr-defined]
    placements = _placements_to_torch(layout)
    if is_per_rank(local):
        raise UnsupportedError(
            "A tensor of a simulated world holds the shards of all ranks, torch's DTensor one. "
            "Convert in real processes, or convert full_tensor()."
        )
    made = TorchDTensor.from_local(
        local,
        layout.grid.mesh,
        placements,
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=layout.stride,
    )
    return made.requires_grad_(tensor.requires_grad)


def from_torch(tensor: Any) -> DTensor:
    """The same tensor as a DTensor of shardwise; both share their memory.

    A lazy conjugate or negative is computed, and shares nothing.
    """
    from torch.distributed.tensor import DTensor as TorchDTensor

    if not isinstance(tensor, TorchDTensor):
        raise ArgumentError(f"from_torch() takes torch's DTensor, found {type(tensor).__name__}.")
    grid = grid_of(tensor.device_mesh)
    detached: Any = tensor.detach()
    local: Any = detached.to_local()
    if not isinstance(local, torch.Tensor):
        raise UnsupportedError(f"The local part is a {type(local).__name__}, not a tensor.")
    placements, order = _placements_from_torch(tensor.placements, grid)
    normal = normalize(placements, tuple(tensor.shape), grid, order)
    layout = make_layout(
        grid, normal, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, order
    )
    return DTensor._wrap(resolved(local), layout).requires_grad_(tensor.requires_grad)


def state_dict_to_torch(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with torch's DTensors in place of ours, at any depth; nothing is copied."""
    return _mapped(state, lambda v: to_torch(v) if isinstance(v, DTensor) else v)


def state_dict_from_torch(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of a model of torch's DTensors, such as FSDP2's, with ours in their place."""
    from torch.distributed.tensor import DTensor as TorchDTensor

    return _mapped(state, lambda v: from_torch(v) if isinstance(v, TorchDTensor) else v)


def save_torch_checkpoint(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state dict as a torch.distributed.checkpoint. Call it on all ranks."""
    checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
    with _without_the_warning_of_one_process():
        checkpoint.save(dict(state), checkpoint_id=str(path), no_dist=is_alone())


def load_torch_checkpoint(
    state: dict[str, Any], path: str | os.PathLike[str], *, trusted: bool = False
) -> None:
    """Load a torch.distributed.checkpoint into a state dict, in place. Call it on all ranks.

    The tensors in `state` give the layouts to load into. See Note [Trusted input].
    """
    if not trusted:
        raise ArgumentError(
            f"{path} is a checkpoint with a pickle in it, and reading that can run code. Pass "
            "trusted=True if you know who wrote it."
        )
    checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
    with _without_the_warning_of_one_process():
        checkpoint.load(state, checkpoint_id=str(path), no_dist=is_alone())


def is_alone() -> bool:
    """Whether all ranks are in this process: it simulates them, or is the only rank."""
    return not dist.is_initialized() or len(current_world().present) == dist.get_world_size()


@contextlib.contextmanager
def _without_the_warning_of_one_process() -> Iterator[None]:
    """torch warns when `no_dist` is set."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


# -- placements ------------------------------------------------------------------------------


def _placements_to_torch(layout: Layout) -> list[Any]:
    from torch.distributed import tensor as theirs

    made: list[Any] = []
    for axis, placement in enumerate(map(plain, layout.placements)):
        if isinstance(placement, NormPartial):
            raise UnsupportedError(
                f"{short(layout.placements)} has norms of shards, which torch's DTensor cannot "
                "reduce: redistribute() to Replicate() first."
            )
        if isinstance(placement, Partial):
            made.append(theirs.Partial(placement.reduce_op))
        elif not isinstance(placement, Shard):
            made.append(theirs.Replicate())
        elif placement.sizes is not None:
            raise UnsupportedError(
                f"{short(layout.placements)} has explicit sizes, which torch's DTensor does not "
                f"know: redistribute() to Shard({placement.dim}) first."
            )
        else:
            # torch applies placements from the left; an axis that splits what later axes have
            # already split is strided by their product.
            order = layout.axes_of(placement.dim)
            before = order[: order.index(axis)]
            factor = math.prod(layout.grid.shape[a] for a in before if a > axis)
            strided = strided_shard()(placement.dim, split_factor=factor)
            made.append(strided if factor > 1 else theirs.Shard(placement.dim))
    return made


def _placements_from_torch(
    placements: Sequence[Any], grid: Grid
) -> tuple[list[Placement], tuple[int, ...]]:
    from torch.distributed import tensor as theirs

    found: list[Placement] = []
    order = list(range(len(placements)))
    for axis, placement in enumerate(placements):
        # Checked first: in some versions torch's strided shard is a Shard.
        if isinstance(placement, strided_shard()):
            found.append(Shard(placement.dim))
            later = _later_axes_before(placement, axis, placements, grid)
            if later:
                order.remove(axis)
                order.insert(order.index(max(later, key=order.index)) + 1, axis)
        elif isinstance(placement, theirs.Shard):
            found.append(Shard(placement.dim))
        elif isinstance(placement, theirs.Replicate):
            found.append(Replicate())
        elif type(placement) is theirs.Partial:
            found.append(Partial(placement.reduce_op))
        else:
            raise UnsupportedError(f"{placement!r} has no counterpart here.")
    return found, tuple(order)


def _later_axes_before(
    placement: Any, axis: int, placements: Sequence[Any], grid: Grid
) -> list[int]:
    """The axes to the right of a strided shard that split its dim before it."""
    dim, factor = placement.dim, int(placement.split_factor)
    later = [
        a
        for a in range(axis + 1, len(placements))
        if getattr(placements[a], "dim", None) == dim and grid.shape[a] > 1
    ]
    if factor == 1:
        return []
    if factor != math.prod(grid.shape[a] for a in later):
        raise UnsupportedError(
            f"{placement!r} on axis {axis} says that dim {dim} was split {factor} times before; "
            f"the later axes split it {math.prod(grid.shape[a] for a in later)} times."
        )
    return later


# -- state dicts ---------------------------------------------------------------------------------
# torch's `get_model_state_dict` and its relatives, on our DTensors.
#
# They gather and lay out tensors by three functions that know only torch's own DTensor. When torch
# imports them, functions here wrap them, handle our DTensors and pass the rest on.


def install(module: ModuleType) -> None:
    """Put our functions before those of `torch.distributed.checkpoint.state_dict`."""
    ours: dict[str, Callable[..., Any]] = {
        "_gather_state_dict": _gather,
        "_distribute_state_dict": _distribute,
        "_broadcast_state_dict": _broadcast,
    }
    for name, function in ours.items():
        theirs = getattr(module, name, None)
        if theirs is not None and not isinstance(theirs, functools.partial):
            setattr(module, name, functools.partial(function, theirs))


@torch.no_grad()
def _gather(theirs: Callable[..., Any], state: Any, **options: Any) -> Any:
    """`full_state_dict`: whole tensors, on all ranks or on some."""
    ranks = options.get("ranks_only") or ()
    is_kept = not ranks or dist.get_rank(options.get("pg")) in ranks

    def whole(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        # One after the other: only what is kept is ever whole on a device.
        full: Any = plain_if_equal(x.full_tensor())
        if not is_kept:
            return full.new_empty(0)
        return full.cpu() if options.get("cpu_offload") else full

    return theirs(tree_map(whole, state), **options)


@torch.no_grad()
def _distribute(
    theirs: Callable[..., Any],
    full: Mapping[str, Any],
    local: dict[str, Any],
    device: torch.device,
    pg: Any = None,
) -> None:
    """Replace each tensor of `local` by the shards of the whole one that all ranks have."""
    rest = {}
    for name, value in full.items():
        if isinstance(local.get(name), DTensor):
            local[name] = _laid_out(value, local[name], device)
        else:
            rest[name] = value
    theirs(rest, local, device, pg)


@dataclass(frozen=True)
class _Tensor:
    """A tensor that rank 0 is about to send."""

    shape: torch.Size
    dtype: torch.dtype


@torch.no_grad()
def _broadcast(
    theirs: Callable[..., Any],
    full: Mapping[str, Any],
    local: dict[str, Any],
    device: torch.device,
    pg: Any = None,
    strict: bool = False,
    cpu_offload: bool = False,
) -> None:
    """Replace each value of `local` by rank 0's: of a tensor, each rank keeps its shards."""
    ours = next((x for x in local.values() if isinstance(x, DTensor)), None)
    if ours is None:
        theirs(full, local, device, pg, strict, cpu_offload)
        return
    is_alone = plays_all(ours._layout.grid)  # one process has all ranks' values
    sends = is_alone or dist.get_rank() == 0
    content: list[Any] = [{name: _described(x) for name, x in full.items()} if sends else None]
    if not is_alone:
        dist.broadcast_object_list(content, src=0, group=pg)
    sharded = [name for name, x in content[0].items() if x is DTensor]
    if sharded:
        raise ArgumentError(
            f"broadcast_from_rank0 sends whole tensors, and {sharded[0]!r} of rank 0 is a DTensor. "
            "Give it what get_model_state_dict returns with full_state_dict=True, and a copy of "
            "it each time: torch puts shards into the dict that it is given."
        )
    for name, value in content[0].items():
        if isinstance(value, _Tensor):
            value = (
                full[name].detach().to(device)
                if sends
                else torch.empty(value.shape, dtype=value.dtype, device=device)
            )
            if not is_alone:
                dist.broadcast(value, src=0, group=pg)
        if name in local:
            made = _laid_out(value, local[name], device)
            local[name] = made.cpu() if cpu_offload and isinstance(made, torch.Tensor) else made
    if strict:
        for name in [name for name in local if name not in content[0]]:
            del local[name]


def _described(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    if isinstance(x, DTensor):
        return DTensor
    return x.cpu() if x.dim() == 0 else _Tensor(x.shape, x.dtype)


def _laid_out(whole: Any, like: Any, device: torch.device) -> Any:
    """The shards of a whole tensor, as those of a DTensor."""
    if not isinstance(like, DTensor) or isinstance(whole, DTensor):
        return whole
    if not isinstance(whole, torch.Tensor) or whole.shape != like.shape:
        return whole  # torch says which shapes differ
    made = torch.empty_like(like, device=device, requires_grad=False)
    with implicit_replication():
        return made.copy_(whole.detach().to(device))
