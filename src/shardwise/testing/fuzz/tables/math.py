"""Pointwise ops, reductions, orderings and products."""

from __future__ import annotations

from shardwise.testing.fuzz.hand import COMPLEX, FLOATS, INEXACT, INTS, WIDE, Hand, Row

_UNARY = (
    "sin cos tanh sigmoid erf atan abs neg exp floor ceil round sign sgn trunc frac square "
    "expm1 nan_to_num relu rad2deg isfinite signbit"
)
# Without hardsigmoid and hardswish: torch computes 1/6 in single precision there.
_UNARY_F = (
    "relu gelu silu softplus elu selu celu leaky_relu hardtanh logsigmoid "
    "mish softsign tanhshrink hardshrink softshrink relu6"
)
_BINARY = (
    "add sub mul maximum minimum fmax fmin atan2 hypot logaddexp eq ne lt le gt ge "
    "copysign logical_and logical_or logical_xor"
)
_INT_BINARY = "bitwise_and bitwise_or bitwise_xor"


def _unary(name: str) -> Row:
    return lambda h: f"torch.{name}({h.floats()})"


def _activation(name: str) -> Row:
    return lambda h: f"F.{name}({h.floats()})"


def _binary(name: str) -> Row:
    return lambda h: f"torch.{name}({(x := h.floats())}, {h.like(x)})"


def _bitwise(name: str) -> Row:
    return lambda h: f"torch.{name}({(x := h.ints())}, {h.like(x)})"


def _cast(h: Hand) -> str:
    dtype = h.pick((*FLOATS, *INTS, *COMPLEX, *INTS)) if h.chance(0.9) else "torch.bool"
    return f"{h.any()}.to({dtype})"


POINTWISE: tuple[Row, ...] = (
    *map(_unary, _UNARY.split()),
    *map(_activation, _UNARY_F.split()),
    *map(_binary, _BINARY.split()),
    *map(_bitwise, _INT_BINARY.split()),
    lambda h: f"{h.inexact()} * {h.number()}",
    lambda h: f"{h.inexact()} + {h.number()}",
    lambda h: f"{h.number()} - {h.inexact()}",
    lambda h: f"{h.inexact()} / {h.number()}",
    lambda h: f"{h.floats()} ** {h.pick((2, 3, 1, 0))}",
    lambda h: f"{(x := h.inexact())} + {h.like(x)}",
    lambda h: f"{(x := h.inexact())} * {h.like(x)}",
    lambda h: f"{(x := h.inexact())} - {h.like(x)}",
    lambda h: f"{(x := h.floats())} / ({h.like(x)}.abs() + 0.5)",
    lambda h: f"torch.sqrt({h.floats()}.abs() + 0.5)",
    lambda h: f"torch.log({h.floats()}.abs() + 0.5)",
    lambda h: f"torch.rsqrt({h.floats()}.abs() + 0.5)",
    lambda h: f"torch.reciprocal({h.floats()}.abs() + 0.5)",
    lambda h: f"torch.add({(x := h.floats())}, {h.like(x)}, alpha={h.number()})",
    lambda h: f"torch.addcmul({(x := h.floats())}, {h.like(x)}, {h.like(x)}, value={h.number()})",
    lambda h: f"torch.addcdiv({(x := h.floats())}, {h.like(x)}, {h.like(x)}.abs() + 0.5)",
    lambda h: f"torch.lerp({(x := h.floats())}, {h.same(x)}, {h.number()})",
    lambda h: f"torch.clamp({h.floats()}, {h.pick(('-0.5', '-1.0', 'None'))}, 0.75)",
    lambda h: f"torch.clamp({(x := h.floats())}, max={h.like(x)})",
    lambda h: f"torch.where({(x := h.floats())} > 0.25, {x}, {h.like(x)})",
    lambda h: f"torch.where({(x := h.floats())} > 0.25, {x}, {h.number()})",
    lambda h: f"{(x := h.floats())}.masked_fill({x} < 0, {h.number()})",
    lambda h: f"torch.remainder({h.floats()}, 0.75)",
    lambda h: f"torch.fmod({h.floats()}, 0.75)",
    lambda h: f"torch.div({h.floats()}, 0.75, rounding_mode='floor')",
    lambda h: f"{h.ints()} * {h.pick((2, -1, 0.5))}",
    lambda h: f"{h.ints()} // 2",
    lambda h: f"{h.ints()} % 3",
    lambda h: f"{(x := h.any())} == {h.like(x)}",
    lambda h: f"torch.logical_not({h.any()})",
    lambda h: f"~{h.bools()}",
    lambda h: f"{(x := h.any())} * {h.like(x, h.dtype())}",
    lambda h: f"{(x := h.any())} + {h.like(x, h.dtype())}",
    lambda h: f"torch.conj({h.inexact()})",
    lambda h: f"torch.real({h.inexact()})",
    lambda h: f"torch.imag({h.tensor(COMPLEX)})",
    lambda h: f"torch.angle({h.tensor(COMPLEX)})",
    lambda h: f"{h.tensor(COMPLEX)}.abs()",
    lambda h: f"torch.complex({(x := h.tensor(WIDE))}, {h.same(x)})",
    lambda h: f"torch.polar({(x := h.tensor(WIDE))}, {h.same(x)})",
    lambda h: f"torch.view_as_real({h.tensor(COMPLEX)}.resolve_conj())",
    _cast,
    _cast,
    _cast,
    lambda h: f"{h.any()}.{h.pick(('float', 'double', 'long', 'bool', 'int', 'half'))}()",
    lambda h: f"{h.any()}.type_as({h.any()})",
    lambda h: f"torch.zeros_like({h.any()})",
    lambda h: f"torch.full_like({h.floats()}, {h.number()})",
    lambda h: f"torch.ones_like({h.any()}, dtype=torch.{h.pick(('float64', 'int64'))})",
    lambda h: f"{h.any()}.clone()",
    lambda h: f"{h.any()}.contiguous()",
    lambda h: f"F.glu({(x := h.floats(1))}, {h.dim(x, 2)})",
    lambda h: f"F.prelu({h.floats(1)}, {h.new((1,), None)})",
    lambda h: f"F.threshold({h.floats()}, 0.1, {h.number()})",
    lambda h: f"torch.special.xlogy({(x := h.floats())}, {h.like(x)}.abs() + 0.5)",
    lambda h: f"torch.heaviside({(x := h.floats())}, {h.like(x)})",
    lambda h: f"torch.isclose({(x := h.floats())}, {h.like(x)})",
    lambda h: f"torch.pow({(x := h.floats())}.abs() + 0.5, {h.like(x)})",
    lambda h: f"torch.cdist({(x := h.tensor(WIDE, (2, 2)))}, {_points(h, x)})",
)


