"""Rule, its input (Call) and its output (Choice), and the notation of most rules, a line each.

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

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from shardwise.core.placements import REPLICATE, Partial, Placement, Shard
from shardwise.core.sizes import Size, statically_equal


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, stride and dtype of a global tensor."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class LocalCall:
    """The function that runs on each rank instead of the op itself.

    With `per_rank`, `fn` is called as `fn(coordinate, layouts, *args, **kwargs)` with the layouts
    of all inputs and then of all outputs. With `collective`, `fn(layouts)` is called when the call
    is planned, and returns the function that runs for all ranks at once; that one may run
    collectives, and its choices say which, in `sent`. Otherwise it is called with the op's own
    arguments. `copies` says that it returns a copy where the op would return a view.
    """

    fn: Callable[..., Any]
    per_rank: bool = False
    collective: bool = False
    copies: bool = False


@dataclass(frozen=True, slots=True)
class UnlessEmpty:
    """The op on a rank's shards; zeros where the input or the output is empty: kernels may fail.

    `shapes` has the positions of arguments that hold the shape of an output, and its number.
    """

    op: Any
    shapes: tuple[tuple[int, int], ...] = ()

    def __call__(self, coordinate: Any, layouts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        outputs = layouts[len(tensors) :]
        # Local shapes are not computed needlessly: a compiler would guard on them.
        alike = _empty_together(layouts[0], outputs[0])
        if math.prod(tensors[0].shape) and (alike or math.prod(outputs[0].local_shape(coordinate))):
            here = list(args)
            for position, number in self.shapes:
                here[position] = outputs[number].local_shape(coordinate)
            return self.op(*here, **kwargs)
        made = [
            torch.zeros(o.local_shape(coordinate), dtype=o.dtype, device=tensors[0].device)
            for o in outputs
        ]
        schema = getattr(self.op, "_schema", None)  # a function of ours has none
        if schema is not None and len(schema.returns) > len(made):
            names, remaining = [a.name for a in schema.arguments], iter(made)
            asked = args[names.index("output_mask")]
            return tuple(next(remaining) if wanted else None for wanted in asked)
        return made[0] if len(made) == 1 else tuple(made)


def _empty_together(one: Any, other: Any) -> bool:
    """Whether a rank's shard of `other` is surely empty only where that of `one` is."""
    if one.placements != other.placements or len(one.shape) != len(other.shape):
        return False
    sharded = {p.dim for p in one.placements if p.is_shard()}
    return all(
        statically_equal(size, its) or (dim not in sharded and type(its) is int and its > 0)
        for dim, (size, its) in enumerate(zip(one.shape, other.shape, strict=True))
    )


