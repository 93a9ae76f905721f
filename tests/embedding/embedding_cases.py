"""Tables, plans and batches for the tests of collections; programs for both worlds."""

import copy
import functools
import time
from pathlib import Path

import torch
import torch.distributed as dist
from parity import parameters
from programs import record

import shardwise
from shardwise import LocalTensor
from shardwise.core.world import current_world
from shardwise.embedding import (
    SGD,
    Adagrad,
    EmbeddingBagCollection,
    Jagged,
    RowWiseAdagrad,
    Table,
)
from shardwise.lookup import engine, exchange

TABLES = [
    Table("user", 11, 8),
    Table("item", 7, 8, features=("seen", "bought"), pooling="mean"),
    Table("place", 5, 4),
    Table("word", 9, 6),
    Table("day", 4, 8),
]
#: Of one width, so that a rank has one stack.
EQUALS = [Table(f"equal{rows}", rows, 4) for rows in (5, 11, 8)]

PLANS = {
    "row_wise": "row_wise",
    "column_wise": "column_wise",
    "table_wise": "table_wise",
    "grid": {"*": {"kind": "grid", "ranks": [1, 3]}},
    "data_parallel": "data_parallel",
    "mixed": {
        "user": "row_wise",
        "item": "column_wise",
        "place": {"kind": "table_wise", "rank": 2},
        "word": {"kind": "grid", "ranks": [1, 2]},
        "day": "data_parallel",
    },
    "few_columns": {"*": {"kind": "column_wise", "ranks": [0, 2]}},
}
#: As "mixed", for two ranks.
MIXED_ON_TWO = {
    **PLANS["mixed"],
    "place": {"kind": "table_wise", "rank": 1},
    "word": {"kind": "grid", "ranks": [1, 0]},
}


def batch(seed, num_bags=3, tables=TABLES, weighted=False, uneven=False):
    """Bags of zero to four ids; with `uneven`, a number of bags of its own for each feature."""
    rows = tuple((name, table.num_embeddings) for table in tables for name in table.features)
    ids, weights = _drawn(seed, num_bags, rows, uneven)
    return Jagged.from_lists(ids, weights if weighted else None)


@functools.cache
def _drawn(seed, num_bags, rows, uneven):
    """The ids and their weights, number by number: the same few batches serve most tests."""
    draw = torch.Generator().manual_seed(seed)

    def below(number):
        return int(torch.randint(number, (1,), generator=draw))

    ids, weights = {}, {}
    for feature, num_rows in rows:
        num = below(4) if uneven else num_bags
        ids[feature] = [[below(num_rows) for _ in range(below(5))] for _ in range(num)]
        weights[feature] = [[below(100) / 50 - 1 for _ in bag] for bag in ids[feature]]
    return ids, weights


def spread(batches):
    """Each rank's own batch: a Jagged of LocalTensors, or that of this process."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        return batches[dist.get_rank()]

    def per_rank(name):
        if getattr(batches[0], name) is None:
            return None
        return LocalTensor.per_rank(lambda rank: getattr(batches[rank], name))

    return Jagged(
        batches[0].features,
        per_rank("values"),
        lengths=per_rank("lengths"),
        weights=per_rank("weights"),
        batch_sizes=per_rank("batch_sizes"),
    )


def make(kind=EmbeddingBagCollection, tables=TABLES, optimizer=None, **options):
    """A collection whose weights are the same each time."""
    collection = kind(tables, optimizer=copy.copy(optimizer), **options)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in collection.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return collection


def loss_of(outputs):
    """A number that every entry of the output has its own part in."""
    if isinstance(outputs, torch.Tensor):
        return outputs.pow(2).sum()
    rows = [each if isinstance(each, torch.Tensor) else each.values for each in outputs.values()]
    return sum(each.pow(2).sum() for each in rows)


def rows_of(outputs):
    """The rows of each feature."""
    return {
        name: out if isinstance(out, torch.Tensor) else out.values for name, out in outputs.items()
    }


def train_alone(collection, per_step, torch_optimizer=None, reduction="mean"):
    """One device: the gradient of the mean of all batches' losses, step by step."""
    optimizer = torch_optimizer(collection.parameters()) if torch_optimizer else None
    for batches in per_step:
        parts = len(batches) if reduction == "mean" else 1
        losses = [loss_of(collection(each)) / parts for each in batches]
        sum(losses).backward() if optimizer else _in_one_update(collection, losses)
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in collection.named_parameters()}


