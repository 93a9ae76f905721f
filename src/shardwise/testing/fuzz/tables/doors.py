"""Doors: other placements, whole tensors, local tensors, and back."""

from __future__ import annotations

from shardwise.testing.fuzz.hand import Draft, Hand, Row


def _redistribute(h: Hand) -> Draft:
    x = h.any()
    return Draft(f"w.redistribute({x}, {h.anywhere(x)})", frozen=(x,))


def _full(h: Hand) -> Draft:
    x = h.any()
    return Draft(f"w.full_tensor({x})", local=True, frozen=(x,))


def _on_local(h: Hand) -> Draft:
    """An op on what every rank holds whole."""
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
