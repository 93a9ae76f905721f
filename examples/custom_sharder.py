"""A sharder of one's own: it decides for each table of a module how it is cut.

python examples/custom_sharder.py
torchrun --nproc-per-node 4 examples/custom_sharder.py
"""

import torch
from torch import nn
from worlds import say, world

import shardwise
from shardwise.shard import ChunkShardingSpec, Sharder, ShardingPlan, shard_module


class BySize(Sharder):
    """Long tables by rows, short and wide ones by columns."""

    def __init__(self, num_ranks):
        self.places = [f"rank:{rank}/cpu" for rank in range(num_ranks)]

    def shard(self, module):
        specs = {
            f"{name}.weight": ChunkShardingSpec(int(table.embedding_dim > 16), self.places)
            for name, table in module.named_modules()
            if isinstance(table, nn.EmbeddingBag)
        }
        return shard_module(module, ShardingPlan(specs))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(1000, 8), nn.EmbeddingBag(50, 32)])
        self.head = nn.Linear(40, 1)

    def forward(self, ids):
        return self.head(torch.cat([table(ids) for table in self.tables], 1))


def main():
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(50, (6, 3))
    expected = model(ids)
    with world(4) as num_ranks:
        shard_module(model, ShardingPlan({"tables": BySize(num_ranks)}))
        found = model(ids)
        found = found.agreed() if isinstance(found, shardwise.LocalTensor) else found
        torch.testing.assert_close(found, expected)
    say("placements:", [table.weight.placements for table in model.tables])


if __name__ == "__main__":
    main()