def _in_one_update(collection, losses):
    with collection.optimizer.hold():
        for loss in losses:
            loss.backward()
    collection.optimizer.step()


def train_sharded(collection, per_step, torch_optimizer=None):
    """Each rank its own batch; the tables afterwards, whole."""
    optimizer = torch_optimizer(collection.parameters()) if torch_optimizer else None
    for batches in per_step:
        loss_of(collection(spread(batches))).backward()
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
    return parameters(collection)


def trained_in_processes(plan, optimizer, num_steps, kind=EmbeddingBagCollection):
    """In four gloo processes: the tables after some steps of training."""
    mesh = shardwise.init_device_mesh("cpu", (4,))
    collection = make(kind, optimizer=optimizer).shard(mesh, plan)
    steps = [[batch(10 * step + rank) for rank in range(4)] for step in range(num_steps)]
    return train_sharded(collection, steps)


def trained_with_large_messages(plan, kind):
    """The same, with what was sent; all messages arrive in memory that steps share."""
    before, exchange.LARGE_BYTES = exchange.LARGE_BYTES, 0
    try:
        return record(trained_in_processes, plan, Adagrad(0.1), 5, kind)
    finally:
        exchange.LARGE_BYTES = before


def beside_ddp(plan):
    """In four gloo processes: tables here, a dense part wrapped in DDP, one optimizer each."""
    mesh = shardwise.init_device_mesh("cpu", (4,))
    bags = make(output="tensor").shard(mesh, plan)
    torch.manual_seed(1)
    dense = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(42, 3))
    optimizer = torch.optim.SGD([*bags.parameters(), *dense.parameters()], lr=0.002)
    for step in range(20):
        optimizer.zero_grad()
        dense(bags(batch(10 * step + dist.get_rank()))).pow(2).sum().backward()
        optimizer.step()
    return {
        **parameters(bags),
        **{name: p.detach() for name, p in dense.module.named_parameters()},
    }


def beside_dense():
    """On one device: what `beside_ddp` computes."""
    bags = make(output="tensor")
    torch.manual_seed(1)
    dense = torch.nn.Linear(42, 3)
    optimizer = torch.optim.SGD([*bags.parameters(), *dense.parameters()], lr=0.002)
    for step in range(20):
        optimizer.zero_grad()
        for rank in range(4):
            (dense(bags(batch(10 * step + rank))).pow(2).sum() / 4).backward()
        optimizer.step()
    return {
        **{name: p.detach() for name, p in bags.named_parameters()},
        **{name: p.detach() for name, p in dense.named_parameters()},
    }


def broken_on_one_rank(plan):
    """In four gloo processes: rank 2 has an id that is no row."""
    mesh = shardwise.init_device_mesh("cpu", (4,))
    collection = make().shard(mesh, plan)
    mine = batch(dist.get_rank())
    if dist.get_rank() == 2:
        mine.values[0] = 99
    collection(mine)


def bad_on_one_rank(plan, others, check):
    """In four gloo processes: what each rank is told when rank 2 alone has a batch that does not
    fit, one kind after another; then the tables after a batch that fits."""
    mesh = shardwise.init_device_mesh("cpu", (4,))
    collection = make(optimizer=SGD(0.1), check=check).shard(mesh, plan)
    good, told = batch(5), {}
    ids, lengths = good.values, good.lengths
    more = torch.cat([lengths[:-1], lengths[-1:] + 1])
    ends = torch.cat([torch.tensor([0]), lengths.cumsum(0)])
    beyond = torch.cat([ends[:-1], ends[-1:] + 3])
    turned = ends.clone()
    turned[2], turned[3] = ends[3] + 1, ends[2]
    bad = {
        "unknown feature": Jagged([*good.features[:-1], "sold"], ids, lengths=lengths),
        "missing feature": Jagged(good.features[:-1], ids, lengths=lengths[:-3]),
        "offsets decrease": Jagged(good.features, ids, offsets=turned),
        "offsets overrun": Jagged(good.features, ids, offsets=beyond),
        "lengths do not sum": Jagged(good.features, ids, lengths=more),
        "weights of another length": Jagged(
            good.features, ids, lengths=lengths, weights=torch.ones(2)
        ),
        "ids that are not flat": Jagged(good.features, ids.view(-1, 1), lengths=lengths),
        "ids that are no numbers": Jagged(good.features, ids.float(), lengths=lengths),
        "offsets that are not flat": Jagged(good.features, ids, offsets=ends.view(1, -1)),
        "sizes that are not whole": Jagged(
            good.features, ids, lengths=lengths, batch_sizes=torch.full((6,), 3.0)
        ),
        "no batch": None,
        "no nested tensors": dict.fromkeys(good.features, ids),
        "id out of range": Jagged(good.features, ids + 100, lengths=lengths),
    }
    for name, wrong in bad.items():
        told[name] = message_of(collection, wrong if dist.get_rank() == 2 else good)
    for position in range(len(ids)):  # one rank after another
        values = ids.clone()
        values[position] = -1 - position
        wrong = Jagged(good.features, values, lengths=lengths)
        told[position] = message_of(collection, wrong if dist.get_rank() == position % 4 else good)
    told["uneven"] = _uneven_on_one_rank(mesh, plan)
    collection.optimizer.lr = 0
    ahead = collection.prefetch(bad["id out of range"] if dist.get_rank() == 2 else good)
    loss_of(collection(good)).backward()  # the ids would follow here
    told["ahead"] = message_of(collection, ahead)
    told["replaced"] = _replaced_on_one_rank(mesh, plan, good)
    told["plan"] = message_of(
        lambda it: make().shard(mesh, it), others if dist.get_rank() == 2 else plan
    )
    missing = Path("/nowhere/plan.toml") if dist.get_rank() == 2 else plan
    told["plan file"] = message_of(lambda it: make().shard(mesh, it), missing)
    collection.optimizer.lr = 0.1
    loss_of(collection(good)).backward()
    return told, {name: p.full_tensor() for name, p in collection.named_parameters()}


