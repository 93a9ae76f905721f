"""Models that tests shard, and sharders for them."""

import torch
import torch.distributed as dist
from shard_cases import chunks
from torch import nn
from torch.nn import functional as F

from shardwise.shard import Sharder, ShardingPlan, shard_module


class Towers(nn.Module):
    """Two tables, a bag and a dense part, with one table shared by two names."""

    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(11, 6)
        self.item = nn.EmbeddingBag(9, 6, mode="mean")
        self.same = nn.Embedding(11, 6)
        self.same.weight = self.user.weight
        self.dense = nn.Linear(12, 4)

    def forward(self, users, items):
        hidden = torch.cat([self.user(users) + self.same(users), self.item(items)], 1)
        return self.dense(F.gelu(hidden))


class Collection(nn.Module):
    """Tables of one size, looked up with the same ids."""

    def __init__(self, num_tables=4):
        super().__init__()
        self.tables = nn.ModuleDict(
            {f"t{i}": nn.EmbeddingBag(10, 8, mode="sum") for i in range(num_tables)}
        )

    def forward(self, ids):
        return torch.cat([table(ids) for table in self.tables.values()])


class ShardedCollection(nn.Module):
    """The same, in the order of shards; a module of another type that a sharder returns."""

    def __init__(self, tables):
        super().__init__()
        self.inner = tables

    def forward(self, ids):
        return torch.cat([table(ids) for table in self.inner.values()])


class HalfAndHalf(Sharder):
    """Every other table by rows, the rest by columns."""

    def __init__(self, ranks=(0, 1, 2, 3)):
        self.rows, self.columns = chunks(0, *ranks), chunks(1, *ranks)

    def shard(self, module):
        for number, name in enumerate(module.tables):
            spec = self.columns if number % 2 else self.rows
            shard_module(module, ShardingPlan({f"tables.{name}.weight": spec}))
        return ShardedCollection(module.tables)


class Broken(Sharder):
    def shard(self, module):
        raise RuntimeError("this sharder has had enough")


class BrokenOnRank(HalfAndHalf):
    """Fails on one rank, before or after it shards."""

    def __init__(self, rank, late):
        super().__init__()
        self.rank, self.late = rank, late

    def shard(self, module):
        made = super().shard(module) if self.late else None
        if dist.get_rank() == self.rank:
            raise RuntimeError("this sharder has had enough")
        return made or super().shard(module)


class Forgetful(Sharder):
    def shard(self, module):
        return None


class Bare(nn.Module):
    """A container without a forward."""

    def __init__(self, tables):
        super().__init__()
        self.tables = tables


class Wrapper(Sharder):
    def shard(self, module):
        return Bare(module.tables)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.collection = Collection()
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.collection(ids))
