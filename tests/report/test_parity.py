"""A sharded model beside one device: what agrees is said to agree, what differs to differ."""

import pytest
import report_models

from shardwise.errors import LayoutError
from shardwise.report import Case, Mesh, check_in_processes, check_simulated


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