def message_of(call, given):
    try:
        call(given)
    except shardwise.ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _uneven_on_one_rank(mesh, plan):
    """Features stand side by side, and rank 2 has more bags of one than of the other."""
    collection = make(output="tensor").shard(mesh, plan)
    bags = {feature: [[0], [1]] for feature in collection.features}
    if dist.get_rank() == 2:
        bags["bought"] = [[0]]
    return message_of(collection, Jagged.from_lists(bags))


def _replaced_on_one_rank(mesh, plan, good):
    collection = make().shard(mesh, plan)
    if dist.get_rank() == 2:
        parameter = collection.parameter("day")
        parameter._local = parameter._local.clone()
    return message_of(collection, good)


def prefetched_late(plan, num_steps, late_s):
    """In four gloo processes: rank 3 is late with every batch, and other collectives run between.

    The tables after training, and the longest that `prefetch` took.
    """
    mesh = shardwise.init_device_mesh("cpu", (4,))
    collection = make(optimizer=SGD(0.1)).shard(mesh, plan)
    mine = [batch(10 * step + dist.get_rank()) for step in range(num_steps + 1)]
    following, longest_s = collection.prefetch(mine[0]), 0.0
    for number in range(num_steps):
        ahead = following
        if dist.get_rank() == 3:
            time.sleep(late_s)
        begin = time.perf_counter()
        following = collection.prefetch(mine[number + 1])
        longest_s = max(longest_s, time.perf_counter() - begin)
        others = [dist.all_reduce(torch.ones(1), async_op=True)]
        loss = loss_of(collection(ahead))
        others.append(dist.all_reduce(torch.ones(1), async_op=True))
        loss.backward()
        for work in others:
            work.wait()
    return parameters(collection), longest_s


def trained_in_small_pieces(kind, num_steps):
    """In four gloo processes: few numbers at a time, two lookups before backward, and the ids of
    the next batch on their way: nothing that is kept is written over."""
    before = engine.CHUNK_NUMBERS, engine.LARGE_BYTES
    engine.CHUNK_NUMBERS, engine.LARGE_BYTES = 8, 0
    mesh = shardwise.init_device_mesh("cpu", (4,))
    collection = make(kind, tables=EQUALS, optimizer=SGD(0.01)).shard(mesh, "row_wise")
    mine = [of_equals(number, dist.get_rank()) for number in range(num_steps + 1)]
    ahead = collection.prefetch(mine[0])
    for number in range(num_steps):
        outputs = collection(ahead), collection(mine[number + 1])
        ahead = collection.prefetch(mine[number + 1])
        (loss_of(outputs[0]) + loss_of(outputs[1])).backward()
    engine.CHUNK_NUMBERS, engine.LARGE_BYTES = before
    return parameters(collection)


#: Two features of one table, and one of another.
REPEATING = [Table("pair", 40, 4, features=("left", "right")), Table("other", 24, 4)]


