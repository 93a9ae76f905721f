"""The global shape, stride and dtype of an op's outputs: the op runs on fake tensors.

Note [Kernels are asked]
torch's shape functions and kernels may raise different types of errors, and kernels refuse some
calls that shape functions accept. Where that matters, the kernel itself runs on small tensors,
equal on all ranks: `as_on_one_device`, `check_target_dtypes`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise._torch.dispatch import (
    OpOverload,
    has_python_meta,
    is_contiguous_or_false,
    outside_modes,
)
from shardwise._torch.functions import detect_fake_mode, tree_leaves, tree_map, tree_map_only
from shardwise.core.layout import Layout, contiguous_stride, shares_entries
from shardwise.core.sizes import recorded
from shardwise.dispatch.rule import Rule, TensorMeta
from shardwise.dispatch.shapes import ASKED, SHAPES, iterated_stride, with_kernel_strides
from shardwise.errors import ShardwiseError, UnsupportedError

#: Ops whose results are views of the operand, unknown to autograd and to their schemas.
UNSAFE_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)

_TENSORS = ("Tensor", "List[Tensor]", "Optional[Tensor]")


def infer_outputs(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, symbolic: bool
) -> tuple[tuple[TensorMeta, ...], Any]:
    """The outputs' metas, and the op's result with a meta in place of each tensor.

    Tensors in `args` are given by their layouts.
    """
    schema = getattr(op, "_schema", None)
    if schema is not None and not any(str(r.type) in _TENSORS for r in schema.returns):
        return (), None  # a number: data-dependent
    if not symbolic and op not in ASKED:
        meta = _elementwise(op, args, kwargs)
        if meta is not None:
            return (meta,), meta
    with _without_data(symbolic):
        result = _call_fake(op, args, kwargs)
        if not symbolic and op in ASKED:
            devices = (a.grid.device_type for a in args if isinstance(a, Layout))
            result = with_kernel_strides(op, *faked(args, kwargs), result, next(devices, "cpu"))
        dense = {id(t) for t in tree_leaves(result) if symbolic and _is_dense(t)}
        if _returns_new(op):
            dense |= {id(t) for t in tree_leaves(result) if _shares_entries(t)}
    metas: list[TensorMeta] = []
    shape = tree_map(lambda leaf: _meta(leaf, metas, id(leaf) in dense), result)
    return tuple(metas), shape


def _elementwise(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TensorMeta | None:
    """The result of a pointwise op; None if torch has to infer it.

    Torch's shape functions for these ops are written in Python. The first call of one imports the
    compiler, which takes longer than the rest of a first call, and those composed of several ops
    give other strides than the kernels.
    """
    if not _infers_in_python(op) or any(
        isinstance(a, (Layout, torch.Tensor)) for a in kwargs.values()
    ):
        return None
    if any(isinstance(a, (torch.Tensor, list, tuple)) for a in args):
        return None
    tensors = [a for a in args if isinstance(a, Layout)]
    dense = all(t.stride == contiguous_stride(t.shape) for t in tensors)
    if not dense and (op._schema.is_mutable or op in _OTHER_ORDER):
        return None
    try:
        shape = tuple(torch.broadcast_shapes(*(t.shape for t in tensors)))
        if op._schema.is_mutable and tensors[0].shape != shape:
            return None
        # The dtype is that of the op on empty tensors, or on one value where a tensor has no dims.
        few = [_few_values(a) if isinstance(a, Layout) else a for a in args]
        with _without_data(symbolic=False):
            dtype = op(*few, **kwargs).dtype
    except Exception:
        return None  # torch's shape function says what is wrong
    given: list[Any] = _as_cast(tensors, few, dtype)
    if op in _ROW_MAJOR:
        power = tensors[_ROW_MAJOR[op]]
        given[_ROW_MAJOR[op]] = TensorMeta(power.shape, contiguous_stride(power.shape), power.dtype)
    return TensorMeta(shape, iterated_stride(shape, given), dtype)


def _as_cast(tensors: Sequence[Layout], few: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Two operands as a CPU kernel sees them: cast to one dtype, an expanded one is dense."""
    if len(tensors) != 2 or len(few) != 2 or tensors[0].grid.device_type != "cpu":
        return list(tensors)
    common = torch.result_type(*few)
    if dtype.is_floating_point and not (common.is_floating_point or common.is_complex):
        common = dtype
    return [
        t if t.dtype == common else TensorMeta(t.shape, iterated_stride(t.shape, [t]), common)
        for t in tensors
    ]


