"""The sides of `benchmarks.embedding`: each builds its tables on a rank and returns one step.

A step takes a batch and a target, runs forward and backward with the update, and returns the loss.
All sides start from the same weights, so that their losses agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

LR = 0.1
EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the problem is."""

    tables: int = 26
    rows: int = 100_000
    dim: int = 64
    batch: int = 2048
    ids: int = 15


#: (ids of all features, feature-major; target) -> loss
Step = Callable[[torch.Tensor, torch.Tensor], float]


def weight_of(sizes: Sizes, table: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(table)
    return torch.rand(sizes.rows, sizes.dim, generator=draw).sub_(0.5).mul_(0.01)


def _train(run: Callable[[torch.Tensor], torch.Tensor], after: Callable[[], None]) -> Step:
    def step(ids: torch.Tensor, target: torch.Tensor) -> float:
        loss = (run(ids) * target).sum() / target.shape[0]
        loss.backward()
        after()
        return float(loss)

    return step


def _nothing() -> None:
    pass


# -- shardwise -------------------------------------------------------------------------------


def ours(sizes: Sizes, kind: str, optimizer: str, backend: str = "auto") -> Step:
    import shardwise
    from shardwise.embedding import SGD, EmbeddingBagCollection, Jagged, RowWiseAdagrad, Table

    world = dist.get_world_size()
    mesh = shardwise.init_device_mesh("cpu", (world,))
    tables = [Table(f"t{i}", sizes.rows, sizes.dim) for i in range(sizes.tables)]
    fused = {
        "sgd": SGD(LR),
        # As torchrec does it; one device's numbers would take another all-reduce.
        "row-wise adagrad": RowWiseAdagrad(LR, eps=EPS, across_columns=False),
        "row-wise adagrad, exact": RowWiseAdagrad(LR, eps=EPS),
    }.get(optimizer)
    bags = EmbeddingBagCollection(tables, output="tensor", optimizer=fused, backend=backend)
    with torch.no_grad():
        for i in range(sizes.tables):
            bags.parameter(f"t{i}").copy_(weight_of(sizes, i))
    bags.shard(mesh, kind)
    features, lengths = bags.features, torch.full((sizes.tables * sizes.batch,), sizes.ids)
    after = _nothing
    if fused is None:
        plain = torch.optim.SGD(bags.parameters(), lr=LR)

        def after() -> None:
            plain.step()
            plain.zero_grad()

    return _train(lambda ids: bags(Jagged(features, ids, lengths=lengths)), after)


# -- torchrec --------------------------------------------------------------------------------


def torchrec(sizes: Sizes, kind: str, optimizer: str) -> Step:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    world = dist.get_world_size()
    cpu = torch.device("cpu")
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}",
                embedding_dim=sizes.dim,
                num_embeddings=sizes.rows,
                feature_names=[f"t{i}"],
            )
            for i in range(sizes.tables)
        ],
        device=torch.device("meta"),
    )
    chosen = {
        "sgd": EmbOptimType.EXACT_SGD,
        "row-wise adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    }[optimizer]
    fused = {"optimizer": chosen, "learning_rate": LR, "eps": EPS}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    # The default kernel ignores the fused optimizer.
    how = {
        "table_wise": lambda i: table_wise(rank=i % world, compute_kernel="fused"),
        "column_wise": lambda i: column_wise(ranks=list(range(world)), compute_kernel="fused"),
        "row_wise": lambda i: row_wise(compute_kernel="fused"),
    }[kind]
    plan = construct_module_sharding_plan(
        bags,
        {f"t{i}": how(i) for i in range(sizes.tables)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = sharder.shard(bags, plan, env, device=cpu)
    for name, table in sharded.state_dict().items():
        values = weight_of(sizes, int(name.split(".")[1][1:]))
        for shard in table.local_shards():
            (row, column), (height, width) = shard.metadata.shard_offsets, shard.tensor.shape
            shard.tensor.copy_(values[row : row + height, column : column + width])
    keys = [f"t{i}" for i in range(sizes.tables)]
    lengths = torch.full((sizes.tables * sizes.batch,), sizes.ids)

    def run(ids: torch.Tensor) -> torch.Tensor:
        found = sharded(KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths))
        return found.wait().values() if hasattr(found, "wait") else found.values()

    step = _train(run, _nothing)
    # Its features come in the order of ranks; regrouping them would cost a copy.
    order = sorted(range(sizes.tables), key=lambda i: i % world if kind == "table_wise" else 0)
    columns = torch.arange(sizes.tables * sizes.dim).view(sizes.tables, -1)[order].flatten()
    regrouped: dict[int, torch.Tensor] = {}

    def in_its_order(ids: torch.Tensor, target: torch.Tensor) -> float:
        if id(target) not in regrouped:
            regrouped[id(target)] = target[:, columns]
        return step(ids, regrouped[id(target)])

    return in_its_order


# -- unsharded, with DDP ---------------------------------------------------------------------


class _Bags(torch.nn.Module):
    def __init__(self, sizes: Sizes, sparse: bool) -> None:
        super().__init__()
        self.sizes = sizes
        self.tables = torch.nn.ModuleList(
            torch.nn.EmbeddingBag.from_pretrained(
                weight_of(sizes, i), freeze=False, mode="sum", sparse=sparse
            )
            for i in range(sizes.tables)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = ids.view(self.sizes.tables, self.sizes.batch, self.sizes.ids)
        found = [table(part) for table, part in zip(self.tables, parts, strict=True)]
        return torch.cat(found, 1)


def ddp(sizes: Sizes, kind: str, optimizer: str) -> Step:
    bags = torch.nn.parallel.DistributedDataParallel(_Bags(sizes, kind == "sparse"))
    plain = torch.optim.SGD(bags.parameters(), lr=LR)

    def after() -> None:
        plain.step()
        plain.zero_grad()

    return _train(bags, after)


# -- torch's DTensor -------------------------------------------------------------------------


def dtensor(sizes: Sizes, kind: str, optimizer: str) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    place = Shard(1 if kind == "column_wise" else 0)
    tables = [
        torch.nn.Parameter(distribute_tensor(weight_of(sizes, i), mesh, [place]))
        for i in range(sizes.tables)
    ]
    plain = torch.optim.SGD(tables, lr=LR)

    def run(ids: torch.Tensor) -> torch.Tensor:
        parts = ids.view(sizes.tables, sizes.batch, sizes.ids)
        found = []
        for table, part in zip(tables, parts, strict=True):
            spread = DTensor.from_local(part, mesh, [Shard(0)])
            pooled = F.embedding(spread, table).sum(1)
            found.append(pooled.redistribute(mesh, [Shard(0)]).to_local())
        return torch.cat(found, 1) / mesh.size()

    def after() -> None:
        plain.step()
        plain.zero_grad()

    step = _train(run, after)
    # Summed over ranks, while the others' gradients are of the mean.
    return lambda ids, target: step(ids, target) * mesh.size()


# -- the floor -------------------------------------------------------------------------------


def floor(sizes: Sizes, kind: str, optimizer: str) -> Step:
    """What cannot be left out, and nothing else: read the rows, send the bytes, add to the rows.

    Everything that depends on the ids alone is done beforehand, and the loss is not computed.
    """
    world = dist.get_world_size()
    tables, bags_per_source = sizes.tables, sizes.tables * sizes.batch
    rows, width, num_bags, ids_per_bag = sizes.rows, sizes.dim, bags_per_source, sizes.ids
    if kind == "table_wise":
        tables = -(-tables // world)
        num_bags = tables * sizes.batch * world
    else:
        num_bags *= world
    if kind == "column_wise":
        width //= world
    if kind == "row_wise":
        rows, ids_per_bag = -(-rows // world), max(1, round(sizes.ids / world))
    num_rows = tables * rows
    weight = torch.randn(num_rows, width)
    table = torch.arange(num_bags) % tables
    ids = torch.randint(rows, (num_bags, ids_per_bag)) + table.unsqueeze(1) * rows
    ids = ids.flatten().int()
    offsets = torch.arange(0, len(ids) + 1, ids_per_bag, dtype=torch.int32)
    order = torch.argsort(ids, stable=True)
    bags = (order // ids_per_bag).int()
    edges = torch.zeros(num_rows + 1, dtype=torch.int32)
    edges[1:] = torch.bincount(ids, minlength=num_rows).cumsum(0)
    matrix = torch.sparse_csr_tensor(edges, bags, torch.ones(len(ids)), (num_rows, num_bags))
    num_ints = -(-(len(ids) + num_bags) // world) * world
    message = torch.zeros(num_ints, dtype=torch.int32)
    num_numbers = -(-num_bags * width // world) * world

    def exchange(sent: torch.Tensor, num: int) -> None:
        even = F.pad(sent, (0, num - len(sent)))
        dist.all_to_all_single(torch.empty_like(even), even)

    def step(_: torch.Tensor, target: torch.Tensor) -> float:
        exchange(message, num_ints)
        found = F.embedding_bag(ids, weight, offsets, mode="sum", include_last_offset=True)
        exchange(found.view(-1), num_numbers)
        exchange(found.view(-1), num_numbers)
        torch.addmm(weight, matrix, found, alpha=-1e-9, out=weight)
        return 0.0

    return step


SIDES: dict[str, Callable[..., Step]] = {
    "shardwise": ours,
    "shardwise, torch kernels": functools.partial(ours, backend="torch"),
    "shardwise, fbgemm's kernels": functools.partial(ours, backend="fbgemm"),
    "torchrec": torchrec,
    "DDP": ddp,
    "torch DTensor": dtensor,
    "floor": floor,
}


def make_step(side: str, sizes: Sizes, **case: Any) -> Step:
    return SIDES[side](sizes, **case)
