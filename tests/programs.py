"""Small programs that run alike in both worlds, and the errors that they meet.

Each returns tensors by name. Values come from one seed; `mine` gives each rank its own.
"""

import io
import itertools
import pickle
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import DTensor, LocalTensor, Partial, Replicate, Shard
from shardwise.core.world import current_world
from shardwise.debug import CommDebugMode
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    Jagged,
    RowWiseAdagrad,
    Table,
)
from shardwise.parallel import ColwiseParallel, RowwiseParallel, data_parallel, parallelize_module

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


def error_of(fn, *args):
    """What a function raises, as text."""
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


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


def moves_apart(shape):
    """As `moves`, each started and awaited when it is looked at; two run at the same time."""
    mesh = line()
    whole = torch.randn(shape)
    terms = DTensor.from_local(
        mine(lambda rank: torch.full(shape, float(rank))), mesh, [Partial("max")]
    )
    found = {}
    for after in [R, S0, S1, Shard(0, (0, shape[0], 0, 0)), Partial("max")]:
        pair = [
            shardwise.distribute_tensor(whole, mesh, [S0]).redistribute(
                placements=[after], async_op=True
            ),
            terms.redistribute(placements=[after], async_op=True),
        ]
        found[f"moved to {after}"], found[f"reduced to {after}"] = pair
    return found


def moves_on_a_cube(number):
    """Every pair of placements on three axes, some of which have one rank."""
    mesh = shardwise.init_device_mesh("cpu", CUBES[number], mesh_dim_names=("a", "b", "c"))
    whole = torch.randn(5, 3, 2)
    places = list(itertools.product([R, S0, Shard(2)], repeat=3))
    generator = random.Random(number)
    found = {}
    for before, after in generator.sample(list(itertools.product(places, repeat=2)), 24):
        x = shardwise.distribute_tensor(whole, mesh, before)
        found[f"{before} -> {after}"] = x.redistribute(placements=after)
    return found


CUBES = [(2, 1, 2), (1, 2, 2), (2, 2, 1)]

#: Everything that is moved as it is, gloo's gaps included.
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


def moves_of_dtypes():
    """Each dtype through each kind of move, and through a sum where it has one."""
    mesh = line()
    found = {}
    for dtype in DTYPES:
        whole = torch.randint(0, 2, (5, 3)).to(dtype)
        x = shardwise.distribute_tensor(whole, mesh, [S0])
        for after in (R, S1, Shard(0, (0, 4, 0, 1))):
            found[f"{dtype} to {after}"] = _as_bytes(x.redistribute(placements=[after]))
        if dtype != torch.bool:
            terms = DTensor.from_local(mine(lambda rank, w=whole: w), mesh, [Partial()])
            for after in (R, S1):
                summed = terms.redistribute(placements=[after])
                found[f"sum of {dtype} to {after}"] = _as_bytes(summed)
    return found


def _as_bytes(x):
    local = x.to_local()
    if isinstance(local, LocalTensor):
        return LocalTensor.per_rank(lambda rank: _bytes(local.on_rank(rank)))
    return _bytes(local)


def _bytes(x):
    return x.contiguous().view(-1).view(torch.uint8)


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

    def with_nan(rank):
        value = term(rank).to(dtype)
        if reduce_op in ("max", "min"):
            value[rank, 0] = torch.nan  # the extreme of a NaN and a number is a NaN, in any order
        return value

    x = DTensor.from_local(mine(with_nan), mesh, [Partial(reduce_op)])
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


class Block(nn.Module):
    """Attention over four heads and an MLP, each with a norm before and a sum around it."""

    def __init__(self, width=8, hidden=12):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Without biases: that of the keys has no gradient but noise, which Adam would blow up.
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        y = self.norm1(x)
        heads = [
            layer(y).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _column_and_row(name, module, mesh):
    columns, rows = ("query", "key", "value", "up"), ("out", "down")
    if name in columns or name in rows:
        placement = S0 if name in columns else S1
        weight = shardwise.distribute_tensor(module.weight.detach(), mesh, [placement])
        module.weight = nn.Parameter(weight)
        if name in columns and module.bias is not None:
            bias = shardwise.distribute_tensor(module.bias.detach(), mesh, [S0])
            module.bias = nn.Parameter(bias)


class OwnAdamW(torch.optim.AdamW):
    """A class of a program's own: its steps run through DTensors."""


def plain_parameters():
    """Plain parameters, one a number, beside a DTensor: each rank has the whole gradient."""
    x = shardwise.distribute_tensor(torch.randn(6, 4), line(), [S0], src_data_rank=None)
    scale, weight = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(6, 4))
    with shardwise.implicit_replication():
        ((x * weight * scale).pow(2).sum().full_tensor() + weight.sum()).backward()
    return {"scale": scale.grad, "weight": weight.grad}


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW one by one": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "own AdamW fused": lambda parameters: OwnAdamW(parameters, lr=0.01, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


