"""The fuzzer: a few hundred programs, and that it finds, names and shrinks what is wrong."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise import Partial, Replicate, Shard, UnsupportedError, simulate
from shardwise.dispatch import catalog
from shardwise.dispatch.rule import Choice, Rule
from shardwise.testing.fuzz.__main__ import (
    Result,
    by_mesh,
    failure_text,
    failures,
    main,
    play_seeds,
    script,
    summary,
)
from shardwise.testing.fuzz.generate import MESHES, Growth, generate
from shardwise.testing.fuzz.hand import Draft, NoFit
from shardwise.testing.fuzz.play import Reference, play, play_alone, play_forked, shrink
from shardwise.testing.fuzz.program import (
    _NAMES,
    Leaf,
    OneDevice,
    Program,
    Sharded,
    Statement,
    run,
    values,
)
from shardwise.testing.fuzz.tables import FAMILIES
from shardwise.testing.fuzz.tables.nn import AUTOGRAD, LAYERS
from shardwise.testing.fuzz.undefined import (
    BIAS_ALONE,
    EMPTY_VIEW,
    MEDIAN,
    OVERLAP,
    REASONS,
    ROUNDING,
    SHARED_GRADIENT,
    SHARED_RESULT,
    SHARED_VIEW,
    ZERO_TENSOR,
    Kinks,
    steady,
)

pytestmark = pytest.mark.slow

SEEDS = range(300)


@pytest.mark.parametrize("part", range(10))
def test_programs_hold_what_one_device_holds(part):
    results = list(play_seeds(by_mesh(SEEDS[part::10])))
    failed = [
        failure_text(result) for result in results if result.kind in ("wrong", "stale", "crash")
    ]
    assert not failed, "\n\n".join(failed)
    done = [result for result in results if result.kind == "ok"]
    assert len(done) > 0.8 * len(results)


def test_a_seed_gives_the_same_program_every_time():
    assert generate(7) == generate(7)
    assert generate(7) != generate(8)


@pytest.mark.parametrize(
    ("family", "number"),
    [(family, n) for family, (_, table) in FAMILIES.items() for n in range(len(table))],
)
def test_every_row_of_the_tables_makes_a_step(family, number):
    row = FAMILIES[family][1][number]
    assert any(_makes_a_step(row, seed) for seed in range(60))


def _makes_a_step(row, seed):
    growth = Growth(seed, (2, 2))
    hand = growth.hand
    hand.new((3, 4), torch.float64, grad=True)
    hand.new((2, 2, 3), torch.float32, grad=False)
    hand.new((3,), torch.int64)
    hand.new((2,), torch.complex128, grad=False)
    growth._add_leaves()
    growth._try(Draft("v0.sin().sum().backward()", statement=True))
    growth._try(Draft("v0.t()"))
    growth._try(Draft("w.full_tensor(v0)", local=True))
    try:
        draft = row(hand)
    except NoFit:
        return False
    return growth._try(Draft(draft) if isinstance(draft, str) else draft) and not growth.refused


def test_leaves_are_exact_distinct_and_bounded():
    value = values((4, 5), torch.bfloat16, 3)
    assert torch.equal(value.double(), values((4, 5), torch.float64, 3))
    assert value.unique().numel() == 20
    assert value.abs().max() <= 2
    assert values((9,), torch.int64, 0, high=2).max() < 2


def test_a_leaf_in_any_placements_is_one_device_s():
    placements = [Shard(0), Partial("avg"), Shard(0)]
    with simulate(8):
        leaf = Sharded((2, 2, 2)).leaf((5, 3), torch.float64, placements, 4, order=(2, 0, 1))
        assert leaf.placements == tuple(placements)
        assert leaf._layout.axes_of(0) == (2, 0)
        assert torch.equal(leaf.full_tensor().agreed(), values((5, 3), torch.float64, 4))


@pytest.mark.parametrize("term", ["sum", "avg"])
def test_the_terms_of_a_coarse_leaf_add_up_exactly(term):
    expected = values((3, 3), torch.bfloat16, 1)
    for mesh in set(MESHES):
        with simulate(math.prod(mesh)):
            leaf = Sharded(mesh).leaf((3, 3), torch.bfloat16, [Partial(term)] * len(mesh), 1)
            assert torch.equal(leaf.full_tensor().agreed(), expected)


def test_results_that_are_equal_by_chance_are_not_compared():
    steps = ["v1 = v0.mean()", "v2 = v0.nanmean()", "v3 = v1 == v2"]
    assert not steady(_program(*steps))
    assert steady(_program(*steps[:2], "v3 = v1 == v1"))


# -- what it finds ---------------------------------------------------------------------------


@pytest.fixture
def wrong_rule(monkeypatch):
    """Sets a rule that is wrong until the test ends."""

    def replace(op, *choices):
        monkeypatch.setitem(catalog.CATALOG, op, Rule(lambda call: choices, "wrong"))
        catalog.find_rule.cache_clear()

    yield replace
    monkeypatch.undo()
    catalog.find_rule.cache_clear()


@pytest.fixture
def wrong_sine(wrong_rule):
    """A sum goes through a function that is not linear."""
    wrong_rule(torch.ops.aten.sin.default, *(Choice((p,), (p,)) for p in (Replicate(), Partial())))


@pytest.fixture
def wrong_cosine(wrong_rule):
    """What every rank holds is called a term: gradients of sines are too large."""
    wrong_rule(torch.ops.aten.cos.default, Choice((Replicate(),), (Partial(),)))


def _leaf(name, *placements, shape=(4, 3), grad=False):
    return Leaf(name, shape, torch.float64, placements, None, grad)


LONG = Program(
    5,
    (2, 2),
    (
        _leaf("v0", Shard(1), Partial("avg"), grad=True),
        _leaf("v1", Shard(0), Partial()),
        Statement("v2 = v0.tanh()", ("v2",)),
        Statement("v3 = torch.sin(v1)", ("v3",)),
        Statement("v4, v5 = v2.split([1, 3])", ("v4", "v5")),
        Statement("v6 = v3 + v2", ("v6",)),
        Statement("v5.sum().backward()"),
    ),
)


def test_a_wrong_rule_is_found_among_random_programs(wrong_cosine):
    results = list(play_seeds(by_mesh(range(40)), most_shrunk=0))
    assert sum(result.kind == "wrong" for result in results) > 3


def test_a_failure_is_shrunk_to_what_is_needed(wrong_sine):
    outcome = play_alone(LONG)
    assert (outcome.kind, outcome.aspect, outcome.slot) == ("wrong", "value", "v3")
    small, why = shrink(LONG, outcome)
    assert [type(item) for item in small.items] == [Leaf, Statement]
    assert small.mesh == (2,)
    assert small.items[0].placements == (Partial(),)
    assert small.items[0].shape == (1, 1)
    assert small.items[1].code == "v3 = torch.sin(v1)"
    text = script(small, why)
    assert text.startswith("# wrong: v3 differs by")


def test_the_script_of_a_failure_runs_on_its_own(tmp_path):
    outcome = play_alone(LONG)
    file = tmp_path / "failure.py"
    file.write_text(script(LONG, outcome).replace('"no error"', "w.read(v0.grad)"))
    root = str(Path(__file__).parents[2])
    shown = subprocess.run(
        [sys.executable, file],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    one, sharded = shown.stdout.split("sharded:   ")
    assert one.startswith("one device: tensor(")
    assert one.removeprefix("one device: ").split() == sharded.split()


PATCHED = Program(
    0,
    (2,),
    (_leaf("v0", Shard(0)), Statement("v1 = w.round_trip(v0)", ("v1",)), Statement("v0.add_(1)")),
)


def _fail(error):
    def door(*args):
        raise error

    return door


def _twice(self, x):
    return x * 2


@pytest.mark.parametrize(
    ("world", "door", "kind", "aspect"),
    [
        (None, None, "ok", ""),
        (OneDevice, lambda self, x: x, "stale", "value"),
        (OneDevice, lambda self, x: x.float(), "wrong", "dtype"),
        (OneDevice, lambda self, x: x.flatten(), "wrong", "shape"),
        (OneDevice, lambda self, x: torch.rand_like(x) * 0 + x, "wrong", "generator"),
        (OneDevice, lambda self, x: x.clone().requires_grad_(), "wrong", "requires_grad"),
        (OneDevice, _fail(ValueError("no")), "wrong", "accepted"),
        (Sharded, _twice, "wrong", "value"),
        (Sharded, _fail(UnsupportedError("no rule")), "refused", "no rule"),
        (Sharded, _fail(ZeroDivisionError("oh")), "crash", "ZeroDivisionError oh"),
    ],
)
def test_outcomes(monkeypatch, world, door, kind, aspect):
    monkeypatch.setattr(Sharded, "round_trip", lambda self, x: x.clone())
    if world is not None:
        monkeypatch.setattr(world, "round_trip", door)
    outcome = play_alone(PATCHED)
    assert (outcome.kind, outcome.aspect) == (kind, aspect), outcome


def test_what_both_refuse_is_no_failure():
    program = Program(0, (2,), (_leaf("v0", Shard(0)), Statement("v1 = v0.view(7)", ("v1",))))
    assert play_alone(program).kind == "torch-refused"


def test_a_wrong_gradient_is_found(monkeypatch):
    monkeypatch.setattr(Sharded, "round_trip", lambda self, x: x.detach() * 0.5 + x * 0.5)
    program = Program(
        0,
        (2,),
        (
            _leaf("v0", Shard(0), grad=True),
            Statement("v1 = w.round_trip(v0)", ("v1",)),
            Statement("v1.sin().sum().backward()"),
        ),
    )
    outcome = play_alone(program)
    assert (outcome.kind, outcome.aspect) == ("wrong", "gradient value")


def test_places_count_differently_in_the_loss(monkeypatch):
    """A gradient of one entry for all that were expanded from it shows."""
    monkeypatch.setattr(Sharded, "round_trip", lambda self, x: x[:, :1].expand_as(x))
    program = Program(
        0,
        (2,),
        (
            _leaf("v0", Shard(0), shape=(4, 1), grad=True),
            Statement("v1 = v0.expand(4, 3)", ("v1",)),
            Statement("v2 = w.round_trip(v1)", ("v2",)),
            Statement("w.weighted(v1).backward()"),
        ),
    )
    assert play_alone(program).kind == "ok"
    program = program.with_item(3, Statement("v1.retain_grad(); w.weighted(v2).backward()"))
    outcome = play_alone(program)
    assert (outcome.kind, outcome.slot) == ("wrong", "v1.grad")


def test_what_comes_before_a_refusal_is_compared(monkeypatch):
    monkeypatch.setattr(Sharded, "round_trip", _twice)
    monkeypatch.setattr(Sharded, "full_tensor", _fail(UnsupportedError("no")))
    program = Program(0, (2,), (*PATCHED.items, Statement("v2 = w.full_tensor(v0)", ("v2",))))
    assert play_alone(program).kind == "wrong"


def test_a_process_that_dies_is_an_outcome(monkeypatch):
    monkeypatch.setattr(Sharded, "round_trip", lambda self, x: os._exit(3))
    outcome = play_forked(PATCHED)
    assert (outcome.kind, outcome.aspect) == ("crash", "process")
    small, _ = shrink(PATCHED, outcome, play_forked)
    assert len(small.items) == 2


def test_programs_of_one_mesh_share_a_world():
    with simulate(4):
        world = Sharded(LONG.mesh)
        assert [play(LONG, world).kind for _ in range(2)] == ["ok", "ok"]


# -- the command -----------------------------------------------------------------------------


def test_the_command_plays_and_writes_what_it_found(wrong_cosine, tmp_path, capsys):
    found = tmp_path / "found.json"
    options = ["--programs=6", "--seed=2", "--mesh=2", "--mesh=2x2", "--shrink=1"]
    assert main([*options, f"--out={found}"]) == 1
    saved = json.loads(found.read_text())
    assert sum(saved["counts"].values()) == 6
    assert saved["counts"]["wrong"] == len(saved["failures"]) > 0
    assert {tuple(f["mesh"]) for f in saved["failures"]} <= {(2,), (2, 2)}
    printed = capsys.readouterr().out
    assert "def program(w):" in printed
    assert "6 programs" in printed


def test_the_command_shares_programs_out(capsys):
    assert main(["--programs=6", "--seed=3", "--part=2/2", "--workers=2"]) == 0
    assert "3 programs" in capsys.readouterr().out


def test_the_command_replays_one_program(capsys):
    assert main(["--replay=3000001"]) == 0
    printed = capsys.readouterr().out
    assert generate(3000001).text in printed
    kinds = ("ok", "refused", "torch-refused", "undefined")
    assert printed.rstrip().splitlines()[-1].split(":")[0] in kinds


@pytest.mark.parametrize("option", ["--mesh=2y2", "--part=3/2", "--out=nowhere/found.json"])
def test_the_command_says_what_it_cannot_read(option, capsys):
    with pytest.raises(SystemExit):
        main([option])
    assert option.split("=")[1] in capsys.readouterr().err


def test_what_rounds_inside_of_autocast_counts_as_rounded():
    leaves = [
        Leaf("v0", (2, 3), torch.float32, (Replicate(),)),
        Leaf("v1", (4, 3, 3), torch.float32, (Replicate(),)),
    ]
    step = 'with torch.autocast("cpu", torch.bfloat16): v2 = F.bilinear(v0, v0, v1)'
    program = Program(7, (2,), (*leaves, Statement(step, ("v2",))))
    with simulate(2):
        assert play(program, Sharded((2,))).kind == "ok"


def test_empty_leaves_are_of_one_rank_each():
    leaf = Leaf("v0", (1, 0), torch.float32, (Shard(1),))
    program = Program(
        7, (2,), (leaf, Statement("v1 = v0.sum()", ("v1",)), Statement("v1.normal_()"))
    )
    with simulate(2):
        assert play(program, Sharded((2,))).kind == "ok"


def test_what_a_kernel_wrote_before_it_raised_is_not_asked_for():
    items = (
        _leaf("v0", Replicate(), Shard(1), shape=(2, 4), grad=True),
        Statement("v3 = F.pad(v0, (1, 1), value=1.25)", ("v3",)),
        Statement("v4 = v3.mT", ("v4",)),
        Leaf("v5", (2,), torch.int64, (Partial("sum"), Replicate()), high=2),
        _leaf("v6", Shard(0), Partial("min"), shape=(6, 2), grad=True),
        Statement("v4.index_add_(1, v5 - 1, v6)"),
    )
    with simulate(4):
        assert play(Program(7, (2, 2), items), Sharded((2, 2))).kind == "torch-refused"


def test_a_gradient_stays_as_it_is_when_its_leaf_is_turned():
    leaf = _leaf("v0", Shard(1), shape=(3, 3), grad=True)
    items = (
        leaf,
        Statement("v0.sin().sum().backward()"),
        Statement("with torch.no_grad(): v0.t_()"),
    )
    with simulate(2):
        assert play(Program(7, (2,), items), Sharded((2,))).kind == "ok"


@pytest.mark.parametrize("between", ["v0 * 1", "-v0"])
def test_the_sign_of_a_zero_is_not_asked_for(between):
    growth = Growth(0, (2,))
    growth.hand.new((3,), torch.float64, grad=False)
    growth._add_leaves()
    assert growth._try(Draft("v0 * 0"))
    assert growth._try(Draft(between.replace("v0", "v1")))
    assert not growth._try(Draft("torch.signbit(v2)"))
    assert growth._try(Draft("v2 + 1"))


def test_only_the_first_result_of_an_op_retains_its_gradient():
    """Torch ends the process where a write to a later one rebases its history."""
    growth = Growth(0, (2,))
    growth.hand.new((2, 3), torch.float64, grad=True)
    growth._add_leaves()
    assert growth._try(Draft("torch.aminmax(v0, dim=0)"))
    row = next(row for row in AUTOGRAD if getattr(row, "__name__", "") == "_retained")
    retained = {row(growth.hand).code for _ in range(20)}
    assert retained == {"v1.retain_grad()"}


def test_a_redistributed_tensor_is_dense_as_a_copy_on_one_device():
    steps = ["v1 = v0[:, :1].expand(4, 2)", "v2 = w.redistribute(v1, [Partial()])"]
    assert play_alone(_program(*steps, "v3 = v2.view(8)", placement=Replicate())).kind == "ok"


def test_group_norm_has_no_bias_alone():
    row = next(row for row in LAYERS if getattr(row, "__name__", "") == "_group_norm")
    for seed in range(40):
        growth = Growth(seed, (2,))
        growth.hand.new((2, 2, 3), torch.float64)
        growth._add_leaves()
        code = row(growth.hand)
        assert "weight=None, bias" not in code


# -- what torch leaves open ------------------------------------------------------------------


def _program(*steps, shape=(4, 4), dtype=torch.float64, placement=None, grad=False, number=0):
    leaf = Leaf(f"v{number}", shape, dtype, (placement or Shard(0),), None, grad)
    made = re.compile(r"^(v\d+)(?:, (v\d+))? = ")
    names = [tuple(n for n in m.groups() if n) if (m := made.match(s)) else () for s in steps]
    return Program(0, (2,), (leaf, *map(Statement, steps, names)))


KINK = _program(
    "v3 = F.instance_norm(v2, eps=0.1)",
    "v5 = torch.pow(v3.abs() + 0.5, v2)",
    "w.weighted(w.full_tensor(v5).sin()).backward(retain_graph=True)",
    shape=(3, 3, 6),
    placement=Replicate(),
    grad=True,
    number=2,
)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (_program("v1 = v0[:, 2]", "v0.copy_(v1)"), OVERLAP),
        (_program("v1 = v0.diagonal()", "v0.copy_(v1)"), OVERLAP),
        (_program("v1 = v0.as_strided((4,), (2,))", "v0.add_(v1)"), OVERLAP),
        (_program("v1, v2 = torch.tensor_split(v0, 2, -1)", "v0[:, :2].mul_(v0[:, 1:3])"), OVERLAP),
        (_program("v0.masked_scatter_(v0 > 0.3, v0)"), OVERLAP),
        (_program("v1 = v0[:, :1].expand(4, 4)", "v2, v3 = torch.median(v1, 1)"), MEDIAN),
        (_program("v1 = v0 * 0", "v2, v3 = v1.median(0)"), MEDIAN),
        (
            _program("v1 = v0.unfold(-1, 2, 1)", "v2 = torch.select_scatter(v1, v1[0], 0, 1)"),
            SHARED_RESULT,
        ),
        (
            _program(
                "v1 = torch.sgn(v0)",
                "w.weighted(v1.sin()).backward(retain_graph=True)",
                "w.weighted(v0.sin()).backward()",
                shape=(),
                placement=Replicate(),
                grad=True,
            ),
            ZERO_TENSOR,
        ),
        (
            _program(
                "_ = v0.register_hook(lambda g: g * -0.75)",
                "v1 = torch.sgn(v0.unsqueeze(0))",
                "w.weighted(v1).backward()",
                shape=(),
                dtype=torch.float32,
                placement=Replicate(),
                grad=True,
            ),
            ZERO_TENSOR,
        ),
        (
            _program(
                "v1 = F.batch_norm(v0.detach(), None, None, bias=v0[0], training=True)",
                "v2 = torch.autograd.grad(v1.sin().sum(), v0, create_graph=True)[0]",
                "v2.sum().backward()",
                grad=True,
            ),
            BIAS_ALONE,
        ),
        (
            _program(
                "v1 = v0 * 1",
                "v2 = v1.detach().requires_grad_()",
                "w.weighted(torch.vstack([v0, v2]).sum(0)).backward()",
                "w.weighted(v2.sin()).backward()",
                shape=(4,),
                placement=Replicate(),
                grad=True,
            ),
            SHARED_GRADIENT,
        ),
        (
            _program(
                "v1 = v0 * 1",
                "v2 = v1[0:0]",
                "v1.mul_(2)",
                "v3 = torch.autograd.grad(v2.sin().sum(), v0, create_graph=True)[0]",
                grad=True,
            ),
            EMPTY_VIEW,
        ),
        (
            _program(
                "v1 = v0[:1].expand(4, 4).detach().requires_grad_()",
                "v2 = v1[2]",
                "with torch.no_grad(): v0.relu_()",
                "w.weighted(v2.sin()).backward()",
            ),
            SHARED_VIEW,
        ),
        (KINK, ROUNDING),
        (KINK.with_item(0, replace(KINK.items[0], dtype=torch.float32)), ROUNDING),
    ],
)
def test_what_torch_does_not_define_is_counted_by_reason(program, reason):
    outcome = play_alone(program)
    assert (outcome.kind, outcome.aspect) == ("undefined", reason)
    assert reason in REASONS
    result = Result(program.seed, program.mesh, 2, outcome.kind, outcome.aspect, outcome.note)
    assert f"undefined     1 times: {reason}" in summary([result])
    assert not failures([result])


@pytest.mark.parametrize(
    "steps",
    [
        ("v0.copy_(v0)",),
        ("v0.mul_(v0)",),
        ("v1 = v0.detach()", "v0.add_(v1)"),
        ("v1, v2 = v0.split(2)", "v1.add_(v2)"),
        ("v1 = v0[::2]", "v0[1::2].copy_(v1)"),
        ("v1, v2 = v0.median(0)",),
        ("v0[v0 > 0.3] = 0.25",),
        ("v1 = torch.select_scatter(v0.t(), v0[:, 0], 0, 1)", "v1.sin_()"),
        ("v1 = torch.diagonal_scatter(v0[:1].expand(4, 4), v0[0])", "v1.sin_()"),
    ],
)
def test_what_torch_defines_is_compared(steps):
    assert Reference(_program(*steps)).undefined is None
    assert play_alone(_program(*steps, placement=Shard(1))).kind == "ok"


def test_a_view_of_an_expanded_tensor_that_is_not_taken_again_is_compared():
    steps = ("v1 = v0[:1].expand(4, 4).detach().requires_grad_()", "w.weighted(v1[2]).backward()")
    assert play_alone(_program(*steps)).kind == "ok"


@pytest.mark.parametrize(("written", "entries"), [("v0.sin()", "0:0"), ("v1.mul_(2)", "0:1")])
def test_a_view_that_is_not_taken_again_or_has_entries_is_compared(written, entries):
    loss = "v3 = torch.autograd.grad(v2.sin().sum(), v0, create_graph=True)[0]"
    program = _program("v1 = v0 * 1", f"v2 = v1[{entries}]", written, loss, grad=True)
    assert play_alone(program).kind == "ok"


def test_watching_does_not_change_what_one_device_gives():
    loss = "v2 = torch.autograd.grad(w.weighted(v1), v0, create_graph=True)[0]"
    steps = ["v1 = torch.prod(v0, 1, keepdim=True)", loss]
    assert play_alone(_program(*steps, shape=(1, 1), grad=True)).kind == "ok"


def test_what_comes_before_the_undefined_is_compared(monkeypatch):
    monkeypatch.setattr(Sharded, "round_trip", _twice)
    program = _program("v1 = w.round_trip(v0)", "v2 = v0[:, 2]", "v0.copy_(v2)")
    assert play_alone(program).kind == "wrong"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_wrong_number_is_not_rounding(wrong_sine, dtype):
    program = _program("v1 = torch.sin(v0)", dtype=dtype, placement=Partial())
    assert play_alone(program).kind == "wrong"


def test_an_entry_next_to_a_kink_is_not_asked_for():
    assert not steady(KINK)
    assert steady(KINK.upto(2))


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        ("v4 = torch.logical_xor(v3, v1)", False),
        ("v4 = v3 > 0", False),
        ("v4 = v3.bool()", False),
        ("v4 = torch.nonzero(v3)", False),
        ("v4 = torch.zeros(2, 3, 4).bool().copy_(v3)", False),
        ("v4 = v3 > 0.3", True),
        ("v4 = v3 == v3", True),
        ("v4 = torch.logical_not(v0)", True),
        ("v4 = v3.sin()", True),
        ("v4 = torch.poisson(v3.abs())", False),
        ("v4 = torch.poisson(v0.abs())", True),
        ("v4 = F.dropout(v3)", True),
    ],
)
def test_the_truth_of_what_cancellation_leaves_is_not_asked_for(step, kept):
    steps = ["v1 = v0.sum()", "v2 = v0.expand(2, 3, 4)", "v3 = F.instance_norm(v2, eps=0.1)"]
    program = _program(*steps, step, shape=(2, 3, 1), dtype=torch.float32, grad=True)
    assert steady(program) == kept


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        ("v1 = torch.argmax(v0)", False),
        ("v1 = torch.argmax(v0, 0)", False),
        ("v1 = torch.max(v0, 0)[1]", False),
        ("v1 = torch.argsort(v0, 0)", False),
        ("v1 = torch.cummax(v0, 0)[1]", False),
        ("v1 = torch.argmin(v0)", True),
        ("v1 = torch.argmax(v0, 1)", True),
        ("v1 = torch.max(v0, 1)[1]", True),
        ("v1 = torch.argmax(v0[1:])", True),
        ("v1 = torch.argmax(v0[:2, :1].expand(2, 4), 1)", True),
        ("v1 = torch.argmax(v0.int())", True),
    ],
)
def test_places_of_entries_that_are_next_to_each_other_are_not_asked_for(step, kept):
    rows = [[1.0, 3.875], [2.0, 3.8750001], [0.5, 1.5]]
    write = f"v0.copy_(torch.tensor({rows}))"  # in place: rounding errors are not added to it
    assert steady(_program(write, step, shape=(3, 2), dtype=torch.bfloat16)) == kept


def test_a_wrong_place_is_wrong(wrong_rule):
    wrong_rule(torch.ops.aten.argmax.default, Choice((Shard(0),), (Partial("max"),)))
    program = _program("v1 = torch.argmax(v0)", dtype=torch.bfloat16)
    assert steady(program)
    assert play_alone(program).kind == "wrong"


def test_an_equal_entry_is_found_in_any_place():
    for first, second in itertools.combinations(range(12), 2):
        x = torch.arange(12.0)
        x[first] = x[second] = 20
        with Kinks() as kinks:
            x.argmax()
        assert kinks.found


@pytest.mark.parametrize(
    ("fn", "at"),
    [(torch.ceil, 1.0), (torch.floor, 2.0), (torch.round, 0.5), (lambda x: x.remainder(3), 6.0)],
    ids=["ceil", "floor", "round", "remainder"],
)
def test_a_number_at_which_an_op_jumps_is_found(fn, at):
    for value, found in ((at, True), (at + 0.1, False)):
        with Kinks() as kinks:
            fn(torch.tensor([0.3, value]))
        assert kinks.found == found


def test_a_zero_tensor_that_backward_makes_is_not_read():
    x = torch.rand(3, requires_grad=True)
    with Kinks() as kinks:
        torch.sgn(x * 2).sum().backward()
        # In a mode, torch itself would read the memory that a ZeroTensor has not.
        torch.ops.aten.mul.Scalar(torch._efficientzerotensor(3), 0.5)
    assert not kinks.found


def test_a_step_does_not_depend_on_who_has_asked_for_a_leaf():
    """Torch refuses to write to a view of what was written to until somebody asks."""
    steps = ["v1 = v0.t()", "v2 = w.leaf((4,), torch.float64, [Shard(0)], 1, grad=True)"]
    program = _program(*steps, "v1[1, :] = v2", "v1.mul_(2)", "v1.sum().backward()")
    assert play_alone(program).kind == "ok"


def test_the_graph_of_a_gradient_keeps_what_came_through_a_door():
    row = next(row for row in AUTOGRAD if getattr(row, "__name__", "") == "_grad")
    found = set()
    for seed in range(40):
        growth = Growth(seed, (2,))
        growth.hand.new((2, 3), torch.float64, grad=True)
        growth._add_leaves()
        assert growth._try(Draft("v0.sin()"))
        draft = row(growth.hand)
        found.add("full_tensor" in draft.code)
        assert draft.frozen == (("v1",) if "full_tensor" in draft.code else ())
    assert found == {True, False}


def test_a_step_that_raises_leaves_no_context_to_later_programs(monkeypatch):
    """As `checkpoint` does in torch 2.11: its generator ends when its frame does."""

    def contexts():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, _fail(ValueError("stale"))):
            yield

    def checkpoint(fn, x, use_reentrant):
        waiting = contexts()
        next(waiting)
        result = fn(x)
        next(waiting, None)
        return result

    monkeypatch.setitem(_NAMES, "checkpoint", checkpoint)
    raising = "v1 = checkpoint(lambda t: t.tanh()[:1], v0, use_reentrant=False)"
    failed = run(_program(raising, shape=(), placement=Replicate(), grad=True), OneDevice())
    assert isinstance(failed.error, IndexError)
    later = _program("v1 = v0.sin() * v0", "v1.sum().backward()", grad=True)
    assert play_alone(later).kind == "ok"


def test_a_view_that_nobody_may_use_is_refused():
    program = _program("v1 = v0 * 1", "v2 = v1.as_strided((2,), (2,))", "v1.add_(v3)")
    tracked = Leaf("v3", (4, 4), torch.float64, (Shard(0),), None, True)
    program = replace(program, items=(tracked, *program.items))
    outcome = play_alone(program)
    assert (outcome.kind, outcome.slot) == ("refused", "v2")
