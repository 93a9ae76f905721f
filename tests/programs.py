"""Small programs that run alike in both worlds, and the errors that they meet.

Each returns tensors by name. Values come from one seed; `mine` gives each rank its own.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import DTensor, LocalTensor, Partial, Replicate, Shard
from shardwise.core.world import current_world
from shardwise.debug import CommDebugMode

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def record(program, *args):
    """`(events, what each rank present holds)` of a run from a fixed seed."""
    torch.manual_seed(0)
    with CommDebugMode() as comm:
        named = program(*args)
    held = {name: _held(tensor.detach()) for name, tensor in named.items()}
    return list(comm.events), held


def _held(tensor):
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if isinstance(local, LocalTensor):
        return [local.on_rank(rank).contiguous() for rank in local.ranks]
    return [local.contiguous()]


def mine(fn):
    """The tensor `fn(rank)`, different on each rank."""
    return LocalTensor.per_rank(fn) if current_world().simulated else fn(dist.get_rank())


def line():
    return shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("line",))


def square():
    return shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "cols"))


# -- data that only moves --------------------------------------------------------------------


def moves(shape):
    mesh = line()
    whole = torch.randn(shape)
    places = [R, S0, S1, Shard(0, (0, shape[0], 0, 0)), Shard(1, (shape[1] - 1, 0, 1, 0))]
    found = {}
    for before in places:
        x = shardwise.distribute_tensor(whole, mesh, [before], src_data_rank=None)
        for after in places:
            found[f"{before} -> {after}"] = x.redistribute(placements=[after])
    return found


GRID_MOVES = [
    ([S0, S0], (0, 1), [S0, S0], (1, 0)),
    ([S0, S1], (0, 1), [S1, S0], (0, 1)),
    ([S0, S0], (1, 0), [R, S1], (0, 1)),
    ([Shard(0, (5, 0)), S0], (0, 1), [S1, S1], (1, 0)),
    ([R, S0], (0, 1), [S0, R], (0, 1)),
    ([S1, R], (0, 1), [R, R], (0, 1)),
]


def moves_on_a_grid():
    mesh = square()
    whole = torch.randn(5, 3)
    found = {}
    for number, (before, order, after, new_order) in enumerate(GRID_MOVES):
        x = shardwise.distribute_tensor(whole, mesh, [R, R])
        x = x.redistribute(placements=before, order=order)
        found[f"{number} before"] = x
        found[f"{number} after"] = x.redistribute(placements=after, order=new_order)
    return found


def distributed_from_other_ranks():
    values = mine(lambda rank: torch.arange(10) + 100 * rank)
    mesh = line()
    return {
        str(source): shardwise.distribute_tensor(values, mesh, [S0], src_data_rank=source)
        for source in (None, 0, 3)
    }


# -- reductions ------------------------------------------------------------------------------


def reductions(reduce_op, dtype):
    mesh = line()

    def term(rank):
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(-9, 9, (5, 3), generator=generator).to(dtype) / (
            1 if not dtype.is_floating_point else 7
        )

    x = DTensor.from_local(mine(lambda rank: term(rank).to(dtype)), mesh, [Partial(reduce_op)])
    return {str(to): x.redistribute(placements=[to]) for to in (R, S0, S1, Shard(0, (1, 0, 4, 0)))}


# -- steps of training -----------------------------------------------------------------------


def _step(loss, parameters):
    loss.backward()
    found = {"loss": loss.redistribute(placements=[R] * loss.device_mesh.ndim)}
    for name, parameter in parameters.items():
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        found[name] = parameter
    return found


def mlp_step(batch_placement):
    mesh = line()
    first, second = torch.randn(10, 6), torch.randn(3, 10)
    w1 = nn.Parameter(shardwise.distribute_tensor(first, mesh, [S0]))
    w2 = nn.Parameter(shardwise.distribute_tensor(second, mesh, [S1]))
    x = shardwise.distribute_tensor(torch.randn(7, 6), mesh, [batch_placement])
    y = F.linear(F.linear(x, w1).relu(), w2)
    return _step((y * y).mean(), {"w1": w1, "w2": w2})


def table_step(placement, ids_placement):
    mesh = line()
    weight = nn.Parameter(shardwise.distribute_tensor(torch.randn(11, 6), mesh, [placement]))
    ids = shardwise.distribute_tensor(torch.randint(0, 11, (5, 2)), mesh, [ids_placement])
    target = shardwise.distribute_tensor(torch.randint(0, 6, (5,)), mesh, [ids_placement])
    logits = F.embedding(ids, weight).sum(1)
    return _step(F.cross_entropy(logits, target), {"table": weight})


def table_on_a_grid_step():
    mesh = square()
    weight = nn.Parameter(shardwise.distribute_tensor(torch.randn(11, 6), mesh, [R, S0]))
    ids = shardwise.distribute_tensor(torch.randint(0, 11, (5,)), mesh, [S0, R])
    return _step(F.embedding(ids, weight).sum(), {"table": weight})


def compiled_steps():
    """Two batch sizes, uneven on four ranks, through one compiled lookup and linear layer."""
    mesh = line()
    fast = torch.compile(_scores, backend="aot_eager", fullgraph=True, dynamic=True)
    places = {"table": S0, "weight": R, "ids": S0}

    def place(name, tensor):
        return shardwise.distribute_tensor(tensor, mesh, [places[name]])

    return {name: tensor.full_tensor().detach() for name, tensor in _two_steps(fast, place)}


def steps_of_one_device():
    return {name: tensor.detach() for name, tensor in _two_steps(_scores, lambda name, x: x)}


def _scores(ids, table, weight):
    return F.linear(F.embedding(ids, table), weight).relu()


def _two_steps(scores, place):
    torch.manual_seed(0)
    table = place("table", torch.randn(11, 14)).requires_grad_()
    weight = place("weight", torch.randn(20, 14)).requires_grad_()
    for size in (26, 35):
        out = scores(place("ids", torch.randint(0, 11, (size,))), table, weight)
        grads = torch.autograd.grad(out.sum(), [table, weight])
        for name, tensor in zip(("out", "table", "weight"), (out, *grads), strict=True):
            yield f"{name} {size}", tensor


# -- bad input -------------------------------------------------------------------------------


def wrong_number_of_placements():
    shardwise.distribute_tensor(torch.ones(4, 4), line(), [S0, S1])


def dim_out_of_range():
    shardwise.distribute_tensor(torch.ones(4, 4), line(), [Shard(2)])


def sizes_that_do_not_add_up():
    shardwise.distribute_tensor(torch.ones(4, 4), line(), [Shard(0, (1, 1, 1, 2))])


def no_such_source():
    shardwise.distribute_tensor(torch.ones(4, 4), line(), [S0], src_data_rank=4)


def mesh_larger_than_the_world():
    mesh = shardwise.init_device_mesh("cpu", (8,))
    shardwise.distribute_tensor(torch.ones(8), mesh, [S0])


def mesh_of_two_ranks():
    """Ranks 2 and 3 are not in the mesh."""
    mesh = shardwise.DeviceMesh("cpu", [0, 1])
    x = shardwise.distribute_tensor(torch.arange(5), mesh, [S0])
    return x.full_tensor().tolist()


def one_rank_brings(odd):
    """Rank 2 brings `odd` where all others bring 2 by 3 ones, and run_check asks to compare."""
    local = mine(lambda rank: odd if rank == 2 else torch.ones(2, 3))
    DTensor.from_local(local, line(), [S1], run_check=True)


def uneven_part_of_another_length():
    """Ten rows on four ranks are 3, 3, 3, 1."""
    local = mine(lambda rank: torch.ones(3, 2))
    DTensor.from_local(local, line(), [S0], shape=(10, 2), run_check=True)


def one_bad_id(placement):
    """The last of four ids, so of one rank's batch when the ids are sharded.

    The table is too large to be gathered, so the ids are, and every rank sees the bad one.
    """
    mesh = line()
    weight = shardwise.distribute_tensor(torch.randn(1100, 64), mesh, [S0])
    ids = shardwise.distribute_tensor(torch.tensor([0, 1, 2, 1100]), mesh, [placement])
    F.embedding(ids, weight)


def op_without_a_rule():
    x = shardwise.ones(4, 4, device_mesh=line(), placements=[S0])
    torch.linalg.svdvals(x)


def sum_over_ranks():
    """Whether the processes still understand each other."""
    x = DTensor.from_local(mine(lambda rank: torch.tensor([rank])), line(), [Partial()])
    return x.full_tensor().tolist()


# -- tables ----------------------------------------------------------------------------------


def exchanged_table_steps(sparse):
    """Two steps of a row-wise table with ids that are sharded, many of them equal."""
    mesh = line()
    weight = nn.Parameter(shardwise.distribute_tensor(torch.randn(500, 64), mesh, [S0]))
    optimizer = (torch.optim.SparseAdam if sparse else torch.optim.SGD)([weight], lr=0.1)
    found = {}
    for step in range(2):
        ids = torch.randint(0, 500, (1600, 2))
        ids[:700] = 3
        laid = shardwise.distribute_tensor(ids, mesh, [S0])
        rows = F.embedding(laid, weight, padding_idx=4, sparse=sparse)
        rows.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"rows {step}": rows, f"table {step}": weight}
    return found


def bag_steps(mode, placement, ids_placement):
    mesh = line()
    weight = nn.Parameter(shardwise.distribute_tensor(torch.randn(11, 6), mesh, [placement]))
    ids = shardwise.distribute_tensor(torch.randint(0, 11, (6, 3)), mesh, [ids_placement])
    starts = shardwise.distribute_tensor(torch.tensor([0, 2, 2, 15]), mesh, [R])
    flat = ids.redistribute(placements=[R]).view(18)
    loss = F.embedding_bag(ids, weight, mode=mode).pow(2).sum()
    loss = loss + F.embedding_bag(flat, weight, starts, mode=mode, padding_idx=3).pow(2).sum()
    return _step(loss, {"table": weight})


def one_bad_id_of_many(placement):
    """Rank 3 alone holds an id out of range, among enough ids to be exchanged."""
    mesh = line()
    weight = shardwise.distribute_tensor(torch.randn(500, 64), mesh, [placement])
    ids = torch.zeros(4000, dtype=torch.long)
    ids[-1] = 500
    F.embedding(shardwise.distribute_tensor(ids, mesh, [S0]), weight)


def one_bad_id_on_a_grid():
    """The ids are sharded over both axes, the rows over one."""
    mesh = square()
    weight = shardwise.distribute_tensor(torch.randn(500, 512), mesh, [R, S0])
    ids = torch.zeros(4000, dtype=torch.long)
    ids[-1] = -1
    F.embedding(shardwise.distribute_tensor(ids, mesh, [S0, S0]), weight)


def peak_of_a_table_step(ids_placement):
    """By how much memory grows at most, in bytes, in a step of a table of 256 MB on four ranks."""
    rows, columns = 1_000_000, 64
    mesh = line()
    weight = shardwise.zeros(rows, columns, device_mesh=mesh, placements=[S0]).requires_grad_()
    ids = shardwise.distribute_tensor(torch.randint(0, rows, (4096,)), mesh, [ids_placement])
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak starts here
    before = _memory("VmRSS")
    F.embedding(ids, weight).sum().backward()
    assert weight.grad.to_local().shape[0] == rows // 4
    return _memory("VmHWM") - before


def _memory(name):
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith(name))
    return int(line.split()[1]) * 1024
