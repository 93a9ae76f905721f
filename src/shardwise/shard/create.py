"""Making sharded tensors: from a whole tensor, from local shards, and new ones."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.comm import collectives
from shardwise.comm.agreement import Fault, agreeing, gather_texts, joint_error
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.dtensor.create import shape_of
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError, LeafError
from shardwise.shard.plan import Sharder
from shardwise.shard.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Shard,
    ShardingSpec,
    ShardMetadata,
    by_boxes,
    check_ranks,
    device_type_of,
)
from shardwise.shard.tensor import GRAD_REDUCTIONS, ShardedTensor
from shardwise.shard.tiling import (
    group_grid,
    group_ranks,
    is_outside,
    make_tiling,
    outside_tiling,
    shard_whole,
)
from shardwise.simulation.ranks import each_rank, localize, no_values


def shard_tensor(
    tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    src_rank: int | None = 0,
    process_group: Any = None,
    *,
    grad_reduction: str = "mean",
) -> ShardedTensor:
    """Shard the tensor of rank `src_rank` of the group; returns a new leaf.

    With `src_rank=None` each rank takes its shards of its own values and nothing is sent. For a
    tensor on the meta device, uninitialised memory is allocated.

    >>> import shardwise
    >>> from shardwise.shard import ChunkShardingSpec, shard_tensor
    >>> with shardwise.simulate(2):
    ...     spec = ChunkShardingSpec(dim=0, placements=["rank:1/cpu", "rank:0/cpu"])
    ...     st = shard_tensor(torch.arange(3), spec)
    ...     [(shard.metadata.rank, shard.tensor.tolist()) for shard in st.local_shards()]
    [(0, [2]), (1, [0, 1])]
    """
    if is_outside(process_group):
        return place_tensor(tensor, sharding_spec, src_rank, process_group, grad_reduction)
    with agreeing(group_grid(process_group), "shard_tensor") as request:
        request += [describe_tensor("the tensor", tensor, sharding_spec), f"src_rank={src_rank}"]
        check_shardable(tensor, "the tensor", sharding_spec, src_rank, process_group)
        check_grad_reduction(grad_reduction)
    return place_tensor(tensor, sharding_spec, src_rank, process_group, grad_reduction)


def describe_tensor(name: str, tensor: Any, spec: Any) -> str:
    """One line that says what is sharded and how, for the ranks to compare."""
    shape = tuple(getattr(tensor, "shape", ()))
    return f"{name}: {shape} {getattr(tensor, 'dtype', type(tensor))} by {comparable(spec)}"


def comparable(value: Any) -> str:
    """A value as text that ranks can compare; an object by its class and attributes."""
    kind = type(value)
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(comparable, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k}: {comparable(v)}' for k, v in value.items())}}}"
    if not isinstance(value, (ShardingSpec, Sharder)):
        return kind.__qualname__
    attributes = ", ".join(
        f"{n}={comparable(v)}" for n, v in getattr(value, "__dict__", {}).items()
    )
    return f"{kind.__module__}.{kind.__qualname__}({attributes})"


_PLAIN = (str, int, float, bool, torch.dtype, ChunkShardingSpec, EnumerableShardingSpec)


def check_grad_reduction(asked: str) -> None:
    if asked not in GRAD_REDUCTIONS:
        raise ArgumentError(
            f"grad_reduction is one of {', '.join(GRAD_REDUCTIONS)}; found {asked!r}."
        )


def check_shardable(
    tensor: Any, name: str, spec: Any, src_rank: int | None, process_group: Any
) -> None:
    """Raise for anything wrong, before anything is sent."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"A tensor is sharded; {name} is a {type(tensor).__name__}.")
    if isinstance(tensor, DTensor):
        raise LayoutError(f"{name} is sharded already, as {tensor._layout!r}. Use reshard(spec).")
    if not isinstance(spec, ShardingSpec):
        raise ArgumentError(
            f"Only `ShardingSpec` and `Sharder` are supported to shard {name}, found {spec!r}: "
            "write a ChunkShardingSpec or an EnumerableShardingSpec."
        )
    if not tensor.is_leaf:
        raise LeafError(f"{name} has a history in autograd: detach() it first.")
    ranks = group_ranks(process_group)
    if src_rank is not None and not 0 <= src_rank < len(ranks):
        raise LayoutError(f"src_rank={src_rank} is not a rank of a group of {len(ranks)}.")
    boxes = spec.boxes(tuple(tensor.shape))
    check_ranks(boxes, ranks)
    kind = device_type_of(spec, tensor.shape)
    if kind == "cuda" and not torch.cuda.is_available():
        raise LayoutError(f"{name}: the spec names cuda, which is not available here: {spec}.")


