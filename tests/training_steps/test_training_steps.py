"""The prover of training steps: drawn cases are right or refused, and it finds what is wrong."""

import dataclasses
import itertools

import pytest
import torch

from shardwise import simulate
from shardwise.errors import ArgumentError, LayoutError
from shardwise.parallel import data_parallel
from shardwise.testing.loop import OPTIONS
from shardwise.testing.training import TrainingOutcome, judge, play, play_alone
from tests.training_steps.__main__ import MESHES, draw_cases, main
from tests.training_steps.case import Door, StepCase, prove, training_of
from tests.training_steps.models import KINDS

pytestmark = pytest.mark.slow

NUM_CASES, NUM_PARTS = 600, 6


def case(text):
    return StepCase.parse(text)


def verdict(text):
    (found,) = prove([case(text)])
    return found


def assert_right(verdicts, num_ok):
    wrong = [str(each) for each in verdicts if each.kind == "wrong"]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(verdicts)} are wrong", *wrong])
    # A tool that is refused everything finds no mistake either.
    assert sum(each.kind == "ok" for each in verdicts) >= num_ok


@pytest.fixture(scope="module")
def drawn():
    return draw_cases(NUM_CASES, seed=0)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_drawn_cases_in_simulated_worlds(drawn, part):
    """Cases of one mesh are in one part: what one of them has planned, the next ones find."""
    cases = sorted(drawn, key=lambda case: str(case.mesh))
    size = NUM_CASES // NUM_PARTS
    assert_right(prove(cases[part * size : (part + 1) * size]), num_ok=65)


@pytest.mark.processes
def test_drawn_cases_in_processes():
    cases = draw_cases(72, seed=1, in_processes=True)
    assert_right(prove(cases, in_processes=True), num_ok=60)


@pytest.mark.processes
def test_shards_of_tensor_parallel_weights_in_processes():
    """A process knows the ranks of its own submesh alone."""
    case = StepCase.parse("bags | tp=2,dp=2 | dp(dp); tp(tp); fs(dp) | freeze, sum | foreach | 475")
    assert_right(prove([case], in_processes=True), num_ok=1)


# What was found to be wrong once, one case each.
FOUND = {
    "a penalty, and backward of some inputs after others": (
        "adapters | dp=3 | fs(dp); dp(dp) | inputs, penalty, pickle | sgd | 302"
    ),
    "a penalty on the inputs of a group that is frozen": (
        "norms | dp=2,tp=1 | tp; fs(dp)@*; fs(dp) | late, penalty, sum | foreach | 674"
    ),
    "norms that no plan names": "norms | dp=2,tp=1 | tp; fs(dp) |  | sgd | 0",
    "and a replicating axis": "norms | rep=2,shard=2,tp=1 | tp; fs(shard); dp(rep) |  | sgd | 0",
    "styles alone on two axes": "norms | dp=2,tp=2 | tp |  | sgd | 0",
    "shards of a replicated model": "bags | dp=2 | replicate; fs(dp) |  | sgd | 0",
    "flattened axes after shards": (
        "tied | rep=2,shard=2,tp=2 | tp; fs(shard); dp(rep*shard) |  | sgd | 0"
    ),
    "after sharded tables": "bags | dp=2 | sm(0); dp(dp) |  | sgd | 0",
    "nested on another axis": "tied | rep=2,shard=2 | dp(rep)@*; dp(shard) |  | sgd | 0",
    "nested in part": "tied | rep=2,shard=2 | dp(rep)@body; dp(shard) |  | sgd | 0",
    "unfrozen later": "norms | dp=2 | dp(dp) | late | sgd | 0",
    "fused tables, unsharded": "fused_sgd | dp=2 | dp(dp) |  | sgd | 0",
    "fused tables on a part of the mesh": (
        "fused_sgd | host=2,dev=2 | tables(dev,row_wise); dp(host*dev) |  | sgd | 0"
    ),
    "gradients of rows": "sparse_bags | dp=2 | dp(dp) |  | sgd | 0",
    "gradients of rows of tables": "sparse_tables | dp=2 | dp(dp) |  | sgd | 0",
    "gradients of rows in shards": "sparse_bags | dp=2 | dm; fs(dp) |  | sgd | 0",
    "gradients of rows of a plain table": "sparse_bags | tp=2 | tp |  | adagrad | 0",
    "double backward": "norms | tp=2 | tp | penalty | sgd | 0",
    "double backward, own batches": "norms | dp=2,tp=2 | tp; dp(dp) | penalty | sgd | 0",
    "a tied bias": "bert | tp=2 | tp | save | sgd | 0",
    "a tied bias whose layer is named": "bert_decoder | tp=2 | tp | save | sgd | 0",
    "hooks of unused parameters": "norms | dp=2 | fs(dp) | hooks, unused | sgd | 0",
    "a checkpoint in a second backward": "norms | dp=2 | fs(dp) | losses, recompute | sgd | 0",
    "and for some parameters": "norms | dp=2,tp=1 | tp; fs(dp) | inputs, recompute | sgd | 0",
    "a GradScaler and rows of tables": (
        "sparse_tables | dp=2 | tables(dp,row_wise); dp(dp) | scale | sgd | 0"
    ),
}


