"""Ops on a batch of matrices, vectors or points.

The last dims of every operand, its core, must be whole. The dims in front of them are the batch,
broadcast from the right; any of these may be sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.core.placements import REPLICATE, Partial, Placement, Shard
from shardwise.core.sizes import equal
from shardwise.dispatch.notation import Group, averages_too, linear_choices
from shardwise.dispatch.rule import Call, Choice, Rule, TensorMeta, empty_safe

aten = torch.ops.aten

#: The number of core dims of each input and of each output.
Cores = tuple[Sequence[int], Sequence[int]]


def batched(
    *ops: Any,
    inputs: Sequence[int] = (2,),
    outputs: Sequence[int] = (2,),
    linear: Sequence[Group] = (),
    cores: Callable[[Call], Cores] | None = None,
    fails_on_empty: bool = False,
    columns: int | None = None,
) -> tuple[tuple[Any, ...], Rule]:
    """An entry of a table. `cores` computes the core dims if they depend on shapes.

    `columns` numbers the operand whose columns are right-hand sides: the first output is linear
    in it, column by column.
    """

    def choices(call: Call) -> Iterator[Choice]:
        local = empty_safe(call.op) if fails_on_empty else None
        for choice in batch_choices(call, *(cores(call) if cores else (inputs, outputs))):
            yield replace(choice, local=local) if choice.outputs[0].is_shard() else choice
        yield from linear_choices(call, linear)
        if columns is not None:
            yield from _column_choices(call, columns)

    return ops, Rule(choices, "... [m] [n] -> ...")


def batch_choices(call: Call, inputs: Sequence[int], outputs: Sequence[int]) -> Iterator[Choice]:
    """Replicated, or one dim of the batch sharded.

    A placeholder (an output that was not requested) has too few dims and is replicated.
    """
    yield call.replicated()
    batches = [_batch(meta, core) for meta, core in zip(call.inputs, inputs, strict=False)]
    longest = max(batches, key=len)
    for dim in range(len(longest)):
        from_right = dim - len(longest)
        size = max((b[from_right] for b in batches if len(b) >= -from_right), default=1)
        found = [_place(b, from_right, size) for b in batches]
        places = [(i, p) for i, p in enumerate(found) if p is not None]
        for sizes in call.splits(places) if not equal(size, 1) else ():
            yield Choice(
                tuple(_sharded(p, sizes) for p in found),
                tuple(
                    _sharded(_place(_batch(meta, core), from_right, size), sizes)
                    for meta, core in zip(call.outputs, outputs, strict=False)
                ),
            )


def _column_choices(call: Call, number: int) -> Iterator[Choice]:
    def alone(placement: Placement) -> Choice:
        inputs = tuple(placement if i == number else REPLICATE for i in range(len(call.inputs)))
        return Choice(inputs, (placement, *(REPLICATE,) * (len(call.outputs) - 1)))

    yield from (alone(Partial(op)) for op in averages_too(call.inputs[number]))
    names = {a.name for a in call.op._schema.arguments}
    if "left" in names and not call.argument("left"):
        return
    last, solution = call.inputs[number].ndim - 1, call.outputs[0]
    if last < 1 or solution.ndim != last + 1 or _is_vector(call, number):
        return
    for sizes in call.splits([(number, last)]):
        yield alone(Shard(last, sizes))


def _is_vector(call: Call, number: int) -> bool:
    """Whether the operand is a batch of single right-hand sides."""
    matrices = max(m.ndim for i, m in enumerate(call.inputs) if i != number)
    return call.inputs[number].ndim < matrices and call.op is aten._linalg_solve_ex.default


def _batch(meta: TensorMeta, core: int) -> tuple[Any, ...]:
    return meta.shape[: meta.ndim - core] if meta.ndim >= core else ()


def _place(batch: tuple[Any, ...], from_right: int, size: Any) -> int | None:
    """The number of the dim in a batch; None if it is absent or broadcast."""
    at = len(batch) + from_right
    return at if at >= 0 and batch[at] == size else None


def _sharded(dim: int | None, sizes: tuple[int, ...] | None) -> Placement:
    return REPLICATE if dim is None else Shard(dim, sizes)
