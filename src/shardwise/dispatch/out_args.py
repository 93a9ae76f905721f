"""DTensors as keyword arguments: out= targets, and inputs.

Note [Results to write to]
`op(..., out=y)` is the op that returns a new tensor, and a copy into `y`, which keeps its layout.
What torch refuses (a wrong dtype or number of results), the op refuses on fake tensors. If a target
has another dtype than the result, the kernel is asked as well, since many refuse what their shape
functions accept (Note [Kernels are asked]).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise._torch.pytree import tree_leaves, tree_map
from shardwise._torch.schema import OpOverload
from shardwise.core.layout import Layout
from shardwise.dispatch.infer import check_target_dtypes, faked
from shardwise.dispatch.inplace import check_overlaps
from shardwise.dispatch.schema import in_order, positional, with_arguments
from shardwise.errors import LayoutError, UnsupportedError

aten = torch.ops.aten

Writer = Callable[[Any, Sequence[Any], Any], Any]


def _uniform(out: Any, args: Sequence[Any], generator: Any) -> Any:
    return out.uniform_(generator=generator)


def _normal(out: Any, args: Sequence[Any], generator: Any) -> Any:
    return out.normal_(*args[:-1], generator=generator)


def _integers(out: Any, args: Sequence[Any], generator: Any) -> Any:
    low, high = (0, args[0]) if len(args) == 2 else args[:2]
    return out.random_(low, high, generator=generator)


def _identity(out: Any, args: Sequence[Any], generator: Any) -> Any:
    return out.fill_(1).tril_().triu_()


#: Factories with out=, such as `torch.rand(3, 2, out=y)`: each is an in-place op on `y`.
_WRITERS: dict[Any, Writer] = {
    aten.rand.out: _uniform,
    aten.rand.generator_out: _uniform,
    aten.randn.out: _normal,
    aten.randn.generator_out: _normal,
    aten.normal.float_float_out: _normal,
    aten.randint.out: _integers,
    aten.randint.generator_out: _integers,
    aten.randint.low_out: _integers,
    aten.randint.low_generator_out: _integers,
    aten.eye.out: _identity,
    aten.eye.m_out: _identity,
    aten.zeros.out: lambda out, args, _: out.zero_(),
    aten.ones.out: lambda out, args, _: out.fill_(1),
    aten.full.out: lambda out, args, _: out.fill_(args[1]),
}


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
    write = _WRITERS.get(op)
    if functional is None and write is None:
        raise UnsupportedError(
            f"{op} does not have a sharding strategy registered: no op does the same and returns a "
            "new tensor. Call it without out=... where torch has such a form."
        )
    targets = [(name, t) for name in names for t in _listed(kwargs[name])]
    fake = _call_fake(op, args, kwargs, as_layouts)
    rest = {name: value for name, value in kwargs.items() if name not in names}
    if functional is None:
        assert write is not None, "refused above"
        _check_shapes(op, args, targets, [fake[name] for name in names], as_layouts)
        return write(targets[0][1], args, rest.get("generator"))
    if torch.Tag.pointwise in functional.tags:
        for _, target in targets:
            check_overlaps(op, (target, *args))
    result = functional(*args, **rest)
    results = _listed(result)
    _check_shapes(op, args, targets, results, as_layouts)
    if any(t.dtype is not r.dtype for (_, t), r in zip(targets, results, strict=True)):
        check_target_dtypes(op, args, kwargs, names, [r.dtype for r in results])
    for (_, target), value in zip(targets, results, strict=True):
        torch.ops.aten.copy_.default(target, value)
    if not op._schema.returns:
        return None
    return targets[0][1] if isinstance(result, torch.Tensor) else tuple(t for _, t in targets)


@functools.lru_cache(maxsize=1024)
def written_keywords(op: Any) -> tuple[str, ...]:
    """The names of the keywords that the op writes its results to."""
    return tuple(
        a.name
        for a in op._schema.arguments
        if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
    )


@functools.lru_cache(maxsize=1024)
def without_out(op: OpOverload) -> OpOverload | None:
    """The op with the same arguments that returns new tensors.

    >>> without_out(torch.ops.aten.add.out)
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    names = written_keywords(op)
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in names]
    return with_arguments(op.overloadpacket, wanted)


def _call_fake(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], as_layouts: Callable[[Any], Any]
) -> Mapping[str, Any]:
    """Raise what torch raises on fake tensors; the keywords, with targets of the needed shapes."""
    # A tensor that is read and written stays one tensor: some ops refuse that.
    made: dict[int, torch.Tensor] = {}

    def fake(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in made:
            ((made[id(leaf)],), _) = faked([as_layouts(leaf)], {})
        return made[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf

    fake_args = tree_map(fake, list(args))
    fake_kwargs: dict[str, Any] = tree_map(fake, dict(kwargs))
    if fake_kwargs.get("device") is not None:
        fake_kwargs["device"] = torch.device("meta")
    if "generator" in fake_kwargs:
        fake_kwargs["generator"] = None
    if torch.Tag.dynamic_output_shape in op.tags:
        return fake_kwargs  # data-dependent
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a resized target, which is refused
        # Some ops have a shape function only where they return new tensors.
        with contextlib.suppress(NotImplementedError):
            op(*fake_args, **fake_kwargs)
    return fake_kwargs


def _check_shapes(
    op: Any,
    args: Sequence[Any],
    targets: Sequence[tuple[str, Any]],
    results: Sequence[torch.Tensor],
    as_layouts: Callable[[Any], Any],
) -> None:
    """Refuse a target of another shape than the result: it cannot be resized."""
    for (name, given), needed in zip(targets, results, strict=True):
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
