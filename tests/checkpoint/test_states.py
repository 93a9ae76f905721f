"""Modules, optimizers and plain values: what is saved comes back, in another world too."""

import errno
import math
import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise
import shardwise.checkpoint.saving
from shardwise import CheckpointError, Replicate, Shard
from shardwise.checkpoint import Checkpoints, inspect, load, save, save_async


class Model(nn.Module):
    """A table, a layer that is tied to it, and a buffer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.ones(4))

    def forward(self, ids):
        return self.head(torch.tanh(self.inner(self.table(ids))) * self.scale)


def shard(model, mesh, table, weight):
    """Distribute the table, and with it the head, and the layer."""

    def partition(name, module, mesh):
        if name == "table":
            tied = shardwise.distribute_tensor(module.weight.data, mesh, [table])
            module.weight = nn.Parameter(tied)
        elif name == "inner":
            new = shardwise.distribute_tensor(module.weight.data, mesh, [weight])
            module.weight = nn.Parameter(new)

    shardwise.distribute_module(model.table, mesh, lambda n, m, mesh: partition("table", m, mesh))
    shardwise.distribute_module(model.inner, mesh, lambda n, m, mesh: partition("inner", m, mesh))
    model.scale = shardwise.distribute_tensor(model.scale, mesh, [Replicate()])
    model.head.weight = model.table.weight
    return model


def train(model, optimizer, steps, ids_of):
    losses = []
    for step in steps:
        ids = ids_of(step)
        loss = F.cross_entropy(model(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        shardwise.reduce_gradients(model.parameters())
        optimizer.step()
        losses.append(loss.detach())
    return losses


def ids_on(mesh):
    def ids_of(step):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(10, (8,), generator=generator)
        return shardwise.distribute_tensor(ids, mesh, [Replicate()])

    return ids_of


def whole(state):
    return {n: t.full_tensor().agreed() for n, t in state.items()}


OPTIMIZERS = {
    "adam": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_training_goes_on_bit_for_bit(tmp_path, kind):
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        model = shard(Model(), mesh, Shard(0), Shard(0))
        optimizer = OPTIMIZERS[kind](model.parameters())
        train(model, optimizer, range(3), ids_on(mesh))
        save({"model": model, "optimizer": optimizer, "step": 3}, tmp_path / "saved")
        train(model, optimizer, range(3, 6), ids_on(mesh))
        straight = whole(model.state_dict())

        torch.manual_seed(99)
        new = shard(Model(), mesh, Shard(0), Shard(0))
        optimizer = OPTIMIZERS[kind](new.parameters())
        state = load({"model": new, "optimizer": optimizer, "step": 0}, tmp_path / "saved")
        assert state["step"] == 3
        assert state["model"] is new
        train(new, optimizer, range(3, 6), ids_on(mesh))
        for name, value in whole(new.state_dict()).items():
            assert torch.equal(value, straight[name]), name


def test_training_goes_on_in_another_world_and_layout(tmp_path):
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        model = shard(Model(), mesh, Shard(0, (9, 0, 1, 0)), Shard(0))
        optimizer = OPTIMIZERS["adam"](model.parameters())
        train(model, optimizer, range(3), ids_on(mesh))
        save({"model": model, "optimizer": optimizer}, tmp_path / "saved")
        train(model, optimizer, range(3, 6), ids_on(mesh))
        straight = whole(model.state_dict())
    with shardwise.simulate(3):
        mesh = shardwise.init_device_mesh("cpu", (3,))
        new = shard(Model(), mesh, Shard(1), Replicate())
        optimizer = OPTIMIZERS["adam"](new.parameters())
        load({"model": new, "optimizer": optimizer}, tmp_path / "saved")
        moment = optimizer.state[new.table.weight]["exp_avg"]
        assert moment.placements == new.table.weight.placements
        train(new, optimizer, range(3, 6), ids_on(mesh))
        torch.testing.assert_close(whole(new.state_dict()), straight)


def test_tied_weights_are_saved_once(tmp_path):
    model = Model()
    save(model, tmp_path / "saved")
    report = inspect(tmp_path / "saved")
    assert report.ties == {"head.weight": "table.weight"}
    assert "head.weight" not in [t.name for t in report.tensors]
    untied = Model()
    untied.head.weight = nn.Parameter(torch.zeros(10, 4))
    load(untied, tmp_path / "saved")
    assert torch.equal(untied.head.weight, model.table.weight)
    assert torch.equal(untied.table.weight, model.table.weight)


def test_values_of_every_kind(tmp_path):
    state = {
        "none": None, "yes": True, "int": 2**70, "float": 0.1, "nan": math.nan, "inf": -math.inf,
        "text": "ä\n", "bytes": b"\0\xff", "tuple": (1, [2, (3,)]), "dtype": torch.bfloat16,
        "table": {1: "a", "b": {}}, "empty": [],
    }  # fmt: skip
    save(state, tmp_path / "saved")
    found = load(dict.fromkeys(state), tmp_path / "saved")
    assert math.isnan(found.pop("nan"))
    state.pop("nan")
    assert found == state
    assert type(found["tuple"]) is tuple


class Counting(nn.Module):
    """A module with extra state, which is no tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class Pair(NamedTuple):
    first: Any
    second: Any