def _points(h: Hand, x: str) -> str:
    return h.new((h.size(), h[x].shape[1]), h[x].dtype)


# -- reductions, orderings and running sums --------------------------------------------------


def _dims(h: Hand, x: str) -> str:
    """Nothing, one dim, several or an empty list, and whether to keep them."""
    ndim = h[x].dim()
    kind = h.between(0, 9)
    if kind == 0 or not ndim:
        return ""
    if kind < 6:
        dims = str(h.dim(x, 0))
    elif kind < 9:
        dims = str(h.random.sample(range(ndim), h.between(1, ndim)))
    else:
        dims = "[]"
    return f", dim={dims}" + (", keepdim=True" if h.chance(0.3) else "")


def _over_dims(name: str) -> Row:
    return lambda h: f"torch.{name}({(x := h.floats())}{_dims(h, x)})"


def _over_one(name: str) -> Row:
    return lambda h: (
        f"torch.{name}({(x := h.floats(1))}, {h.dim(x)}{', keepdim=True' if h.chance(0.3) else ''})"
    )


def _norm(h: Hand) -> str:
    x = h.floats()
    return f"torch.linalg.vector_norm({x}, {h.pick((1, 2, 3))}{_dims(h, x)})"


REDUCTIONS: tuple[Row, ...] = (
    *map(_over_dims, ("sum", "mean", "sum", "mean", "nansum", "nanmean")),
    *map(_over_dims, ("amax", "amin", "logsumexp", "count_nonzero")),
    *map(_over_one, ("prod", "max", "min", "argmax", "argmin", "mode", "median")),
    lambda h: f"torch.{h.pick(('any', 'all'))}({(x := h.any())} != 0{_dims(h, x)})",
    lambda h: f"torch.sum({(x := h.any())}{_dims(h, x)})",
    lambda h: f"torch.sum({h.real()}, dtype=torch.float64)",
    lambda h: f"torch.{h.pick(('std', 'var'))}({(x := h.floats(1))}, {h.dim(x, 2)})",
    lambda h: f"torch.var_mean({(x := h.floats(1))}, {h.dim(x, 2)}, correction=0)",
    lambda h: f"torch.{h.pick(('prod', 'max', 'min', 'median'))}({h.floats()})",
    lambda h: f"torch.argmax({h.floats()})",
    lambda h: f"{h.floats()}.norm()",
    lambda h: f"{h.inexact()}.sum()",
    lambda h: f"{h.inexact()}.mean()",
    _norm,
    lambda h: f"torch.aminmax({(x := h.floats(1))}, dim={h.dim(x)})",
    lambda h: f"torch.dist({(x := h.floats())}, {h.like(x)})",
    lambda h: f"torch.equal({(x := h.any())}, {h.same(x)})",
    lambda h: f"{h.floats(0, 0)}.item()",
    lambda h: f"torch.renorm({(x := h.floats(2))}, 2, {h.dim(x)}, 1.5)",
)

