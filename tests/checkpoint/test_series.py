"""Series of checkpoints: what is kept, what is skipped, and what dead jobs left."""

import os

import pytest
import torch

from shardwise import CheckpointError, CheckpointWarning
from shardwise.checkpoint import Checkpoints
from shardwise.checkpoint.claim import Claim
from shardwise.checkpoint.index import INDEX_NAME


@pytest.fixture
def run(tmp_path):
    """A function that saves steps, and sets when each was completed: a second apart."""
    clock = [1_000_000_000]

    def save(series, *steps):
        for step in steps:
            series.save(step, {"x": torch.full((100,), float(step)), "step": step})
            clock[0] += 1
            os.utime(series.path(step) / INDEX_NAME, (clock[0], clock[0]))

    return save


def loaded(series, step):
    return series.load({"x": torch.zeros(100), "step": 0}, step)["step"]


def test_a_lower_step_that_was_just_saved_stays(run, tmp_path):
    series = Checkpoints(tmp_path, keep=1)
    run(series, 30, 20)
    assert series.steps() == [20]
    assert loaded(series, None) == 20


def test_the_oldest_by_time_goes(run, tmp_path):
    series = Checkpoints(tmp_path, keep=2)
    run(series, 30, 10, 20)
    assert series.steps() == [10, 20]
    run(Checkpoints(tmp_path, keep=2), 5)  # another job
    assert series.steps() == [5, 20]


def test_what_a_job_was_rolled_back_to_stays(run, tmp_path):
    run(Checkpoints(tmp_path), 20, 30)
    series = Checkpoints(tmp_path, keep=2)
    assert loaded(series, 20) == 20
    run(series, 25)
    assert series.steps() == [20, 25]
    run(series, 26)
    assert series.steps() == [25, 26]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_with_one_to_keep_the_loaded_one_stays_until_the_second_save(run, tmp_path, asynchronous):
    run(Checkpoints(tmp_path), 20, 30)
    series = Checkpoints(tmp_path, keep=1)
    loaded(series, 20)
    save = series.save_async if asynchronous else series.save
    save(25, {"step": 25})
    assert series.latest() == 25
    assert series.steps() == [20, 25]
    save(26, {"step": 26})
    assert series.latest() == 26
    assert 20 not in series.steps() or asynchronous  # a save in the background trims at its start


@pytest.mark.parametrize("step", [-1, -5, 1.5, "3", None, True])
def test_steps_that_are_none(tmp_path, step):
    series = Checkpoints(tmp_path)
    for save in (series.save, series.save_async):
        with pytest.raises(CheckpointError, match="A step is a number from 0 on"):
            save(step, {"x": 1})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keep", [0, -1, 1.5, "2", True])
def test_numbers_to_keep_that_are_none(tmp_path, keep):
    with pytest.raises(CheckpointError, match="At least one checkpoint is kept, found keep="):
        Checkpoints(tmp_path, keep=keep)


def test_what_dead_jobs_left_is_removed_and_what_lives_is_not(run, tmp_path):
    series = Checkpoints(tmp_path)
    for name in (".step-00000001.half", ".step-00000002.half-abc", ".step-00000003.half-def"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001-of-00001.safetensors").write_text("some bytes")
    (tmp_path / ".step-00000002.lock").write_text("process 1 on elsewhere")
    (tmp_path / ".other.half-abc").mkdir()
    alive = Claim(tmp_path / "step-00000003")
    run(series, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".other.half-abc",
        ".step-00000003.half-def",
        ".step-00000003.lock",
        "step-00000004",
    ]
    alive.release()
    run(series, 5)
    assert not list(tmp_path.glob(".step-*"))


def damage(series, step, name=None):
    (file,) = series.path(step).glob("*.safetensors")
    file = file if name is None else series.path(step) / name
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def test_a_damaged_latest_one_is_skipped_and_named(run, tmp_path):
    series = Checkpoints(tmp_path)
    run(series, 10, 20, 30)
    damage(series, 30)
    damage(series, 20, INDEX_NAME)
    state = {"x": torch.zeros(100), "step": 0}
    assert series.latest() == 30
    with pytest.raises(CheckpointError, match="step-00000030"):
        series.load_latest(state)
    with pytest.warns(CheckpointWarning, match="Step 10 was loaded. Step 30 is damaged: .*Step 20"):
        assert series.load_latest(state, fallback=True)["step"] == 10
    assert state["x"].tolist() == [10.0] * 100


def test_a_state_that_does_not_fit_is_no_damage(run, tmp_path):
    """An older checkpoint must not be taken because the newer one is of another model."""
    series = Checkpoints(tmp_path)
    run(series, 10)
    series.save(20, {"x": torch.ones(3), "step": 20})
    with pytest.raises(CheckpointError, match=r"x has shape \(3,\)"):
        series.load_latest({"x": torch.zeros(100), "step": 0}, fallback=True)


def test_when_all_are_damaged_or_there_is_none(run, tmp_path):
    series = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        series.load_latest({"x": 0}, fallback=True)
    run(series, 10)
    damage(series, 10)
    with pytest.raises(CheckpointError, match=r"Every checkpoint in .* is damaged. Step 10"):
        series.load_latest({"x": torch.zeros(100)}, fallback=True)
