"""The catalog of rules, rules that a program registers, variants and arguments of an op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise._torch.dispatch import OpOverload, OpOverloadPacket
from shardwise._torch.functions import tree_leaves
from shardwise.core.layout import Layout, check_kinds, with_dim_from_zero
from shardwise.core.placements import Placement
from shardwise.dispatch.rule import Call, Choice, Group, Pattern, Rule, Table, TensorMeta, parse
from shardwise.dispatch.rule import rule as parse_rule
from shardwise.errors import ArgumentError, LayoutError

#: The rules of all families in `ops`; `ops.catalog` fills it.
CATALOG: Table = {}

#: Called in turn for an op without an entry, such as one that torch tags as pointwise.
DEFAULT_RULES: list[Callable[[Any], Rule | None]] = []

#: Rules that a program registered; they take precedence over the catalog.
REGISTERED: Table = {}

#: Cleared when a rule is added: plans made before may no longer be right.
rule_caches: list[Callable[[], None]] = []


@functools.lru_cache(maxsize=4096)
def find_rule(op: Any) -> Rule | None:
    """The rule of an op; an in-place op, or an op that copies a view, has the rule of its twin."""
    rule = REGISTERED.get(op) or CATALOG.get(op)
    if rule is not None or not isinstance(op, OpOverload):
        return rule
    twin = functional_twin(op) or view_twin(op)
    if twin is not None:
        return find_rule(twin)
    return next((rule for default in DEFAULT_RULES if (rule := default(op))), None)


rule_caches.append(find_rule.cache_clear)


@functools.lru_cache(maxsize=4096)
def written_twin(op: Any) -> OpOverload | None:
    """The functional twin of an op that writes only to its first argument, and returns it."""
    if not isinstance(op, OpOverload) or written_inputs(op) != (0,) or op in _RESIZES:
        return None
    if torch.Tag.nondeterministic_seeded in op.tags:
        return None  # the twin would draw other numbers
    twin = functional_twin(op)
    # `copy_` itself does the copying back; `set_` replaces the memory. A table is never gathered,
    # not even to scale its rows down.
    aten = torch.ops.aten
    if twin is None or twin in (
        aten.copy.default,
        aten.set.default,
        aten.embedding_renorm.default,
    ):
        return None
    return twin if len(op._schema.returns) == 1 and not changes_shape(op) else None


def copies_view(op: Any) -> bool:
    """Whether the op returns a copy of a view."""
    return isinstance(op, OpOverload) and view_twin(op) is not None


def written_inputs(op: Any) -> tuple[int, ...]:
    """The positions of the arguments that the op writes to."""
    if not isinstance(op, OpOverload):
        return ()
    return tuple(
        position
        for position, arg in enumerate(op._schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    )


def changes_shape(op: Any) -> bool:
    """Whether the op turns its argument into a view of itself."""
    if not isinstance(op, OpOverload) or op in _RESIZES:
        return False
    return torch.Tag.inplace_view in op.tags


_RESIZES = frozenset({torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default})


def has_unknown_shape(op: OpOverload, args: Sequence[Any]) -> bool:
    """Whether the shape of the result is data-dependent.

    `args` has layouts in place of tensors.
    """
    if op is torch.ops.aten._unique.default:
        return True  # torch before 2.13 does not tag it
    if torch.Tag.dynamic_output_shape not in op.tags:
        return False
    if op is torch.ops.aten.index.Tensor:  # a mask; with numbers, the shape is that of the index
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return True


def is_view(op: Any) -> bool:
    """Whether the op returns an alias of an argument that it does not write to."""
    return isinstance(op, OpOverload) and any(
        r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns
    )


# -- registered rules ------------------------------------------------------------------------

Choices = Callable[[Call], Iterable[Choice]]


def register_rule(
    op: Any,
    rule: str | Choices,
    *,
    linear: Sequence[Group] = (),
    added: Group = (),
    reduce_op: str | None = "sum",
    replace: bool = False,
    **bound: str,
) -> None:
    """Give `op` a rule: a line of the notation, or a function from a `Call` to its `Choice`s.

    `linear`, `added`, `reduce_op` and letters bound to arguments belong to the notation; see
    `shardwise.dispatch.rule`. Earlier plans are dropped. Rules are local to a process: register
    them on every rank, before the op is used. `testing.check_rule` compares a rule with the op on
    one device.
    """
    found = overload(op)
    if not replace and (found in CATALOG or found in REGISTERED):
        raise LayoutError(
            f"{found} has a rule already. Give replace=True to put this one in its place."
        )
    if isinstance(rule, str):
        try:
            _, made = parse_rule(
                found, like=rule, linear=linear, added=added, reduce_op=reduce_op, **bound
            )
            _check_counts(found, parse(rule))
        except ValueError as error:
            raise LayoutError(f"The rule of {found} cannot be read: {error}.") from error
        _check_names(found, bound)
    elif callable(rule):
        made = _rule_of(rule)
    else:
        raise ArgumentError(
            f"The rule of {found} is a line of the notation or a function, found {rule!r}."
        )
    _add(found, made)


def _rule_of(choices: Choices) -> Rule:
    def checked(call: Call) -> Iterator[Choice]:
        return (_checked(call, choice) for choice in choices(call))

    return Rule(checked, getattr(choices, "__name__", "a function"), by_value=True)


def _checked(call: Call, choice: Choice) -> Choice:
    """The choice with dims counted from 0; raises if it does not fit the call's tensors."""
    if not isinstance(choice, Choice):
        raise ArgumentError(f"The rule of {call.op} has to yield Choices, found {choice!r}.")
    found = []
    for what, placements, metas in (
        ("tensor arguments", choice.inputs, call.inputs),
        ("outputs", choice.outputs, call.outputs),
    ):
        if len(placements) != len(metas):
            raise LayoutError(
                f"A sharding of {call.op} gives {len(placements)} placements for {len(metas)} "
                f"{what}: found {choice.outputs!r} for the outputs, {choice.inputs!r} for the "
                "arguments."
            )
        check_kinds(placements)
        pairs = zip(placements, metas, strict=True)
        found.append(
            tuple(with_dim_from_zero(p, meta.shape, f" of {call.op}") for p, meta in pairs)
        )
    return replace(choice, inputs=found[0], outputs=found[1])


