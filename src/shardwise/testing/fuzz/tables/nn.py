"""Layers (norms, losses, lookups, pooling), random ops, autocast, autograd, conversions."""

from __future__ import annotations

import torch

from shardwise.testing.fuzz.hand import FLOATS, WIDE, Draft, Hand, NoFit, Row
from shardwise.testing.fuzz.tables.math import POINTWISE, PRODUCTS


def _affine(h: Hand, x: str, shape: tuple[int, ...]) -> str:
    """A weight and a bias, or one of them, or none."""
    weight = h.new(shape, h[x].dtype) if h.chance(0.6) else "None"
    bias = h.new(shape, h[x].dtype) if h.chance(0.5) else "None"
    return f"weight={weight}, bias={bias}"


def _layer_norm(h: Hand) -> str:
    x = h.floats(1, nonempty=True)
    shape = tuple(h[x].shape[h.between(0, h[x].dim() - 1) :])
    return f"F.layer_norm({x}, {shape}, {_affine(h, x, shape)})"


def _rms_norm(h: Hand) -> str:
    x = h.floats(1, nonempty=True)
    shape = tuple(h[x].shape[-1:])
    weight = f", weight={h.new(shape, h[x].dtype)}" if h.flag() else ""
    return f"F.rms_norm({x}, {shape}{weight})"


def _group_norm(h: Hand) -> str:
    x = h.floats(3, nonempty=True)
    channels = h[x].shape[1]
    groups = h.pick([g for g in (1, 2, channels) if channels % g == 0])
    affine = _affine(h, x, (channels,))
    if affine.startswith("weight=None"):
        # No bias without a weight: backward fails on one device ("tensor does not have a device").
        affine = "weight=None"
    return f"F.group_norm({x}, {groups}, {affine})"


def _batch_norm(h: Hand) -> str:
    x = h.floats(2, nonempty=True)
    affine = _affine(h, x, (h[x].shape[1],))
    return f"F.batch_norm({x}, None, None, {affine}, training=True, eps=0.1)"


def _classes(h: Hand, x: str) -> str:
    """A class for each entry of `x` without its dim of classes."""
    shape = h[x].shape
    classes = shape[1] if len(shape) > 1 else shape[0]
    if not classes:
        return h.new((0,), torch.int64)  # refused by both, but for an empty batch
    rest = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    return h.new(rest, torch.int64, high=classes)


def reduction(h: Hand) -> str:
    return f"reduction={h.pick(('mean', 'sum', 'none'))!r}"


def _against(name: str) -> Row:
    return lambda h: f"F.{name}({(x := h.floats())}, {h.same(x)}, {reduction(h)})"


def _embedding(h: Hand) -> str:
    table = h.tensor(FLOATS, (2, 2), nonempty=True)
    ids = h.new(h.shape(1, 2), torch.int64, high=h[table].shape[0])
    if h.chance(0.4) and h[ids].dim() == 2:
        mode = h.pick(("sum", "mean", "max"))
        return f"F.embedding_bag({ids}, {table}, mode={mode!r})"
    return f"F.embedding({ids}, {table})"


