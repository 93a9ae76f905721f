"""One step as a report: what it says follows from the model's shapes."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import report_models
from rich.console import Console

from shardwise.cli.model import explain_step
from shardwise.errors import ArgumentError
from shardwise.report import Case, Mesh
from shardwise.report.step import RankMemory
from shardwise.report.tables import memory_table


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    plan = tmp_path_factory.mktemp("plans") / "plan.toml"
    plan.write_text(report_models.TENSOR_PLAN)
    return explain_step(Case("report_models:mlp", str(plan)), Mesh.parse("dp=2,tp=2"), "adamw")


def test_memory_follows_from_the_shapes(report):
    # up: 5x6 and 5, down: 6x5 and the whole bias of 6; in single precision.
    parameters = 4 * (30 + 5 + 30 + 6)
    for memory in report.memory:
        assert (memory.parameters, memory.gradients) == (parameters, parameters)
        assert memory.optimizer == 2 * parameters  # two moments
        assert memory.activations > 0


def test_memory_of_any_size_fits_into_a_terminal(report):
    large = [RankMemory(*[123_456_789_012] * 4, peak=999_990_000_000) for _ in report.ranks]
    console = Console(width=80)
    with console.capture() as captured:
        console.print(memory_table(replace(report, memory=large)))
    text = captured.get()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "parameters" in text
    assert "494 GB" in text
    assert "1 TB" in text


def test_collectives_have_module_axis_and_phase(report):
    found = [(each.module, each.axis, each.phase, each.kind) for each in report.collectives]
    assert ("down", "tp", "forward", "all_reduce") in found
    assert ("dp", "backward") in [(axis, phase) for _, axis, phase, _ in found]
    assert report.num_implicit == 0
    assert report.num_bytes == sum(each.num_bytes for each in report.collectives)


def test_parts_cover_each_parameter_once(report):
    for parameter in report.parameters:
        covered = sum(volume(part.box) for part in parameter.parts)
        assert covered == volume([(0, size) for size in parameter.shape])
        assert sorted(r for part in parameter.parts for r in part.ranks) == [0, 1, 2, 3]


def test_outputs_are_named(report):
    texts = {each.module: each.text for each in report.outputs}
    assert texts["up"] == "4x5 (differs by rank)"


def test_json_holds_the_same(report):
    content = json.loads(report.to_json())
    assert content["totals"]["bytes"] == report.num_bytes
    assert [each["name"] for each in content["parameters"]] == [p.name for p in report.parameters]
    assert len(content["memory"]) == 4


def volume(box):
    total = 1
    for start, stop in box:
        total *= stop - start
    return total


# -- sharded and context axes ------------------------------------------------------------------


def step_of(mesh, target="layers", plan=None, **patterns):
    case = Case(f"report_models:{target}", plan, **{k: (v,) for k, v in patterns.items()})
    return explain_step(case, Mesh.parse(mesh), "adamw")


def test_fully_sharded_layers(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'format = "shardwise plan 1"\n[modules]\n"layers.*.up" = "colwise"\n'
        '"layers.*.down" = "rowwise"\n'
    )
    report = step_of("dp=2,fsdp=2,tp=2", plan=str(plan), groups="layers.*")
    found = Counter((each.kind, each.axis, each.phase) for each in report.collectives)
    assert found["all_gather_into_tensor", "fsdp", "forward"] == 2
    assert found["reduce_scatter_tensor", "fsdp", "backward"] == 2
    whole = step_of("dp=2,tp=2", plan=str(plan))
    for rank in range(8):
        assert report.memory[rank].parameters < 0.6 * whole.memory[0].parameters


def test_lines_of_backward_are_the_models_own():
    report = step_of("fsdp=2", groups="layers.*")
    assert {each.line.partition(":")[0] for each in report.collectives if each.module} == {
        "report_models.py"
    }


def test_split_sequences_and_recomputed_layers():
    plain = step_of("fsdp=2,cp=2", groups="layers.*", context="layers.*")
    assert {each.axis for each in plain.collectives} == {"fsdp", "cp"}
    again = step_of("fsdp=2,cp=2", groups="layers.*", context="layers.*", recompute="layers.*")
    assert again.memory[0].activations < 0.5 * plain.memory[0].activations
    assert again.num_bytes > plain.num_bytes


def test_peak_of_a_step():
    layer = 4 * (64 * 64 + 64)  # bytes of one of eight layers
    # Parameters, gradients and two moments; a bucket of all gradients, and its sum.
    for memory in step_of("dp=4", "wide_layers").memory:
        assert 48 * layer <= memory.peak < 49 * layer
    # A quarter of them; two layers are whole, and there are a few rows of gradients.
    for memory in step_of("fsdp=4", "wide_layers", groups="*").memory:
        assert (8 + 2) * layer <= memory.peak < (8 + 6) * layer
        # Gathered parameters that were freed are no activations; those of the last layer are kept.
        assert memory.activations < 2 * layer


@pytest.mark.parametrize("axes", ["dp=2", "fsdp=2", "dp=2,tp=2", "fsdp=2,tp=2"])
def test_activations_of_a_model_without_values(axes, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'format = "shardwise plan 1"\n[modules]\n"up" = "colwise"\n"down" = "rowwise"\n'
    )
    options = {"groups": "*"} if "fsdp" in axes else {}
    options |= {"plan": str(plan)} if "tp" in axes else {}
    real, meta = (step_of(axes, target, **options).memory for target in ("mlp", "mlp_on_meta"))
    for one, other in zip(real, meta, strict=True):
        assert replace(one, peak=0) == replace(other, peak=0)
        # Kernels may use a little more, and so does comparing values of ranks along tp.
        assert other.peak == pytest.approx(one.peak, rel=0.15 if "tp" in axes else 0.05)


def test_patterns_that_match_nothing():
    with pytest.raises(ArgumentError, match=r"matches 'layer\.\*'; did you mean 'layers\.1'"):
        step_of("fsdp=2", groups="layer.*")
    with pytest.raises(ArgumentError, match="along the axis 'cp'; found fsdp=2"):
        step_of("fsdp=2", context="layers.*")


def test_sparse_gradients_are_stepped_by_sparse_adam():
    report = explain_step(Case("report_models:sparse_rows"), Mesh.parse("dp=2"), "adamw")
    assert report.facts["optimizer"] == "AdamW, SparseAdam"
    # Two moments of a table of 8 x 4, and of a layer of 5 numbers.
    assert report.memory[0].optimizer == 2 * 4 * (32 + 5)


def test_a_model_that_is_updated_in_backward_needs_no_other_optimizer(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(report_models.TABLE_PLAN)
    case = Case("report_models:only_tables", str(plan))
    report = explain_step(case, Mesh.parse("2"), "adamw")
    assert report.facts["optimizer"] == "that of the tables"
    assert report.num_bytes > 0
