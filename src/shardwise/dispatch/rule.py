"""Rule, its input (Call) and its output (Choice)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.core.sizes import Size


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
    """What runs on each rank when it is not the op itself.

    With `per_rank`, `fn` is called as `fn(coordinate, layouts, *args, **kwargs)` with the layouts
    of all inputs and then of all outputs. With `collective` it is called once for all ranks,
    as `fn(layouts, *args, **kwargs)`, and may run collectives; its choices say which, in `sent`.
    Otherwise it is called with the op's own arguments. `copies` says that it returns a copy where
    the op would return a view.
    """

    fn: Callable[..., Any]
    per_rank: bool = False
    collective: bool = False
    copies: bool = False


@dataclass(frozen=True, slots=True)
class EmptySafe:
    """An op whose kernel fails on empty shards: there the results are zeros."""

    op: Any

    def __call__(self, coordinate: Any, layouts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        given = [a for a in args if isinstance(a, torch.Tensor)]
        if all(a.numel() for a in given):
            return self.op(*args, **kwargs)
        results = tuple(
            given[0].new_zeros(layout.local_shape(coordinate), dtype=layout.dtype)
            for layout in layouts[len(given) :]
        )
        return results[0] if len(results) == 1 else results


def empty_safe(op: Any) -> LocalCall:
    return LocalCall(EmptySafe(op), per_rank=True)


@dataclass(frozen=True, slots=True)
class UnlessEmpty:
    """The op on a rank's shards; zeros where the input or the output is empty.

    `shapes` has the positions of arguments that hold the shape of an output, and its number.
    """

    op: Any
    shapes: tuple[tuple[int, int], ...] = ()

    def __call__(self, coordinate: Any, layouts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        outputs = layouts[len(tensors) :]
        if math.prod(tensors[0].shape) and math.prod(outputs[0].local_shape(coordinate)):
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


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """A collective that a local function runs along the axis of its choice.

    `kind` is one of `comm.cost`; `num_bytes` is about the size of its larger side on each rank.
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