def repeating(rank, num_different):
    """48 bags of one id: per table, so many of a rank's ids are different."""
    ids = torch.arange(16)
    tables = [ids % num_different, ids % num_different, (ids + rank) % num_different]
    return Jagged(("left", "right", "other"), torch.cat(tables), lengths=torch.ones(48).long())


def step_of_repeated_ids(kind, plan, num_different):
    """The rows, and the tables after a step."""
    mesh = shardwise.init_device_mesh("cpu", (4,))
    collection = make(kind, REPEATING, SGD(0.1)).shard(mesh, plan)
    given = [repeating(rank, num_different) for rank in range(4)]
    outputs = collection(spread(given) if current_world().simulated else given[dist.get_rank()])
    loss_of(outputs).backward()
    return rows_of(outputs) | {
        name: p.detach().full_tensor() for name, p in collection.named_parameters()
    }


def of_equals(number, rank):
    """Some have weights, some do not; features have numbers of bags of their own."""
    return batch(10 * number + rank, tables=EQUALS, weighted=rank % 2 == 1, uneven=number % 2 == 1)


def drawn_when_sharded(plan):
    """In four gloo processes, each with random numbers of its own: tables that never were whole."""
    mesh = shardwise.init_device_mesh("cpu", (4,))
    torch.manual_seed(dist.get_rank())
    collection = EmbeddingBagCollection(TABLES, device="meta", optimizer=SGD(0.1)).shard(mesh, plan)
    collection(batch(0))
    return parameters(collection)


def trained_by_sgd(plan, num_steps):
    """In four gloo processes: tables with row-sparse gradients and torch's own SGD."""
    mesh = shardwise.init_device_mesh("cpu", (4,))
    steps = [[batch(10 * step + rank) for rank in range(4)] for step in range(num_steps)]
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return train_sharded(make().shard(mesh, plan), steps, sgd)


def trained_on_some_ranks(kind, plan, optimizer, ahead):
    """In four gloo processes: a step with tables that train on ranks 0 and 2 alone.

    Returns the local shards: before, after, and after a step in which they train on all ranks.
    """
    mesh = shardwise.init_device_mesh("cpu", (4,))
    found = []
    for ranks in ((), (0, 2), range(4)):
        collection = make(kind, optimizer=optimizer).shard(mesh, plan)
        for parameter in collection.parameters():
            parameter.requires_grad_(dist.get_rank() in ranks)
        mine = batch(dist.get_rank())
        if ranks:
            loss_of(collection(collection.prefetch(mine) if ahead else mine)).backward()
        if optimizer is None:
            torch.optim.SGD(collection.parameters(), 0.1).step()
        found.append([p.detach().to_local() for p in collection.parameters()])
    return found


def trained_with_prefetch(plan, num_steps):
    """In four gloo processes: the ids of the next batch travel while backward runs."""
    mesh = shardwise.init_device_mesh("cpu", (4,))
    collection = make(optimizer=SGD(0.1)).shard(mesh, plan)
    mine = [batch(10 * step + dist.get_rank()) for step in range(num_steps)]
    ahead = collection.prefetch(mine[0])
    for number in range(num_steps):
        loss = loss_of(collection(ahead))
        if number + 1 < num_steps:
            ahead = collection.prefetch(mine[number + 1])
        loss.backward()
    return parameters(collection)


def gradients_of_weights(plan):
    """In four gloo processes: the weights of ids get gradients on odd ranks, others want none."""
    mesh = shardwise.init_device_mesh("cpu", (4,))
    collection = make(optimizer=SGD(0.1)).shard(mesh, plan)
    rank = dist.get_rank()
    mine = batch(rank, weighted=rank != 2)
    if rank % 2:
        mine.weights.requires_grad_()
    loss_of(collection(mine)).backward()
    return mine.weights.grad if rank % 2 else None


def copies_beside_a_large_table(num_steps):
    """In two gloo processes: the copy of a small table, where one rank has a large table too."""
    mesh = shardwise.init_device_mesh("cpu", (2,))
    tables = [Table("large", 5000, 32), Table("small", 50, 32)]
    collection = EmbeddingBagCollection(tables, optimizer=RowWiseAdagrad(0.1))
    collection.shard(mesh, {"large": {"kind": "table_wise", "rank": 0}, "small": "data_parallel"})
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(num_steps):
        ids = torch.randint(50, (6464,), generator=generator)
        lengths = torch.tensor([100] * 64 + [1] * 64)
        loss_of(collection(Jagged(["large", "small"], ids, lengths=lengths))).backward()
    return collection.parameter("small").detach().to_local()