@pytest.mark.parametrize("text", FOUND.values(), ids=FOUND)
def test_found_once(text):
    found = verdict(text)
    assert found.kind != "wrong", str(found)


# -- what it finds ---------------------------------------------------------------------------


RIGHT = "norms | dp=2 | dp(dp) | clip, save | momentum | 0"


def test_a_right_case_is_ok():
    assert verdict(RIGHT).kind == "ok"


def test_a_reduction_that_is_left_out_is_found(monkeypatch):
    monkeypatch.setattr("tests.training_steps.case.data_parallel", lambda module, mesh: module)
    assert verdict(RIGHT).kind == "wrong"


def halved(module, mesh):
    """As a reduction by two mechanisms would be: everybody agrees, on a wrong gradient."""
    data_parallel(module, mesh)
    for parameter in module.parameters():
        parameter.register_hook(lambda grad: grad / 2)
    return module


def test_a_gradient_of_another_size_is_found(monkeypatch):
    monkeypatch.setattr("tests.training_steps.case.data_parallel", halved)
    found = verdict("norms | dp=2 | dp(dp) |  | sgd | 0")
    assert found.kind == "wrong"
    assert "off by" in found.text


def test_a_parameter_that_is_left_out_is_found(monkeypatch):
    def forgetful(module, mesh):
        module.gain.requires_grad_(False)
        return data_parallel(module, mesh)

    monkeypatch.setattr("tests.training_steps.case.data_parallel", forgetful)
    found = verdict("norms | dp=2 | dp(dp) | save | sgd | 0")
    assert "parameters gain off by 1e+02%" in found.text


@pytest.mark.parametrize(
    ("error", "kind"), [(LayoutError("not here"), "refused"), (KeyError("x"), "wrong")]
)
def test_an_error_is_a_refusal_when_it_is_one_of_shardwise(monkeypatch, error, kind):
    def refuse(module, mesh):
        raise error

    monkeypatch.setattr("tests.training_steps.case.data_parallel", refuse)
    assert verdict(RIGHT).kind == kind


def test_an_error_after_the_first_step_is_no_refusal(monkeypatch):
    def tired(module, mesh):
        calls = itertools.count()

        def refuse(*_):
            if next(calls):
                raise LayoutError("not twice")

        module.register_forward_pre_hook(refuse)
        return data_parallel(module, mesh)

    monkeypatch.setattr("tests.training_steps.case.data_parallel", tired)
    found = verdict(RIGHT)
    assert found.kind == "wrong"
    assert "not twice" in found.text


@pytest.fixture
def outcomes(tmp_path):
    training = training_of(case("norms | dp=2 | dp(dp) | copy | sgd | 0"))
    with simulate(2):
        return training, play(training, tmp_path)


