"""Who writes a checkpoint: one job at a time, to its end, and nothing that cannot be loaded."""

import errno
import fcntl
import os
import subprocess
import sys
import time

import pytest
import torch
from time_limit import cpu_limit

import shardwise.checkpoint.index
import shardwise.checkpoint.saving
from shardwise import CheckpointError
from shardwise.checkpoint import convert, load, save, save_async, verify
from shardwise.checkpoint.claim import Claim
from shardwise.checkpoint.saving import ChunkToWrite, _keys
from shardwise.core.box import Box

DEEP = []
for _ in range(400):
    DEEP = [DEEP]


# -- what is saved can be loaded ---------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"v": [[] for _ in range(300)]},
        {"v": [[i] for i in range(20_000)]},
        {"v": {i: {} for i in range(5000)}},
        {"v": [[[[[[]]]]]] * 100},
    ],
    ids=["empty lists", "lists of one", "tables", "nested"],
)
def test_plain_values_of_many_lists(tmp_path, values):
    save(values, tmp_path / "saved")
    assert load({"v": None}, tmp_path / "saved") == values


def test_a_tensor_with_the_name_that_the_format_uses(tmp_path):
    state = {"__metadata__": torch.arange(3), "x": torch.ones(2)}
    save(state, tmp_path / "saved")
    for folder in ("saved", "whole"):
        new = {"__metadata__": torch.zeros(3, dtype=torch.int64), "x": torch.zeros(2)}
        load(new, tmp_path / folder)
        assert new["__metadata__"].tolist() == [0, 1, 2]
        assert verify(tmp_path / folder).ok
        if folder == "saved":
            convert(tmp_path / "saved", tmp_path / "whole")
    with pytest.raises(CheckpointError, match="cannot hold a tensor called '__metadata__'"):
        convert(tmp_path / "saved", tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"v": DEEP}, "lists and tables deep"),
        ({"v": {float("nan"): 1}}, "the key nan: use text"),
        ({"v": [[]] * 2000}, "was not saved, as it could not be loaded"),
        ({"v": 10**5000}, "4300 digits"),
    ],
    ids=["deep", "nan", "too many", "long number"],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, monkeypatch, state, words):
    monkeypatch.setattr(shardwise.checkpoint.index, "MAX_INDEX_BRACKETS", 3000)
    with pytest.raises(CheckpointError, match=words):
        save(state, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_the_keys_of_16_000_tensors(tmp_path):
    """In time that grows with their number, not with its square, which took seconds."""
    box = Box((0,), (1,))
    chunks = [ChunkToWrite(f"layer.{i}.weight", torch.float32, box) for i in range(16_000)]
    with cpu_limit(0.5):
        assert len(_keys(chunks)) == 16_000


# -- two jobs ----------------------------------------------------------------------------------


def test_the_second_job_is_told_of_the_first(tmp_path):
    first = Claim(tmp_path / "saved")
    with pytest.raises(CheckpointError) as error:
        save({"x": 1}, tmp_path / "saved")
    assert f"is being written by another job: process {os.getpid()} on" in str(error.value)
    with pytest.raises(CheckpointError, match="another job"):
        convert_something(tmp_path)
    first.release()
    save({"x": 1}, tmp_path / "saved")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def convert_something(folder):
    save({"x": torch.ones(2)}, folder / "other")
    convert(folder / "other", folder / "saved")


SAVER = """
import sys, torch, shardwise
from shardwise.checkpoint import save
torch.manual_seed(int(sys.argv[2]))
state = {f"x{i}": torch.randn(2000) for i in range(40)}
sys.stdin.readline()
for number in range(8):
    try:
        save({**state, "job": int(sys.argv[2])}, f"{sys.argv[1]}/{number}")
        print("saved", number)
    except shardwise.CheckpointError as error:
        print("refused", number, str(error).replace(chr(10), " "))
"""


def test_jobs_that_race_leave_one_whole_checkpoint_of_each_name(tmp_path):
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(2)
    ]
    time.sleep(1)
    for job in jobs:
        job.stdin.write("go\n")
        job.stdin.flush()
    lines = [job.communicate(timeout=120)[0].splitlines() for job in jobs]
    for number in range(8):
        told = [next(x for x in of_one if x.split()[1] == str(number)) for of_one in lines]
        assert [line.split()[0] for line in told].count("saved") == 1, told
        for line in told:
            assert line.startswith("saved") or "another job" in line or "exists already" in line
        assert verify(tmp_path / str(number)).ok
    assert not list(tmp_path.glob(".*"))


def test_without_locks_one_of_two_jobs_wins_and_none_is_spoiled(tmp_path, monkeypatch):
    def no_locks(number, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / ".saved.half-other").mkdir()
    held = shardwise.checkpoint.saving._Job({"x": torch.zeros(5)}, tmp_path / "saved")
    save({"x": torch.ones(5)}, tmp_path / "saved")
    with pytest.raises(CheckpointError, match="was saved by another job meanwhile"):
        held.finish()
    new = torch.zeros(5)
    load({"x": new}, tmp_path / "saved")
    assert new.tolist() == [1.0] * 5
    # Whose that is cannot be known.
    assert [p.name for p in tmp_path.iterdir() if p.name[0] == "."] == [".saved.half-other"]


def test_a_claim_that_cannot_be_signed_is_given_up(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save({"x": 1}, tmp_path / "a")
    assert not list(tmp_path.iterdir())
    save({"x": 1}, tmp_path / "a")


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / ".saved.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(CheckpointError):
        save({"x": 1}, tmp_path / "saved")
    assert (tmp_path / "mine").read_text() == "precious"


# -- saves in the background when the program ends ----------------------------------------------


def ended(program, *words):
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=90,
    )


SLOW = """
import sys, time, torch
import shardwise.checkpoint.saving as saving
from shardwise.checkpoint import save_async

def slow(path, data, write=saving.write_synced):
    time.sleep(float(sys.argv[2]))
    if sys.argv[3] == "fails":
        raise OSError(28, "No space left on device")
    write(path, data)

saving.write_synced = slow
saving.EXIT_WAIT_S = 2.0
save_async({"x": torch.ones(2)}, sys.argv[1])
print("the end")
"""


def test_the_end_of_a_program_waits_for_a_save(tmp_path):
    ran = ended(SLOW, tmp_path / "saved", 0.5, "works")
    assert (ran.returncode, ran.stdout) == (0, "the end\n"), ran.stderr
    assert "Waiting at most 2 s for" in ran.stderr
    assert verify(tmp_path / "saved").ok


def test_the_end_of_a_program_reports_a_save_that_failed(tmp_path):
    ran = ended(SLOW, tmp_path / "saved", 0.2, "fails")
    assert (ran.returncode, ran.stdout) == (1, "the end\n")
    assert "saved was not saved: No space left on device" in ran.stderr


def test_the_end_of_a_program_does_not_wait_for_ever(tmp_path):
    start = time.monotonic()
    ran = ended(SLOW, tmp_path / "saved", 60, "works")
    assert ran.returncode == 1
    assert "saved was not saved within 2 s" in ran.stderr
    assert time.monotonic() - start < 50
    save({"x": 1}, tmp_path / "saved")  # nobody owns what it left
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_a_result_that_was_read_is_not_reported_again(tmp_path, monkeypatch):
    monkeypatch.setattr(shardwise.checkpoint.saving, "_in_flight", [])
    saving = save_async({"x": torch.ones(2)}, tmp_path / "saved")
    saving.result()
    assert shardwise.checkpoint.saving._in_flight == []