def unless_empty(op: Any, shapes: tuple[tuple[int, int], ...] = ()) -> LocalCall:
    return LocalCall(UnlessEmpty(op, shapes), per_rank=True)


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """A collective that a local function runs along the axis of its choice.

    `kind` is one of `collective_s`; `num_bytes` is about the size of its larger side on each rank.
    """

    kind: str
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One correct way to run an op, for one mesh axis.

    `even` names `(input, dim)` pairs that must divide by the product of all axes that shard them;
    `alone` names pairs that no other axis may shard. `sent` lists the collectives that the local
    function runs along this axis.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    local: LocalCall | None = None
    even: tuple[tuple[int, int], ...] = ()
    alone: tuple[tuple[int, int], ...] = ()
    sent: tuple[CollectiveCost, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """An op call as a rule sees it, along one axis of the mesh."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    #: Of this axis: its size, the placement of each input, and the preferred placement of each
    #: output, if there is one (a gradient should be laid out like its parameter).
    axis_size: int = 1
    placed: tuple[Placement, ...] = ()
    wanted: tuple[Placement, ...] = ()

    def argument(self, name: str) -> Any:
        """The value of the op's argument `name`, or its default."""
        if inspect.isfunction(self.op):
            given = inspect.signature(self.op).bind(*self.args, **self.kwargs)
            given.apply_defaults()
            return given.arguments[name]
        for position, arg in enumerate(self.op._schema.arguments):
            if arg.name == name:
                if position < len(self.args):
                    return self.args[position]
                return self.kwargs.get(name, arg.default_value if arg.has_default_value() else None)
        raise KeyError(f"{self.op} has no argument {name!r}")

    def tensor_names(self) -> list[str]:
        """The name of the argument of each input, in order."""
        arguments = self.op._schema.arguments
        values = (*self.args, *(self.kwargs.get(a.name) for a in arguments[len(self.args) :]))
        return [
            argument.name
            for argument, value in zip(arguments, values, strict=False)
            if hasattr(value, "dtype") and hasattr(value, "shape")
        ]

    def splits(
        self,
        places: Sequence[tuple[int, int]],
        output_places: Sequence[tuple[int, int]] = (),
    ) -> list[tuple[int, ...] | None]:
        """The sizes to split a dim into: those of `torch.chunk`, of an input, or preferred ones.

        `places` and `output_places` list the `(input, dim)` and `(output, dim)` pairs that are
        split alike.
        """
        found: dict[tuple[int, ...] | None, None] = {None: None}
        for known, pairs in ((self.placed, places), (self.wanted, output_places)):
            for number, dim in pairs if known else ():
                placement = known[number]
                if isinstance(placement, Shard) and placement.dim == dim:
                    found[placement.sizes] = None
        return list(found)

    def asked(self, outputs: Sequence[int | Placement]) -> tuple[Any, ...]:
        """Of the placements of all possible outputs, those that `output_mask` asks for."""
        return tuple(itertools.compress(outputs, self.argument("output_mask")))

    def replicated(self) -> Choice:
        """Everything replicated: correct for every op that is a function."""
        return Choice((REPLICATE,) * len(self.inputs), (REPLICATE,) * len(self.outputs))


@dataclass(frozen=True, slots=True)
class Rule:
    """Yields an op's choices for one mesh axis.

    `local_shape` maps names of arguments that hold a global shape to the number of the output
    whose local shape they must hold on each rank. With `found_shapes` all operands and results are
    replicated, and the number and shapes of the results are data-dependent. `shaped_like` is the
    input whose shape and dtype the one output has, where torch cannot infer them without data.
    With `by_value`, choices depend on float arguments, whose values plans otherwise ignore.
    """

    choices: Callable[[Call], Iterable[Choice]]
    text: str
    local_shape: Mapping[str, int] = field(default_factory=dict)
    found_shapes: bool = False
    shaped_like: int | None = None
    by_value: bool = False


Table = dict[Any, Rule]


def table(*entries: tuple[Iterable[Any], Rule]) -> Table:
    """One family's rules. Adding the same op twice raises."""
    result: Table = {}
    for ops, rule in entries:
        for op in ops:
            if op in result:
                raise ValueError(f"{op} has two rules in one table")
            result[op] = rule
    return result


def merge(*tables: Table) -> Table:
    """All families in one table. An op in two families raises."""
    result: Table = {}
    for each in tables:
        twice = result.keys() & each.keys()
        if twice:
            raise ValueError(f"these ops have rules in two families: {sorted(map(str, twice))}")
        result.update(each)
    return result


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
        tokens = tuple(t.strip("[]") for t in _TOKEN.findall(part))
        if len(set(tokens)) < len(tokens):
            raise ValueError(
                f"{part.strip()!r} in {text!r} has a letter twice: shards of one dim have no part "
                "of the other"
            )
        result.append(tokens)
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
    _check_options(pattern, like, (*linear, added), reduce_op, bound)

    def choices(call: Call) -> Iterator[Choice]:
        yield from pattern_choices(pattern, call, linear, added, reduce_op, bound)

    return ops, Rule(choices, like)


def _check_options(
    pattern: Pattern,
    text: str,
    groups: Iterable[Group],
    reduce_op: str | None,
    bound: Mapping[str, str],
) -> None:
    """Raise where an option names nothing: it would be ignored, and the rule be another one."""
    letters = {letter for operand in (*pattern.inputs, *pattern.outputs) for letter in operand}
    for letter, name in bound.items():
        if letter not in letters:
            raise ValueError(f"{letter}={name!r} names no letter of {text!r}")
    num = len(pattern.inputs)
    for group in groups:
        if not all(0 <= number < num for number in group):
            raise ValueError(f"{group} names operands of {text!r}, which has 0 to {num - 1}")
    if reduce_op is not None:
        Partial(reduce_op)  # raises where it is not a reduction


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


def sharded_together(
    call: Call,
    inputs: Sequence[int | Placement],
    outputs: Sequence[int | Placement],
    local: LocalCall | None = None,
    alone: tuple[tuple[int, int], ...] = (),
) -> Iterator[Choice]:
    """One choice per way to split a dim that several tensors share.

    Each input and output is given as the number of that dim in it, or as its placement.
    """
    for sizes in call.splits([(i, dim) for i, dim in enumerate(inputs) if isinstance(dim, int)]):
        ins, outs = (
            tuple(Shard(at, sizes) if isinstance(at, int) else at for at in tensors)
            for tensors in (inputs, outputs)
        )
        yield Choice(ins, outs, local, alone=alone)


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
