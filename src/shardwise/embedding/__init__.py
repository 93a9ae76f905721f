"""Collections of embedding tables, sharded by plan, with fused optimizers.

A single table as a DTensor needs nothing from here; see `ops.lookup`. Plans are found by
`planner`.
"""

from shardwise.embedding.backends.backend import Backend, Query, Run
from shardwise.embedding.collection import EmbeddingBagCollection, EmbeddingCollection, JaggedRows
from shardwise.embedding.in_backward import InBackward
from shardwise.embedding.jagged import Jagged
from shardwise.embedding.optimizers import SGD as SGD  # public without being in __all__
from shardwise.embedding.optimizers import Adagrad as Adagrad
from shardwise.embedding.optimizers import Adam as Adam
from shardwise.embedding.optimizers import FusedOptimizer, RowUpdate, RowWiseAdagrad
from shardwise.embedding.plan import Plan
from shardwise.embedding.table import Table

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
    "Run",
    "Table",
]
