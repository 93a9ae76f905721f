"""Products: matrices, linear layers, einsum, convolutions, attention."""

from __future__ import annotations

from shardwise.testing.fuzz.hand import COMPLEX, FLOATS, Hand, Row

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
_WIDE = (*FLOATS, *COMPLEX)


def _einsum(h: Hand) -> str:
    pattern = h.pick(_EINSUMS_TWO)
    x = h.tensor(_WIDE, (2, 2))
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
    x = h.tensor(_WIDE, (1, 4))
    features = h[x].shape[-1]
    if h.chance(0.07):
        return f"F.linear({x}, {_operand(h, x, features)})"
    out = h.size()
    bias = f", {_operand(h, x, out)}" if h.flag() else ""
    return f"F.linear({x}, {h.new((out, features), h[x].dtype)}{bias})"


def _matmul(h: Hand) -> str:
    x = h.tensor(_WIDE, (1, 3))
    inner = h[x].shape[-1]
    kind = h.between(0, 3)
    if kind == 0:
        return f"torch.matmul({x}, {_operand(h, x, inner)})"
    if kind == 1 and h[x].dim() == 3:
        return f"torch.matmul({x}, {_operand(h, x, h.pick((1, h[x].shape[0])), inner, -1)})"
    return f"{x} @ {_operand(h, x, inner, -1)}"


def _bmm(h: Hand) -> str:
    x = h.tensor(_WIDE, (3, 3))
    batch, _, inner = h[x].shape
    return f"torch.bmm({x}, {_operand(h, x, batch, inner, -1)})"


def _addmm(h: Hand) -> str:
    x = h.tensor(_WIDE, (2, 2))
    out = h.size()
    first = _operand(h, x, h.pick((1, h[x].shape[0])), out)
    weight = h.new((h[x].shape[1], out), h[x].dtype)
    return f"torch.addmm({first}, {x}, {weight}, beta={h.number()}, alpha={h.number()})"


def _conv1d(h: Hand) -> str:
    x = h.tensor(FLOATS[:2], (3, 3), nonempty=True)
    channels, length = h[x].shape[1:]
    groups = h.pick((1, channels))
    kernel = h.between(1, min(3, length))
    weight = h.new((groups * h.between(1, 2), channels // groups, kernel), h[x].dtype)
    options = f", stride={h.between(1, 2)}, padding={h.between(0, 1)}, groups={groups}"
    return f"F.conv1d({x}, {weight}{options})"


def _conv2d(h: Hand) -> str:
    x = h.tensor(FLOATS[:2], (4, 4), nonempty=True)
    channels = h[x].shape[1]
    weight = h.new((h.between(1, 3), channels, 1, h.between(1, min(2, h[x].shape[3]))), h[x].dtype)
    return f"F.conv2d({x}, {weight}, {h.new((h[weight].shape[0],), h[x].dtype)}, padding=1)"


def _attention(h: Hand) -> str:
    x = h.tensor(FLOATS[:2], (3, 4), nonempty=True)
    key = h.like(x, exact=True)
    causal = ", is_causal=True" if h.chance(0.3) else ""
    return f"F.scaled_dot_product_attention({x}, {key}, {h.like(x, exact=True)}{causal})"


def _tensordot(h: Hand) -> str:
    x = h.tensor(_WIDE, (2, 3))
    inner = h[x].shape[-1]
    return f"torch.tensordot({x}, {_operand(h, x, inner, -1)}, dims=1)"


PRODUCTS: tuple[Row, ...] = (
    _einsum,
    _einsum,
    lambda h: f'torch.einsum("{h.pick(_EINSUMS_ONE)}", {h.tensor(_WIDE, (2, 2))})',
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
    lambda h: f"torch.mm({(x := h.tensor(_WIDE, (2, 2)))}, {_operand(h, x, h[x].shape[1], -1)})",
    lambda h: f"torch.mv({(x := h.tensor(_WIDE, (2, 2)))}, {_operand(h, x, h[x].shape[1])})",
    lambda h: f"torch.dot({(x := h.tensor(_WIDE, (1, 1)))}, {_operand(h, x, h[x].shape[0])})",
    lambda h: f"torch.outer({(x := h.tensor(_WIDE, (1, 1)))}, {_operand(h, x, -1)})",
    lambda h: f"torch.inner({(x := h.tensor(_WIDE, (1, 2)))}, {_operand(h, x, h[x].shape[-1])})",
    lambda h: (
        f"F.bilinear({(x := h.floats(2, 2))}, {(y := _operand(h, x, h[x].shape[0], -1))}, "
        f"{h.new((2, h[x].shape[1], h[y].shape[1]), h[x].dtype)})"
    ),
    # Not kron: a write to an operand before backward goes unnoticed on one device.
    lambda h: f"torch.trace({h.floats(2, 2)})",
    lambda h: f"torch.cross({(x := h.new((h.size(), 3)))}, {h.like(x, exact=True)}, dim=1)",
)