def place_tensor(
    tensor: torch.Tensor,
    spec: ShardingSpec,
    src_rank: int | None,
    process_group: Any,
    grad_reduction: str,
) -> ShardedTensor:
    """The sharded tensor; all ranks have checked the arguments."""
    if is_outside(process_group):
        made = _empty_like(tensor, spec, process_group)
    else:
        made = spec.shard(tensor, src_rank=src_rank, process_group=process_group)
        if not isinstance(made, ShardedTensor) or made.shape != tensor.shape:
            raise LayoutError(
                f"{type(spec).__name__}.shard() returns the tensor of shape {tuple(tensor.shape)} "
                f"as a ShardedTensor, found {type(made).__name__} "
                f"{tuple(getattr(made, 'shape', ()))}."
            )
    made.grad_reduction = grad_reduction
    return made.requires_grad_(tensor.requires_grad)


def _by_boxes(
    tensor: torch.Tensor, spec: ShardingSpec, src_rank: int | None, process_group: Any
) -> ShardedTensor:
    """What `ShardingSpec.shard` does."""
    if tensor.is_meta:
        return _empty_like(tensor, spec, process_group)
    shape = tuple(tensor.shape)
    grid = group_grid(process_group, device_type_of(spec, shape))
    tiling = make_tiling(spec, shape, grid)
    whole = localize(grid, tensor.detach().to(grid.device_type))
    if src_rank is not None:
        with because("shard_tensor", implicit=False):
            whole = collectives.broadcast(whole, src_rank, grid, 0)
    made = ShardedTensor.over(shard_whole(tiling, whole), tiling)
    return made.requires_grad_(tensor.requires_grad)


by_boxes.append(_by_boxes)


# -- from local shards -------------------------------------------------------------------------


