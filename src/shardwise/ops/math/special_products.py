"""Products with a kernel of their own: of groups of rows, and of scaled float8 matrices.

Their kernels load 16 bytes at a time: a dim of the operands that is sharded has a multiple of that
on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.core.sizes import Size
from shardwise.dispatch.notation import linear_choices
from shardwise.dispatch.rule import Call, Choice, Rule, Table, TensorMeta, table

aten = torch.ops.aten

_LOADED_BYTES = 16

#: By the dims of both operands: where a letter is in the first, in the second and in the result.
#: The groups are told apart by `offs` along the rows of a matrix, which cannot be sharded.
_GROUPED: dict[tuple[int, int], dict[str, tuple[int | None, int | None, int | None]]] = {
    (2, 3): {"k": (1, 1, None), "n": (None, 2, 1)},
    (3, 3): {"g": (0, 0, 0), "m": (1, None, 1), "k": (2, 1, None), "n": (None, 2, 2)},
    (2, 2): {"m": (0, None, 1), "n": (None, 1, 2)},
    (3, 2): {"m": (1, None, 0), "k": (2, 0, None)},
}


def grouped_choices(call: Call) -> Iterator[Choice]:
    """Each group is a product: its rows, its columns, or what is summed over may be sharded."""
    yield call.replicated()
    first, second = call.inputs[:2]
    if call.argument("bias") is not None:
        return
    rest = (REPLICATE,) * (len(call.inputs) - 2)  # where the groups begin
    for letter, dims in _GROUPED[first.ndim, second.ndim].items():
        places = [(number, dim) for number, dim in enumerate(dims[:2]) if dim is not None]
        if letter != "g" and not all(_fits(call, number, dim) for number, dim in places):
            continue
        found = [_sharded(dim) for dim in dims]
        out = SUM if dims[2] is None else found[2]
        yield Choice((found[0], found[1], *rest), (out,), even=tuple(places), alone=tuple(places))
    yield from linear_choices(call, ((0,), (1,)))


def scaled_choices(call: Call) -> Iterator[Choice]:
    """Scales are one number, or one for each row of the first operand and column of the second."""
    yield call.replicated()
    names = call.tensor_names()
    placed: dict[str, dict[str, Placement]] = {
        "m": {"self": Shard(0), "scale_a": Shard(0)},
        "n": {"mat2": Shard(1), "scale_b": Shard(1), "bias": Shard(0)},
        "k": {"self": Shard(1), "mat2": Shard(0)},
    }
    metas = dict(zip(names, call.inputs, strict=True))
    rows, columns = call.inputs[0].shape[0], call.inputs[1].shape[1]
    known = _is_scale(metas["scale_a"], (rows, 1)) and _is_scale(metas["scale_b"], (1, columns))
    if not known or "scale_result" in names:
        return
    wide = call.outputs[0].dtype.itemsize > 1
    results: dict[str, Placement] = {"m": Shard(0), "n": Shard(1), "k": SUM}
    for letter, out in results.items():
        if letter == "k" and ("bias" in names or not wide):
            continue
        inputs = tuple(
            REPLICATE if _is_number(metas[name]) else placed[letter].get(name, REPLICATE)
            for name in names
        )
        places = tuple((i, p.dim) for i, p in enumerate(inputs[:2]) if isinstance(p, Shard))
        if letter == "m" or all(_fits(call, number, dim) for number, dim in places):
            yield Choice(inputs, (out,), even=places, alone=places)


def _is_scale(meta: TensorMeta, shape: tuple[Size, ...]) -> bool:
    return _is_number(meta) or tuple(meta.shape) == shape


def _is_number(meta: TensorMeta) -> bool:
    return all(size == 1 for size in meta.shape)


def _fits(call: Call, number: int, dim: int) -> bool:
    size, itemsize = call.inputs[number].shape[dim], call.inputs[number].dtype.itemsize
    return type(size) is int and size % (call.axis_size * _LOADED_BYTES // itemsize) == 0


def _sharded(dim: int | None) -> Placement:
    return REPLICATE if dim is None else Shard(dim)


RULES: Table = table(
    ((aten._grouped_mm.default,), Rule(grouped_choices, "t k, g k n, [g] -> t n")),
    ((aten._scaled_mm.default,), Rule(scaled_choices, "m k, k n, m, n, n -> m n")),
)
