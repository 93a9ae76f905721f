"""The notation in which most rules are written, one line each.

    "m k, k n -> m n"            a letter shared by inputs and outputs may be sharded together;
                                 one that is missing on the right leaves a Partial
    "... [n] -> ... [n]"         `[n]` must stay whole
    "..., ... -> ..."            `...` is a batch, broadcast from the right
    "... [n] -> ...", n="dim"    `n` is the dim that the argument `dim` names

`linear` lists groups of operands in which the op is linear together: when all of a group are
Partial (and the others replicated), so is the output. `added` lists operands that are added to a
contraction: they are Partial while a contracted letter is sharded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from shardwise.core.placements import REPLICATE, Partial, Placement, Shard
from shardwise.dispatch.rule import Call, Choice, Rule, TensorMeta

_TOKEN = re.compile(r"\.\.\.|\[[a-z]\]|[a-z]")
_BATCH = "..."

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed line: the letters of each operand and result, and those that must stay whole."""

    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    whole: frozenset[str]


def parse(text: str) -> Pattern:
    """Parse one line of the notation.

    >>> parse("m k, k n -> m n").inputs
    (('m', 'k'), ('k', 'n'))
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"{text!r} has no '->'")
    whole = frozenset(re.findall(r"\[([a-z])\]", text))
    return Pattern(_operands(left, text), _operands(right, text), whole)


def _operands(side: str, text: str) -> tuple[tuple[str, ...], ...]:
    result = []
    for part in side.split(","):
        if _TOKEN.sub("", part).strip():
            raise ValueError(f"{part.strip()!r} in {text!r} is not in the notation")
        if part.count(_BATCH) > 1:
            raise ValueError(f"{part.strip()!r} in {text!r} has {_BATCH} twice: a comma is missing")
        result.append(tuple(t.strip("[]") for t in _TOKEN.findall(part)))
    return tuple(result)


def rule(
    *ops: Any,
    like: str,
    linear: Sequence[Group] = (),
    added: Group = (),
    reduce_op: str | None = "sum",
    **bound: str,
) -> tuple[tuple[Any, ...], Rule]:
    """An entry of a table: `ops` behave like the pattern. `bound` maps letters to arguments."""
    pattern = parse(like)

    def choices(call: Call) -> Iterator[Choice]:
        yield from pattern_choices(pattern, call, linear, added, reduce_op, bound)

    return ops, Rule(choices, like)


def pattern_choices(
    pattern: Pattern,
    call: Call,
    linear: Sequence[Group] = (),
    added: Group = (),
    reduce_op: str | None = "sum",
    bound: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Choice]:
    """The choices of a call that follows the pattern."""
    dims = assign(pattern, call, bound)
    yield call.replicated()
    yield from sharded_choices(call, dims, pattern.whole, added, reduce_op)
    yield from linear_choices(call, linear)


@dataclass(frozen=True, slots=True)
class Dims:
    """The letter of each dim of each input and output; None where a dim is broadcast."""

    inputs: tuple[tuple[str | None, ...], ...]
    outputs: tuple[tuple[str | None, ...], ...]

    def letters(self) -> list[str]:
        every = (letter for dims in (*self.inputs, *self.outputs) for letter in dims)
        return list(dict.fromkeys(letter for letter in every if letter))


def assign(pattern: Pattern, call: Call, bound: Mapping[str, str]) -> Dims:
    """Match the pattern with the call's tensors. Absent optional inputs are left out."""
    # Trailing operands of the pattern are optional tensors (a bias, class weights).
    inputs = pattern.inputs[: len(call.inputs)]
    batch = max(
        (meta.ndim - len(tokens) + 1 for tokens, meta in _with_batch(inputs, call.inputs)),
        default=0,
    )
    result_inputs = tuple(
        _letters(t, m, batch, call, bound) for t, m in zip(inputs, call.inputs, strict=True)
    )
    outputs = pattern.outputs[: len(call.outputs)]
    result_outputs = tuple(
        _letters(t, m, batch, call, bound) for t, m in zip(outputs, call.outputs, strict=True)
    )
    return Dims(_drop_broadcast(result_inputs, call), result_outputs)


def _with_batch(
    tokens: Sequence[tuple[str, ...]], metas: Sequence[TensorMeta]
) -> list[tuple[tuple[str, ...], TensorMeta]]:
    return [(t, m) for t, m in zip(tokens, metas, strict=True) if _BATCH in t]


