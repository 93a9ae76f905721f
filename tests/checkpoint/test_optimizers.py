"""The state of an optimizer goes by the names of its parameters, whatever their order."""

import json
import warnings

import pytest
import torch
from torch import nn

import shardwise
from shardwise import CheckpointError, CheckpointWarning, Shard
from shardwise.checkpoint import inspect, load, save
from shardwise.checkpoint.index import INDEX_NAME, _checksum
from shardwise.embedding import SGD, EmbeddingBagCollection, RowWiseAdagrad, Table
from shardwise.shard import ShardedOptimizer


class Two(nn.Module):
    """Two layers of one shape, registered in either order."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(3, 3, bias=False))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def trained(model, optimizer):
    """Each parameter has a gradient of its own, by name."""
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, float(len(name)))
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 1}


def moments(model, optimizer):
    return {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}


def same_moments(new, old):
    return new.keys() == old.keys() and all(torch.equal(new[name], old[name]) for name in old)


@pytest.fixture
def saved(tmp_path):
    """A path, and the moments of a model of layers `a` and `bb`."""
    model = Two("a", "bb")
    state = trained(model, adam(model.parameters()))
    save(state, tmp_path / "saved")
    return tmp_path / "saved", moments(model, state["optimizer"])


def test_another_order_of_parameters(saved):
    path, old = saved
    model = Two("bb", "a")
    optimizer = adam(model.parameters())
    # The optimizer may come first: names are known when all of the state is.
    load({"optimizer": optimizer, "model": model}, path)
    assert same_moments(moments(model, optimizer), old)
    names = [t.name for t in inspect(path).tensors]
    assert "optimizer.state.model.bb.weight.exp_avg" in names


def test_groups_in_another_order_keep_their_settings(tmp_path):
    def make(*names):
        model = Two("a", "bb")
        rates = {"a": 0.1, "bb": 0.5}
        groups = [{"params": getattr(model, n).parameters(), "lr": rates[n]} for n in names]
        return model, torch.optim.Adam(groups)

    model, optimizer = make("a", "bb")
    save(trained(model, optimizer), tmp_path / "saved")
    new, other = make("bb", "a")
    for group in other.param_groups:
        group["lr"] = 7.0
    load({"model": new, "optimizer": other}, tmp_path / "saved")
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.1]
    assert same_moments(moments(new, other), moments(model, optimizer))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: [{"params": m.a.parameters()}, {"params": m.bb.parameters()}], "as fewer"),
        (lambda m: m.a.parameters(), "1 parameters that it does not have here, such as model.bb"),
        (lambda m: [*m.parameters(), nn.Parameter(torch.ones(2))], "was saved without 2"),
    ],
)
def test_an_optimizer_that_does_not_fit_leaves_everything(saved, make, words):
    path, _ = saved
    model = Two("a", "bb")
    before = model.a.weight.detach().clone()
    optimizer = adam(make(model))
    with pytest.raises(CheckpointError, match=words):
        load({"model": model, "optimizer": optimizer}, path)
    assert torch.equal(model.a.weight, before)
    assert not optimizer.state


def test_without_strictness_the_rest_is_loaded(saved):
    path, old = saved
    model = Two("a", "bb")
    optimizer = adam(model.bb.parameters())
    load({"model": model, "optimizer": optimizer}, path, strict=False)
    assert torch.equal(optimizer.state[model.bb.weight]["exp_avg"], old["bb.weight"])


def test_an_optimizer_with_its_own_names(tmp_path):
    """Of torch's named parameters, and of a ShardedOptimizer: no module is needed."""
    model = Two("a", "bb")
    optimizer = adam(model.named_parameters())
    trained(model, optimizer)
    save({"o": optimizer}, tmp_path / "saved")
    new = Two("bb", "a")
    for other in (
        adam(new.named_parameters()),
        ShardedOptimizer(dict(new.named_parameters()), torch.optim.Adam),
    ):
        load({"o": other}, tmp_path / "saved")
        assert same_moments(moments(new, other), moments(model, optimizer))
    if "param_names" in other.param_groups[0]:
        assert other.param_groups[0]["param_names"] == ["bb.weight", "a.weight"]


def test_names_that_are_known_and_others_are_refused(saved):
    path, _ = saved
    with pytest.raises(CheckpointError, match="Load it together with the modules"):
        load({"optimizer": adam(Two("a", "bb").named_parameters())}, path)


def test_without_any_names_the_order_counts_and_is_warned_of(saved):
    path, old = saved
    model = Two("a", "bb")
    optimizer = adam(model.parameters())
    with pytest.warns(CheckpointWarning, match="by the order of its parameters"):
        load({"optimizer": optimizer}, path)
    assert same_moments(moments(model, optimizer), old)


