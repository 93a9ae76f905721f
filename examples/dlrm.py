"""A recommender whose tables are sharded by a mixed plan; each rank has its own examples.

python examples/dlrm.py
torchrun --nproc-per-node 4 examples/dlrm.py
"""

import torch
from torch import nn
from worlds import own, say, world

import shardwise
from shardwise.embedding import EmbeddingBagCollection, Jagged, RowWiseAdagrad, Table
from shardwise.parallel import data_parallel

TABLES = [Table("user", 5000, 16), Table("item", 2000, 16), Table("hour", 24, 16)]
PLAN = {"user": "row_wise", "item": "column_wise", "hour": "data_parallel"}
SIZE = 64


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = EmbeddingBagCollection(
            TABLES, output="tensor", optimizer=RowWiseAdagrad(lr=0.1)
        )
        self.top = nn.Sequential(nn.Linear(16 * len(TABLES), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids):
        return self.top(self.tables(ids)).squeeze(1)


def examples(step, rank):
    """Users click on items of their own parity."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.stack([torch.randint(t.num_embeddings, (SIZE,), generator=draw) for t in TABLES])
    return ids, (ids[0] % 2 == ids[1] % 2).float()


def main():
    torch.manual_seed(0)
    with world(4) as num_ranks:
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,))
        model = Recommender()
        model.tables.shard(mesh, PLAN)
        data_parallel(model.top, mesh)
        optimizer = torch.optim.SGD(model.top.parameters(), lr=0.1)
        one_each = own(lambda rank: torch.ones(SIZE * len(TABLES), dtype=torch.int64))
        for step in range(20):
            ids = own(lambda rank, step=step: examples(step, rank)[0].flatten())
            clicks = own(lambda rank, step=step: examples(step, rank)[1])
            batch = Jagged(["user", "item", "hour"], ids, lengths=one_each)
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), clicks)
            optimizer.zero_grad()
            loss.backward()  # tables are updated on the way
            optimizer.step()
        say(model.tables.describe(batch_size=SIZE))
        say("trained 20 steps on", num_ranks, "ranks")


if __name__ == "__main__":
    main()
