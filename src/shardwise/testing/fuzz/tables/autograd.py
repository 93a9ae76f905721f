"""Autograd (backward, second derivatives, hooks, recomputation), and conversions of DTensors."""

from __future__ import annotations

import torch

from shardwise.testing.fuzz.hand import Draft, Hand, Row


def _tracked(t: torch.Tensor) -> bool:
    return t.requires_grad


def _inner(t: torch.Tensor) -> bool:
    return t.requires_grad and not t.is_leaf


def _retaining(t: torch.Tensor) -> bool:
    """The first result of its op: torch crashes where a later one retains its gradient, and is
    written to.
    """
    return _inner(t) and t.output_nr == 0


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
    x = h.pick(h.names(_inner))
    keep = h.pick(("retain_graph=True", "retain_graph=True", "retain_graph=True", ""))
    return Draft(f"{scalar(h, x)}.backward({keep})", statement=True)


def _given(h: Hand) -> Draft:
    """Backward with a given gradient."""
    x = h.pick(h.names(_inner))
    return Draft(f"{x}.backward(torch.ones_like({x}), retain_graph=True)", statement=True)


def _grad(h: Hand) -> Draft:
    x, leaf = h.pick(h.names(_inner)), h.pick(h.names(_tracked))
    graph = h.pick(("create_graph=True", "create_graph=True", "retain_graph=True"))
    loss = scalar(h, x)
    # The new graph keeps the result of a conversion, which on one device is a copy.
    frozen = (x,) if "w.full_tensor(" in loss else ()
    return Draft(f"torch.autograd.grad({loss}, {leaf}, {graph})[0]", frozen=frozen)


def _penalty(h: Hand) -> Draft:
    """Backward through a gradient."""
    x, leaf = h.pick(h.names(_inner)), h.pick(h.names(_tracked))
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
