"""A model of tables and a dense part, compiled; for both worlds."""

import copy

import embedding_cases as cases
import torch
import torch.distributed as dist
from compiling import compiled
from parity import parameters

import shardwise
from shardwise.debug import CommDebugMode
from shardwise.embedding import EmbeddingCollection, Jagged, Table

SIZES = (3, 5, 4, 7)
#: Features of these stand in one tensor of ids: `batch_of_pairs` has two of each per bag.
PAIRS = [Table("first", 11, 8), Table("second", 7, 4, features=("left", "right"))]


class Recommender(torch.nn.Module):
    """Bags of ids, side by side, into one layer."""

    def __init__(self, plan=None, optimizer=None, **options):
        super().__init__()
        self.bags = cases.make(output="tensor", optimizer=optimizer, **options)
        if plan is not None:
            self.bags.shard(shardwise.init_device_mesh("cpu", (dist.get_world_size(),)), plan)
        torch.manual_seed(1)
        self.dense = torch.nn.Linear(42, 3)

    def forward(self, batch):
        return torch.tanh(self.dense(self.bags(batch))).pow(2).sum()


class Reader(torch.nn.Module):
    """A row for each id; the batch is made of tensors inside."""

    def __init__(self, plan=None, optimizer=None):
        super().__init__()
        self.rows = cases.make(EmbeddingCollection, tables=PAIRS, optimizer=optimizer)
        if plan is not None:
            self.rows.shard(shardwise.init_device_mesh("cpu", (4,)), plan)
        torch.manual_seed(1)
        self.first, self.left = torch.nn.Linear(8, 3), torch.nn.Linear(4, 3)

    def forward(self, ids, lengths):
        found = self.rows(Jagged(["right", "first", "left"], ids, lengths=lengths))
        of_first = self.first(found["first"].values).tanh().sum()
        return of_first + self.left(found["left"].values).sum() * found["right"].lengths.sum()


def pairs(seed, num_bags):
    """Ids and lengths for a Reader: two ids per bag."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 7, (6 * num_bags,), generator=draw)
    return ids, torch.full((3 * num_bags,), 2)


def _tables(model):
    return [p for name, p in model.named_parameters() if "embedding" in name]


def train(model, run, per_step, torch_optimizer=None):
    """The loss of each step; updates are part of backward, or of a step on the tables."""
    optimizer = torch_optimizer(_tables(model)) if torch_optimizer else None
    losses = []
    for batch in per_step:
        model.zero_grad()
        loss = run(*batch)
        loss.backward()
        losses.append(loss.detach())
        if optimizer is not None:
            optimizer.step()
    return losses


def trained_compiled(plan, optimizer, torch_optimizer, backend, sizes):
    """In gloo processes: tables after a step for each number of bags, the number of graphs,
    and whether a step of compiled code communicates as an eager one does."""
    torch._dynamo.reset()
    model = Recommender(plan, optimizer)
    fast, counter = compiled(model, backend)
    rank = dist.get_rank()
    steps = [(cases.batch(10 * n + rank, num_bags),) for n, num_bags in enumerate(sizes)]
    train(model, fast, steps, torch_optimizer)
    tables = copy.deepcopy(parameters(model.bags))
    seen = []
    for run in (model, fast):
        with CommDebugMode() as comm:
            run(*steps[-1]).backward()
        seen.append(comm.get_comm_counts())
    return tables, counter.frame_count, seen[0] == seen[1] and len(seen[0]) > 0


def trained_on_one_rank(plan, optimizer):
    """In two gloo processes: a step with tables that train on rank 0 alone.

    Returns the local shards: before, after, and after a step in which they train on both ranks.
    """
    rank, found = dist.get_rank(), []
    for ranks in ((), (0,), (0, 1)):
        torch._dynamo.reset()
        model = Recommender(plan, optimizer).requires_grad_(rank in ranks)
        if ranks:
            compiled(model)[0](cases.batch(rank)).backward()
        if optimizer is None:
            torch.optim.SGD(_tables(model), 0.1).step()
        found.append([p.detach().to_local() for p in _tables(model)])
    return found


def told_of_a_bad_batch(plan):
    """In four gloo processes: what each rank hears when rank 2 has a batch that does not fit, one
    kind after another; then the loss of a batch that does."""
    torch._dynamo.reset()
    model = Recommender(plan)
    fast, _ = compiled(model)
    told = []
    good = cases.batch(5)
    ids, lengths = good.values, good.lengths
    for bad in (
        Jagged(good.features, ids + 100, lengths=lengths),
        Jagged(good.features[:-1], ids, lengths=lengths[:-3]),
        Jagged(good.features, ids.float(), lengths=lengths),
        None,
    ):
        try:
            fast(bad if dist.get_rank() == 2 else good)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told, fast(good).detach()