def of_format_1(folder, model, optimizer):
    """As the first format has it: positions, and lists of groups."""
    save({"model": model, "optimizer": optimizer.state_dict()}, folder)
    content = json.loads((folder / INDEX_NAME).read_bytes())
    content["shardwise"]["format"] = "shardwise checkpoint 1"
    del content["shardwise"]["checksum"]
    content["shardwise"]["checksum"] = f"{_checksum(content):08x}"
    (folder / INDEX_NAME).write_text(json.dumps(content))


def test_a_file_of_the_first_format(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    optimizer = adam(model.parameters())
    trained(model, optimizer)
    of_format_1(tmp_path / "old", model, optimizer)
    new = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    other = adam(new.parameters())
    with pytest.warns(CheckpointWarning, match="by the order of its parameters"):
        load({"model": new, "optimizer": other}, tmp_path / "old")
    assert same_moments(moments(new, other), moments(model, optimizer))

    # An order that shapes contradict, and other groups, are refused before anything is loaded.
    start = [p.detach().clone() for p in new.parameters()]
    with torch.no_grad():
        new[0].weight.zero_()
    others = [p for layer in reversed(new) for p in layer.parameters()]
    with pytest.raises(CheckpointError, match="in another order than when they were saved"):
        load({"model": new, "optimizer": adam(others)}, tmp_path / "old")
    with pytest.raises(CheckpointError, match=r"groups of \[3\] parameters here, and of \[4\]"):
        load({"model": new, "optimizer": adam(others[:3])}, tmp_path / "old")
    assert not new[0].weight.any()
    assert torch.equal(new[1].weight, start[2])


def test_one_parameter_has_no_order(tmp_path):
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = adam([weight])
    optimizer.step()
    save({"o": optimizer}, tmp_path / "saved")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load({"o": optimizer}, tmp_path / "saved")
    with pytest.raises(CheckpointError, match="exp_avg has shape"):
        load({"o": adam([nn.Parameter(torch.ones(3))])}, tmp_path / "saved")


def test_a_setting_that_was_not_saved_stays(saved):
    path, _ = saved
    model = Two("a", "bb")
    optimizer = adam(model.parameters())
    optimizer.param_groups[0]["mark"] = "mine"
    load({"model": model, "optimizer": optimizer}, path)
    assert optimizer.param_groups[0]["mark"] == "mine"


def test_tied_and_untied_parameters(tmp_path):
    model = Two("a", "bb")
    model.bb.weight = model.a.weight
    optimizer = adam(model.parameters())
    save(trained(model, optimizer), tmp_path / "saved")
    new = Two("a", "bb")
    other = adam(new.parameters())
    load({"model": new, "optimizer": other}, tmp_path / "saved")
    for parameter in new.parameters():
        found = other.state[parameter]["exp_avg"]
        assert torch.equal(found, optimizer.state[model.a.weight]["exp_avg"])


def test_moments_of_sharded_parameters_in_another_order_and_layout(tmp_path):
    def make(num_ranks, dim, *names):
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,))
        model = Two(*names)
        for layer in model.children():
            whole = shardwise.distribute_tensor(layer.weight.data, mesh, [Shard(dim)])
            layer.weight = nn.Parameter(whole)
        return model, adam(model.parameters())

    with shardwise.simulate(3):
        model, optimizer = make(3, 0, "a", "bb")
        save(trained(model, optimizer), tmp_path / "saved")
        old = {n: m.full_tensor().agreed() for n, m in moments(model, optimizer).items()}
    with shardwise.simulate(2):
        model, optimizer = make(2, 1, "bb", "a")
        load({"model": model, "optimizer": optimizer}, tmp_path / "saved")
        found = moments(model, optimizer)
        assert found["a.weight"].placements == (Shard(1),)
        assert same_moments({n: m.full_tensor().agreed() for n, m in found.items()}, old)


def test_saving_warns_of_a_fused_optimizer_that_is_left_out(tmp_path):
    def make(optimizer):
        model = nn.ModuleDict({"dense": nn.Linear(2, 2)})
        model["tables"] = EmbeddingBagCollection([Table("a", 6, 2)], optimizer=optimizer)
        model["tables"].shard(shardwise.init_device_mesh("cpu", (2,)), "row_wise")
        return model, torch.optim.SGD(model["dense"].parameters(), lr=0.1)

    with shardwise.simulate(2):
        model, dense = make(RowWiseAdagrad(lr=0.1))
        state = {"model": model, "dense": dense}
        with pytest.warns(CheckpointWarning, match=r"Save model\.tables\.optimizer too"):
            save(state, tmp_path / "left_out")
        save(state | {"tables": model["tables"].optimizer}, tmp_path / "object")
        save(state | {"tables": model["tables"].optimizer.state_dict()}, tmp_path / "state")
        save({"model": model}, tmp_path / "weights")
        model, dense = make(SGD(lr=0.1))
        save({"model": model, "dense": dense}, tmp_path / "no_state")
