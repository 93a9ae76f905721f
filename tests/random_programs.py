"""Programs that draw random numbers, for both worlds.

Each names the axes of its meshes as no other does: generators are compared at the first draw on a
mesh, and meshes that are called alike are one.
"""

import torch
import torch.distributed as dist
from programs import S0, S1, R
from torch import distributions as D
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Partial, Shard, random
from shardwise.debug import check_rng


def line(name):
    return shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=(name,))


def square(name):
    names = (f"{name} rows", f"{name} cols")
    return shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def draws():
    """All kinds of draws, in several layouts and from small chunks."""
    before, random.CHUNK = random.CHUNK, 32
    try:
        found = {}
        for mesh, ways in (
            (line("draws"), [[S0], [S1], [R], [Shard(0, (9, 0, 1, 0))]]),
            (square("draws"), [[S0, S1], [S1, S1], [R, S0]]),
        ):
            for placements in ways:
                to = {"device_mesh": mesh, "placements": placements}
                x = shardwise.randn(10, 7, **to)
                found |= {
                    f"randn {placements}": x,
                    f"normal_ {placements}": shardwise.empty(10, 7, **to).normal_(1, 2),
                    f"bernoulli {placements}": torch.bernoulli(x.sigmoid()),
                    f"dropout {placements}": F.dropout(x, 0.5),
                    f"randint {placements}": torch.randint_like(x, 9),
                    f"poisson {placements}": torch.poisson(x.abs()),
                    f"sparse_ {placements}": nn.init.sparse_(torch.empty_like(x), 0.4),
                    # Torch stops checking arguments in a process that has compiled anything.
                    f"exponential {placements}": D.Exponential(
                        x.exp(), validate_args=True
                    ).sample(),
                }
        found["partial"] = _partial(line("partial draws"))
        return found
    finally:
        random.CHUNK = before


def _partial(mesh):
    x = shardwise.zeros(6, 5, device_mesh=mesh, placements=[R])
    return x.redistribute(placements=[Partial()]).clone().uniform_()


def fast_draws():
    with shardwise.rng("fast"):
        x = shardwise.randn(10, 7, device_mesh=square("fast_draws"), placements=[S0, R])
        return {"randn": x, "dropout": F.dropout(x, 0.5)}


def recomputed_step():
    mesh = line("recomputed_step")
    with torch.device("meta"):
        model = nn.Linear(8, 12)
    for name, placements in (("weight", [S0]), ("bias", [S0])):
        placed = shardwise.distribute_tensor(getattr(model, name), mesh, placements)
        setattr(model, name, nn.Parameter(placed))
    model.to_empty(device="cpu")
    model.reset_parameters()
    x = shardwise.randn(6, 8, device_mesh=mesh, placements=[R])
    y = checkpoint(lambda t: F.dropout(model(t), 0.5), x, use_reentrant=False)
    y.square().mean().backward()
    return {"y": y, "weight": model.weight, "grad": model.weight.grad}


# -- generators that differ ------------------------------------------------------------------


def _seed_one_rank_otherwise(odd):
    torch.manual_seed(5 if dist.get_rank() == odd else 0)


def draw_after_another_seed(odd):
    mesh = line("draw_after_another_seed")
    _seed_one_rank_otherwise(odd)
    shardwise.rand(8, device_mesh=mesh, placements=[S0])


def sparse_after_another_seed(odd):
    """The values come from a generator that all ranks have alike, the rows from the default one."""
    x = shardwise.empty(8, 6, device_mesh=line("sparse_after_another_seed"), placements=[S0])
    _seed_one_rank_otherwise(odd)
    nn.init.sparse_(x, 0.4, generator=torch.Generator().manual_seed(1))


def check_after_another_seed(odd):
    _seed_one_rank_otherwise(odd)
    check_rng()


def check_a_given_generator(odd):
    check_rng(
        line("check_a_given_generator"), torch.Generator().manual_seed(int(dist.get_rank() == odd))
    )


def check_when_all_is_well():
    torch.manual_seed(0)
    check_rng()
    check_rng(square("check_when_all_is_well"))
    check_rng(generator=torch.Generator().manual_seed(3))
    return True


# -- memory ----------------------------------------------------------------------------------


def peak_growth_of_an_initialisation(num_rows, row):
    """How many bytes a rank needs at most, beyond what it had, to initialise its rows."""
    mesh = line("peak_growth_of_an_initialisation")
    torch.manual_seed(0)
    shardwise.randn(
        random.CHUNK * 2, device_mesh=mesh, placements=[S0]
    )  # compares and tries chunks
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts from now
    before = _peak_bytes()
    x = shardwise.empty(num_rows, row, device_mesh=mesh, placements=[S0])
    nn.init.normal_(x)
    return _peak_bytes() - before, x.to_local().nbytes


def _peak_bytes():
    with open("/proc/self/status") as file:
        line = next(text for text in file if text.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


# -- compiled --------------------------------------------------------------------------------


def compiled_dropout():
    mesh = line("compiled")
    x = shardwise.distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [S0])
    fast = torch.compile(_dropped, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.manual_seed(3)
    return {"dropped": fast(x), "after": torch.get_rng_state()}


def eager_dropout():
    torch.manual_seed(3)
    return _dropped(torch.arange(35.0).view(7, 5)), torch.get_rng_state()


def _dropped(x):
    return F.dropout(x, 0.4) + torch.rand_like(x)
