"""torch's functions for state dicts, and `load_state_dict`, on sharded models and optimizers."""

import copy

import pytest
import torch
import torch.distributed as dist
from fully_sharded import IDS, PLAN, Model, loss_of, mesh_of, sharded
from parity import whole
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import shardwise
from shardwise import DTensor
from shardwise.errors import ArgumentError
from shardwise.parallel import parallelize_module

FULL = {"full_state_dict": True}
CPU = {**FULL, "cpu_offload": True}
BROADCAST = {**FULL, "broadcast_from_rank0": True}


def is_first():
    return dist.get_rank() == 0


def made(fully=True, device="cpu"):
    with torch.device(device):
        model = Model()
    mesh = mesh_of(dp=2, tp=2)
    model = parallelize_module(model, mesh, PLAN)
    return sharded(model, mesh["dp"]) if fully else model


def values(seed):
    made = {name: x + 0.01 * seed for name, x in Model().state_dict().items()}
    return made | {"head.weight": made["embed.weight"]}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(whole(found[name]), x), name


def models_of_all_kinds():
    for fully in (True, False):
        model = made(fully)
        layouts = {name: getattr(x, "placements", None) for name, x in model.state_dict().items()}
        model.load_state_dict(values(1))
        assert_same(model.state_dict(), values(1))
        found = get_model_state_dict(model, options=StateDictOptions(**FULL))
        assert not any(isinstance(x, DTensor) for x in found.values())
        assert_same(found, values(1))
        found = get_model_state_dict(model, options=StateDictOptions(**CPU))
        assert_same(found, values(1) if is_first() else {})
        set_model_state_dict(model, values(2), options=StateDictOptions(**FULL))
        assert_same(model.state_dict(), values(2))
        given = values(3) if is_first() else {}
        set_model_state_dict(model, given, options=StateDictOptions(**BROADCAST))
        assert_same(model.state_dict(), values(3))
        after = {name: getattr(x, "placements", None) for name, x in model.state_dict().items()}
        assert after == layouts


def models_without_values():
    """Values come from rank 0; torch asks a process group for its device, in processes alone."""
    model = made(device="meta")
    given = values(1) if is_first() else {}
    set_model_state_dict(model, given, options=StateDictOptions(**BROADCAST))
    assert_same(model.state_dict(), values(1))
    alone = Model()
    alone.load_state_dict(values(1))
    torch.testing.assert_close(whole(model(IDS[0])), alone(IDS[0]).detach(), rtol=1e-5, atol=1e-5)


def shards_to_broadcast():
    """torch puts shards into the dict that it is given; rank 0 alone would know that they are."""
    model, given = made(), values(1) if is_first() else {}
    set_model_state_dict(model, given, options=StateDictOptions(**BROADCAST))
    with pytest.raises(ArgumentError, match="of rank 0 is a DTensor"):
        set_model_state_dict(model, given, options=StateDictOptions(**BROADCAST))
    assert_same(model.state_dict(), values(1))


def trained(model, optimizer):
    loss_of(model, IDS[0]).backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizers():
    alone, model = Model(), made()
    one, many = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (alone, model))
    for each in ((alone, one), (model, many)):
        trained(*each)
    expected = get_optimizer_state_dict(alone, one)["state"]
    state = get_optimizer_state_dict(model, many, options=StateDictOptions(**FULL))
    torch.testing.assert_close(state["state"], expected)
    for options in (FULL, BROADCAST):
        other = torch.optim.AdamW(model.parameters(), lr=1e-3)
        given = {} if options is BROADCAST and not is_first() else copy.deepcopy(state)
        set_optimizer_state_dict(model, other, given, options=StateDictOptions(**options))
        assert other.param_groups[0]["lr"] == 1e-2
        for parameter in model.parameters():
            found, before = other.state[parameter]["exp_avg"], many.state[parameter]["exp_avg"]
            assert getattr(found, "placements", None) == getattr(before, "placements", None)
            assert torch.equal(whole(found), whole(before))
    trained(model, other)


pytestmark = pytest.mark.filterwarnings("ignore:`_get_pg_default_device`:UserWarning")
PROGRAMS = [models_of_all_kinds, optimizers]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_simulated(program):
    with shardwise.simulate(4):
        program()


@pytest.mark.processes
@pytest.mark.parametrize(
    "program",
    [*PROGRAMS, models_without_values, shards_to_broadcast],
    ids=lambda program: program.__name__,
)
def test_in_processes(processes, program):
    processes(program)


def test_a_wrong_shape_is_named():
    with shardwise.simulate(4):
        model, given = made(), values(1)
        given["layers.0.up.weight"] = torch.zeros(3, 8)
        for load in (
            model.load_state_dict,
            lambda state: set_model_state_dict(model, state, options=StateDictOptions(**FULL)),
        ):
            with pytest.raises(RuntimeError, match=r"size mismatch for layers\.0\.up\.weight"):
                load(dict(given))
