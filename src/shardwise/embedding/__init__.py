"""Collections of embedding tables, sharded by plan."""

from shardwise.embedding.backend import Backend, Query, Run
from shardwise.embedding.collection import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    JaggedRows,
)
from shardwise.embedding.fused import (
    SGD,
    Adagrad,
    Adam,
    FusedOptimizer,
    RowUpdate,
    RowWiseAdagrad,
)
from shardwise.embedding.in_backward import InBackward
from shardwise.embedding.jagged import Jagged
from shardwise.embedding.plan import Plan
from shardwise.embedding.table import Table

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
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
