"""The demonstration at a small size."""

import io
import math

import pytest
import torch
from rich.console import Console

from shardwise.demo.run import (
    Options,
    TrainingRun,
    largest_difference,
    run_demo,
    train_alone,
    train_simulated,
)
from shardwise.demo.tasks import MIXED_PLAN, SIZES, ClickLog, Recommending, read_clicks


def silent(*_):
    pass


def run(tmp_path, **options):
    out = io.StringIO()
    page = tmp_path / "report.html"
    status = run_demo(Options(**options, report=str(page)), Console(file=out, width=100))
    return status, out.getvalue(), page


def test_the_log_is_the_same_each_time_and_follows_a_power_law():
    one, two = ClickLog(3).batch(4096), ClickLog(3).batch(4096)
    assert torch.equal(one.ids.values, two.ids.values)
    counts = torch.bincount(one.ids.values[:4096], minlength=SIZES["user"]).sort(descending=True)[0]
    # Of n ids, the r-th most frequent comes about 1/r as often as the first.
    assert 0.02 * 4096 < counts[0] < 0.15 * 4096
    assert counts[:100].sum() > 10 * counts[10_000:10_100].sum()
    clicked = one.clicks.bool()
    assert one.truth[clicked].mean() > one.truth[~clicked].mean() + 1


def test_recommender_on_simulated_ranks(tmp_path):
    status, text, page = run(tmp_path, steps=3)
    assert status == 0, text
    assert "4 simulated ranks: step 3/3" in text
    assert "all_to_all_single" in text
    assert "on the true side of 50%" in text
    assert page.read_text().startswith("<!doctype html>")


def test_recommender_learns_the_truth():
    task = Recommending(40, 0, MIXED_PLAN, size=512)
    found = train_alone(task, silent).found
    assert found["best loss"] < found["loss"] < found["blind loss"] - 0.03
    assert found["accuracy"] > 0.65


def test_every_kind_of_plan_has_one_devices_numbers(tmp_path):
    for kind in ("row_wise", "column_wise", "table_wise", "data_parallel"):
        plan = tmp_path / f"{kind}.toml"
        plan.write_text(f'format = "shardwise embedding plan 1"\n\n[tables]\n"*" = "{kind}"\n')
        status, text, _ = run(tmp_path, steps=2, ranks=2, plan=str(plan))
        assert status == 0, text


def test_language_model_on_simulated_ranks(tmp_path):
    status, text, _ = run(tmp_path, model="gpt", steps=3, ranks=2)
    assert status == 0, text
    assert "next characters right" in text


def test_a_parameter_that_is_no_number_is_the_largest_difference():
    def trained(**parameters):
        tensors = {name: torch.tensor(values) for name, values in parameters.items()}
        return TrainingRun([1.0], tensors, 1.0, 1)

    one, many = trained(a=[1.0, 2.0], b=[3.0], c=[]), trained(a=[1.0, math.nan], b=[4.0], c=[])
    difference, name = largest_difference(one, many)
    assert math.isnan(difference)
    assert name == "a"
    assert largest_difference(one, one) == (0.0, "b")


def criteo_line(number):
    fields = [str(number % 2), *(str(number * k % 50) for k in range(13))]
    return "\t".join([*fields, *(f"{number * 31 + k:08x}" for k in range(26))])


def test_criteo_files(tmp_path):
    good = [criteo_line(number) for number in range(40)]
    empty_fields = "1" + 13 * "\t" + 26 * "\t"
    bad = ["1\t2\t3", criteo_line(7).replace("0", "x", 1), good[3][:-8] + "nothex"]
    path = tmp_path / "clicks.tsv"
    path.write_text("\n".join([*good[:5], bad[0], *good[5:], bad[1], empty_fields, bad[2]]) + "\n")
    data = read_clicks(str(path))
    assert len(data) == 41
    assert list(data.bad) == [6, 42, 44]
    assert data.bad[6] == "3 fields, not 40"
    assert "hexadecimal" in data.bad[44]
    status, text, _ = run(tmp_path, steps=2, ranks=2, data=str(path))
    assert status == 0, text
    assert "3 bad lines were left out" in text
    assert "line 44: field 40 is 'nothex'" in text


def test_ids_of_a_file_reach_the_tables():
    task = Recommending(2, 0, MIXED_PLAN, size=64)
    one, many = train_alone(task, silent), train_simulated(task, 4, silent)
    difference, _ = largest_difference(one, many)
    assert difference < 1e-5
    start = task.model().state_dict()
    moved = [n for n, v in one.parameters.items() if not torch.equal(v, start[n])]
    assert len(moved) == len(one.parameters)


@pytest.mark.processes
@pytest.mark.parametrize("model", ["dlrm", "gpt"])
def test_in_processes(tmp_path, model):
    status, text, _ = run(tmp_path, model=model, steps=2, processes=2)
    assert status == 0, text
    assert "2 gloo processes" in text