def test_named_tuples_of_tensors_and_of_numbers(tmp_path):
    state = {"moments": Pair(torch.ones(2), torch.ones(3)), "range": Pair(1, 2.5)}
    save(state, tmp_path / "saved")
    blank = {"moments": Pair(torch.zeros(2), torch.zeros(3)), "range": Pair(0, 0.0)}
    found = load(blank, tmp_path / "saved")
    assert found["range"] == Pair(1, 2.5)
    assert type(found["range"]) is Pair
    assert type(found["moments"]) is Pair
    assert found["moments"].second is blank["moments"].second
    assert found["moments"].second.tolist() == [1.0, 1.0, 1.0]


def test_extra_state_of_a_module(tmp_path):
    module = Counting()
    module.count = 5
    module.weight.data += 1
    save({"m": module}, tmp_path / "saved")
    new = Counting()
    load({"m": new}, tmp_path / "saved")
    assert new.count == 5
    assert new.weight.tolist() == [1, 1]


def test_schedulers_and_lists_of_modules(tmp_path):
    def make():
        layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
        optimizer = torch.optim.SGD(layers[0].parameters(), lr=1.0)
        return {"layers": layers, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}

    state = make()
    state["scheduler"].optimizer.step()
    state["scheduler"].step()
    save(state, tmp_path / "saved")
    new = load(make(), tmp_path / "saved")
    assert new["scheduler"].last_epoch == 1
    for mine, other in zip(new["layers"], state["layers"], strict=True):
        assert torch.equal(mine.weight, other.weight)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (lambda: {"x": torch.zeros(3)}, r"x has shape \(4,\), asked for \(3,\)"),
        (lambda: {"x": torch.zeros(4, dtype=torch.int64)}, "x is torch.float32, asked for"),
        (lambda: {"y": torch.zeros(4)}, "y was not saved"),
        (lambda: {"x": torch.zeros(1).expand(4)}, "x cannot be written to: its elements share"),
        (lambda: {"step": torch.zeros(4)}, "step is a tensor here"),
        (lambda: {"x": {"a": 1}}, "x is a table here"),
        (lambda: {"x": nn.Linear(1, 1)}, "x is a module here"),
        (lambda: {"model": nn.Linear(2, 2)}, "model.bias was not saved"),
        (lambda: {"model": nn.ParameterDict()}, "model.weight was saved and is not in the module"),
    ],
)
def test_a_state_that_does_not_fit(tmp_path, wanted, message):
    save({"x": torch.ones(4), "step": 1, "model": nn.Linear(2, 2, bias=False)}, tmp_path / "saved")
    state = {"model": nn.Linear(2, 2, bias=False), **wanted()}
    before = [p.clone() for p in state["model"].parameters()]
    with pytest.raises(CheckpointError, match=message):
        load(state, tmp_path / "saved")
    for value, old in zip(state["model"].parameters(), before, strict=True):
        assert torch.equal(value, old), "something was loaded"


