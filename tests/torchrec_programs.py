"""Programs that use torchrec beside shardwise, run on every rank of a job of two.

`python tests/torchrec_programs.py` runs them in an environment with torchrec and without pytest.
"""

import logging
import os
import warnings

import torch
import torch.distributed as dist

import shardwise
from shardwise import interop
from shardwise.embedding import Adagrad, EmbeddingBagCollection, RowWiseAdagrad

LR = 0.1


def torchrec_model(optimizer, plan=None):
    """torchrec's collection of four tables, one of each kind, in a model; and its plan."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("LOCAL_WORLD_SIZE", "2")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection as Theirs

    model = torch.nn.Module()
    model.ebc = Theirs(
        tables=[
            EmbeddingBagConfig(
                name=name,
                embedding_dim=8,
                num_embeddings=10 + number,
                feature_names=[f"f_{name}"],
                pooling=PoolingType.SUM,
            )
            for number, name in enumerate("abcd")
        ]
    )
    configs = model.ebc.embedding_bag_configs()
    kinds = {
        "rowwise": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
    }
    fused = {"optimizer": kinds[optimizer], "learning_rate": LR, "eps": 1e-8}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    if plan is None:
        chosen = {
            "a": table_wise(rank=1, compute_kernel="fused"),
            "b": row_wise(compute_kernel="fused"),
            "c": column_wise(ranks=[0, 1], compute_kernel="fused"),
            "d": data_parallel(),
        }
        plan = construct_module_sharding_plan(
            model.ebc, chosen, sharder=sharder, local_size=2, world_size=2, device_type="cpu"
        )
    whole = ShardingPlan(plan={"ebc": plan})
    theirs = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=whole,
        sharders=[sharder],
        device=torch.device("cpu"),
    )
    return theirs, whole, configs


def batch(step):
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
    ids = torch.randint(0, 10, (4 * 3 * 2,), generator=draw)
    keys = [f"f_{name}" for name in "abcd"]
    return KeyedJaggedTensor(keys=keys, values=ids, lengths=torch.full((12,), 2))


def train_theirs(model, steps):
    for step in steps:
        output = model.module.ebc(batch(step))
        found = output.wait() if hasattr(output, "wait") else output
        found = found.to_dict()
        sum(found[f"f_{name}"].square().sum() for name in "abc").backward()


def ours(optimizer, configs, plan):
    made = {
        "rowwise": RowWiseAdagrad(LR, eps=1e-8, across_columns=False),
        "adagrad": Adagrad(LR, eps=1e-8),
    }[optimizer]
    bags = EmbeddingBagCollection(interop.tables_from_torchrec(configs), optimizer=made)
    mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    return bags.shard(mesh, interop.plan_from_torchrec(plan))


def train_ours(bags, steps):
    for step in steps:
        found = bags(batch(step))
        sum(found[f"f_{name}"].square().sum() for name in "abc").backward()


def wholes(bags):
    return {t.name: bags.parameter(t.name).detach().full_tensor() for t in bags.tables}


def there_and_back(optimizer):
    """Two steps there, two steps here, two steps there again: as six steps there."""
    theirs, plan, configs = torchrec_model(optimizer)
    start = theirs.state_dict()
    draw = torch.Generator().manual_seed(0)
    for name in sorted(start):
        value = start[name]
        whole = torch.rand(value.shape, generator=draw)
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.tensor.shape
                shard.tensor.copy_(whole[row : row + rows, column : column + columns])
        else:
            value.copy_(whole)
    bags = ours(optimizer, configs, plan)
    train_theirs(theirs, [0, 1])
    interop.load_torchrec(
        bags, theirs.state_dict(), theirs.fused_optimizer.state_dict(), prefix="ebc."
    )
    assert list(bags.state_dict()) == [f"embedding_bags.{name}.weight" for name in "abcd"]
    train_ours(bags, [2, 3])
    again, _, _ = torchrec_model(
        optimizer, interop.plan_to_torchrec(bags.plan, bags.tables, num_ranks=2)
    )
    state, states = interop.state_dicts_to_torchrec(bags, prefix="ebc.")
    again.load_state_dict(state, strict=False)
    again.fused_optimizer.load_state_dict(states)
    train_theirs(again, [4, 5])
    train_theirs(theirs, [2, 3, 4, 5])
    found, expected = ours(optimizer, configs, plan), ours(optimizer, configs, plan)
    interop.load_torchrec(found, again.state_dict(), prefix="ebc.")
    interop.load_torchrec(expected, theirs.state_dict(), prefix="ebc.")
    torch.testing.assert_close(wholes(found), wholes(expected))
    return dict(bags.plan.entries)


if __name__ == "__main__":
    from launcher import Processes

    processes = Processes(2)
    for optimizer in ("rowwise", "adagrad"):
        print(optimizer, processes(there_and_back, optimizer, timeout_s=240))
    processes.kill()
