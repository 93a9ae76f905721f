"""Collections of embedding tables, sharded by plan, with fused optimizers.

A single table as a DTensor needs nothing from here; see `ops.lookup`. Plans are found by
`planner`.
"""

from shardwise.embedding.collection import EmbeddingBagCollection, EmbeddingCollection, JaggedRows
from shardwise.embedding.in_backward import InBackward
from shardwise.embedding.jagged import Jagged
from shardwise.embedding.plan import Plan
from shardwise.lookup.backends.backend import Backend, Query, Runs
from shardwise.lookup.optimizers import SGD as SGD  # public without being in __all__
from shardwise.lookup.optimizers import Adagrad as Adagrad
from shardwise.lookup.optimizers import Adam as Adam
from shardwise.lookup.optimizers import FusedOptimizer, RowUpdate, RowWiseAdagrad
from shardwise.lookup.tiling import Table

__all__ = [
    "Backend",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "FusedOptimizer",
    "InBackward",
    "Jagged",
    "JaggedRows",
    "Plan",
    "Query",
    "RowUpdate",
    "RowWiseAdagrad",
    "Runs",
    "Table",
]
