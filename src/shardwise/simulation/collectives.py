"""Collectives on LocalTensors, computed in one process.

Terms are added in the order of ranks. Ranks whose results are equal share one tensor.

Note [How CommDebugMode sees them]
The compiler traces through a LocalTensor into its parts, where a collective is only an addition or
a concatenation. `mark` adds an op to the graph that names the collective, and CommDebugMode sees
that op when compiled code runs. A process group calls `listeners`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise._torch.c10d import inherit_timeout
from shardwise.core.mesh import Grid
from shardwise.core.sizes import lengths
from shardwise.core.world import World, current_world
from shardwise.errors import LayoutError, RankMismatchError, UnsupportedError, WorldError
from shardwise.simulation.local_tensor import (
    LocalTensor,
    collective_handlers,
    from_ranks,
    shared_roster,
)
from shardwise.simulation.roster import rank_values_of

#: Called for collectives that are not ops: `(c10d op, tensor, group name)`.
listeners: list[Callable[[str, Any, str], None]] = []

_library = torch.library.Library("shardwise", "DEF")
_library.define("collective(Tensor[] sent, str kind, str group_name) -> Tensor[]")


def _copied(sent: Sequence[torch.Tensor], kind: str, group_name: str) -> list[torch.Tensor]:
    return [x.clone() for x in sent]  # the result of an op may not share memory with its input


_library.impl("collective", _copied, "CompositeExplicitAutograd")

#: The op packet; its arguments are what a rank sends, the kind, and the name of the group.
COLLECTIVE = torch.ops.shardwise.collective


def mark(sent: Sequence[torch.Tensor], kind: str, group_name: str) -> list[torch.Tensor]:
    """Mark what one rank sends; use the returned tensors in its place."""
    return COLLECTIVE(sent, kind, group_name)


_ops = torch.ops._c10d_functional
c10d: Any = distributed_c10d  # private names, unknown to its stubs

#: From the tensors of one group, in order, to the results of its ranks.
Exchange = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def reduce_parts(parts: Sequence[torch.Tensor], reduce_op: str) -> torch.Tensor:
    """The reduction of the parts, always a new tensor."""
    reduced = functools.reduce(_REDUCE[reduce_op], parts)
    if reduce_op == "avg":
        return reduced / len(parts)
    return reduced.clone() if len(parts) == 1 else reduced


def reduced(reduce_op: str) -> Exchange:
    return lambda parts: [reduce_parts(parts, reduce_op)] * len(parts)


def scattered(reduce_op: str) -> Exchange:
    def exchange(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        whole, num = reduce_parts(parts, reduce_op), len(parts)
        return whole.split([_chunk_size(whole, num)] * num)

    return exchange


def gathered(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [torch.cat(list(parts))] * len(parts)


def copied_from(source: int) -> Exchange:
    def exchange(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not 0 <= source < len(parts):
            raise LayoutError(f"A collective of {len(parts)} ranks has no rank {source}.")
        return [parts[source].clone()] * len(parts)

    return exchange


def transposed(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What each rank receives in an all-to-all of equal chunks."""
    num, size = len(parts), _chunk_size(parts[0], len(parts))
    if is_plain(parts[0]):  # chunk by chunk, many ranks would take quadratic time
        apart = torch.stack(list(parts)).unflatten(1, (num, size))
        return [column.flatten(0, 1).contiguous() for column in apart.unbind(1)]
    chunks = [part.split([size] * num) for part in parts]
    return [torch.cat(column) for column in zip(*chunks, strict=True)]


def _chunk_size(x: torch.Tensor, num: int) -> int:
    """The size of each rank's chunk of dim 0."""
    size = x.shape[0]
    if type(size) is int and size % num:
        raise LayoutError(
            f"A collective of {num} ranks splits dim 0 of a tensor of shape {tuple(x.shape)} into "
            f"equal chunks, but {size} is not a multiple of {num}. Pad the tensor."
        )
    return size // num


def run_groups(x: LocalTensor, group: str, exchange: Exchange) -> LocalTensor:
    """Apply `exchange` to each group of ranks that runs the collective; `group` is rank 0's."""
    world = x._roster.world
    if world.faults is not None:
        x = world.faults.collective(x)
    result: dict[int, torch.Tensor] = {}
    met: dict[tuple[int, ...], Sequence[torch.Tensor]] = {}
    for line in _lines(world, group):
        parts = [x.on_rank(rank) for rank in line]
        key = tuple(map(id, parts))
        if key not in met:
            met[key] = exchange(parts)
            check_length(met[key], len(line))
        result.update(zip(line, met[key], strict=True))
    missing = [rank for rank in x.ranks if rank not in result]
    if missing:
        raise WorldError(
            f"The collective's group reaches no rank of {missing}; the tensor is on {x.ranks}."
        )
    return from_ranks(world, x.ranks, [result[rank] for rank in x.ranks], x._sized)