class Picky:
    """An object that may refuse what it is given, after it has taken some of it."""

    def __init__(self, refuses=None):
        self.table = torch.zeros(3)
        self.mode = "old"
        self.refuses = refuses

    def state_dict(self):
        return {"mode": self.mode, "table": self.table}

    def load_state_dict(self, state):
        self.mode = state["mode"]
        self.table.copy_(state["table"])
        if self.refuses:
            raise self.refuses


class PickyModule(Counting):
    def set_extra_state(self, state):
        super().set_extra_state(state)
        if state["count"] == 5:
            raise KeyError("count")


@pytest.mark.parametrize(
    ("key", "refusing", "words"),
    [
        ("last", lambda: Picky(KeyError("mode")), "last refuses what was saved: KeyError: 'mode'"),
        ("module", PickyModule, "module refuses what was saved: KeyError: 'count'"),
        ("optimizer", lambda: hooked_optimizer(), "optimizer refuses .*: ZeroDivisionError"),
    ],
)
def test_an_object_that_refuses_leaves_everything_as_it_was(mesh, tmp_path, key, refusing, words):
    def make():
        layer = nn.Linear(2, 2)
        place = shardwise.distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
        return {
            "layer": layer, "optimizer": torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.5),
            "x": place, "first": Picky(), "last": Picky(), "module": Counting(), "plain": [0],
        }  # fmt: skip

    saved = make()
    for parameter in saved["layer"].parameters():
        parameter.grad = torch.ones_like(parameter)
    saved["optimizer"].step()
    saved["first"].table += 7
    saved["first"].mode = saved["last"].mode = "new"
    saved["module"].count = 5
    saved["x"].add_(1)
    save(saved, tmp_path / "saved")

    state = make()
    state[key] = refusing()
    if key == "optimizer":
        state["layer"] = state[key].layer
    before = state["layer"].weight.detach().clone()
    with pytest.raises(CheckpointError, match=words):
        load(state, tmp_path / "saved")
    assert torch.equal(state["layer"].weight, before)
    assert not state["x"].to_local().agreed().any()
    assert not state["module"].weight.any()
    assert state["module"].count == 0
    assert not state["optimizer"].state
    for name in ("first", "last"):
        assert (state[name].mode, state[name].table.tolist()) == ("old", [0, 0, 0]), name


def hooked_optimizer():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.5)
    optimizer.layer = layer
    # Its own undoing passes the hook too: only the saved momentum is refused.
    optimizer.register_load_state_dict_pre_hook(lambda _, state: 1 / 0 if state["state"] else state)
    return optimizer


