"""A user's own `torch.distributed.all_reduce` and its kin, on LocalTensors.

These write into their arguments. What a rank would receive is computed as for the functional
collectives, then written once into each tensor that ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from shardwise.comm.local_tensor import LocalTensor, collective_handlers, from_ranks, shared_roster
from shardwise.comm.simulated_collectives import reduce_parts, run_groups
from shardwise.core.world import current_world
from shardwise.errors import RankMismatchError, UnsupportedError

_c10d = torch.ops.c10d
_native: Any = _distributed_c10d

_REDUCE_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
}


def _group(boxed: Any) -> Any:
    return dist.ProcessGroup.unbox(boxed)


def _reduce_op(boxed: Any) -> str:
    op = boxed.op()
    if op not in _REDUCE_OPS:
        raise UnsupportedError(
            f"{op} is not played in a simulated world; use sum, avg, max or min."
        )
    return _REDUCE_OPS[op]


def _done() -> Any:
    return _native.FakeWork().boxed()


def _as_local(x: torch.Tensor) -> LocalTensor:
    if isinstance(x, LocalTensor):
        return x
    world = current_world()
    return LocalTensor((x,), shared_roster(world, tuple(range(world.size))))


def write(target: torch.Tensor, value: LocalTensor) -> None:
    """Write each rank's value into the tensor that it holds as `target`."""
    local = _as_local(target)
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


def _in_place(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that rewrites each of its tensors."""

    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        tensors, group, *rest = args
        for tensor in tensors:
            write(tensor, run_groups(_as_local(tensor), _group(group), exchange(*rest)))
        return (tensors, _done()) if len(func._schema.returns) > 1 else _done()

    return handler


def _all_reduce(reduce_op: Any, *_: Any) -> Any:
    name = _reduce_op(reduce_op)
    return lambda parts: [reduce_parts(parts, name)] * len(parts)


def _reduce(reduce_op: Any, root: int, *_: Any) -> Any:
    name = _reduce_op(reduce_op)
    return lambda parts: [
        reduce_parts(parts, name) if i == root else part for i, part in enumerate(parts)
    ]


def _broadcast(root: int, *_: Any) -> Any:
    return lambda parts: [parts[root].clone()] * len(parts)


def _all_gather_base(func: Any, args: Any, kwargs: Any) -> Any:
    output, x, group, *_ = args
    gathered = run_groups(
        _as_local(x), _group(group), lambda parts: [torch.cat(list(parts))] * len(parts)
    )
    write(output, gathered)
    return output, _done()


def _reduce_scatter_base(func: Any, args: Any, kwargs: Any) -> Any:
    output, x, group, reduce_op, *_ = args
    name = _reduce_op(reduce_op)

    def exchange(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return reduce_parts(parts, name).chunk(len(parts))

    write(output, run_groups(_as_local(x), _group(group), exchange))
    return output, _done()


def _all_to_all_base(func: Any, args: Any, kwargs: Any) -> Any:
    output, x, group, _, input_splits, *_ = args

    def exchange(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        pieces = [
            part.split(list(input_splits)) if input_splits else part.chunk(len(parts))
            for part in parts
        ]
        return [torch.cat(column) for column in zip(*pieces, strict=True)]

    write(output, run_groups(_as_local(x), _group(group), exchange))
    return _done()


def _stacked(tensors: Sequence[torch.Tensor]) -> LocalTensor:
    """A list of tensors per rank as one tensor per rank."""
    locals_ = [_as_local(t) for t in tensors]
    ranks = locals_[0].ranks
    world = locals_[0]._roster.world
    return from_ranks(world, ranks, [torch.stack([t.on_rank(r) for t in locals_]) for r in ranks])


def _write_rows(targets: Sequence[torch.Tensor], rows: LocalTensor) -> None:
    for number, target in enumerate(targets):
        row = rows.select(0, number)
        assert isinstance(row, LocalTensor), "a row of a LocalTensor is one"
        write(target, row)


def _all_gather(func: Any, args: Any, kwargs: Any) -> Any:
    outputs, inputs, group, *_ = args
    for targets, x in zip(outputs, inputs, strict=True):
        rows = run_groups(
            _as_local(x), _group(group), lambda parts: [torch.stack(list(parts))] * len(parts)
        )
        _write_rows(targets, rows)
    return outputs, _done()


def _reduce_scatter(func: Any, args: Any, kwargs: Any) -> Any:
    outputs, inputs, group, reduce_op, *_ = args
    name = _reduce_op(reduce_op)
    for target, tensors in zip(outputs, inputs, strict=True):
        stacked = _stacked(tensors)
        write(target, run_groups(stacked, _group(group), lambda p: reduce_parts(p, name).unbind(0)))
    return outputs, _done()


def _all_to_all(func: Any, args: Any, kwargs: Any) -> Any:
    outputs, inputs, group, *_ = args

    def exchange(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [torch.stack([part[i] for part in parts]) for i in range(len(parts))]

    _write_rows(outputs, run_groups(_stacked(inputs), _group(group), exchange))
    return outputs, _done()


collective_handlers.update(
    {
        _c10d.allreduce_.default: _in_place(_all_reduce),
        _c10d.allreduce_coalesced_.default: _in_place(_all_reduce),
        _c10d.reduce_.default: _in_place(_reduce),
        _c10d.broadcast_.default: _in_place(_broadcast),
        _c10d._allgather_base_.default: _all_gather_base,
        _c10d.allgather_.default: _all_gather,
        _c10d._reduce_scatter_base_.default: _reduce_scatter_base,
        _c10d.reduce_scatter_.default: _reduce_scatter,
        _c10d.alltoall_base_.default: _all_to_all_base,
        _c10d.alltoall_.default: _all_to_all,
    }
)
