"""The launcher against ranks that die, fail, hang or send late, in any order: no processes."""

import multiprocessing
import os
import pickle
import random
import time

import pytest
import torch

from shardwise import launch as jobs
from shardwise.errors import ArgumentError, LaunchError, LayoutError, ShardwiseError
from shardwise.launch import Failed, Job, Message, launch
from shardwise.preload import warm_up


class Process:
    """A rank as the launcher sees it: what it sends, and how it ends."""

    def __init__(self, messages, ending, pipe):
        self.messages, self.ending, self.pipe = list(messages), ending, pipe
        self.exitcode, self.was_ended = None, False

    def advance(self):
        """Send the next message, or end; whether there is more to come."""
        if self.messages:
            self.pipe.send_bytes(pickle.dumps(self.messages.pop(0)))
            return True
        if self.ending != "hangs" and self.exitcode is None:
            if self.ending != "done":
                self.pipe.close()
                self.exitcode = {"killed": -9, "exits": 7}[self.ending]
            return False
        return False

    def join(self, timeout=None):
        pass

    def is_alive(self):
        return self.exitcode is None

    def terminate(self):
        self.was_ended = True
        self.exitcode = -15

    kill = terminate


def failure(draw, rank):
    error = LayoutError(f"rank {rank} has no room") if draw.random() < 0.5 else None
    return Message("failed", Failed(draw.random(), error, f"ValueError: on rank {rank}", "trace"))


def story(draw, rank):
    """The messages of a rank, and its end."""
    whole = [Message("here"), Message("started"), Message("note", rank), Message("done", rank)]
    kind = draw.choice(["done"] * 6 + ["killed", "exits", "hangs", "fails"])
    if kind == "done":
        return whole, "done"
    cut = whole[: draw.randrange(len(whole))]
    return ([*cut, failure(draw, rank)], "done") if kind == "fails" else (cut, kind)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(jobs, "CAUSE_S", 0.02)
    monkeypatch.setattr(jobs, "GRACE_S", 0.02)


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_whatever_ranks_do_the_launcher_names_it_and_ends_all(first):
    for seed in range(first, first + 100):
        draw = random.Random(seed)
        notes = []
        job = Job(lambda rank, value, notes=notes: notes.append((rank, value)))
        processes, stories = [], [story(draw, rank) for rank in range(draw.randrange(1, 6))]
        for messages, ending in stories:
            ours, theirs = multiprocessing.Pipe()
            processes.append(Process(messages, ending, theirs))
            job.add(processes[-1], ours)
        running = list(processes)
        while running:  # all is sent before: the order of what arrives is drawn
            one = draw.choice(running)
            if not one.advance():
                running.remove(one)
        begin = time.monotonic()
        try:
            assert job.results(0.05, 0.05) == list(range(len(stories)))
            assert all(ending == "done" for _, ending in stories)
        except ShardwiseError as error:
            check_error(error, stories)
        finally:
            job.end()
        assert time.monotonic() - begin < 60
        assert all(p.was_ended or p.exitcode is not None or p.ending == "done" for p in processes)
        for process in processes:
            process.pipe.close()


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


def test_a_value_that_the_launcher_cannot_read():
    ours, theirs = multiprocessing.Pipe()
    process = Process([Message("here"), Message("done", Unreadable())], "done", theirs)
    job = Job(None)
    job.add(process, ours)
    while process.advance():
        pass
    with pytest.raises(
        LaunchError, match=r"Rank 0 sent what cannot be unpickled here \(ValueError"
    ):
        job.results(5, 5)
    job.end()
    theirs.close()


@pytest.mark.parametrize("options", [{"port": 70000}, {"port": -1}, {"num_ranks": 2.0}], ids=str)
def test_a_job_that_cannot_be_is_refused(options):
    with pytest.raises(ArgumentError, match="found"):
        launch(os.getpid, **{"num_ranks": 1, **options})


def check_error(error, stories):
    dead = {rank for rank, (_, ending) in enumerate(stories) if ending in ("killed", "exits")}
    failed = {rank for rank, (sent, _) in enumerate(stories) if sent and sent[-1].kind == "failed"}
    hangs = {rank for rank, (_, ending) in enumerate(stories) if ending == "hangs"}
    text = f"{error} {' '.join(getattr(error, '__notes__', ()))}"
    named = {rank for rank in range(len(stories)) if f"ank {rank}" in text or f", {rank}" in text}
    if dead:
        assert isinstance(error, LaunchError)
        assert named <= dead
        assert "killed by SIGKILL" in text or "exit status 7" in text
    elif failed:
        assert named
        assert named <= failed
    else:
        assert isinstance(error, LaunchError)
        assert "did not" in text
        assert hangs


def test_what_ranks_are_forked_from_does_not_ask_the_runtime_for_gpus(monkeypatch):
    """Its children could not use a GPU then; with the setting, torch asks NVML."""
    asked = []

    def is_available():
        asked.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    warm_up()
    assert asked
    assert set(asked) == {"1"}
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "0"
