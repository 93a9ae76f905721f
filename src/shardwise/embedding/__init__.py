"""Collections of embedding tables, sharded by plan.

`SGD`, `Adagrad` and `Adam` are imported by name. `import *` leaves them out, since it would replace
torch's optimizers of the same names.
"""

from shardwise.embedding.backend import Backend, Query, Run
from shardwise.embedding.collection import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    JaggedRows,
)
from shardwise.embedding.fused import SGD as SGD  # public without being in __all__
from shardwise.embedding.fused import Adagrad as Adagrad
from shardwise.embedding.fused import Adam as Adam
from shardwise.embedding.fused import FusedOptimizer, RowUpdate, RowWiseAdagrad
from shardwise.embedding.in_backward import InBackward
from shardwise.embedding.jagged import Jagged
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
