"""Checkpoints of real processes: the same files as a simulated world's, and errors on all ranks."""

import multiprocessing
import random
import time

import checkpoint_programs as programs
import pytest

import shardwise
from shardwise import launch as jobs
from shardwise.checkpoint import Checkpoints, inspect, verify
from shardwise.launch import PRELOADED, launch

pytestmark = pytest.mark.processes


def test_both_worlds_write_the_same_files(processes, tmp_path):
    processes(programs.save_here, tmp_path / "real")
    with shardwise.simulate(4):
        programs.save_here(tmp_path / "simulated")
    names = sorted(p.name for p in (tmp_path / "real").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "simulated").iterdir())
    for name in names:
        real, simulated = tmp_path / "real" / name, tmp_path / "simulated" / name
        assert real.read_bytes() == simulated.read_bytes(), name
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_processes_load_what_another_world_saved(processes, tmp_path):
    with shardwise.simulate(3):
        mesh = shardwise.init_device_mesh("cpu", (3,))
        state = {
            n: shardwise.distribute_tensor(v, mesh, [shardwise.Shard(0)])
            for n, v in programs.wholes().items()
        }
        plain = programs.torch.arange(4)
        shardwise.checkpoint.save({"x": state, "plain": plain, "step": 7}, tmp_path / "saved")
    assert processes(programs.load_here, tmp_path / "saved") == [True] * 4
    assert processes(programs.load_here, tmp_path / "saved", (2, 2)) == [True] * 4


def test_a_rank_reads_what_it_needs(processes, tmp_path):
    """Once to check it, once to copy it; never the rest."""
    quarter = 4096 * 4096 * 4 // 4
    assert processes(programs.bytes_read, tmp_path / "saved") == [2 * quarter] * 4
    assert {size // 2**20 for size in inspect(tmp_path / "saved").files.values()} == {16}


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (programs.save_what_differs, "step is 0 on one and 1 on another"),
        (programs.save_shapes_that_differ, "Ranks disagree on x"),
        (programs.save_what_one_rank_cannot, "On rank 2: x is a function"),
        (programs.save_to_different_places, "Ranks 0 and 3 save to different places"),
        (programs.save_different_steps, "step-00000010 and"),
    ],
)
def test_what_one_rank_does_wrong_all_ranks_hear(processes, tmp_path, program, words):
    errors = processes(program, tmp_path / "saved")
    assert len(set(errors)) == 1
    assert words in errors[0]
    assert not list(tmp_path.iterdir())


def test_damage_that_one_rank_finds_stops_all(processes, tmp_path):
    processes(programs.save_four_parts, tmp_path / "saved")
    name = "model-00004-of-00004.safetensors"
    file = tmp_path / "saved" / name
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    for error, loaded in processes(programs.load_damaged, tmp_path / "saved", 3):
        assert error.startswith("CheckpointError: On rank 3:")
        assert name in error
        assert loaded == 0, "half loaded"


def test_saves_in_the_background(processes, tmp_path):
    for step, values, steps in processes(programs.save_twice_in_the_background, tmp_path):
        # The oldest goes when the next save begins.
        assert (step, values, steps) == (3, [3.0], [1, 2, 3])
    assert verify(tmp_path / "last").ok


def test_ranks_with_layers_of_their_own(processes, tmp_path):
    assert processes(programs.stages, tmp_path / "saved") == [[0.0], [1.0], [2.0], [3.0]]


def test_what_one_rank_refuses_no_rank_keeps(processes, tmp_path):
    for error, x, table in processes(programs.load_what_one_rank_refuses, tmp_path / "saved"):
        assert "On rank 2: object refuses what was saved: KeyError: 'mode'" in error
        assert (x, table) == ([0, 0], [0, 0, 0]), "half loaded"


def test_an_optimizer_that_differs_on_one_rank(processes, tmp_path):
    for error, loaded in processes(programs.load_into_optimizers_that_differ, tmp_path / "saved"):
        assert "On rank 1: The state does not fit" in error
        assert not loaded


def test_ranks_that_train_layers_of_their_own(processes, tmp_path):
    assert processes(programs.stages_with_optimizers, tmp_path / "saved") == [True] * 4


def test_ranks_skip_a_damaged_checkpoint_together(processes, tmp_path):
    found = processes(programs.load_past_a_damaged_one, tmp_path)
    assert [(step, values) for step, values, _ in found] == [(1, [1.0])] * 4
    assert [len(warnings) for *_, warnings in found] == [1, 0, 0, 0]
    assert "Step 1 was loaded. Step 2 is damaged:" in found[0][2][0]


def test_a_rank_is_done_when_its_saves_are(tmp_path, monkeypatch):
    """Even if that takes longer than the launcher gives processes to end."""
    monkeypatch.setattr(jobs, "GRACE_S", 0.3)
    assert launch(programs.end_during_a_save, 2, tmp_path / "saved", 2, False) == [0, 1]
    assert verify(tmp_path / "saved").ok


def test_a_save_that_fails_after_the_function_has_returned_fails_the_job(tmp_path):
    with pytest.raises(shardwise.CheckpointError, match="On rank 0: No space left on device"):
        launch(programs.end_during_a_save, 2, tmp_path / "saved", 0.5, True)
    assert not list(tmp_path.iterdir())


def test_killed_at_any_moment_of_a_save(tmp_path):
    """What is there is whole, nothing is lost that was there, and the next save tidies up."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    series, chance, latest = Checkpoints(tmp_path, keep=2), random.Random(3), 0
    for _ in range(8):
        process = context.Process(target=programs.save_for_ever, args=(tmp_path,))
        process.start()
        deadline = time.monotonic() + 60
        while (series.steps() or [0])[-1] <= latest:
            assert time.monotonic() < deadline, "it saves nothing"
            time.sleep(0.002)
        time.sleep(chance.random() * 0.03)
        process.kill()
        process.join()
        steps = series.steps()
        assert steps[-1] > latest
        for step in steps:
            assert verify(series.path(step)).ok
        latest = steps[-1]
    series.save(latest + 1, {"step": latest + 1})
    assert [p.name for p in tmp_path.iterdir() if p.name[0] == "."] == []