def block_steps(batch_placement, optimizer):
    """Two steps of a transformer block, clipped."""
    mesh = line()
    block = shardwise.distribute_module(Block().double(), mesh, _column_and_row)
    steps = OPTIMIZERS[optimizer](block.parameters())
    found = {}
    for number in range(2):
        x = shardwise.distribute_tensor(torch.randn(4, 5, 8).double(), mesh, [batch_placement])
        steps.zero_grad()
        loss = (block(x) ** 2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        steps.step()
        found[f"loss {number}"] = loss.redistribute(placements=[R])
    return found | {name: p.detach() for name, p in block.named_parameters()}


def apart_step():
    """A gathered weight whose gather overlaps what comes before its use, in both directions."""
    mesh = line()
    weight = nn.Parameter(shardwise.distribute_tensor(torch.randn(5, 6), mesh, [S0]))
    x = shardwise.distribute_tensor(torch.randn(7, 6), mesh, [S0])
    gathered = weight.redistribute(placements=[R], async_op=True)
    y = F.linear(x.exp(), gathered).redistribute(placements=[S1], async_op=True)
    return _step((y * y).mean(), {"weight": weight})


def compiled_steps():
    """Two batch sizes, through one compiled lookup and linear layer."""
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
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
    for size in (27, 35):
        out = scores(place("ids", torch.randint(0, 11, (size,))), table, weight)
        grads = torch.autograd.grad(out.sum(), [table, weight])
        for name, tensor in zip(("out", "table", "weight"), (out, *grads), strict=True):
            yield f"{name} {size}", tensor


# -- between worlds --------------------------------------------------------------------------


def saved():
    """A tensor and a module's state, as bytes that `torch.load` reads without running code."""
    mesh = line()
    buffer = io.BytesIO()
    x = shardwise.distribute_tensor(torch.arange(10.0), mesh, [S0]).requires_grad_()
    layer = shardwise.distribute_module(nn.Linear(2, 2), mesh)
    torch.save({"x": x, "layer": layer.state_dict()}, buffer)
    return buffer.getvalue()


def loaded(content):
    """What was saved in another world, put together in this one."""
    line()
    found = torch.load(io.BytesIO(content), weights_only=True)
    x = found["x"]
    return x.requires_grad, x.placements, x.detach().full_tensor(), found["layer"]["bias"].shape


def loaded_mine(contents):
    return loaded(contents[dist.get_rank()])


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
    """Ranks 2 and 3 are not in the mesh; the program is the same."""
    mesh = shardwise.DeviceMesh("cpu", [0, 1])
    torch.manual_seed(0)
    x = shardwise.distribute_tensor(torch.arange(5.0), mesh, [S0]).requires_grad_()
    y = shardwise.rand(5, device_mesh=mesh, placements=[S0])
    z = DTensor.from_local(torch.ones(5), mesh, [R])
    made = shardwise.ones(5, device_mesh=mesh, placements=[S0])
    layer = shardwise.distribute_module(torch.nn.Linear(5, 3), mesh)
    mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    split = {"0": ColwiseParallel(), "2": RowwiseParallel(use_local_output=False)}
    parallelize_module(mlp, mesh, split)(torch.ones(3, 4)).sum().backward()
    optimizer = torch.optim.Adam([x, *layer.parameters()], foreach=True)
    out = layer((x * y + z * made).redistribute(placements=[R]))
    out.view(1, 3).split(1, dim=1)[0].square().sum().backward()
    torch.nn.utils.clip_grad_norm_([x, *layer.parameters()], 1.0)
    optimizer.step()
    assert tuple(x.grad.shape) == tuple(x.shape) == (5,)
    assert out.placements == (R,)
    copied = pickle.loads(pickle.dumps(x))
    held = [t.to_local().numel() for t in (x, y, z, out, x.grad, copied)]
    return held, x.detach().full_tensor(), torch.rand(2).tolist()


def train_on_two_ranks():
    """Replicas, collections and a local_map on ranks 0 and 1; the losses and shapes of each rank.

    The tables' gradients are those of the mean of two ranks' losses, so a rank outside counts not.
    """
    mesh = shardwise.DeviceMesh("cpu", [0, 1])
    torch.manual_seed(dist.get_rank())
    tables = [Table(name, 10, 4) for name in "abc"]
    bags = EmbeddingBagCollection(tables, output="tensor", optimizer=RowWiseAdagrad(lr=0.1))
    bags.shard(mesh, {"a": "row_wise", "b": "column_wise", "c": "data_parallel"})
    rows = EmbeddingCollection([Table("word", 6, 2)], device="meta").shard(mesh, "row_wise")
    top = data_parallel(nn.Linear(12, 1), mesh)
    optimizer = torch.optim.SGD(top.parameters(), lr=0.1)
    batch = Jagged.from_lists({name: [[1, 2], [3], []] for name in "abc"})
    losses = []
    for _ in range(2):
        loss = top(bags(bags.prefetch(batch))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = rows(Jagged.from_lists({"word": [[1], [2, 2]]}))["word"]  # not each id once
    found.values.sum().backward()
    x = shardwise.ones(5, 4, device_mesh=mesh, placements=[S0]).requires_grad_()
    twice = shardwise.local_map(lambda t: t @ t.new_ones(4, 3), out_placements=[S0])(x)
    twice.sum().backward()
    saved = bags.optimizer.state_dict()["state"]["a"]["sum"].shape
    shapes = [found.values.shape, twice.shape[1:], x.grad.shape, saved, bags.state_dict().keys()]
    with pytest.raises(shardwise.BatchError, match="c"):
        bags(Jagged.from_lists({name: [[1]] for name in "ab"}))
    return losses, str(shapes), bags.parameter("a").detach().to_local().numel()


def value_outside_the_mesh():
    mesh = shardwise.DeviceMesh("cpu", [0, 1])
    return shardwise.ones(5, device_mesh=mesh).sum().item()


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


def refused_on_rank_3(name):
    """An op that refuses a value which rank 3 alone holds."""
    x, one = torch.ones(4, 3), torch.tensor([0, 1, 2, 77])
    column = one[:, None].expand(4, 3).contiguous()
    far = torch.tensor([0.1, 0.2, 0.3, -1.5])
    nan_on_3 = torch.eye(3) * far[:, None, None].sqrt()

    def whole(t):
        return shardwise.distribute_tensor(t, line(), [R])

    def cut(t):
        return shardwise.distribute_tensor(t, line(), [S0])

    calls = {
        "index": lambda: whole(x)[cut(one)],
        "index_select": lambda: whole(x).index_select(0, cut(one)),
        "gather": lambda: whole(x).gather(0, cut(column)),
        "gather along another dim": lambda: cut(x).gather(1, cut(column)),
        "scatter_": lambda: cut(x).scatter_(1, cut(column), 1.0),
        "index_add": lambda: whole(torch.zeros(4, 3)).index_add(0, cut(one), cut(x)),
        "take": lambda: whole(x).take(cut(one)),
        "cross_entropy": lambda: F.cross_entropy(cut(x), cut(one)),
        "multi_margin_loss": lambda: F.multi_margin_loss(cut(x), cut(one)),
        "binary_cross_entropy": lambda: F.binary_cross_entropy(cut(far), cut(torch.rand(4))),
        "normal": lambda: torch.normal(0.0, cut(far)),
        "bernoulli": lambda: torch.bernoulli(cut(far)),
        "//": lambda: cut(one) // cut(torch.tensor([1, 1, 1, 0])),
        "%": lambda: cut(one) % cut(torch.tensor([1, 1, 1, 0])),
        "number // tensor": lambda: 5 // cut(torch.tensor([1, 1, 1, 0])),
        "number % tensor": lambda: 5 % cut(torch.tensor([1, 1, 1, 0])),
        "cholesky": lambda: torch.linalg.cholesky(cut(far[:, None, None].contiguous())),
        "cholesky_ex": lambda: torch.linalg.cholesky_ex(
            cut(far[:, None, None].contiguous()), check_errors=True
        ),
        "eigh": lambda: torch.linalg.eigh(cut(nan_on_3)),
        "eigvals": lambda: torch.linalg.eigvals(cut(nan_on_3)),
        "svd": lambda: torch.linalg.svdvals(cut(nan_on_3)),
        "pinv": lambda: torch.linalg.pinv(cut(nan_on_3)),
        "lu_unpack": lambda: torch.lu_unpack(
            cut(torch.ones(4, 1, 1)), cut(one[:, None].int() // 3 + 1)
        ),
        "sorter": lambda: torch.searchsorted(
            cut(torch.ones(4, 3)), cut(torch.ones(4, 1)), sorter=cut(one[:, None].expand(4, 3))
        ),
        "unpool": lambda: F.max_unpool2d(
            cut(torch.ones(4, 1, 1, 1)), cut(one.view(4, 1, 1, 1)), kernel_size=2
        ),
    }
    calls[name]()


def refused_but_on_rank_3(name):
    """An op that refuses an index which all ranks hold; rank 3 has none of the three columns."""
    index = shardwise.distribute_tensor(torch.tensor([0, -1, 77]), line(), [R])
    x, rows = (shardwise.distribute_tensor(torch.ones(n, 3), line(), [S1]) for n in (4, 3))
    calls = {
        "index": lambda: x[index],
        "index_put": lambda: x.index_put((index,), rows),
        "index_add": lambda: x.index_add(0, index, rows),
        "index_copy": lambda: x.index_copy(0, index, rows),
    }
    calls[name]()


def half_precision_under_autocast():
    """Torch's `cat` refuses it under autocast to bfloat16; rank 0 alone joins pieces to send."""
    value = torch.arange(30.0).view(6, 5).half()
    with torch.autocast("cpu", torch.bfloat16):
        x = shardwise.distribute_tensor(value, line(), [S0])
        moved = x.redistribute(placements=[S1]).redistribute(placements=[S0])
        return torch.equal(moved.full_tensor(), value), str(moved.to_local().dtype)


def norms_with_a_bias_alone(name, rows):
    """A step of a norm that has no weight; with fewer rows than ranks, some hold nothing."""
    mesh = line()
    torch.manual_seed(0)
    value, shift = torch.randn(rows, 4, 3), torch.randn(4)
    calls = {
        "group_norm": lambda x, b: F.group_norm(x, 2, None, b),
        "instance_norm": lambda x, b: F.instance_norm(x, bias=b),
        "batch_norm": lambda x, b: F.batch_norm(x, None, None, None, b, True),
        "layer_norm": lambda x, b: F.layer_norm(x.mT, (4,), None, b),
    }
    grads = []
    for put in (torch.clone, lambda t: shardwise.distribute_tensor(t, mesh, [S0])):
        x, bias = put(value).requires_grad_(), put(shift).requires_grad_()
        if name == "group_norm" and put is torch.clone:  # torch's own backward crashes
            out = F.group_norm(x, 2, None, None) + bias[:, None]
        else:
            out = calls[name](x, bias)
        out.square().sum().backward()
        grads.append([getattr(g, "full_tensor", lambda g=g: g)() for g in (x.grad, bias.grad)])
    return [torch.allclose(*pair, atol=1e-4) for pair in zip(*grads, strict=True)]


def infinite_factors_of_some_ranks():
    """Infinity times a sum, where one column of the mesh alone has the infinity."""
    mesh = square()
    value, factors = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([2.0, 1.0, 1.0, float("inf")])
    terms = torch.stack([value, torch.zeros(4)])
    x = shardwise.distribute_tensor(terms, mesh, [S0, S1]).sum(0)
    found = x * shardwise.distribute_tensor(factors, mesh, [R, S0])
    return found.full_tensor().tolist()


def op_without_a_rule():
    x = shardwise.ones(4, 4, device_mesh=line(), placements=[S0])
    x.to_sparse()


def sum_over_ranks():
    """Whether the processes still understand each other."""
    x = DTensor.from_local(mine(lambda rank: torch.tensor([rank])), line(), [Partial()])
    return x.full_tensor().tolist()


def _start_again(port):
    """Leave the world and enter another one of the same processes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    yield
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size
    )


def errors_of_a_world_that_is_gone(port):
    """What each use of an old tensor or mesh says, without a world and in the next one."""
    mesh = line()
    x = shardwise.distribute_tensor(torch.arange(8.0), mesh, [S0])
    steps = _start_again(port)
    next(steps)
    uses = {
        "gather": lambda: x.full_tensor(),
        "move": lambda: x.redistribute(placements=[R]),
        "make": lambda: shardwise.distribute_tensor(torch.ones(8), mesh, [S0]),
        "wrap": lambda: DTensor.from_local(torch.ones(2), mesh, [S0]),
    }
    found = {f"{name}, no world": _error(use) for name, use in uses.items()}
    next(steps, None)
    new = shardwise.distribute_tensor(torch.arange(8.0), line(), [S0])
    found |= {f"{name}, next world": _error(use) for name, use in uses.items() if name != "make"}
    found["both"] = _error(lambda: x + new)
    # The new world is none the worse.
    return found, new.full_tensor().tolist()


def _error(use):
    try:
        use()
    except Exception as error:
        return type(error), str(error)
    return None


def one_rank_runs_out_of_memory(failing):
    """The all-gather cannot get its memory on one rank; the others wait for it."""
    mesh = line()
    x = shardwise.distribute_tensor(torch.arange(8.0), mesh, [S0])
    x.full_tensor()
    if dist.get_rank() == failing:
        from shardwise.comm import collectives

        def no_memory(*args):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 99 bytes.")

        collectives._all_gather_into_tensor = no_memory
    return x.full_tensor()


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


def maximum_with_nan():
    """Bags whose maximum is NaN, infinite or neither, and its gradient."""
    mesh, found = line(), {}
    entries = torch.tensor([-1.0, 0.5, -torch.inf, torch.inf, torch.nan, torch.nan])
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        whole = entries[torch.randint(6, (11, 5), generator=draw)]
        ids = torch.randint(11, (8, 3), generator=draw)
        table = shardwise.distribute_tensor(whole, mesh, [S0]).requires_grad_()
        bags = F.embedding_bag(shardwise.distribute_tensor(ids, mesh, [R]), table, mode="max")
        bags.sum().backward()
        found |= {f"{seed} bags": bags.detach(), f"{seed} gradient": table.grad}
    return found


def short_bag_steps():
    """Enough bags of two ids that their rows are exchanged."""
    mesh = line()
    weight = nn.Parameter(shardwise.distribute_tensor(torch.randn(500, 64), mesh, [S0]))
    ids = shardwise.distribute_tensor(torch.randint(0, 500, (1601, 2)), mesh, [S0])
    bags = F.embedding_bag(ids, weight, mode="mean", padding_idx=4)
    return {"bags": bags} | _step(bags.pow(2).sum(), {"table": weight})


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


# -- layers and ops that run whole -----------------------------------------------------------


def _placed(mesh, tensor, *placements):
    return shardwise.distribute_tensor(tensor, mesh, list(placements), src_data_rank=None)


def convolutional_net():
    """A convolution, batch norm in training, pooling: five examples on four ranks."""
    mesh = square()
    x = _placed(mesh, torch.randn(5, 4, 6, 6), S0, S1).requires_grad_()
    weight = _placed(mesh, torch.randn(6, 4, 3, 3), R, S0).requires_grad_()
    scale = _placed(mesh, torch.randn(6), R, R).requires_grad_()
    mean, var = _placed(mesh, torch.zeros(6), R, R), _placed(mesh, torch.ones(6), R, R)
    hidden = F.batch_norm(F.conv2d(x, weight), mean, var, scale, training=True)
    out = F.max_pool2d(hidden, 2)
    out.square().sum().backward()
    grads = {"x grad": x.grad, "weight grad": weight.grad, "scale grad": scale.grad}
    return {"out": out, "mean": mean, "var": var, **grads}


def attention_and_recurrence():
    mesh = line()
    q = _placed(mesh, torch.randn(2, 4, 5, 8), S1).requires_grad_()
    mask = _placed(mesh, torch.randn(2, 1, 5, 5), R)
    out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    net = nn.LSTM(8, 6)
    for name, parameter in list(net.named_parameters()):
        setattr(net, name, nn.Parameter(_placed(mesh, parameter.detach(), R)))
    steps, _ = net(_placed(mesh, torch.randn(3, 5, 8), S1))
    (out.square().sum() + steps.square().sum()).backward()
    return {"out": out, "steps": steps, "q grad": q.grad, "net grad": net.weight_hh_l0.grad}


def picked_and_written():
    mesh = line()
    x = _placed(mesh, torch.randn(7, 3), S0).requires_grad_()
    rows = _placed(mesh, torch.tensor([6, 0, 6, 2]), R)
    picked = x[rows]
    (picked.square().sum() + (x @ _placed(mesh, torch.randn(3, 2), R)).sum()).backward()
    y = x.detach().clone()
    y.index_add_(0, rows, picked.detach())
    y.masked_fill_(y > 1, 7.0)
    return {"picked": picked, "grad": x.grad, "y": y, "large": y[y > 0], "places": y.nonzero()}


def mapped_over_parts():
    mesh = line()
    x = _placed(mesh, torch.randn(5, 3), S0).requires_grad_()
    out = shardwise.local_map(lambda part: part * 2, out_placements=[S0])(x)
    out.sum().backward()
    return {"out": out, "grad": x.grad}


# -- where parts are easily taken for something else -----------------------------------------


def expanded_gradients():
    """Every position of an expanded tensor counts; a foreach op makes entries of their own."""
    mesh = line()
    leaf = shardwise.distribute_tensor(torch.randn(6, 1), mesh, [S0]).requires_grad_()
    weights = torch.randn(6, 4)
    (leaf.expand(6, 4).full_tensor() * weights).sum().backward()
    spread = shardwise.distribute_tensor(weights, mesh, [S0])
    (product,) = torch._foreach_mul([leaf.detach().expand(6, 4)], [spread])
    return {
        "grad": leaf.grad,
        "whole grad": leaf.grad.full_tensor(),
        "product": product.full_tensor(),
        "expected": weights.sum(1, keepdim=True),
        "expected product": leaf.detach().full_tensor() * weights,
    }


def terms_that_do_not_pass():
    """Sums that are rounded, multiplied by an infinity, or made into factors on another axis."""
    mesh = square()
    x = shardwise.distribute_tensor(torch.tensor([0.5, 0.25, 0.75, 0.5]), mesh, [S0, S0]).sum()
    ones = DTensor.from_local(torch.ones(1), mesh, [R, Partial()])
    factors = ones.redistribute(placements=[Partial("product"), R])
    return {
        "long": x.long().full_tensor(),
        "bool": (x - x).bool().full_tensor(),
        "inf": (x * float("inf")).full_tensor(),
        "over zero": (x / 0).full_tensor(),
        "factors": factors.full_tensor(),
    }


def bits():
    """Conjugates and zeros that torch puts off, and gradients of complex layers."""
    mesh = line()
    values = torch.randn(8, 4, dtype=torch.complex64)
    x = DTensor.from_local(mine(lambda rank: values[2 * rank : 2 * rank + 2].conj()), mesh, [S0])
    leaf = shardwise.distribute_tensor(torch.randn(8), mesh, [R]).requires_grad_()
    torch.sgn(leaf.redistribute(placements=[S0])).sum().backward()
    weight = shardwise.distribute_tensor(torch.randn(3, 4, dtype=torch.complex64), mesh, [S0])
    weight.requires_grad_()
    F.linear(x, weight).sum().abs().backward()
    return {"conjugate": x + x, "zeros": leaf.grad + 1, "weight": weight.grad.full_tensor()}


def scaled_step():
    """An infinity in the shard of one rank: all ranks skip the step."""
    mesh, values = line(), torch.arange(8.0)
    parameters = [shardwise.distribute_tensor(values, mesh, [p]).requires_grad_() for p in (S0, R)]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for last in (1.0, float("inf"), 2.0):
        factors = shardwise.distribute_tensor(torch.tensor([1.0] * 7 + [last]), mesh, [S0])
        optimizer.zero_grad()
        loss = (parameters[0] * factors).sum() + parameters[1].sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"sharded": parameters[0], "whole": parameters[1], "scale": scaler._scale}
