"""Checkpoints of real processes: the same files as a simulated world's, and errors on all ranks."""

import checkpoint_programs as programs
import pytest

import shardwise
from shardwise.checkpoint import inspect, verify

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