def _add(op: Any, rule: Rule) -> None:
    REGISTERED[op] = rule
    for forget in rule_caches:
        forget()


def _check_names(op: Any, bound: dict[str, str]) -> None:
    names = [a.name for a in op._schema.arguments]
    for letter, name in bound.items():
        if name not in names:
            raise LayoutError(
                f"{letter}={name!r} names no argument of {op}, which takes {', '.join(names)}."
            )


def _check_counts(op: Any, pattern: Pattern) -> None:
    """Optional tensors may be left out of the line; lists of tensors have any length."""
    schema = op._schema
    for what, values, found in (
        ("tensor arguments", schema.arguments, len(pattern.inputs)),
        ("tensor results", schema.returns, len(pattern.outputs)),
    ):
        types = [str(value.type) for value in values if "Tensor" in str(value.type)]
        required = types.count("Tensor")
        if not any("List" in text for text in types) and not required <= found <= len(types):
            raise ValueError(f"the op has {len(types)} {what}, the line {found}")


def overload(op: Any) -> OpOverload:
    """The overload that `op` stands for: itself, the one of its packet, or of a custom op."""
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if isinstance(op, OpOverloadPacket):
        if len(op.overloads()) != 1:
            raise ArgumentError(
                f"{op} has the overloads {', '.join(op.overloads())}: name one, as in "
                f"{op}.{op.overloads()[0]}."
            )
        op = getattr(op, op.overloads()[0])
    if not isinstance(op, OpOverload):
        raise ArgumentError(
            f"A rule belongs to an op such as torch.ops.aten.mm.default, found {op!r}. Make one of "
            "a Python function with torch.library.custom_op."
        )
    return op


# -- torch's form of a rule --------------------------------------------------------------------

Shardings = Sequence[tuple[Sequence[Placement | None], Sequence[Placement | None]]]


def register_sharding(op: Any) -> Callable[[Callable[..., Shardings]], Callable[..., Shardings]]:
    """Decorate a function that lists the acceptable shardings of `op`, or of each op in a list.

    The function takes the op's arguments, with the global shape (`shape`, `ndim`, `stride`,
    `dtype`) in place of each tensor, and returns pairs: the placements of the outputs, then those
    of the arguments, with None for an argument that is not a tensor. Each is for one mesh axis. The
    rule replaces an existing one.
    """
    ops = [overload(o) for o in (op if isinstance(op, (list, tuple)) else [op])]

    def register(shardings: Callable[..., Shardings]) -> Callable[..., Shardings]:
        def choices(call: Call) -> Iterator[Choice]:
            arguments = call.op._schema.arguments
            num = sum(not a.kwarg_only for a in arguments)
            args = [_described(arg) for arg in call.args]
            kwargs = {name: _described(value) for name, value in call.kwargs.items()}
            # Arguments after a keyword-only tensor are positional here; see Positional.
            kwargs.update(
                (a.name, arg) for a, arg in zip(arguments[num:], args[num:], strict=False)
            )
            for outputs, inputs in shardings(*args[:num], **kwargs):
                yield Choice(_flat(inputs), _flat(outputs))

        for each in ops:
            _add(each, _rule_of(functools.wraps(shardings)(choices)))
        return shardings

    return register


