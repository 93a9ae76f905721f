"""The sweep over torch's table of operators: a fast part of it, and that it finds mistakes."""

import json

import pytest
import torch
from torch._dynamo.utils import counters
from torch._guards import TracingContext

from shardwise import DTensor, Partial, Replicate, Shard, init_device_mesh, simulate
from shardwise.dispatch import catalog
from shardwise.dispatch.rule import Choice, Rule
from shardwise.testing.cases import reading, repeats_memory
from shardwise.testing.compare import OpCall, outcome_of
from shardwise.testing.layouts import OperandLayouts, laid_out
from tests.op_sweep import report
from tests.op_sweep.__main__ import main
from tests.op_sweep.cases import Cases, VariantsAlone
from tests.op_sweep.play import Compiler, play_compiled, play_operator
from tests.op_sweep.report import OpResult
from tests.op_sweep.table import operators, samples
from tests.op_sweep.ways import further_ways, ways

pytestmark = pytest.mark.slow

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
    "expand",
    "cat",
    "sort",
    "cumsum",
    "diagonal",
    "searchsorted",
    "fft.rfft",
    "linalg.solve",
    "linalg.eigvalsh",
    "nn.functional.dropout",
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
    for kind in ("doors", "inplace", "out"):
        assert result.worst(kind) in ("ok", ""), result.notes
    assert result.worst("writes") in ("ok", "raises"), result.notes  # writes to copies are refused


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


def _outcomes(op, *tensors, num=12, inplace=None):
    """kind -> outcomes of an op that is not in torch's table, over many readings and writes."""
    sample = OpCall(tensors, {}, (True,) * len(tensors), lambda result: result)
    found = {}
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2))
        way = OperandLayouts((2, 2), ((Shard(0), Shard(0)),) * len(tensors), (1, 0))
        for kind, case in Cases(
            VariantsAlone(Op(op, inplace), sample), way, mesh, 0, num_doors=num
        ).each():
            found.setdefault(kind, set()).add(outcome_of(case)[0])
    return found


class Op:
    name, variant_test_name = "op", ""
    supports_autograd = True

    def __init__(self, op, inplace):
        self.op, self._inplace = op, inplace
        self.supports_out = inplace is not None

    def __call__(self, *args, **out):
        return self.op(*args, **out)

    def get_inplace(self):
        return self._inplace


def on_ranks(one, there):
    """An op that is `one` on one device and `there` on DTensors."""
    return lambda x, *rest: (there if isinstance(x, DTensor) else one)(x, *rest)


def test_readings_and_writes_of_a_right_op_are_right():
    found = _outcomes(lambda x: (x * 2, x.t()), torch.randn(5, 4))
    assert found == {kind: {"ok"} for kind in ("forward", "backward", "doors", "writes")}


@pytest.mark.parametrize(("off", "outcome"), [(0.0, "ok"), (1e-3, "wrong")])
def test_rounding_is_no_difference_in_forms_that_write_either(off, outcome):
    """On ranks a large number is added and taken off again, which costs digits."""

    def op(x, y, out=None):
        there = isinstance(x, DTensor)
        result = x + 3e4 + y - 3e4 if there else x + y
        return result if out is None else out.copy_(result + off * there)

    tensors = torch.randn(5, 4), torch.randn(5, 4)
    found = _outcomes(op, *tensors, inplace=lambda x, y: op(x, y, out=x))
    assert found["forward"] == {"ok"}
    assert found["inplace"] == found["out"] == {outcome}


def test_a_wrong_gradient_of_a_door_is_found(monkeypatch):
    def twice(self, **options):
        whole = read(self, **options)
        return whole * 2 - whole.detach()

    read = DTensor.full_tensor
    monkeypatch.setattr(DTensor, "full_tensor", twice)
    found = _outcomes(torch.neg, torch.randn(5, 4))
    assert found["backward"] == {"ok"}
    assert found["doors"] == {"ok", "wrong"}


def test_memory_that_is_shared_on_one_side_alone_is_found():
    copied = _outcomes(on_ranks(torch.t, lambda x: x.t().clone()), torch.randn(5, 4))
    assert copied["doors"] == {"ok"}
    assert "wrong" in copied["writes"]
    shared = _outcomes(on_ranks(lambda x: x.t().clone(), torch.t), torch.randn(5, 4))
    assert "wrong" in shared["writes"]


def test_a_write_that_one_device_refuses_and_ranks_do_not_is_found():
    parts = on_ranks(lambda x: x.unbind(), lambda x: tuple(x.clone()[i] for i in range(2)))
    assert "wrong" in _outcomes(parts, torch.randn(2, 4), num=30)["writes"]


def test_what_backward_needs_may_be_refused_or_kept():
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x.clone()
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.x.exp()

    assert _outcomes(on_ranks(torch.exp, Kept.apply), torch.randn(5, 4))["writes"] == {"ok"}
    assert _outcomes(on_ranks(Kept.apply, torch.exp), torch.randn(5, 4))["writes"] == {"ok"}


def test_windows_that_overlap_repeat_memory():
    x = torch.zeros(5, 4)
    assert repeats_memory(x.unfold(0, 3, 1))
    assert repeats_memory(x[:1].expand(5, 4))
    assert not any(map(repeats_memory, (x, x.t(), x[:, 1], x.unfold(0, 2, 2), x[:0])))


def test_a_generator_in_another_state_is_found():
    def draw_more(x):
        torch.rand(1)
        return x + 1

    assert _outcomes(on_ranks(lambda x: x + 1, draw_more), torch.randn(5, 4)) == {
        "forward": {"wrong"},
        "backward": {"ok"},
        "doors": {"ok"},
        "writes": {"ok"},
    }


def test_further_ways_have_axes_in_any_order_and_are_the_same_every_time():
    tensors = [torch.zeros(5, 8), torch.zeros(8)]
    found = further_ways(tensors, 40, "key")
    assert found == further_ways(tensors, 40, "key") != further_ways(tensors, 40, "other")
    assert {way.mesh for way in found} == {(2, 2), (2, 2, 2)}
    assert len({way.order for way in found if way.mesh == (2, 2, 2)}) == 6


def test_readings_cover_every_door():
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2))
        layout = laid_out(torch.randn(4, 5), mesh, [Shard(0), Replicate()])._layout
        found = [reading(layout, str(number)) for number in range(200)]
    assert {each.end for each in found} == {
        "placed",
        "whole",
        "whole, terms",
        "local",
        "local, terms",
    }
    targets = {p for each in found for p in each.target or ()}
    assert {Replicate(), Shard(0), Shard(1), Partial()} <= targets
    assert {each.order for each in found} == {None, (0, 1), (1, 0)}


def test_a_tensor_is_laid_out_with_its_axes_in_any_order():
    value = torch.arange(8.0)
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2))
        local = laid_out(value, mesh, [Shard(0), Shard(0)], (1, 0)).to_local()
        assert local.on_rank(1).tolist() == [4.0, 5.0]
        assert local.on_rank(2).tolist() == [2.0, 3.0]
        summed = laid_out(value, mesh, [Partial(), Shard(0)], (1, 0))
        assert torch.equal(summed.full_tensor().agreed(), value)


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