def check_length(tensors: Sequence[Any], num_ranks: int) -> None:
    if len(tensors) != num_ranks:
        raise LayoutError(
            f"A collective of {num_ranks} ranks takes a list of {num_ranks} tensors, one per rank, "
            f"found {len(tensors)}."
        )


def _lines(world: World, group: str) -> list[list[int]]:
    if group not in world.lines:
        ranks = dist.get_process_group_ranks(c10d._resolve_process_group(group))
        world.lines[group] = parallel_groups(ranks, world.size)
    return world.lines[group]


def parallel_groups(ranks: list[int], world_size: int) -> list[list[int]]:
    """The groups of all ranks, if each calls the collective on its own group.

    This process sees only rank 0's group; the others are that group, shifted.

    >>> parallel_groups([0, 2], 4)
    [[0, 2], [1, 3]]
    """
    if len(ranks) == world_size:
        return [ranks]
    groups, seen = [], set[int]()
    for shift in range(world_size - ranks[-1]):
        group = [rank + shift for rank in ranks]
        if shift not in seen and not seen.intersection(group):
            groups.append(group)
            seen.update(group)
    if len(seen) != world_size:
        raise UnsupportedError(
            f"A collective on ranks {ranks} of a simulated world of {world_size} does not say what "
            "the other ranks do. Use the groups of a device mesh: mesh.get_group(axis)."
        )
    return groups


def _all_reduce(func: Any, args: Any, kwargs: Any) -> LocalTensor:
    x, reduce_op, group = args
    return run_groups(x, group, reduced(reduce_op))


def _all_gather(func: Any, args: Any, kwargs: Any) -> LocalTensor:
    x, _, group = args
    return run_groups(x, group, gathered)


def _reduce_scatter(func: Any, args: Any, kwargs: Any) -> LocalTensor:
    x, reduce_op, _, group = args
    return run_groups(x, group, scattered(reduce_op))


def _all_to_all(func: Any, args: Any, kwargs: Any) -> LocalTensor:
    x, output_splits, input_splits, group = args
    if any(rank_values_of(split) is not None for split in (*input_splits, *output_splits)):
        return _uneven_all_to_all(x, input_splits, group)
    check_equal_splits(input_splits, output_splits)
    return run_groups(x, group, transposed)


def check_equal_splits(input_splits: Sequence[int], output_splits: Sequence[int]) -> None:
    if len({*output_splits, *input_splits}) > 1:
        raise UnsupportedError(
            f"all_to_all_single with splits {list(input_splits)} and {list(output_splits)}: these "
            "are one rank's, and a simulated world cannot know the other ranks'. Use equal splits, "
            "or sizes of LocalTensors, which know every rank's."
        )


def _uneven_all_to_all(x: LocalTensor, splits: Sequence[Any], group: Any) -> LocalTensor:
    """Each rank has its own input splits; what it receives follows from the others'."""
    result: dict[int, torch.Tensor] = {}
    if x._roster.world.faults is not None:
        x = x._roster.world.faults.collective(x)
    for line in _lines(x._roster.world, group):
        chunks = [x.on_rank(rank).split(_splits_of(splits, rank)) for rank in line]
        joined = map(torch.cat, zip(*chunks, strict=True))
        result.update(zip(line, joined, strict=True))
    return from_ranks(x._roster.world, x.ranks, [result[rank] for rank in x.ranks], x._sized)


def _splits_of(splits: Sequence[Any], rank: int) -> list[int]:
    """The splits of one rank, out of ints and RankInts."""
    nodes = [(split, rank_values_of(split)) for split in splits]
    return [s if node is None else node.values[node.ranks.index(rank)] for s, node in nodes]


def _broadcast(func: Any, args: Any, kwargs: Any) -> LocalTensor:
    x, source, group = args
    return run_groups(x, group, copied_from(source))


def name_of_groups(grid: Grid, axis: int) -> str:
    """The name that collective ops take for the process groups along `axis`.

    A simulated world sees the groups of rank 0 only. There, a name made here stands for all groups
    along the axis, whether rank 0 is in one of them or not.
    """
    if grid.world.simulated:
        return f"axis {axis} of {grid.submeshes} as {grid.shape}"
    group = grid.mesh.get_group(axis)
    inherit_timeout(group)
    return group.group_name


