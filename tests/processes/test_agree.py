"""`agree` finds what one rank does differently, and tells all ranks."""

import re

import agree_programs as programs
import pytest

from shardwise.comm.collectives import GRACE_S
from shardwise.launch import launch

pytestmark = pytest.mark.processes


def check(heard, mistake):
    """All ranks raise one error, which names the guilty rank, the call and its line."""
    assert len(set(heard)) == 1
    text = heard[0]
    assert text.startswith("RankMismatchError: ")
    assert programs.MISTAKES[mistake] in text
    if mistake == "other seed":
        assert re.search(r"ranks 0-1, 3: state \w{4}; rank 2: state \w{4}", text)
    else:
        assert "ranks 0-1, 3: " in text
        assert "rank 2: " in text
    assert re.search(r"at agree_programs\.py:\d+", text)


@pytest.mark.parametrize("mistake", programs.MISTAKES)
def test_a_mistake_of_one_rank_is_found_before_a_collective(processes, mistake):
    check(processes(programs.train, mistake, "collective"), mistake)


@pytest.mark.parametrize("mistake", [m for m in programs.MISTAKES if m not in programs.PARTING])
def test_a_mistake_of_one_rank_is_found_after_the_step(processes, mistake):
    check(processes(programs.train, mistake, "step"), mistake)
    check(processes(programs.train, mistake, 2), mistake)


@pytest.mark.parametrize(
    ("what", "said"), [("shape", "Layout((8, 4), torch.float32"), ("dtype", "torch.float64")]
)
def test_another_tensor_is_found_before_it_is_sent(processes, what, said):
    heard = set(processes(programs.distribute, what))
    assert len(heard) == 1
    text = heard.pop()
    assert "ranks 0-1, 3: distribute_tensor as Layout((8, 8), torch.float32, [S(0)]" in text
    assert f"rank 2: distribute_tensor as Layout((8, {4 if what == 'shape' else 8}), " in text
    assert said in text


def test_ranks_that_agree(processes):
    for every in ("collective", "step", 2):
        assert processes(programs.train, None, every) == [None] * 4


@pytest.mark.parametrize("every", ["collective", "step"])
def test_ranks_of_two_axes_agree(processes, every):
    """Along one of them, what the lines of the mesh send may differ in size."""
    assert processes(programs.train_on_two_axes, every) == [None] * 4


@pytest.mark.parametrize("mistake", programs.PARTING)
def test_a_mistake_after_which_no_step_ends(mistake):
    """Ranks that fail, or wait in vain, compare what they ran since the last step."""
    check(launch(programs.train, 4, mistake, "step", collective_timeout_s=3), mistake)


def test_a_rank_that_fails_alone_is_named_by_those_that_wait():
    # Longer than the rank that fails listens to the others, who would tell it what differs.
    said = launch(programs.fail_alone, 4, collective_timeout_s=GRACE_S + 4)
    assert said[programs.GUILTY] == "ValueError: a bad row"
    for rank in {*range(4)} - {programs.GUILTY}:
        assert said[rank].startswith("RankMismatchError: ")
        assert "rank 2: nothing more before ValueError: a bad row." in said[rank]


def test_an_error_of_all_ranks_stays_what_it_is(processes):
    assert processes(programs.fail_together) == ["ValueError: a bad batch"] * 4
