"""The sweep over torch's table of operators: a fast part of it, and that it finds mistakes."""

import json

import pytest
import torch
from torch._dynamo.utils import counters
from torch._guards import TracingContext

from shardwise import DTensor, Partial, Replicate, Shard, simulate
from shardwise.rules import catalog
from shardwise.rules.rule import Choice, Rule
from shardwise.testing.op_sweep import report
from shardwise.testing.op_sweep.__main__ import main
from shardwise.testing.op_sweep.compiled import Compiler, play_compiled
from shardwise.testing.op_sweep.lay_out import laid_out
from shardwise.testing.op_sweep.play import play_operator
from shardwise.testing.op_sweep.result import OpResult
from shardwise.testing.op_sweep.table import operators, samples
from shardwise.testing.op_sweep.ways import ways

# One or two of each family, small and quick; the whole table is a command (docs/operators.md).
FAST = (
    "add",
    "clamp",
    "where",
    "mm",
    "sum",
    "amax",
    "var_mean",
    "view_as",
    "cat",
    "sort",
    "cumsum",
    "diagonal",
    "searchsorted",
    "fft.rfft",
    "linalg.solve",
    "linalg.eigvalsh",
    "nn.functional.mse_loss",
    "nn.functional.cross_entropy",
    "nn.functional.huber_loss",
    "nn.functional.cosine_embedding_loss",
    "nn.functional.multi_margin_loss",
    "nn.functional.pad.reflect",
    "quantile",
    "unique",
)


@pytest.mark.parametrize("name", FAST)
def test_an_operator_is_right_in_every_layout(name):
    (entry, *_) = operators([name])
    result = play_operator(entry, num_samples=2, num_ways=5)
    assert result.worst("forward") == "ok", result.notes
    assert result.worst("backward") in ("ok", ""), result.notes
    for kind in ("inplace", "out"):
        assert result.worst(kind) in ("ok", ""), result.notes


def test_a_wrong_number_is_found(monkeypatch):
    """A rule that lets a sum through a function that is not linear."""
    op = torch.ops.aten.exp.default
    wrong = Rule(lambda call: [Choice((Partial(),), (Partial(),))], "wrong")
    monkeypatch.setitem(catalog.CATALOG, op, wrong)
    catalog.find_rule.cache_clear()
    try:
        result = play_operator(operators(["exp"])[0], 1, 8, ("forward",))
    finally:
        monkeypatch.undo()
        catalog.find_rule.cache_clear()
    assert result.worst("forward") == "wrong"


def _played_compiled(name, num_ways=2, kinds=("forward", "backward"), dynamic=False):
    (entry, *_) = operators([name])
    return play_compiled(entry, 1, num_ways, kinds, Compiler("aot_eager", dynamic))


def test_a_compiled_operator_is_right_and_was_compiled():
    counters.clear()
    result = _played_compiled("mm", kinds=("forward", "backward", "out"), dynamic=True)
    assert {kind: result.worst(kind) for kind in result.counts} == {
        "forward": "ok",
        "backward": "ok",
        "out": "ok",
    }, result.notes
    assert counters["stats"]["unique_graphs"] >= 4  # two ways, each with and without `out`


def test_what_torch_or_eager_code_refuses_is_no_failure_of_compiled_code():
    assert _played_compiled("equal").counts == {"forward": {"torch": 2}}
    assert _played_compiled("as_strided_scatter").worst("backward") == "eager"


def test_what_fails_in_compiled_code_alone_is_found(monkeypatch):
    def refuse(*given):
        if TracingContext.try_get() is not None:
            raise NotImplementedError("not here")
        return dispatch(*given)

    dispatch = DTensor.__torch_dispatch__
    monkeypatch.setattr(DTensor, "__torch_dispatch__", staticmethod(refuse))
    result = _played_compiled("neg", num_ways=1)
    assert result.worst("forward") == result.worst("backward") == "error"
    assert "not here" in result.notes["forward"][0]


def test_ways_shard_every_dim_evenly_and_unevenly_and_leave_sums():
    tensors = [torch.zeros(5, 8), torch.zeros(8)]
    found = ways(tensors, 100)
    first = {way.placements[0] for way in found if way.mesh == (4,)}
    assert {(Replicate(),), (Shard(0),), (Shard(1),), (Partial(),)} <= first
    assert any(p.sizes for (p,) in first if isinstance(p, Shard))
    assert {way.mesh for way in found} == {(4,), (2, 2)}
    assert len(ways(tensors, 3)) == 3


def test_terms_of_a_sum_add_up_exactly():
    from shardwise import init_device_mesh

    value = torch.randn(7) * 1e-30
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        placed = laid_out(value, mesh, [Partial()])
        assert not torch.equal(placed.to_local().on_rank(0), value)
        assert torch.equal(placed.full_tensor().agreed(), value)


def test_samples_are_the_same_every_time():
    (entry,) = operators(["baddbmm"])
    once, again = samples(entry, 2), samples(entry, 2)
    for one, other in zip(once, again, strict=True):
        assert all(map(torch.equal, one.tensors, other.tensors))


def test_the_worst_case_counts():
    result = OpResult("op")
    result.add("forward", "ok")
    result.add("forward", "raises", "why")
    assert result.worst("forward") == "raises"
    assert result.worst("backward") == ""
    assert "why" in report.table([result])


def test_the_command_writes_a_table_and_json(tmp_path, capsys):
    found, table = tmp_path / "found.json", tmp_path / "table.txt"
    options = ["--samples=1", "--ways=2", "--processes=1", f"--json={found}", f"--table={table}"]
    assert main(["neg", "no_such_op", *options]) == 0
    assert json.loads(found.read_text())["summary"]["forward"] == {"ok": 1}
    assert table.read_text().splitlines()[1].startswith("neg")
    assert "1 ops: 1 ok" in capsys.readouterr().out
    assert main(["no_such_op"]) == 2


def test_the_command_plays_a_part_compiled(tmp_path, capsys):
    found = tmp_path / "found.json"
    options = ["--compiled", "--ways=1", "--processes=1", "--part=2/2", f"--json={found}"]
    assert main(["neg", "abs", *options]) == 0
    saved = json.loads(found.read_text())
    assert [op["name"] for op in saved["ops"]] == ["neg"]
    assert saved["settings"] | {"backend": "aot_eager", "dynamic": False} == saved["settings"]
    assert "1 ops: 1 ok" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--part=3/2"])
    assert "3/2" in capsys.readouterr().err
