"""Ops on each entry: arithmetic, comparisons, masks, casts and promotion."""

from __future__ import annotations

from shardwise.testing.fuzz.hand import COMPLEX, FLOATS, INTS, Hand, Row

_UNARY = (
    "sin cos tanh sigmoid erf atan abs neg exp floor ceil round sign sgn trunc frac square "
    "expm1 nan_to_num relu rad2deg isfinite signbit"
)
# Not hardsigmoid and hardswish: one device has 1/6 in single precision in them.
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
    lambda h: f"torch.lerp({(x := h.floats())}, {h.like(x, exact=True)}, {h.number()})",
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
    lambda h: f"torch.complex({(x := h.tensor(FLOATS[:2]))}, {h.like(x, exact=True)})",
    lambda h: f"torch.polar({(x := h.tensor(FLOATS[:2]))}, {h.like(x, exact=True)})",
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
    lambda h: f"torch.cdist({(x := h.tensor(FLOATS[:2], (2, 2)))}, {_points(h, x)})",
)


def _points(h: Hand, x: str) -> str:
    return h.new((h.size(), h[x].shape[1]), h[x].dtype)