LAYERS: tuple[Row, ...] = (
    lambda h: f"F.softmax({(x := h.floats(1))}, {h.dim(x)})",
    lambda h: f"F.log_softmax({(x := h.floats(1))}, {h.dim(x)})",
    lambda h: f"F.softmin({(x := h.floats(1))}, {h.dim(x)})",
    lambda h: f"F.normalize({(x := h.floats(1))}, dim={h.dim(x)}, eps=0.5)",
    _layer_norm,
    _layer_norm,
    _rms_norm,
    _group_norm,
    _batch_norm,
    lambda h: f"F.instance_norm({h.floats(3, nonempty=True)}, eps=0.1)",
    *map(_against, ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")),
    lambda h: f"F.kl_div({(x := h.floats())}, {h.same(x)}, reduction='sum', log_target=True)",
    lambda h: (
        f"F.binary_cross_entropy_with_logits({(x := h.floats())}, "
        f"{h.same(x)}.sigmoid(), {reduction(h)})"
    ),
    lambda h: (
        f"F.binary_cross_entropy({(x := h.floats())}.sigmoid(), "
        f"{h.same(x)}.sigmoid(), {reduction(h)})"
    ),
    lambda h: f"F.cross_entropy({(x := h.floats(1, 3))}, {_classes(h, x)}, {reduction(h)})",
    lambda h: f"F.cross_entropy({(x := h.floats(2, 2))}, {_classes(h, x)}, label_smoothing=0.1)",
    lambda h: (
        f"F.cross_entropy({(x := h.floats(2, 2))}, F.softmax({h.same(x)}, 1), {reduction(h)})"
    ),
    lambda h: f"F.nll_loss({(x := h.floats(1, 3))}, {_classes(h, x)}, {reduction(h)})",
    lambda h: (
        f"F.nll_loss({(x := h.floats(2, 2))}, {_classes(h, x)}, ignore_index=0, {reduction(h)})"
    ),
    lambda h: f"F.cosine_similarity({(x := h.floats(1))}, {h.same(x)}, {h.dim(x)})",
    lambda h: f"F.multilabel_soft_margin_loss({(x := h.floats(2, 2))}, {h.same(x)})",
    _embedding,
    _embedding,
    lambda h: f"F.one_hot({h.ints(0, 2)}.remainder(4), 4)",
    lambda h: f"F.max_pool1d({h.floats(2, 3, nonempty=True)}, 2, 1, 1)",
    lambda h: f"F.avg_pool1d({h.floats(2, 3, nonempty=True)}, 1, 2)",
    lambda h: f"F.adaptive_avg_pool1d({h.floats(2, 3, nonempty=True)}, 2)",
    lambda h: f"F.max_pool2d({h.floats(3, 4, nonempty=True)}, 1, 2)",
    lambda h: f"F.interpolate({h.tensor(WIDE, (3, 3), True)}, scale_factor=2)",
    lambda h: f"F.pad({h.inexact(1)}, ({h.between(0, 2)}, {h.between(0, 2)}), value={h.number()})",
    lambda h: f"F.pad({h.floats(2, 3)}, (1, 0), mode={h.pick(('replicate', 'circular'))!r})",
    lambda h: f"F.pixel_unshuffle({h.tensor(FLOATS, (3, 4), True)}, 1)",
)


# -- random numbers --------------------------------------------------------------------------

_IN_PLACE = (
    "normal_()",
    "uniform_()",
    "bernoulli_(0.3)",
    "exponential_()",
    "random_(5)",
    "geometric_(0.4)",
    "normal_(0.5, 0.25)",
    "log_normal_(0, 0.25)",
)


def _drawn(h: Hand) -> Draft:
    x = h.writable(lambda t: t.dtype in WIDE)
    return h.write(x, f"{x}.{h.pick(_IN_PLACE)}")


DRAWS: tuple[Row, ...] = (
    lambda h: f"F.dropout({h.floats()}, 0.5)",
    lambda h: f"F.dropout({h.floats()}, {h.pick((0.25, 0.75))})",
    lambda h: f"F.alpha_dropout({h.floats()}, 0.5, training=True)",
    lambda h: f"F.dropout1d({h.floats(2, 3)}, 0.5)",
    lambda h: f"torch.rand_like({h.floats()})",
    lambda h: f"torch.randn_like({h.tensor(WIDE)})",
    lambda h: f"torch.randint_like({h.any()}, 5)",
    lambda h: f"torch.bernoulli({h.tensor(WIDE)}.sigmoid())",
    lambda h: f"torch.normal({h.tensor(WIDE)}, 0.5)",
    lambda h: f"torch.normal(0.0, {h.tensor(WIDE)}.abs() + 0.1)",
    lambda h: f"F.gumbel_softmax({(x := h.tensor(WIDE, (1, 3)))}, dim={h.dim(x)})",
    lambda h: f"torch.poisson({h.tensor(WIDE)}.abs())",
    lambda h: f"F.rrelu({h.tensor(WIDE)}, training=True)",
    lambda h: f"torch.multinomial(F.softmax({h.tensor(WIDE, (1, 2), True)}, -1), 1)",
    _drawn,
    _drawn,
    _drawn,
)


# -- autocast --------------------------------------------------------------------------------

#: Products twice, since autocast mostly concerns them.
_TABLES = (*PRODUCTS, *PRODUCTS, *LAYERS, *POINTWISE)


def _cast(h: Hand) -> Draft:
    row = h.pick(_TABLES)(h)
    if isinstance(row, Draft):
        raise NoFit
    dtype = h.pick(("torch.bfloat16", "torch.bfloat16", "torch.float16"))
    return Draft(row, before=f'with torch.autocast("cpu", {dtype}): ')


AUTOCAST: tuple[Row, ...] = (_cast,)


# -- autograd ------------------------------------------------------------------------------------


def tracked(t: torch.Tensor) -> bool:
    return t.requires_grad


def non_leaf(t: torch.Tensor) -> bool:
    return t.requires_grad and not t.is_leaf


def _retaining(t: torch.Tensor) -> bool:
    """The first result of its op: torch crashes where a later one retains its gradient, and is
    written to.
    """
    return non_leaf(t) and t.output_nr == 0


def _hookable(t: torch.Tensor) -> bool:
    """Not a view: torch crashes where the base of one was written to without grad."""
    return t.requires_grad and not t._is_view()


def scalar(h: Hand, x: str) -> str:
    """A number whose gradient is bounded and differs from entry to entry."""
    real = f"torch.view_as_real({x}.resolve_conj())" if h[x].is_complex() else x
    if x in h.local:
        return f"w.weighted({real}.sin())"
    return h.pick(
        (
            f"{real}.sin().sum()",
            f"w.weighted({real}.tanh())",
            f"w.weighted({real}.sin())",
            f"w.weighted(w.full_tensor({real}))",
            f"w.weighted(w.full_tensor({real}).sin())",
            f"w.weighted(w.redistribute({real}, {h.anywhere(x)}))"
            if real == x
            else f"{real}.sum()",
        )
    )


def _backward(h: Hand) -> Draft:
    x = h.pick(h.names(non_leaf))
    keep = h.pick(("retain_graph=True", "retain_graph=True", "retain_graph=True", ""))
    return Draft(f"{scalar(h, x)}.backward({keep})", statement=True)


def _given(h: Hand) -> Draft:
    """Backward with a given gradient."""
    x = h.pick(h.names(non_leaf))
    return Draft(f"{x}.backward(torch.ones_like({x}), retain_graph=True)", statement=True)


def _grad(h: Hand) -> Draft:
    x, leaf = h.pick(h.names(non_leaf)), h.pick(h.names(tracked))
    graph = h.pick(("create_graph=True", "create_graph=True", "retain_graph=True"))
    loss = scalar(h, x)
    # The new graph keeps the result of a conversion, which on one device is a copy.
    frozen = (x,) if "w.full_tensor(" in loss else ()
    return Draft(f"torch.autograd.grad({loss}, {leaf}, {graph})[0]", frozen=frozen)


def _penalty(h: Hand) -> Draft:
    """Backward through a gradient."""
    x, leaf = h.pick(h.names(non_leaf)), h.pick(h.names(tracked))
    grad = f"torch.autograd.grad({scalar(h, x)}, {leaf}, create_graph=True)[0]"
    return Draft(f"{grad}.abs().square().sum().backward(retain_graph=True)", statement=True)


def _recomputed(h: Hand) -> str:
    x = h.inexact()
    body = h.pick(("t.sin() * t", "t.sum() * t", "F.dropout(t, 0.5) * 2", "t.tanh()[:1]"))
    return f"checkpoint(lambda t: {body}, {x}, use_reentrant=False)"


def _retained(h: Hand) -> Draft:
    return Draft(f"{h.pick(h.names(_retaining))}.retain_grad()", statement=True)


AUTOGRAD: tuple[Row, ...] = (
    _backward,
    _backward,
    _given,
    _grad,
    _grad,
    _penalty,
    _penalty,
    _recomputed,
    lambda h: f"{h.inexact()}.detach()",
    lambda h: f"{h.inexact()}.detach()",
    lambda h: f"{h.inexact()}.detach().requires_grad_()",
    _retained,
    _retained,
    lambda h: Draft(
        f"_ = {h.pick(h.names(_hookable))}.register_hook(lambda g: g * {h.number()})",
        statement=True,
    ),
    lambda h: f"torch.utils.checkpoint.checkpoint(torch.sin, {h.floats()}, use_reentrant=False)",
)


# -- conversions -----------------------------------------------------------------------------


def _redistribute(h: Hand) -> Draft:
    x = h.any()
    return Draft(f"w.redistribute({x}, {h.anywhere(x)})", frozen=(x,))


def _full(h: Hand) -> Draft:
    x = h.any()
    return Draft(f"w.full_tensor({x})", local=True, frozen=(x,))


def _on_local(h: Hand) -> Draft:
    """An op on a plain tensor that every rank has."""
    x = h.whole()
    return Draft(h.pick((f"{x} * 0.5", f"{x} + {x}", f"{x}.sum()", f"{x}.clone()")), local=True)


DOORS: tuple[Row, ...] = (
    _redistribute,
    _redistribute,
    _redistribute,
    _redistribute,
    _redistribute,
    _full,
    _full,
    _on_local,
    lambda h: Draft(f"w.round_trip({(x := h.any())})", frozen=(x,)),
    lambda h: Draft(f"w.from_whole({(x := h.whole())})", frozen=(x,)),
    lambda h: Draft(f"w.distribute({(x := h.whole())}, {h.sharded(x)})", frozen=(x,)),
)