def test_precision_may_change_and_strictness_may_go(tmp_path):
    save({"x": torch.tensor([0.1]), "old": 1}, tmp_path / "saved")
    half = torch.zeros(1, dtype=torch.bfloat16)
    found = load({"x": half, "new": 7}, tmp_path / "saved", strict=False)
    assert half.item() == torch.tensor(0.1, dtype=torch.bfloat16).item()
    assert found["new"] == 7


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"f": lambda: 1}, "f is a function"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "called 'a.b'"),
        ({"x": torch.ones(1, device="meta")}, "x is not a dense tensor"),
        ({"x": torch.ones(1, dtype=torch.complex128)}, "x is torch.complex128"),
        ({(1, 2): 3}, "use text"),
    ],
)
def test_what_cannot_be_saved_leaves_nothing(tmp_path, state, message):
    with pytest.raises(CheckpointError, match=message):
        save(state, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_partial_is_saved_as_its_sum_and_not_loaded_into(mesh, tmp_path):
    ones = shardwise.DTensor.from_local(torch.ones(2), mesh, [shardwise.Partial()])
    save({"x": ones}, tmp_path / "saved")
    plain = torch.zeros(2)
    load({"x": plain}, tmp_path / "saved")
    assert plain.tolist() == [4, 4]
    with pytest.raises(CheckpointError, match=r"x is \[P\(sum\)\]"):
        load({"x": ones}, tmp_path / "saved")


def test_the_state_of_an_optimizer_that_took_a_partial_gradient(mesh, tmp_path):
    weight = nn.Parameter(shardwise.distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    weight.grad = shardwise.DTensor.from_local(torch.ones(2), mesh, [shardwise.Partial()])
    optimizer.step()
    save({"o": optimizer}, tmp_path / "saved")
    load({"o": optimizer}, tmp_path / "saved")
    buffer = optimizer.state[weight]["momentum_buffer"]
    assert buffer.full_tensor().agreed().tolist() == [4, 4]


def test_ranks_with_other_values_are_refused(mesh, tmp_path):
    uneven = shardwise.LocalTensor.per_rank(lambda rank: torch.full((2,), rank))
    with pytest.raises(CheckpointError, match="rank"):
        save({"x": uneven}, tmp_path / "saved")


def test_an_existing_checkpoint_is_not_overwritten(tmp_path):
    save({"x": 1}, tmp_path / "saved")
    with pytest.raises(CheckpointError, match="exists already"):
        save({"x": 2}, tmp_path / "saved")
    assert load({"x": 0}, tmp_path / "saved") == {"x": 1}


@pytest.mark.parametrize("copy_bytes", [0, 4000, 1 << 30])
def test_asynchronous_save_keeps_the_values_of_its_call(mesh, tmp_path, copy_bytes):
    whole = torch.randn(500, 3)
    x = shardwise.distribute_tensor(whole, mesh, [Shard(0)])
    y = torch.ones(1000)
    saving = save_async({"x": x, "y": y}, tmp_path / "saved", copy_bytes=copy_bytes)
    x.zero_()
    y.zero_()
    saving.result()
    assert saving.done
    load({"x": x, "y": y}, tmp_path / "saved")
    assert torch.equal(x.full_tensor().agreed(), whole)
    assert y.sum() == 1000


@pytest.mark.parametrize("copy_bytes", [0, 3000, 5000])
def test_an_asynchronous_save_copies_no_more_than_it_may(tmp_path, copy_bytes):
    """What is beyond that is in the file before the state may change."""
    state = {f"x{i}": torch.full((500,), float(i)) for i in range(4)}
    job = shardwise.checkpoint.saving._Job(state, tmp_path / "saved")
    job.start(copy_bytes)
    (file,) = job._files
    copies = [value for value in file._values if value.numel()]
    held = {value.data_ptr() for value in state.values()}
    assert sum(value.numel() * 4 for value in copies) <= copy_bytes
    assert len(copies) == copy_bytes // 2000
    assert not held & {value.data_ptr() for value in copies}
    job.finish()
    new = {name: torch.zeros(500) for name in state}
    load(new, tmp_path / "saved")
    assert all(torch.equal(new[name], value) for name, value in state.items())


def test_a_failed_asynchronous_save_is_not_forgotten(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(shardwise.checkpoint.saving, "write_synced", full)
    save_async({"x": torch.ones(2)}, tmp_path / "saved")
    with pytest.raises(CheckpointError, match="No space left on device"):
        save({"x": 1}, tmp_path / "next")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up(tmp_path):
    """The operating system refuses to let the file grow; nothing is left behind."""
    program = f"""
import resource, torch, shardwise
from shardwise.checkpoint import save
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save({{"x": torch.ones(100_000)}}, {str(tmp_path / "saved")!r})
except shardwise.CheckpointError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=90
    )
    assert ran.stdout.startswith("File too large"), ran.stdout + ran.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match="file"):
        save({"x": 1}, tmp_path / "file" / "saved")


def test_the_last_few_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run", keep=2)
    assert checkpoints.latest() is None
    for step in range(1, 5):
        checkpoints.save(step, {"step": step})
    assert checkpoints.steps() == [3, 4]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "step-00000003",
        "step-00000004",
    ]
    assert checkpoints.load({"step": 0}) == {"step": 4}
    assert checkpoints.load({"step": 0}, 3) == {"step": 3}
    checkpoints.save_async(5, {"step": 5}).result()
    assert checkpoints.latest() == 5
    # What a killed save leaves is no checkpoint, and the next save takes its place.
    (tmp_path / "run" / ".step-00000006.half").mkdir()
    assert checkpoints.latest() == 5
    checkpoints.save(6, {"step": 6})
    assert checkpoints.steps() == [5, 6]