def init_from_local_shards(
    local_shards: Sequence[Shard],
    *global_size: Any,
    process_group: Any = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """The tensor that consists of these local shards; in a simulated world, of all ranks' shards.

    >>> import shardwise
    >>> from shardwise.shard import Shard, init_from_local_shards
    >>> with shardwise.simulate(2):
    ...     shards = [
    ...         Shard.from_tensor_and_offsets(torch.full((2,), rank), [2 * rank], rank)
    ...         for rank in range(2)
    ...     ]
    ...     init_from_local_shards(shards, 4).full_tensor().agreed()
    tensor([0, 0, 1, 1])
    """
    check_torch_options("init_from_local_shards", init_rrefs=init_rrefs)
    shape = shape_of(global_size)
    grid = group_grid(process_group)
    what, shards = "init_from_local_shards", list(local_shards)
    told = gather_texts(grid, what, lambda rank: _as_text(shards, shape, rank, grid))
    everyones = [json.loads(text) for text in told]
    said = [(rank, each["fault"]) for rank, each in zip(grid.ranks, everyones, strict=True)]
    faults = {rank: Fault(text) for rank, text in said if text}
    if faults:
        raise joint_error(f"{what}: ", faults, len(grid.ranks))
    kinds = {(tuple(e["shape"]), e["dtype"], e["grad"]) for e in everyones if e["dtype"]}
    sizes = {tuple(e["shape"]) for e in everyones}
    if len(kinds) != 1 or len(sizes) != 1:
        raise LayoutError(
            f"{what}: the ranks have shards of different tensors (shape, dtype, requires_grad): "
            f"{sorted(kinds)}."
        )
    boxes = [ShardMetadata(*box) for every in everyones for box in every["boxes"]]
    spec = simplest_spec(boxes, shape)
    tiling = make_tiling(spec, shape, group_grid(process_group, device_type_of(spec)))
    _, dtype_name, grad = kinds.pop()
    dtype = getattr(torch, dtype_name)

    def hold(place: Any) -> torch.Tensor:
        rank = tiling.grid.ranks[place[0]]
        mine = {s.metadata: s.tensor for s in shards if s.metadata.rank == rank}
        local = tiling.empty_local(rank, dtype, tiling.device(rank))
        for box, view in zip(tiling.on_rank(rank), tiling.box_views(rank, local), strict=True):
            view.copy_(mine[box].detach())
        return local

    made = ShardedTensor.over(each_rank(tiling.grid, hold), tiling)
    return made.requires_grad_(grad)


def _as_text(shards: Sequence[Any], shape: tuple[int, ...], rank: int, grid: Grid) -> str:
    """The metadata of a rank's shards, or what is wrong with them, as JSON."""
    fault, dtypes, grads, boxes = "", set(), set(), []
    for shard in shards:
        if not isinstance(shard, Shard):
            fault = f"a local shard is a shardwise.shard.Shard, found {type(shard).__name__}"
            continue
        at = shard.metadata
        if at.rank not in grid.ranks or at.rank not in grid.world.present:
            fault = f"a shard is on {at.placement}, which is not this rank"
        if len(at.shard_sizes) != len(shape):
            fault = f"a shard has shape {at.shard_sizes}, the tensor {shape}"
        dtypes.add(str(shard.tensor.dtype).removeprefix("torch."))
        grads.add(shard.tensor.requires_grad)
        if at.rank == rank:
            boxes.append([at.shard_offsets, at.shard_sizes, str(at.placement)])
    if len(dtypes) > 1:
        fault = f"shards have one dtype, found {sorted(dtypes)}"
    if len(grads) > 1:
        fault = "shards have one requires_grad, found True and False"
    dtype, grad = min(dtypes, default=""), any(grads)
    told = {"fault": fault, "shape": shape, "dtype": dtype, "grad": grad, "boxes": boxes}
    return json.dumps(told)


def simplest_spec(boxes: Sequence[ShardMetadata], shape: tuple[int, ...]) -> ShardingSpec:
    """A ChunkShardingSpec if one gives these boxes, else an EnumerableShardingSpec."""
    general = EnumerableShardingSpec(boxes)
    general.boxes(shape)
    for dim in range(len(shape)):
        ordered = sorted(boxes, key=lambda box: box.shard_offsets[dim])
        chunks = ChunkShardingSpec(dim, [box.placement for box in ordered])
        if chunks.boxes(shape) == tuple(ordered):
            return chunks
    return general


# -- new ones ----------------------------------------------------------------------------------


def empty(
    sharding_spec: ShardingSpec,
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    process_group: Any = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """An uninitialised sharded tensor over the ranks of `process_group` (None: all ranks).

    `layout`, `pin_memory`, `memory_format` and `init_rrefs` exist for torch's sharded tensors; here
    each allows one value.
    """
    check_torch_options("empty", layout, pin_memory, memory_format, init_rrefs)
    return _create(torch.empty, sharding_spec, size, dtype, requires_grad, process_group)


def zeros(
    sharding_spec: ShardingSpec,
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    process_group: Any = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """A sharded tensor of zeros; options as for `empty`."""
    check_torch_options("zeros", layout, pin_memory, memory_format, init_rrefs)
    return _create(torch.zeros, sharding_spec, size, dtype, requires_grad, process_group)


def ones(
    sharding_spec: ShardingSpec,
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    process_group: Any = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """A sharded tensor of ones; options as for `empty`."""
    check_torch_options("ones", layout, pin_memory, memory_format, init_rrefs)
    return _create(torch.ones, sharding_spec, size, dtype, requires_grad, process_group)


def full(
    sharding_spec: ShardingSpec,
    size: int | Sequence[int],
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    process_group: Any = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """A sharded tensor filled with one number; options as for `empty`."""
    check_torch_options("full", layout, pin_memory, memory_format, init_rrefs)
    make = functools.partial(torch.full, fill_value=fill_value)
    return _create(make, sharding_spec, (size,), dtype, requires_grad, process_group)


def rand(
    sharding_spec: ShardingSpec,
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    process_group: Any = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """Uniform random numbers, equal to one device's; options as for `empty`."""
    check_torch_options("rand", layout, pin_memory, memory_format, init_rrefs)
    made = _create(torch.empty, sharding_spec, size, dtype, False, process_group)
    made.uniform_()
    return made.requires_grad_(requires_grad)


def randn(
    sharding_spec: ShardingSpec,
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    process_group: Any = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """Normal random numbers, equal to one device's; options as for `empty`."""
    check_torch_options("randn", layout, pin_memory, memory_format, init_rrefs)
    made = _create(torch.empty, sharding_spec, size, dtype, False, process_group)
    made.normal_()
    return made.requires_grad_(requires_grad)


def check_torch_options(
    what: str,
    layout: torch.layout = torch.strided,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    init_rrefs: bool = False,
) -> None:
    """Check options of torch's sharded tensors that allow only one value here."""
    asked = {
        "layout": layout is not torch.strided,
        "memory_format": memory_format is not torch.contiguous_format,
        "pin_memory": pin_memory,
        "init_rrefs": init_rrefs,
    }
    if refused := [name for name, differs in asked.items() if differs]:
        raise ArgumentError(
            f"{what}({', '.join(refused)}): the shards of a ShardedTensor are contiguous, strided, "
            "not pinned and not reached through RPC; leave these options out."
        )


def _empty_like(tensor: torch.Tensor, spec: ShardingSpec, process_group: Any) -> ShardedTensor:
    size, grad = (tensor.shape,), tensor.requires_grad
    return _create(torch.empty, spec, size, tensor.dtype, grad, process_group)


def _create(
    make: Callable[..., torch.Tensor],
    spec: ShardingSpec,
    size: tuple[Any, ...],
    dtype: torch.dtype | None,
    requires_grad: bool,
    process_group: Any,
) -> ShardedTensor:
    """A sharded tensor of the values that `make(shape)` returns."""
    if not isinstance(spec, ShardingSpec):
        raise ArgumentError(f"The first argument is a sharding spec, found {spec!r}.")
    options: dict[str, Any] = {"dtype": make((), dtype=dtype).dtype}
    shape = shape_of(size)

    def here(place: Any) -> torch.Tensor:
        rank = tiling.grid.ranks[place[0]]
        return make(tiling.local_shape(rank), device=tiling.device(rank), **options)

    if is_outside(process_group):
        tiling = outside_tiling(spec, shape)
        local = no_values(tiling.grid, **options)
    else:
        tiling = make_tiling(spec, shape, group_grid(process_group, device_type_of(spec, shape)))
        local = each_rank(tiling.grid, here)
    return ShardedTensor.over(local, tiling).requires_grad_(requires_grad)