def test_a_rank_that_drifts_is_found(outcomes, tmp_path):
    training, (first, second) = outcomes
    moved = second.parameters["gain"] * (1 + 1e-6)
    second = dataclasses.replace(second, parameters={**second.parameters, "gain": moved})
    found = judge(training, [first, second], tmp_path)
    assert found.kind == "wrong"
    assert found.text.startswith("on rank 1: parameters gain off by")


def test_a_copied_module_that_moves_on_is_found(outcomes, tmp_path):
    training, held = outcomes
    moved = [dataclasses.replace(each, left=each.parameters) for each in held]
    assert "left" in judge(training, moved, tmp_path).text


def test_ranks_that_refuse_differently_are_wrong(outcomes, tmp_path):
    training, (first, _) = outcomes
    refused = TrainingOutcome(refused="LayoutError: not here")
    assert judge(training, [first, refused], tmp_path).kind == "wrong"
    assert judge(training, [refused, refused], tmp_path).kind == "refused"


# -- drawing and text ------------------------------------------------------------------------


def test_cases_are_drawn_alike_and_cover_what_there_is(drawn):
    assert drawn == draw_cases(NUM_CASES, seed=0)
    assert drawn[:20] != draw_cases(20, seed=1)
    assert {each.kind for each in drawn} == set(KINDS)
    assert len({each.mesh for each in drawn}) == len(MESHES)
    assert {option for each in drawn for option in each.options} == set(OPTIONS)
    tried = {(each.kind, option) for each in drawn for option in each.options}
    possible = {(name, o) for name, kind in KINDS.items() for o in OPTIONS if o not in kind.without}
    assert len(tried) > 0.9 * len(possible)


@pytest.mark.parametrize("each", draw_cases(40, seed=2), ids=str)
def test_text_of_a_case_says_it_all(each):
    assert StepCase.parse(str(each)) == each


@pytest.mark.parametrize(
    "text",
    [
        "norms",
        "nobody | dp=2 | dp(dp) |  | sgd | 0",
        "norms | dp=2 | dq(dp) |  | sgd | 0",
        "norms | dp=2 | dp(rep) |  | sgd | 0",
        "norms | dp=2 | dp(dp) | clop | sgd | 0",
        "norms | dp=2 | dp(dp) |  | sgd | x",
    ],
)
def test_a_text_that_is_no_case_is_refused(text, capsys):
    with pytest.raises(ArgumentError):
        StepCase.parse(text)
    assert main(["--replay", text]) == 2


def test_a_batch_differs_along_the_axes_that_a_door_was_given():
    def axes(doors):
        mesh = "rep=2,shard=2,tp=2"
        return case(f"norms | {mesh} | {doors} |  | sgd | 0").data_axes

    assert axes("fs(shard)") == ("shard",)
    assert axes("tp") == ("rep", "shard")
    assert axes("fs(shard); dp(rep)") == ("rep", "shard")
    assert axes("dp(rep*shard)@body") == ("rep", "shard")
    assert Door.parse("sm(1)").detail == "1"


def test_command_line(capsys):
    assert main(["--replay", RIGHT, "-v"]) == 0
    assert "1 ok" in capsys.readouterr().out
    assert main(["--cases", "2", "--seed", "3", "--part", "1/2", "--workers", "1"]) in (0, 1)
    assert "1 cases" in capsys.readouterr().out


def test_one_device_trains_otherwise_with_most_options():
    """Those that change what one device computes do, so that none is played in vain."""
    plain = _alone("norms | dp=2 | dp(dp) |  | momentum | 0")
    same = {"copy", "pickle", "recompute", "unused", "save", "zeros"}
    same |= {"average", "evaluate", "scale", "inputs"}
    for option in OPTIONS:
        found = _alone(f"norms | dp=2 | dp(dp) | {option} | momentum | 0")
        assert torch.equal(found.double(), plain) == (option in same), option


def _alone(text):
    return play_alone(training_of(case(text)))[0].parameters["head.weight"]