ORDERINGS: tuple[Row, ...] = (
    lambda h: f"torch.sort({(x := h.floats(1))}, {h.dim(x)}, descending={h.flag()})",
    lambda h: f"torch.argsort({(x := h.floats(1))}, dim={h.dim(x)}, stable=True)",
    lambda h: f"torch.topk({(x := h.floats(1))}, {_some(h, x, (d := h.dim(x)))}, {d})",
    lambda h: f"torch.kthvalue({(x := h.floats(1))}, {_some(h, x, (d := h.dim(x)))}, {d})",
    lambda h: f"torch.{h.pick(('cumsum', 'cumprod'))}({(x := h.inexact(1))}, {h.dim(x)})",
    lambda h: f"torch.{h.pick(('cummax', 'cummin'))}({(x := h.floats(1))}, {h.dim(x)})",
    lambda h: f"torch.logcumsumexp({(x := h.floats(1))}, {h.dim(x)})",
    lambda h: f"torch.cumsum({(x := h.ints(1))}, {h.dim(x)})",
    lambda h: f"torch.diff({(x := h.floats(1))}, dim={h.dim(x)})",
    lambda h: f"torch.cumulative_trapezoid({(x := h.floats(1))}, dim={h.dim(x)})",
    lambda h: f"torch.quantile({(x := h.tensor(WIDE, (1, 4)))}, 0.3, dim={h.dim(x)})",
    lambda h: f"torch.bucketize({h.floats()}, {_ordered(h)})",
    lambda h: f"torch.histc({h.tensor(WIDE)}.detach(), 4, -2, 2)",
    lambda h: f"torch.unique({h.ints()})",
    lambda h: f"torch.nonzero({h.floats()} > 0.5)",
    lambda h: f"torch.flip({(x := h.any(1))}, [{h.dim(x)}])",
    lambda h: f"torch.roll({(x := h.any(1))}, {h.between(-3, 3)}, {h.dim(x)})",
    lambda h: f"torch.tril({h.inexact(2)}, {h.between(-1, 1)})",
    lambda h: f"torch.triu({h.inexact(2)}, {h.between(-1, 1)})",
    lambda h: f"torch.rot90({h.inexact(2)}, {h.between(0, 3)})",
)


def _some(h: Hand, x: str, dim: int) -> int:
    return h.between(1, h[x].shape[dim])


def _ordered(h: Hand) -> str:
    return f"torch.sort({h.new((h.between(1, 5),), grad=False)})[0]"


# -- products --------------------------------------------------------------------------------

_EINSUMS_ONE = ("ij->ji", "ij->i", "ij->j", "ij->", "ij->ij")
_EINSUMS_TWO = (
    "ij,jk->ik",
    "ij,ij->i",
    "ij,ij->ij",
    "ij,kj->ki",
    "ij,jk->k",
    "ij,j->i",
    "ij,k->kj",
)


def _einsum(h: Hand) -> str:
    pattern = h.pick(_EINSUMS_TWO)
    x = h.tensor(INEXACT, (2, 2))
    first, second = pattern.split("->")[0].split(",")
    sizes = dict(zip(first, h[x].shape, strict=True))
    return f'torch.einsum("{pattern}", {x}, {_other(h, x, second, sizes)})'


def _other(h: Hand, x: str, letters: str, sizes: dict[str, int]) -> str:
    shape = tuple(sizes.setdefault(letter, h.size()) for letter in letters)
    found = h.names(lambda t: t.shape == shape and t.dtype == h[x].dtype)
    return h.pick(found) if found and h.chance(0.6) else h.new(shape, h[x].dtype)


def _operand(h: Hand, x: str, *shape: int) -> str:
    """An operand of this shape and of the dtype of `x`; -1 is any size."""
    sizes = tuple(h.size() if size < 0 else size for size in shape)
    wanted = [None if size < 0 else size for size in shape]
    found = h.names(
        lambda t: (
            t.dtype == h[x].dtype
            and t.dim() == len(wanted)
            and all(w is None or w == s for w, s in zip(wanted, t.shape, strict=True))
        )
    )
    return h.pick(found) if found and h.chance(0.6) else h.new(sizes, h[x].dtype)