#: The operand that is an exponent: the power of a number is row-major, whatever the exponent's
#: strides.
_ROW_MAJOR: dict[Any, int] = {torch.ops.aten.pow.Scalar: 0}


#: Pointwise ops whose kernels do not go through memory in the order of `iterated_stride`.
_OTHER_ORDER = frozenset(
    {
        torch.ops.aten.clone.default,
        torch.ops.aten.conj_physical.default,
        torch.ops.aten.masked_fill.Scalar,
        torch.ops.aten.mvlgamma.default,
        torch.ops.aten.threshold_backward.default,
    }
)


def _infers_in_python(op: Any) -> bool:
    """Whether it is pointwise, with a shape function in Python and none in `SHAPES`."""
    return (
        isinstance(op, OpOverload)
        and torch.Tag.pointwise in op.tags
        and torch.Tag.nondeterministic_seeded not in op.tags
        and has_python_meta(op)
        and op not in SHAPES
        and len(op._schema.returns) == 1
        and not op.is_view
    )


def _few_values(layout: Layout) -> torch.Tensor:
    return torch.ones((0,) if layout.shape else (), dtype=layout.dtype)


def _returns_new(op: Any) -> bool:
    """Whether the result is a new tensor, whose entries do not share memory.

    The shape function of `diagonal_scatter` keeps the strides of a view by `unfold`, and in some
    versions those of an expanded operand.
    """
    if not isinstance(op, OpOverload) or op in UNSAFE_VIEWS:
        return False
    aliased = any(x.alias_info for x in (*op._schema.returns, *op._schema.arguments))
    return not aliased and not op._schema.name.endswith("_strided")


def _shares_entries(x: Any) -> bool:
    """Whether several entries share one memory location."""
    if not isinstance(x, torch.Tensor):
        return False
    if any(type(part) is not int for part in (*x.shape, *x.stride())):
        return any(type(stride) is int and stride == 0 for stride in x.stride())
    return shares_entries(x.shape, x.stride())


def outputs_of(
    rule: Rule,
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[TensorMeta],
    *,
    symbolic: bool,
) -> tuple[tuple[TensorMeta, ...], Any]:
    """Like `infer_outputs`, for an op whose rule may know more than torch does."""
    if rule.shaped_like is None:
        return infer_outputs(op, args, kwargs, symbolic=symbolic)
    model = inputs[rule.shaped_like]
    meta = TensorMeta(model.shape, contiguous_stride(model.shape), model.dtype)
    return (meta,), meta


def _call_fake(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`fn` on fake tensors in place of layouts and tensors."""
    fake_args, fake_kwargs = faked(args, kwargs)
    try:
        return SHAPES.get(fn, fn)(*fake_args, **fake_kwargs)
    except Exception as error:
        found = as_on_one_device(fn, fake_args, fake_kwargs, error)
        if found is error and isinstance(error, AssertionError):
            found = RuntimeError(
                str(error)
            )  # kernels raise RuntimeError where shape functions assert
        if found is error:
            raise
        raise found from error


class ResizedError(UnsupportedError):
    """The op would resize a tensor that it writes to, on one device."""


#: With more entries than this in all its tensors, a kernel is not asked.
_SMALL = 2**16


def as_on_one_device(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> Exception:
    """The kernel's error for tensors like these if it has another type, else `error`."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if (
        isinstance(error, (NotImplementedError, ShardwiseError))
        or any(not isinstance(t.numel(), int) for t in tensors)
        or sum(t.numel() for t in tensors) > _SMALL
        or kwargs.get("device")
    ):
        return error
    with _without_data(symbolic=False):
        small = {id(t): torch.zeros(t.shape, dtype=t.dtype) for t in tensors}
        args, kwargs = tree_map(lambda leaf: small.get(id(leaf), leaf), (list(args), dict(kwargs)))
        found = _raised(fn, args, kwargs)
    for tensor in tensors:
        shape = tuple(small[id(tensor)].shape)
        if shape != tensor.shape:
            return ResizedError(
                f"{fn} gives a tensor of shape {tuple(tensor.shape)} that it writes to the shape "
                f"{shape} on one device, and a DTensor cannot be resized. Make one of that shape, "
                "or call the op that returns a new tensor."
            )
    return error if found is None or isinstance(found, type(error)) else found