def _described(arg: Any) -> Any:
    if isinstance(arg, Layout):
        return TensorMeta(arg.shape, arg.stride, arg.dtype)
    if isinstance(arg, torch.Tensor):
        return TensorMeta(tuple(arg.shape), tuple(arg.stride()), arg.dtype)
    if isinstance(arg, (list, tuple)):
        return [_described(a) for a in arg]
    return arg


def _flat(placements: Any) -> tuple[Any, ...]:
    """The placements, also those in lists, without None."""
    return tuple(p for p in tree_leaves(placements) if p is not None)


# -- schema --------------------------------------------------------------------------------------
# Related forms of an op: its functional twin, its view twin, and its call by position.


def functional_twin(op: OpOverload) -> OpOverload | None:
    """The op that returns as a new tensor what `op` writes to its first argument.

    >>> functional_twin(torch.ops.aten.add_.Tensor)
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    namespace, _, name = op._schema.name.partition("::")
    if not name.endswith("_") or name.startswith("__") or not op._schema.is_mutable:
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    # Not by the overload's name: pow_.Scalar is pow.Tensor_Scalar, and pow.Scalar is another op.
    return with_arguments(packet, [(a.name, str(a.type)) for a in op._schema.arguments])


def with_arguments(packet: Any, wanted: Sequence[tuple[str, str]]) -> OpOverload | None:
    """The overload that takes these arguments (name and type) and writes to none of them."""
    for overload in packet.overloads() if packet is not None else ():
        op = getattr(packet, overload)
        has = [(a.name, str(a.type)) for a in op._schema.arguments]
        if has == wanted and not op._schema.is_mutable:
            return op
    return None


def view_twin(op: OpOverload) -> OpOverload | None:
    """The view op that `op` copies.

    >>> view_twin(torch.ops.aten.permute_copy.default)
    <OpOverload(op='aten.permute', overload='default')>
    """
    namespace, _, name = op._schema.name.partition("::")
    if not name.endswith("_copy") or op._schema.is_mutable:
        return None
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_copy"), None)
    return getattr(packet, op._schema.overload_name or "default", None)


class Positional:
    """An op with keyword-only tensors, called with all arguments in the order of the schema.

    Rules, plans and the hot path know tensors by position.
    """

    __slots__ = ("_names", "_num_positional", "_schema", "op")

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self._schema = op._schema
        arguments = op._schema.arguments
        self._num_positional = sum(not a.kwarg_only for a in arguments)
        self._names = [a.name for a in arguments if a.kwarg_only]

    def __call__(self, *args: Any) -> Any:
        return self.call(self.op, *args)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call `fn`, which has the op's signature, with keywords where it needs them."""
        named = zip(self._names, args[self._num_positional :], strict=True)
        return fn(*args[: self._num_positional], **dict(named))

    def __repr__(self) -> str:
        return repr(self.op)


@functools.lru_cache(maxsize=1024)
def positional(op: OpOverload) -> Positional:
    """The Positional of an op, interned: cache keys compare ops by identity."""
    return Positional(op)


def in_order(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """All arguments in the order of the schema, defaults filled in."""
    return [
        args[position] if position < len(args) else kwargs.get(a.name, a.default_value)
        for position, a in enumerate(op._schema.arguments)
    ]


def plain_op(op: Any) -> Any:
    """The op that a Positional stands for; any other op itself."""
    return op.op if isinstance(op, Positional) else op


#: The position of a tensor in the arguments, and its index if it is inside a list.
Path = tuple[int, ...]


def tensor_paths(args: Sequence[Any]) -> Iterator[Path]:
    for i, arg in enumerate(args):
        if isinstance(arg, (Layout, torch.Tensor)):
            yield (i,)
        elif isinstance(arg, (list, tuple)):
            yield from ((i, j) for j, a in enumerate(arg) if isinstance(a, (Layout, torch.Tensor)))


def at_path(args: Sequence[Any], path: Path) -> Any:
    return args[path[0]] if len(path) == 1 else args[path[0]][path[1]]
