"""A rank is killed at a random step; the job ends, names it, and goes on from the checkpoint."""

import random

import pytest
import resume_programs as programs

import shardwise
from shardwise.checkpoint import Checkpoints, verify
from shardwise.launch import launch

pytestmark = pytest.mark.processes


def test_killed_and_resumed_bit_for_bit(tmp_path):
    straight = launch(programs.train, 2, str(tmp_path / "straight"))[0]
    chance = random.Random(4)
    for number in range(4):
        folder = tmp_path / str(number)
        during_save = number % 2 == 1
        steps = range(programs.EVERY - 1, programs.NUM_STEPS, programs.EVERY)
        step = chance.choice(list(steps)) if during_save else chance.randrange(programs.NUM_STEPS)
        rank = chance.randrange(2)
        with pytest.raises(shardwise.LaunchError, match=f"Rank {rank} was killed by SIGKILL"):
            launch(programs.train, 2, str(folder), (rank, step), during_save)
        checkpoints = Checkpoints(folder)
        whole = step // programs.EVERY * programs.EVERY
        assert (checkpoints.latest() or 0) in (whole, *([step + 1] if during_save else []))
        for saved in checkpoints.steps():
            assert verify(checkpoints.path(saved)).ok
        assert launch(programs.train, 2, str(folder))[0] == straight
    # On another number of ranks the sums come in another order.
    other = tmp_path / "other"
    with pytest.raises(shardwise.LaunchError):
        launch(programs.train, 2, str(other), (1, 7), False)
    assert launch(programs.train, 3, str(other))[0] == pytest.approx(straight, rel=1e-5)
