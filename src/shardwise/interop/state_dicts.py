"""torch's `get_model_state_dict` and its relatives, on our DTensors.

They gather and lay out tensors with three functions that only know torch's own DTensor. When torch
imports them, each is wrapped by one here, which handles our DTensors and passes the rest on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch.pytree import tree_map
from shardwise.comm.watch import implicit_replication
from shardwise.dtensor.tensor import DTensor
from shardwise.simulation.ranks import one_for_all, own_roster


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
        full: Any = one_for_all(x.full_tensor())
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
    is_alone = own_roster(ours._layout.grid) is not None  # one process has all ranks' values
    sends = is_alone or dist.get_rank() == 0
    content: list[Any] = [{name: _described(x) for name, x in full.items()} if sends else None]
    if not is_alone:
        dist.broadcast_object_list(content, src=0, group=pg)
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