def _letters(
    tokens: tuple[str, ...], meta: TensorMeta, batch: int, call: Call, bound: Mapping[str, str]
) -> tuple[str | None, ...]:
    fixed = {}
    for letter, argument in bound.items():
        if letter in tokens and meta.ndim:
            fixed[call.argument(argument) % meta.ndim] = letter
    free = [t for t in tokens if t not in fixed.values()]
    if _BATCH in free:
        num_batch = meta.ndim - len(fixed) - (len(free) - 1)
        names = [f"batch{i}" for i in range(batch - num_batch, batch)]
        at = free.index(_BATCH)
        free = [*free[:at], *names, *free[at + 1 :]]
    remaining = iter(free)
    return tuple(fixed.get(d) or next(remaining) for d in range(meta.ndim))


def _drop_broadcast(
    inputs: tuple[tuple[str | None, ...], ...], call: Call
) -> tuple[tuple[str | None, ...], ...]:
    """A dim of size 1 whose letter is larger elsewhere is broadcast, and loses the letter."""
    largest: dict[str, Any] = {}
    for letters, meta in zip(inputs, call.inputs, strict=True):
        for letter, size in zip(letters, meta.shape, strict=True):
            if letter and (type(size) is not int or size != 1):
                largest[letter] = size
    return tuple(
        tuple(
            None if letter and letter in largest and type(size) is int and size == 1 else letter
            for letter, size in zip(letters, meta.shape, strict=True)
        )
        for letters, meta in zip(inputs, call.inputs, strict=True)
    )


def sharded_choices(
    call: Call, dims: Dims, whole: frozenset[str], added: Group, reduce_op: str | None
) -> Iterator[Choice]:
    """One choice per letter and way to split it."""
    for letter in dims.letters():
        if letter in whole:
            continue
        contracted = not all(letter in out for out in dims.outputs)
        if contracted and reduce_op is None:
            continue
        places = [(i, d.index(letter)) for i, d in enumerate(dims.inputs) if letter in d]
        if not places:
            continue
        partial = Partial(reduce_op) if reduce_op else REPLICATE
        output_places = [(i, d.index(letter)) for i, d in enumerate(dims.outputs) if letter in d]
        for sizes in call.splits(places, output_places):
            yield Choice(
                tuple(
                    _placed(d, letter, sizes, partial if contracted and i in added else REPLICATE)
                    for i, d in enumerate(dims.inputs)
                ),
                tuple(_placed(d, letter, sizes, partial) for d in dims.outputs),
            )


def _placed(
    letters: tuple[str | None, ...],
    letter: str,
    sizes: tuple[int, ...] | None,
    default: Placement,
) -> Placement:
    return Shard(letters.index(letter), sizes) if letter in letters else default


def averages_too(meta: TensorMeta) -> tuple[str, ...]:
    """The reductions that commute with a linear op; integers have no average."""
    return ("sum", "avg") if meta.dtype.is_floating_point or meta.dtype.is_complex else ("sum",)


def converts_by_terms(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a sum in another dtype is the sum of the terms in that dtype.

    Not where values are rounded: to a narrower type, from floats to integers. Nor for bools.

    >>> converts_by_terms(torch.float32, torch.float64)
    True
    >>> converts_by_terms(torch.float32, torch.int64)
    False
    """
    if before == after:
        return True
    exact = before.is_floating_point or before.is_complex
    if exact != (after.is_floating_point or after.is_complex) or before == torch.bool:
        return False
    # Complex numbers convert like their real parts.
    before, after = (t.to_real() if t.is_complex else t for t in (before, after))
    if exact and 1 in (before.itemsize, after.itemsize):  # float8, which torch does not promote
        return before.itemsize < after.itemsize
    return torch.promote_types(before, after) == after


def linear_choices(call: Call, linear: Sequence[Group]) -> Iterator[Choice]:
    """Partial operands pass through an op that is linear in them, as sums and averages.

    Not where the dtype conversion of a sum differs from that of its terms.
    """
    num = len(call.inputs)
    groups = dict.fromkeys(tuple(i for i in group if i < num) for group in linear)
    for group in filter(None, groups):
        dtypes = [(call.inputs[i].dtype, out.dtype) for i in group for out in call.outputs]
        if not all(converts_by_terms(*pair) for pair in dtypes):
            continue
        for reduce_op in averages_too(call.inputs[group[0]]):
            partial = Partial(reduce_op)
            yield Choice(
                tuple(partial if i in group else REPLICATE for i in range(num)),
                (partial,) * len(call.outputs),
            )
