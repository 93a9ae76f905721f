"""A small DLRM, trained as torchrec's tutorials do it."""

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

FEATURES, ROWS, DIM, DENSE, BATCH = ("user", "item", "shop"), 50, 8, 4, 6


class DLRM(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = tables
        self.bottom = nn.Sequential(nn.Linear(DENSE, DIM), nn.ReLU())
        num = len(FEATURES) + 1
        self.top = nn.Sequential(
            nn.Linear(DIM + num * (num - 1) // 2, 8), nn.ReLU(), nn.Linear(8, 1)
        )
        self.register_buffer("pairs", torch.triu_indices(num, num, offset=1), persistent=False)

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        found = self.tables(sparse).to_dict()
        every = torch.stack([x, *(found[feature] for feature in FEATURES)], dim=1)
        dots = every @ every.transpose(1, 2)
        return self.top(torch.cat([x, dots[:, self.pairs[0], self.pairs[1]]], dim=1)).squeeze(1)


def batch(step):
    draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
    lengths = torch.randint(0, 4, (len(FEATURES) * BATCH,), generator=draw)
    ids = torch.randint(ROWS, (int(lengths.sum()),), generator=draw)
    sparse = KeyedJaggedTensor(keys=list(FEATURES), values=ids, lengths=lengths)
    label = torch.randint(2, (BATCH,), generator=draw).float()
    return torch.rand(BATCH, DENSE, generator=draw), sparse, label


def tables():
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{name}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name]
            )
            for name in FEATURES
        ],
        device=torch.device("cpu"),
    )


def set_weights(collection):
    """Values that are the same on both sides; torchrec draws new ones when it shards."""
    state = collection.state_dict()
    for number, feature in enumerate(FEATURES):
        draw = torch.Generator().manual_seed(number)
        whole = torch.rand(ROWS, DIM, generator=draw) - 0.5
        for shard in state[f"embedding_bags.t_{feature}.weight"].local_shards():
            first = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(whole[first : first + len(shard.tensor)])


def parallel(model):
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    plan = construct_module_sharding_plan(
        model.tables,
        {
            "t_user": row_wise(compute_kernel="fused"),
            "t_item": row_wise(compute_kernel="fused"),
            "t_shop": table_wise(rank=1, compute_kernel="fused"),
        },
        sharder=sharder,
        local_size=dist.get_world_size(),
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        plan=ShardingPlan(plan={"tables": plan}),
        sharders=[sharder],
        device=torch.device("cpu"),
    )


def main():
    collection = tables()
    torch.manual_seed(0)
    model = parallel(DLRM(collection))
    set_weights(model.module.tables)
    dense = [p for n, p in model.named_parameters() if "embedding_bags" not in n]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    losses = []
    for step in range(5):
        x, sparse, label = batch(step)
        loss = nn.functional.binary_cross_entropy_with_logits(model(x, sparse), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
