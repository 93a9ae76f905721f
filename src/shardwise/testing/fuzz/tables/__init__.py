"""The tables of what a program can do. A row makes the text of a step from the values at hand.

To add an op, add a row to the table of its family; a row raises `NoFit` where no value fits.
"""

from __future__ import annotations

from shardwise.testing.fuzz.hand import Row
from shardwise.testing.fuzz.tables.common import COMMON_LAYERS, FUNCTIONS, PYTHON, SHAPES
from shardwise.testing.fuzz.tables.math import ORDERINGS, POINTWISE, PRODUCTS, REDUCTIONS
from shardwise.testing.fuzz.tables.nn import AUTOCAST, AUTOGRAD, DOORS, DRAWS, LAYERS
from shardwise.testing.fuzz.tables.rare import ALGEBRA, RARE_LAYERS, RARE_STEPS
from shardwise.testing.fuzz.tables.shape import INDEXING, JOINS, VIEWS, WRITES

#: Each family with its share of the steps.
FAMILIES: dict[str, tuple[int, tuple[Row, ...]]] = {
    "pointwise": (18, POINTWISE),
    "reductions": (9, REDUCTIONS),
    "orderings": (5, ORDERINGS),
    "products": (9, PRODUCTS),
    "layers": (8, LAYERS),
    "views": (16, VIEWS),
    "joins": (6, JOINS),
    "indexing": (9, INDEXING),
    "writes": (13, WRITES),
    "doors": (9, DOORS),
    "autograd": (8, AUTOGRAD),
    "draws": (4, DRAWS),
    "autocast": (3, AUTOCAST),
    "algebra": (5, ALGEBRA),
    "rare layers": (5, RARE_LAYERS),
    "rare steps": (6, RARE_STEPS),
    "functions": (4, FUNCTIONS),
    "shapes": (5, SHAPES),
    "common layers": (5, COMMON_LAYERS),
    "python": (4, PYTHON),
}
