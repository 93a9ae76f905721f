"""Programs in processes whose ranks differ in what each knows alone."""

import embedding_cases as cases
import torch
import torch.distributed as dist
from parity import parameters

import shardwise
from shardwise.embedding import SGD, EmbeddingBagCollection, Jagged, RowWiseAdagrad, Table
from shardwise.parallel import data_parallel


def replicas_with_other_threads(plan):
    """Tables with a replica on two hosts, of which one has more threads; this rank's shards."""
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "dev"))
    before, rank = torch.get_num_threads(), dist.get_rank()
    collection = cases.make(tables=[Table("t", 6000, 32)], optimizer=RowWiseAdagrad(0.1))
    data_parallel(collection.shard(mesh["dev"], plan), mesh["host"])
    torch.set_num_threads(1 if rank < 2 else 3)
    try:
        draw = torch.Generator().manual_seed(rank)
        for _ in range(3):
            ids = torch.randint(6000, (6000,), generator=draw)
            batch = Jagged(["t"], ids, lengths=torch.full((600,), 10))
            cases.loss_of(collection(batch)).backward()
    finally:
        torch.set_num_threads(before)
    return collection.parameter("t").detach().to_local()


def unreadable_on_one_rank(batch):
    mesh = shardwise.init_device_mesh("cpu", (2,))
    collection = cases.make().shard(mesh, cases.MIXED_ON_TWO)
    collection(batch if dist.get_rank() else cases.batch(0))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def no_gradient_on_one_rank(kind, output):
    """The tables after a step in which the loss of rank 1 gives no gradient."""
    mesh = shardwise.init_device_mesh("cpu", (2,))
    collection = cases.make(kind, optimizer=SGD(0.1), **output).shard(mesh, cases.MIXED_ON_TWO)
    found = collection(cases.batch(dist.get_rank()))
    rows = [found] if isinstance(found, torch.Tensor) else cases.rows_of(found).values()
    if dist.get_rank():
        rows = [_NoGradient.apply(each) for each in rows]
    sum(each.pow(2).sum() for each in rows).backward()
    return parameters(collection)


def other_settings(lr, features):
    """Rank 1 asks for another learning rate, or other features."""
    mesh = shardwise.init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    tables = [Table("t", 8, 4, features=features[rank])]
    EmbeddingBagCollection(tables, optimizer=SGD(lr[rank])).shard(mesh, "data_parallel")


def weights_that_train_on_one_rank(plan, optimizer):
    """Frozen tables, and weights of ids that only rank 1 has: their gradient."""
    mesh = shardwise.init_device_mesh("cpu", (2,))
    collection = cases.make(optimizer=optimizer).shard(mesh, plan).requires_grad_(False)
    batch = cases.batch(dist.get_rank(), weighted=dist.get_rank() == 1)
    if dist.get_rank():
        batch.weights = batch.weights.requires_grad_()
    cases.loss_of(collection(batch)).backward()
    return None if batch.weights is None else batch.weights.grad


def without_autograd_on_one_rank(plan, optimizer, compiled):
    """Rank 1 looks up under `no_grad`."""
    torch._dynamo.reset()
    mesh = shardwise.init_device_mesh("cpu", (2,))
    collection = cases.make(optimizer=optimizer).shard(mesh, plan)
    run = torch.compile(collection, backend="aot_eager") if compiled else collection
    with torch.set_grad_enabled(dist.get_rank() == 0):
        cases.loss_of(run(cases.batch(dist.get_rank()))).backward()


def frozen_on_one_rank(plan, optimizer, compiled):
    """Rank 1 freezes a table; then all ranks do."""
    torch._dynamo.reset()
    mesh = shardwise.init_device_mesh("cpu", (2,))
    collection = cases.make(optimizer=optimizer).shard(mesh, plan)
    run = torch.compile(collection, backend="aot_eager") if compiled else collection
    batch, said = cases.batch(dist.get_rank()), None
    collection.parameter("day").requires_grad_(dist.get_rank() == 0)
    try:
        cases.loss_of(run(batch)).backward()
    except shardwise.errors.RankMismatchError as error:
        said = str(error)
    collection.parameter("day").requires_grad_(False)
    cases.loss_of(run(batch)).backward()
    return said, parameters(collection)
