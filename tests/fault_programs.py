"""What ranks run in the tests of faults: disks, folders, plans and code that differ."""

import os
import resource
import time

import torch
import torch.distributed as dist
from programs import error_of
from torch import nn

import shardwise
from shardwise import Partial, Replicate, Shard, parallel
from shardwise._torch.c10d import group_timeout
from shardwise.checkpoint import Checkpoints, load, save, save_async
from shardwise.checkpoint.crew import current_crew
from shardwise.core import encode
from shardwise.core.mesh import grid_of
from shardwise.embedding import EmbeddingBagCollection, Table
from shardwise.parallel import parallelize_module


def save_with_a_full_disk(folder):
    """The system refuses to let the files of one rank grow."""
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"x": shardwise.ones(4000, 100, device_mesh=mesh, placements=[Shard(0)])}
    series = Checkpoints(folder)
    series.save(1, state)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    series.save(2, state)


def save_without_permission(folder):
    """As somebody who may not write there; root may write anywhere."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    Checkpoints(folder).save(1, {"x": torch.ones(2)})


def shard_by_different_plans():
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    tables = EmbeddingBagCollection([Table("a", 8, 4), Table("b", 8, 4)])
    tables.shard(mesh, {"a": "row_wise", "b": "column_wise" if dist.get_rank() else "row_wise"})


def parallelize_by_different_plans():
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": "colwise", "1": "rowwise"} if dist.get_rank() else {"0": "colwise"}
    parallelize_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh, plan)


def parallelize_where_one_rank_is_mistaken():
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": "colwise" if dist.get_rank() else "sideways"}
    parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, plan)


def parallelize_by_different_code(package):
    """One rank runs the code in another folder."""
    if dist.get_rank() == 1:
        encode.PACKAGE = package
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": "colwise"})


# -- who waits how long ----------------------------------------------------------------------


def timeouts_s():
    """Of the groups of a mesh that is used, of checkpoints, and of a group of the program's own."""
    mesh = shardwise.init_device_mesh("cpu", (2, 2))
    terms = [Partial(), Partial()]
    shardwise.DTensor.from_local(torch.ones(1), mesh, terms).full_tensor()
    own = dist.new_group([0, 1, 2, 3])
    used = grid_of(mesh).mesh  # equal meshes use the groups of the first
    groups = [used.get_group(0), used.get_group(1), current_crew().group, own]
    return [group_timeout(group).total_seconds() for group in groups]


def wait_for_a_rank_that_never_comes():
    """In a group of a mesh axis, which torch would let wait for half an hour."""
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if dist.get_rank() == 3:
        time.sleep(60)
    x = shardwise.DTensor.from_local(torch.ones(1), mesh, [Replicate(), Partial()])
    x.full_tensor()


# -- an error on one rank --------------------------------------------------------------------


class Failing:
    """Saves or loads nothing on one rank, where it raises."""

    def __init__(self, error):
        self._error = error if dist.get_rank() == 1 else None

    def state_dict(self):
        if self._error is not None:
            raise self._error
        return {"x": torch.ones(2)}

    def load_state_dict(self, state):
        self.state_dict()


ERRORS = [
    KeyError("k"),
    AttributeError("a"),
    IndexError("i"),
    AssertionError("s"),
    MemoryError(),
    StopIteration(),
    ZeroDivisionError("z"),
    RecursionError("r"),
    NotImplementedError("n"),
]


def fail_on_one_rank(folder):
    """What every rank hears when a step of a checkpoint fails on one of them."""
    crew, heard = current_crew(), []
    for error in ERRORS:

        def step(error=error):
            if dist.get_rank() == 1:
                raise error
            return [None]

        heard.append(error_of(crew.together, step))
    for error in ERRORS[:2]:
        heard.append(error_of(save, {"part": Failing(error)}, f"{folder}/failing"))
    save({"part": Failing(None)}, f"{folder}/whole")
    for error in ERRORS[:2]:
        heard.append(error_of(load, {"part": Failing(error)}, f"{folder}/whole"))
    return heard


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


def exit_on_one_rank(folder):
    """What each rank hears when one of them calls sys.exit() in the midst of a save."""
    rank = dist.get_rank()
    try:
        save({"mine": Failing(SystemExit("enough"))}, f"{folder}/left")
    except BaseException as error:
        return rank, f"{type(error).__name__}: {error}"


def save_where_a_rank_comes_late(folder):
    if dist.get_rank() == 1:
        time.sleep(5)
        return None
    return error_of(save, {"a": 1}, f"{folder}/first")


def ask_wrongly_on_one_rank(folder):
    """What every rank hears when one of them gives a path, a step or a number that is none."""
    wrong, series, state = dist.get_rank() == 1, Checkpoints(f"{folder}/series"), {"x": 1}
    series.save(3, state)
    return [
        error_of(save, state, None if wrong else f"{folder}/a"),
        error_of(load, state, None if wrong else series.path(3)),
        error_of(series.save, -1 if wrong else 4, state),
        error_of(series.save_async, "4" if wrong else 4, state),
        error_of(series.load, state, -1 if wrong else 3),
        error_of(lambda: save_async(state, f"{folder}/b", copy_bytes=-1 if wrong else 5)),
        error_of(save, {"part": Failing(Mute())}, f"{folder}/c"),
    ]


def plan_with_an_error_of_its_own():
    """A style that fails on one rank, by an error that no door expects."""

    class Broken(parallel.ColwiseParallel):
        def check_distributed(self, module, mesh):
            return {}["missing"] if dist.get_rank() == 1 else None

    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    return error_of(parallelize_module, nn.Sequential(nn.Linear(4, 4)), mesh, {"0": Broken()})


# -- ranks that do different things ----------------------------------------------------------


def step_once_more():
    """One rank takes a step that the others do not take."""
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for _ in range(2 + (dist.get_rank() == 1)):
        shardwise.DTensor.from_local(torch.ones(3), mesh, [Partial()]).full_tensor()


def replace_a_sharded_parameter(on_ranks):
    """Train a fully sharded layer whose parameter some ranks have replaced."""
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    layer = parallel.fully_shard(nn.Linear(4, 4), mesh)
    layer(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() in on_ranks:
        layer.weight = nn.Parameter(torch.zeros(4, 4))
    layer(torch.ones(2, 4))


def replace_it_and_go_on(axes):
    """One rank alone replaces a parameter, catches the error, and trains on with the others."""
    mesh = shardwise.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    if "tp" in axes:
        parallel.parallelize_module(layer, mesh, "colwise")
        mesh = mesh["dp"]
    parallel.fully_shard(layer, mesh)
    errors = []
    for _ in range(2):
        if dist.get_rank() == 1:
            for replace in (lambda: setattr(layer, "weight", None), lambda: delattr(layer, "bias")):
                errors.append(error_of(replace))
        layer(torch.ones(2, 4)).sum().backward()
    return errors, layer.weight.grad.full_tensor()


def save_against_load(folder):
    state = {"x": torch.ones(2)}
    save(state, f"{folder}/whole")
    if dist.get_rank() == 1:
        return error_of(load, state, f"{folder}/whole")
    return error_of(save, state, f"{folder}/again")


def save_against_step(folder):
    """One rank saves while the others train."""
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    current_crew()
    if dist.get_rank() == 1:
        return save({"x": torch.ones(2)}, f"{folder}/whole")
    x = shardwise.DTensor.from_local(torch.ones(3), mesh, [Partial(), Partial()])
    return x.full_tensor()