def check_target_dtypes(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    dtypes: Sequence[torch.dtype],
) -> None:
    """Raise the kernel's error for the dtypes of the tensors that `op` is to write to.

    `names` are the keywords that hold them, `dtypes` those of the results. An error that the kernel
    raises for tensors of these dtypes too is ignored: it is about the small tensors.
    """
    leaves = tree_leaves((args, kwargs))
    if any(isinstance(leaf, (torch.SymInt, torch.SymFloat)) for leaf in leaves):
        return
    rest = {name: value for name, value in kwargs.items() if name not in names}
    # Ones are values that most kernels take, zeros are ids.
    small = lambda t: _filled(int(t.is_floating_point()), t)  # noqa: E731
    args, rest = tree_map_only(torch.Tensor, small, (list(args), rest))
    given = {name: kwargs[name] for name in names}

    def raised(wanted: Iterator[torch.dtype] | None) -> Exception | None:
        def target(t: torch.Tensor) -> torch.Tensor:
            return torch.empty(0, dtype=next(wanted) if wanted else t.dtype, device=t.device)

        return _raised(op, args, {**rest, **tree_map_only(torch.Tensor, target, given)})

    with _without_data(symbolic=False):
        found = raised(None)
        if found is not None and str(found) != str(raised(iter(dtypes))):
            raise found


#: Ops and dtypes of their tensors that kernels take.
_taken: set[Any] = set()


def check_whole_numbers(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise the kernel's error for tensors of integers or bools, if floats raise none.

    Decompositions and shape functions accept integers that kernels refuse.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(t.is_floating_point() or t.is_complex() for t in tensors):
        return
    key = (op, *[t.dtype for t in tensors])
    if key in _taken or any(isinstance(x, torch.SymInt) for t in tensors for x in t.shape):
        return
    with _without_data(symbolic=False):
        # Zeros are ids of any dim, ones are divisors.
        given = [
            tree_map_only(torch.Tensor, functools.partial(_filled, value), (list(args), kwargs))
            for value in (0, 1)
        ]
        zeros, ones = (_raised(op, *each) for each in given)
        if zeros is not None and ones is not None:
            floats = tree_map_only(torch.Tensor, lambda t: t.to(torch.float32), given[1])
            if _raised(op, *floats) is None:
                raise zeros
    _taken.add(key)


def _filled(value: int, tensor: torch.Tensor) -> torch.Tensor:
    """A small tensor like it, of one value."""
    sizes = [size if type(size) is int and size < 8 else 8 for size in tensor.shape]
    return torch.full(sizes, value, dtype=tensor.dtype, device=tensor.device)


def _raised(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """The error that a call raises, if any; generators keep their state."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fn(*args, **kwargs)
        except Exception as error:
            return error
    return None


def faked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with fake tensors in place of layouts and tensors; one tensor stays one."""
    kwargs = dict(kwargs)
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")  # a real one would allocate
    made: dict[int, torch.Tensor] = {}

    def fake(leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return None  # some shape functions accept no generator, and no shape depends on it
        if isinstance(leaf, Layout):
            return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")
        if isinstance(leaf, torch.Tensor) and id(leaf) not in made:
            made[id(leaf)] = torch.empty_strided(
                leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta"
            )
        return made.get(id(leaf), leaf)

    return tree_map(fake, list(args)), tree_map(fake, kwargs)


def _is_dense(leaf: Any) -> bool:
    """Whether it is dense for certain: a data-dependent size cannot be compared with 0 or 1."""
    return isinstance(leaf, torch.Tensor) and is_contiguous_or_false(leaf)


def _meta(leaf: Any, metas: list[TensorMeta], multiply: bool) -> Any:
    """With `multiply`, strides are computed here, so that the tracer records them.

    It cannot derive the square of a size that it has not recorded.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = tuple(recorded(leaf.shape))
    stride = contiguous_stride(shape) if multiply else tuple(recorded(leaf.stride()))
    metas.append(TensorMeta(shape, stride, leaf.dtype))
    return metas[-1]


@contextlib.contextmanager
def _without_data(symbolic: bool) -> Any:
    """Outside all modes, so that nothing is counted or traced; symbolic sizes need a fake mode."""
    fake = detect_fake_mode() if symbolic else None
    with outside_modes(), torch.no_grad(), fake or contextlib.nullcontext():
        yield
