"""A sharded model beside one device: what agrees is said to agree, what differs to differ."""

import pytest
import report_models
import torch

from shardwise.errors import LayoutError
from shardwise.report import Case, Mesh, check_in_processes, check_simulated, check_training
from shardwise.testing.compare import differences


@pytest.fixture
def plans(tmp_path):
    for name in ("TENSOR_PLAN", "TABLE_PLAN"):
        (tmp_path / f"{name.lower()}.toml").write_text(getattr(report_models, name))
    return tmp_path


def case(plans, target, plan="tensor_plan"):
    return Case(f"report_models:{target}", str(plans / f"{plan}.toml") if plan else None)


@pytest.mark.parametrize("mesh", ["1", "2", "4", "dp=2,tp=2", "dp=4,tp=1"])
def test_tensor_parallel_model_agrees(plans, mesh):
    parity = check_simulated(case(plans, "mlp"), Mesh.parse(mesh))
    assert parity.agrees, parity.differing
    compared = [(each.what, each.name) for each in parity.differences]
    assert ("gradients", "up.weight") in compared
    assert ("parameters", "down.bias") in compared
    assert ("random", "the next draws") in compared


@pytest.mark.parametrize("ranks", ["1", "2", "4"])
def test_tables_agree(plans, ranks):
    parity = check_simulated(case(plans, "clicks", "table_plan"), Mesh.parse(ranks))
    assert parity.agrees, parity.differing


def test_dropout_agrees_without_a_data_axis(plans):
    assert check_simulated(case(plans, "dropping"), Mesh.parse("2")).agrees


def test_data_parallel_without_a_plan(plans):
    assert check_simulated(case(plans, "mlp", None), Mesh.parse("dp=4")).agrees


def test_a_batch_may_be_a_named_tuple(plans):
    assert check_simulated(case(plans, "mlp_with_named_batch", None), Mesh.parse("dp=2")).agrees


def test_infinite_outputs_agree_where_they_are_infinite_on_one_device(plans):
    assert check_simulated(case(plans, "masked", None), Mesh.parse("dp=2")).agrees
    parity = check_simulated(case(plans, "badly_masked", None), Mesh.parse("dp=2"))
    assert {each.name for each in parity.differing} == {
        "on rank 0, tensor 1",
        "on rank 1, tensor 1",
    }


def test_the_loss_may_be_in_a_dict(plans):
    found = check_simulated(case(plans, "loss_in_dict", None), Mesh.parse("dp=2"))
    plain = check_simulated(case(plans, "mlp", None), Mesh.parse("dp=2"))
    sizes = [
        {each.name: each.scale for each in parity.differences if each.what == "gradients"}
        for parity in (found, plain)
    ]
    assert sizes[0] == sizes[1]


def test_complex_parameters_are_compared_as_such(plans, recwarn):
    parity = check_simulated(case(plans, "complex_filter", None), Mesh.parse("dp=2"))
    assert parity.agrees, parity.differing
    one, many = torch.ones(2, dtype=torch.complex64), torch.tensor([1, 1 + 1j])
    (found,) = differences("parameters", {"weight": one}, {"weight": many})
    assert found.largest == found.scale == 1


def test_sparse_gradients_train_with_an_optimizer_that_takes_them(plans):
    asked = case(plans, "sparse_rows", None)
    runs = check_training(asked, Mesh.parse("dp=2"))
    assert {run.kind for run in runs} == {"ok"}, runs
    assert ("two",) in [run.options for run in runs]


@pytest.mark.parametrize(
    ("target", "run", "left_out"),
    [
        ("normed", {"recompute", "evaluate", "copy"}, {"save", "reload"}),
        ("tied", {"two", "save", "hooks"}, {"late", "freeze", "inputs"}),
    ],
)
def test_options_that_one_device_does_not_have_are_left_out(plans, target, run, left_out):
    runs = check_training(case(plans, target, None), Mesh.parse("dp=2"))
    assert {each.kind for each in runs} == {"ok"}, runs
    options = {option for each in runs for option in each.options}
    assert run <= options
    assert not left_out & options


def test_what_does_not_train_in_double_precision_is_refused_once(plans):
    (found,) = check_training(case(plans, "single", None), Mesh.parse("dp=2"))
    assert (found.options, found.kind) == ((), "refused")
    assert "in double precision" in found.text


def test_what_one_device_does_not_train_is_refused(plans):
    (found,) = check_training(case(plans, "sparse_rows", None), Mesh.parse("dp=2"), ["clip"])
    assert found.kind == "refused"
    assert "one device does not train like this" in found.text


def test_a_model_that_computes_something_else_is_named(plans):
    parity = check_simulated(case(plans, "careless"), Mesh.parse("2"))
    assert "on rank 0" in [each.name for each in parity.differing]
    assert all(each.what in ("outputs", "gradients", "parameters") for each in parity.differing)


def test_batches_that_do_not_divide_are_refused(plans):
    with pytest.raises(LayoutError, match="8 examples does not divide among 3"):
        check_simulated(case(plans, "mlp", None), Mesh.parse("dp=3"))


def test_a_plan_of_tables_needs_tables(plans):
    with pytest.raises(LayoutError, match="no collection of tables"):
        check_simulated(case(plans, "mlp", "table_plan"), Mesh.parse("2"))


@pytest.mark.processes
@pytest.mark.parametrize(("target", "plan"), [("mlp", "tensor_plan"), ("clicks", "table_plan")])
def test_in_processes(plans, target, plan):
    assert check_in_processes(case(plans, target, plan), Mesh.parse("2")).agrees