def name_of_new_groups(grid: Grid, axis: int) -> str | None:
    """The name of further process groups along `axis`; all ranks of one make it together.

    None in a simulated world, where all ranks are always at the same collective. None also if the
    job's group is bound to a device: torch would split its communicator, which needs all its ranks.
    """
    job = None if grid.world.simulated else dist.GroupMember.WORLD
    if job is None or getattr(job, "bound_device_id", None) is not None:
        return None
    mine = grid.mesh.get_group(axis)
    ranks = dist.get_process_group_ranks(mine)
    backend = dist.get_backend_config(mine)
    group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    inherit_timeout(group)
    return group.group_name


def simulated_scatter(
    x: Any, dim: int, sizes: tuple[int, ...] | None, source: int, group: str
) -> LocalTensor:
    """The result of `comm.collectives.scatter` on each rank."""

    def exchange(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        whole = parts[source]
        return [
            shard.clone()
            for shard in whole.split(lengths(whole.shape[dim], len(parts), sizes), dim)
        ]

    return run_groups(x, group, exchange)


def _each(handler: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """The collective on a list of tensors, one after another."""
    return lambda func, args, kwargs: [handler(func, (x, *args[1:]), kwargs) for x in args[0]]


def _wait(func: Any, args: Any, kwargs: Any) -> LocalTensor:
    return args[0]


def as_local(x: torch.Tensor) -> LocalTensor:
    """`x` as a LocalTensor; a plain tensor is the same on every rank."""
    if isinstance(x, LocalTensor):
        return x
    if hasattr(x, "placements"):
        raise UnsupportedError(
            f"A collective got a {type(x).__name__}, whose shards it would mix without its "
            "layout. Use redistribute() or full_tensor(), or the collective on x.to_local()."
        )
    world = current_world()
    return LocalTensor((x,), shared_roster(world, tuple(range(world.size))))


def write(target: torch.Tensor, value: LocalTensor) -> None:
    """Write each rank's value to its tensor in `target`."""
    local = as_local(target)
    for part, tensor in enumerate(local._parts):
        ranks = local._roster.ranks_of(part)
        values = [value.on_rank(rank) for rank in ranks]
        for rank, other in zip(ranks[1:], values[1:], strict=True):
            if other is not values[0] and not torch.equal(other, values[0]):
                raise RankMismatchError(
                    f"The collective gives rank {rank} another value than rank {ranks[0]}, but "
                    "both hold one tensor to receive it. Give each rank its own: "
                    "LocalTensor.per_rank(lambda rank: torch.empty(...))."
                )
        tensor.copy_(values[0].view_as(tensor))


def _in_place(handler: Callable[..., LocalTensor]) -> Callable[..., torch.Tensor]:
    """The collective that writes its result to its input, or to `out`."""

    def run(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        target = kwargs.get("out", args[0])
        write(target, handler(func, (as_local(args[0]), *args[1:]), {}))
        return target

    return run


def _marked_in_graph(kind: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    """`handler`, which marks its collective in a traced graph."""

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        several = isinstance(args[0], (list, tuple))
        sent = list(args[0]) if several else [args[0]]
        if all(isinstance(x, LocalTensor) and not is_plain(x._parts[0]) for x in sent):
            marks = mark([x._parts[0] for x in sent], kind, args[-1])
            sent = [
                LocalTensor([first, *x._parts[1:]], x._roster, x._sized)
                for first, x in zip(marks, sent, strict=True)
            ]
            args = (sent if several else sent[0], *args[1:])
        return handler(func, args, kwargs)

    return run


def is_plain(part: torch.Tensor) -> bool:
    """Whether a part has values; parts that torch.compile traces have none."""
    return type(part) is torch.Tensor or type(part) is torch.nn.Parameter


_RESULTS = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
}


def _handlers() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Each collective, also of several tensors, in place, and with out=."""
    for name, handler in _RESULTS.items():
        for variant, adapted in (
            (name, _marked_in_graph(name, handler)),
            (f"{name}_coalesced", _marked_in_graph(f"{name}_coalesced", _each(handler))),
            (f"{name}_", _in_place(handler)),
            (f"{name}_coalesced_", _each(_in_place(handler))),
            (f"{name}_out", _in_place(handler)),
        ):
            if hasattr(_ops, variant):
                yield getattr(_ops, variant).default, adapted
    yield _ops.wait_tensor.default, _wait


collective_handlers.update(_handlers())