def _linear(h: Hand) -> str:
    x = h.tensor(INEXACT, (1, 4))
    features = h[x].shape[-1]
    if h.chance(0.07):
        return f"F.linear({x}, {_operand(h, x, features)})"
    out = h.size()
    bias = f", {_operand(h, x, out)}" if h.flag() else ""
    return f"F.linear({x}, {h.new((out, features), h[x].dtype)}{bias})"


def _matmul(h: Hand) -> str:
    x = h.tensor(INEXACT, (1, 3))
    inner = h[x].shape[-1]
    kind = h.between(0, 3)
    if kind == 0:
        return f"torch.matmul({x}, {_operand(h, x, inner)})"
    if kind == 1 and h[x].dim() == 3:
        return f"torch.matmul({x}, {_operand(h, x, h.pick((1, h[x].shape[0])), inner, -1)})"
    return f"{x} @ {_operand(h, x, inner, -1)}"


def _bmm(h: Hand) -> str:
    x = h.tensor(INEXACT, (3, 3))
    batch, _, inner = h[x].shape
    return f"torch.bmm({x}, {_operand(h, x, batch, inner, -1)})"


def _addmm(h: Hand) -> str:
    x = h.tensor(INEXACT, (2, 2))
    out = h.size()
    first = _operand(h, x, h.pick((1, h[x].shape[0])), out)
    weight = h.new((h[x].shape[1], out), h[x].dtype)
    return f"torch.addmm({first}, {x}, {weight}, beta={h.number()}, alpha={h.number()})"


def _conv1d(h: Hand) -> str:
    x = h.tensor(WIDE, (3, 3), nonempty=True)
    channels, length = h[x].shape[1:]
    groups = h.pick((1, channels))
    kernel = h.between(1, min(3, length))
    weight = h.new((groups * h.between(1, 2), channels // groups, kernel), h[x].dtype)
    options = f", stride={h.between(1, 2)}, padding={h.between(0, 1)}, groups={groups}"
    return f"F.conv1d({x}, {weight}{options})"


def _conv2d(h: Hand) -> str:
    x = h.tensor(WIDE, (4, 4), nonempty=True)
    channels = h[x].shape[1]
    weight = h.new((h.between(1, 3), channels, 1, h.between(1, min(2, h[x].shape[3]))), h[x].dtype)
    return f"F.conv2d({x}, {weight}, {h.new((h[weight].shape[0],), h[x].dtype)}, padding=1)"


def _attention(h: Hand) -> str:
    x = h.tensor(WIDE, (3, 4), nonempty=True)
    key = h.same(x)
    causal = ", is_causal=True" if h.chance(0.3) else ""
    return f"F.scaled_dot_product_attention({x}, {key}, {h.same(x)}{causal})"


def _tensordot(h: Hand) -> str:
    x = h.tensor(INEXACT, (2, 3))
    inner = h[x].shape[-1]
    return f"torch.tensordot({x}, {_operand(h, x, inner, -1)}, dims=1)"


PRODUCTS: tuple[Row, ...] = (
    _einsum,
    _einsum,
    lambda h: f'torch.einsum("{h.pick(_EINSUMS_ONE)}", {h.tensor(INEXACT, (2, 2))})',
    _linear,
    _linear,
    _matmul,
    _matmul,
    _bmm,
    _addmm,
    _conv1d,
    _conv2d,
    _attention,
    _tensordot,
    lambda h: f"torch.mm({(x := h.tensor(INEXACT, (2, 2)))}, {_operand(h, x, h[x].shape[1], -1)})",
    lambda h: f"torch.mv({(x := h.tensor(INEXACT, (2, 2)))}, {_operand(h, x, h[x].shape[1])})",
    lambda h: f"torch.dot({(x := h.tensor(INEXACT, (1, 1)))}, {_operand(h, x, h[x].shape[0])})",
    lambda h: f"torch.outer({(x := h.tensor(INEXACT, (1, 1)))}, {_operand(h, x, -1)})",
    lambda h: f"torch.inner({(x := h.tensor(INEXACT, (1, 2)))}, {_operand(h, x, h[x].shape[-1])})",
    lambda h: (
        f"F.bilinear({(x := h.floats(2, 2))}, {(y := _operand(h, x, h[x].shape[0], -1))}, "
        f"{h.new((2, h[x].shape[1], h[y].shape[1]), h[x].dtype)})"
    ),
    # Without kron: one device does not notice a write to an operand before backward.
    lambda h: f"torch.trace({h.floats(2, 2)})",
    lambda h: f"torch.cross({(x := h.new((h.size(), 3)))}, {h.same(x)}, dim=1)",
)
