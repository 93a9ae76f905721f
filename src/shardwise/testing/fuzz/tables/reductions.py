"""Reductions, orderings and running sums."""

from __future__ import annotations

from shardwise.testing.fuzz.hand import FLOATS, Hand, Row


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
    lambda h: f"torch.equal({(x := h.any())}, {h.like(x, exact=True)})",
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
    lambda h: f"torch.quantile({(x := h.tensor(FLOATS[:2], (1, 4)))}, 0.3, dim={h.dim(x)})",
    lambda h: f"torch.bucketize({h.floats()}, {_ordered(h)})",
    lambda h: f"torch.histc({h.tensor(FLOATS[:2])}.detach(), 4, -2, 2)",
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
