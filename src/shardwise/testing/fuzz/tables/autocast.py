"""Ops under autocast."""

from __future__ import annotations

from shardwise.testing.fuzz.hand import Draft, Hand, NoFit, Row
from shardwise.testing.fuzz.tables.layers import LAYERS
from shardwise.testing.fuzz.tables.pointwise import POINTWISE
from shardwise.testing.fuzz.tables.products import PRODUCTS

#: Twice the products: they are what autocast is about.
_TABLES = (*PRODUCTS, *PRODUCTS, *LAYERS, *POINTWISE)


def _cast(h: Hand) -> Draft:
    row = h.pick(_TABLES)(h)
    if isinstance(row, Draft):
        raise NoFit
    dtype = h.pick(("torch.bfloat16", "torch.bfloat16", "torch.float16"))
    return Draft(row, before=f'with torch.autocast("cpu", {dtype}): ')


AUTOCAST: tuple[Row, ...] = (_cast,)
