"""The process group of a simulated world: a user's own `torch.distributed.all_reduce` and its kin.

What each rank would receive is computed as for the functional collectives, then written once into
each tensor that ranks share. A plain tensor counts as the same on every rank, so its sum over four
ranks is four times itself; what would leave ranks with different values cannot be written to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from shardwise.comm.local_tensor import LocalTensor, from_ranks, shared_roster
from shardwise.comm.simulated_collectives import Exchange, reduce_parts, run_groups
from shardwise.comm.watch import watch
from shardwise.core.world import current_world
from shardwise.errors import RankMismatchError, UnsupportedError

# The stubs of torch describe neither what a Python group may leave out nor its newer names.
_native: Any = _distributed_c10d
_Group: Any = dist.ProcessGroup

_REDUCE_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
}


class PlayedGroup(_Group):
    """All ranks of a group, and of the groups beside it, at once."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    # Both spellings are asked for, by Python and by C++.
    def getGroupName(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return "shardwise_simulated"

    def barrier(self, opts: Any = None) -> Any:
        return _native.FakeWork()

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        name = _reduce_op(opts)
        return self._rewrite(
            "allreduce_", tensors, lambda parts: [reduce_parts(parts, name)] * len(parts)
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        name, root = _reduce_op(opts), opts.rootRank

        def exchange(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [reduce_parts(parts, name) if i == root else p for i, p in enumerate(parts)]

        return self._rewrite("reduce_", tensors, exchange)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        root = opts.rootRank
        return self._rewrite(
            "broadcast_", tensors, lambda parts: [parts[root].clone()] * len(parts)
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for targets, x in zip(outputs, inputs, strict=True):
            rows = self._run("allgather_", _as_local(x), lambda p: [torch.stack(list(p))] * len(p))
            _write_rows(targets, rows)
        return _native.FakeWork()

    def _allgather_base(self, output: Any, x: Any, opts: Any = None) -> Any:
        gathered = self._run(
            "_allgather_base_", _as_local(x), lambda parts: [torch.cat(list(parts))] * len(parts)
        )
        _write(output, gathered)
        return _native.FakeWork()

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        name = _reduce_op(opts)
        for target, tensors in zip(outputs, inputs, strict=True):
            found = self._run(
                "reduce_scatter_", _stacked(tensors), lambda p: reduce_parts(p, name).unbind(0)
            )
            _write(target, found)
        return _native.FakeWork()

    def _reduce_scatter_base(self, output: Any, x: Any, opts: Any = None) -> Any:
        name = _reduce_op(opts)
        found = self._run(
            "_reduce_scatter_base_", _as_local(x), lambda p: reduce_parts(p, name).chunk(len(p))
        )
        _write(output, found)
        return _native.FakeWork()

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        def exchange(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [torch.stack([part[i] for part in parts]) for i in range(len(parts))]

        _write_rows(outputs, self._run("alltoall_", _stacked(inputs), exchange))
        return _native.FakeWork()

    def alltoall_base(
        self, output: Any, x: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        if len({*output_splits, *input_splits}) > 1:
            raise UnsupportedError(
                f"all_to_all_single with splits {list(input_splits)} and {list(output_splits)}: "
                "these are one rank's, and a simulated world cannot know the other ranks'."
            )

        def exchange(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            pieces = [part.chunk(len(parts)) for part in parts]
            return [torch.cat(column) for column in zip(*pieces, strict=True)]

        _write(output, self._run("alltoall_base_", _as_local(x), exchange))
        return _native.FakeWork()

    # The names that torch 2.13 gives them.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            "This collective is not played in a simulated world: what a rank does in it depends on "
            "which rank it is. Use all_reduce, all_gather, reduce_scatter or all_to_all."
        )

    gather = scatter = send = recv = recv_anysource = _refuse

    def _rewrite(self, kind: str, tensors: Any, exchange: Exchange) -> Any:
        for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            _write(tensor, self._run(kind, _as_local(tensor), exchange))
        return _native.FakeWork()

    def _run(self, kind: str, x: LocalTensor, exchange: Exchange) -> LocalTensor:
        watch.tell(kind, x, self._name)
        return run_groups(x, self, exchange)


def _reduce_op(opts: Any) -> str:
    asked = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    for op, name in _REDUCE_OPS.items():
        if asked == op:
            return name
    raise UnsupportedError(f"{asked} is not played in a simulated world; use sum, avg, max or min.")


def _as_local(x: torch.Tensor) -> LocalTensor:
    if isinstance(x, LocalTensor):
        return x
    world = current_world()
    return LocalTensor((x,), shared_roster(world, tuple(range(world.size))))


def _write(target: torch.Tensor, value: LocalTensor) -> None:
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


def _write_rows(targets: Sequence[torch.Tensor], rows: LocalTensor) -> None:
    for number, target in enumerate(targets):
        row = rows.select(0, number)
        assert isinstance(row, LocalTensor), "a row of a LocalTensor is one"
        _write(target, row)


def _stacked(tensors: Sequence[torch.Tensor]) -> LocalTensor:
    """A list of tensors per rank as one tensor per rank."""
    locals_ = [_as_local(t) for t in tensors]
    ranks, world = locals_[0].ranks, locals_[0]._roster.world
    return from_ranks(world, ranks, [torch.stack([t.on_rank(r) for t in locals_]) for r in ranks])
