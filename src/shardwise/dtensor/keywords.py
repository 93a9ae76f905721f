"""DTensors that are given by keyword: results to write to, and inputs.

Note [Results to write to]
`op(..., out=y)` is the op that returns a new tensor, and a copy into `y` that leaves `y` where it
lies. What torch would refuse (a type that does not fit, a wrong number of results) is refused by
the op itself, run without data.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.core.layout import Layout
from shardwise.dtensor.made_into import writer_of
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.rules.infer import hollowed
from shardwise.rules.positional import in_order, positional
from shardwise.rules.twins import with_arguments


class TensorByKeyword(Exception):
    """Raised while a key is built: the call has a DTensor among its keywords."""


def run_by_keyword(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    run: Callable[..., Any],
    as_layouts: Callable[[Any], Any],
) -> Any:
    """Run a call with DTensors in `kwargs`; `run` runs an op whose tensors are positional."""
    names = written_keywords(op)
    if not names:
        return run(positional(op), None, tuple(in_order(op, args, kwargs)))
    functional = without_out(op)
    made = writer_of(op)
    if functional is None and made is None:
        raise UnsupportedError(
            f"{op} does not have a sharding strategy registered: no op does the same and returns a "
            "new tensor. Call it without out=... where torch has such a form."
        )
    targets = [kwargs[name] for name in names]
    _check_targets(op, args, kwargs, targets, names, as_layouts)
    rest = {name: value for name, value in kwargs.items() if name not in names}
    if functional is None:
        assert made is not None, "refused above"
        return made(targets[0], args, rest.get("generator"))
    result = functional(*args, **rest)
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    if len(targets) == 1 and isinstance(targets[0], (list, tuple)):
        targets = list(targets[0])
    for target, value in zip(targets, results, strict=True):
        torch.ops.aten.copy_.default(target, value)
    if not op._schema.returns:
        return None
    return targets[0] if isinstance(result, torch.Tensor) else tuple(targets)


@functools.lru_cache(maxsize=1024)
def written_keywords(op: Any) -> tuple[str, ...]:
    """The names of the keywords that the op writes its results to."""
    return tuple(
        a.name
        for a in op._schema.arguments
        if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
    )


@functools.lru_cache(maxsize=1024)
def without_out(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The op with the same arguments that returns new tensors.

    >>> without_out(torch.ops.aten.add.out)
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    names = written_keywords(op)
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in names]
    return with_arguments(op.overloadpacket, wanted)


def _check_targets(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    targets: Sequence[Any],
    names: Sequence[str],
    as_layouts: Callable[[Any], Any],
) -> None:
    """Raise what torch would raise, and refuse a target of another shape: it cannot grow."""
    if torch.Tag.dynamic_output_shape in op.tags:
        return  # only the values can tell
    # A tensor that is read and written is one tensor: some ops refuse that.
    made: dict[int, torch.Tensor] = {}

    def hollow(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in made:
            ((made[id(leaf)],), _) = hollowed([as_layouts(leaf)], {})
        return made[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf

    hollow_args = tree_map(hollow, list(args))
    hollow_kwargs = tree_map(hollow, dict(kwargs))
    if hollow_kwargs.get("device") is not None:
        hollow_kwargs["device"] = torch.device("meta")
    if "generator" in hollow_kwargs:
        hollow_kwargs["generator"] = None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a target is resized: it is refused below
        op(*hollow_args, **hollow_kwargs)
    for name, target in zip(names, targets, strict=True):
        pairs = zip(_listed(target), _listed(hollow_kwargs[name]), strict=True)
        for given, needed in pairs:
            if given.shape != needed.shape:
                if any(given is leaf for leaf in tree_leaves(list(args))):
                    raise RuntimeError(
                        f"{op} reads the tensor that was given as {name}=, and cannot give it "
                        f"the shape {tuple(needed.shape)}. Use the result of the call."
                    )
                found: Layout = as_layouts(given)
                raise LayoutError(
                    f"{op} was given {name}= of shape {tuple(given.shape)} for a result of shape "
                    f"{tuple(needed.shape)}: {found!r} cannot be resized. Make one of that shape, "
                    "or use the result of the call."
                )


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)
