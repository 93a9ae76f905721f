"""Each collective says which op, module and line it comes from."""

import inspect
import json

import pytest
import torch
import torch.distributed as dist
from by_hand import lay
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import LocalTensor, Partial, Replicate, Shard
from shardwise.comm.watch import watch
from shardwise.debug import CommDebugMode

c10d = torch.ops.c10d_functional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.net2 = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.net2(self.net1(x).relu()).redistribute(placements=[Replicate()])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x * self.scale


def shard(name, module, mesh):
    """Columns then rows; the rest is replicated."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        placement = Shard(0) if name.endswith("net1") else Replicate()
        placement = Shard(1) if name.endswith("net2") else placement
        placed = shardwise.distribute_tensor(parameter.data, mesh, [placement])
        module.register_parameter(key, nn.Parameter(placed))


@pytest.fixture
def model(mesh):
    return shardwise.distribute_module(Model(), mesh, shard)


@pytest.fixture
def batch(mesh):
    return lay(torch.randn(4, 8), mesh, [Shard(0)])


@pytest.fixture
def quiet():
    """Nothing is left switched on."""
    yield
    assert (watch.on, watch.watchers, watch.notes, watch.cause) == (False, 0, None, None)


def here(offset=0):
    frame = inspect.currentframe().f_back
    return f"test_provenance.py:{frame.f_lineno + offset}"


def test_an_op_that_moves_its_input_is_an_implicit_cause(mesh):
    x = lay(torch.ones(64, 4), mesh, [Shard(0)])
    w = lay(torch.ones(4, 4), mesh, [Shard(0)])
    with CommDebugMode() as comm:
        x @ w
        line = here(-1)
    (event,) = comm.events
    assert (event.op, event.implicit, event.phase) == ("aten.mm.default", True, "forward")
    assert (event.module, event.line) == ("", line)


def test_a_redistribution_that_is_written_down_is_explicit(mesh):
    x = lay(torch.ones(8), mesh, [Shard(0)])
    with CommDebugMode() as comm:
        x.redistribute(placements=[Replicate()])
        x.full_tensor()
    assert [(event.op, event.implicit) for event in comm.events] == [("redistribute", False)] * 2


def test_a_users_own_collective_has_no_cause(square):
    mine = LocalTensor.per_rank(lambda rank: torch.ones(3))
    lay(torch.ones(4), square, [Shard(0), Replicate()])
    with CommDebugMode() as comm:
        functional.all_reduce(mine, "sum", (square, 1))
        line = here(-1)
    (event,) = comm.events
    assert (event.op, event.implicit, event.axis) == (None, False, "cols")
    assert event.line == line


def test_a_simulated_group_is_heard(square):
    mine = LocalTensor.per_rank(lambda rank: torch.ones(3))
    lay(torch.ones(4), square, [Shard(0), Replicate()])
    with CommDebugMode() as outer, CommDebugMode() as comm:
        dist.all_reduce(mine, group=square.get_group("cols"))
        line = here(-1)
    (event,) = comm.events
    assert (event.kind, event.axis, event.num_bytes) == ("allreduce_", "cols", 12)
    assert (event.op, event.implicit, event.line) == (None, False, line)
    assert comm.get_comm_counts() == {torch.ops.c10d.allreduce_: 1}
    assert outer.events == comm.events
    dist.all_reduce(mine)
    assert comm.get_total_counts() == 1


def test_an_op_that_leads_to_a_simulated_group_counts_once(mesh):
    with CommDebugMode() as comm:
        functional.all_reduce(torch.ones(3), "sum", mesh) + 1
    assert comm.get_comm_counts() == {c10d.all_reduce: 1}


def test_forward_and_backward_are_told_apart(mesh):
    x = lay(torch.ones(8, 8), mesh, [Shard(0)]).requires_grad_()
    with CommDebugMode() as comm:
        x.redistribute(placements=[Shard(1)]).square().sum().backward()
        x.full_tensor()
    assert [(event.kind, event.phase) for event in comm.events] == [
        ("all_to_all_single", "forward"),
        ("all_to_all_single", "backward"),
        ("all_gather_into_tensor", "forward"),
    ]


def test_modules_in_both_phases(model, batch):
    with CommDebugMode() as comm:
        loss = model(batch).square().sum()
        loss.backward()
    forward = {event.module for event in comm.events if event.phase == "forward"}
    assert forward == {"layers.0.net1", "layers.0", "layers.1.net1", "layers.1"}
    after = [event for event in comm.events if event.phase == "backward"]
    # Backward has the line that forward ran.
    assert {event.line for event in after} <= {event.line for event in comm.events[:4]}
    assert {e.module for e in after if e.op == "linear_weight_grad"} == {
        "layers.0.net1",
        "layers.1.net1",
    }
    # The second block's is the first to run backward.
    moved = [event.module for event in after if event.op == "redistribute"]
    assert moved.index("layers.1") < moved.index("layers.0")


def test_counts_of_a_module_include_those_inside_it(model, batch):
    with CommDebugMode() as comm:
        model(batch).sum().backward()
    counts = comm.comm_module_counts
    for phase in ("forward", "backward"):
        assert sum(counts["Global"][phase].values()) == sum(e.phase == phase for e in comm.events)
    gather, reduce = c10d.all_gather_into_tensor, c10d.all_reduce
    assert counts["Model.layers.0.net1"]["forward"] == {gather: 1}
    assert counts["Model.layers.0"]["forward"] == {gather: 1, reduce: 1}
    assert counts["Model"]["forward"] == {gather: 2, reduce: 2}
    assert "Model.layers.0.net2" not in counts


def test_what_the_outermost_module_sends_itself_is_not_what_runs_outside(model, batch):
    class Summed(nn.Module):
        def forward(self, x):
            return x.sum().redistribute(placements=[Replicate()])

    with CommDebugMode() as comm:
        Summed()(batch)
        batch.full_tensor()
    assert comm.comm_module_counts == {
        "Global": {
            "forward": {c10d.all_reduce: 1, c10d.all_gather_into_tensor: 1},
            "backward": {},
        },
        "Summed": {"forward": {c10d.all_reduce: 1}, "backward": {}},
    }


def test_where_nothing_was_sent_global_is_there():
    with CommDebugMode() as comm:
        pass
    assert comm.comm_module_counts == {"Global": {"forward": {}, "backward": {}}}
    assert comm.comm_module_counts["Global"]["forward"][c10d.all_reduce] == 0


def test_the_table_of_modules_is_that_of_torch(model, batch):
    with CommDebugMode() as comm:
        model(batch)
    table = comm.advanced_module_tracker
    assert table.module_helper_dict["Model.layers.0.net1"]["depth"] == 4
    assert "Linear" in table.module_helper_dict["Model.layers.0.net1"]["module_type"]
    assert table.module_helper_dict["Model.layers.0.net2"]["parameters"] == {
        "weight": "(Shard(1),)"
    }
    assert table.module_parents_dict["Model.layers"] == {"Global", "Model", "Model.layers"}
    assert table.parent_dict["Global"] == ["Model"]
    assert table.sharding_dict == comm.get_sharding_info()


def test_backward_that_a_module_starts_is_not_its_own(model, batch):
    class Trainer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            self.model(x).sum().backward()

    with CommDebugMode() as comm:
        Trainer()(batch)
    assert {e.module for e in comm.events if e.op == "linear_weight_grad"} == {
        "model.layers.0.net1",
        "model.layers.1.net1",
    }


def test_what_is_computed_again_in_backward_belongs_to_its_module(model, batch):
    with CommDebugMode() as comm:
        y = checkpoint(model.layers[0], batch, use_reentrant=False)
        model.layers[1](y).sum().backward()
    again = [e for e in comm.events if e.phase == "backward" and e.op == "aten.linear.default"]
    assert [event.module for event in again] == ["net1"]


def test_a_second_model_goes_by_its_class(mesh, model, batch):
    other = shardwise.distribute_module(nn.Sequential(Block()), mesh, shard)
    with CommDebugMode() as comm:
        other(model(batch))
    assert comm.events[-1].module.startswith("Sequential.0")
    assert "Sequential.0.net1.weight" in comm.get_sharding_info()


def test_a_model_that_holds_an_earlier_one_takes_it_over(model, batch):
    with CommDebugMode() as comm:
        model.layers[0](batch)
        model(batch)
    assert {event.module for event in comm.events} == {
        "net1",
        "",
        "layers.0.net1",
        "layers.0",
        "layers.1.net1",
        "layers.1",
    }
    assert "Model.layers.0.net1.weight" in comm.get_sharding_info()


@pytest.mark.parametrize("grad", [True, False])
def test_parameters_of_the_modules_that_ran(model, batch, grad):
    model.register_buffer("seen", torch.zeros(1))
    model.plain = nn.Linear(2, 2)
    with CommDebugMode() as comm, torch.set_grad_enabled(grad):
        model(batch)
    found = comm.get_parameter_info()
    assert found["Model"] == {"scale": model.scale}
    assert found["Model.layers.1.net1"]["bias"] is model.layers[1].net1.bias
    sharding = comm.get_sharding_info()
    assert sharding["Model.scale"] == (Replicate(),)
    assert sharding["Model.layers.0.net2.weight"] == (Shard(1),)
    assert "Model.plain.weight" in [f"{m}.{n}" for m, own in found.items() for n in own]
    assert not any(name.startswith("Model.plain") for name in sharding)


def test_a_later_use_forgets_earlier_modules(model, batch, mesh):
    comm = CommDebugMode()
    with comm:
        model(batch)
    with comm:
        batch.full_tensor()
    assert comm.get_parameter_info() == {}
    assert comm.comm_module_counts.keys() == {"Global"}


# -- switches --------------------------------------------------------------------------------


@pytest.mark.usefixtures("quiet")
def test_an_exception_leaves_nothing_switched_on(mesh):
    outer = CommDebugMode()

    def fails():
        with outer, CommDebugMode():
            assert (watch.on, watch.watchers) == (True, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not watch.on
    with outer:
        assert watch.watchers == 1


@pytest.mark.usefixtures("quiet")
def test_one_mode_is_not_entered_twice(mesh):
    comm = CommDebugMode()
    with comm:
        lay(torch.ones(4), mesh, [Shard(0)]).full_tensor()
        with pytest.raises(shardwise.ShardwiseError, match="active already"), comm:
            pass
        assert watch.watchers == 1
    assert comm.get_total_counts() == 1


# -- reports ---------------------------------------------------------------------------------


def test_the_tracing_table_has_a_line_per_module(model, batch):
    with CommDebugMode() as comm:
        model(batch).sum().backward()
    lines = comm.generate_comm_debug_tracing_table(noise_level=0).splitlines()
    assert [line.split("  forward")[0].split("  backward")[0].rstrip() for line in lines] == [
        "Global",
        "  layers",
        "    0",
        "      net1",
        "      net2",
        "    1",
        "      net1",
        "      net2",
    ]
    assert "forward: 1 all_gather_into_tensor (32 bytes)" in lines[3]
    assert f"{comm.get_total_bytes():,}" == f"{sum(e.num_bytes for e in comm.events):,}"
    noisy = comm.generate_comm_debug_tracing_table()
    assert noisy.count(" * ") == comm.get_total_counts()
    assert "for aten.linear.default (implicit) at test_provenance.py:" in noisy


def test_json(model, batch, tmp_path):
    with CommDebugMode() as comm:
        model(batch)
    read = json.loads(comm.to_json())
    assert read["totals"]["collectives"] == len(read["events"]) == comm.get_total_counts()
    assert read["totals"]["bytes"] == comm.get_total_bytes()
    assert read["totals"]["kinds"] == {"all_gather_into_tensor": 2, "all_reduce": 2}
    assert read["modules"]["Model.layers"]["forward"]["all_reduce"] == 2
    assert read["sharding"]["Model.layers.0.net1.weight"] == "[S(0)]"
    assert read["events"][0]["module"] == "layers.0.net1"
    comm.generate_json_dump(str(tmp_path / "log.json"))
    assert json.loads((tmp_path / "log.json").read_text()) == read
    comm.log_comm_debug_tracing_table_to_file(str(tmp_path / "log.txt"))
    assert "Global" in (tmp_path / "log.txt").read_text()


def test_the_table_for_terminals(mesh, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    x = lay(torch.ones(8), mesh, [Partial()])
    with CommDebugMode() as comm:
        for _ in range(3):
            x.full_tensor()
    comm.log()
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    row = next(number for number, line in enumerate(lines) if "all_reduce" in line)
    assert "redistribute" in lines[row]
    assert "test_provenance.py" in lines[row + 1]
    assert lines[row].split()[-2:] == ["3", "96"]


def test_nothing_communicated_is_reported_as_such(mesh, capsys):
    with CommDebugMode() as comm:
        pass
    comm.log()
    assert comm.generate_comm_debug_tracing_table() == "Global"
    assert json.loads(comm.to_json())["totals"]["bytes"] == 0


def test_tensors_that_are_not_distributed_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CommDebugMode() as comm:
        loss = nn.functional.cross_entropy(model(torch.randn(2, 4)), torch.tensor([0, 2]))
        loss.backward()
        optimizer.step()
    assert comm.get_total_counts() == 0
    assert comm.get_parameter_info()["Sequential.0"]["weight"] is model[0].weight
    assert comm.get_sharding_info() == {}
