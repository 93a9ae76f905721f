"""A rank is killed: the job ends and names it, and goes on from its last whole checkpoint."""

import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwise.checkpoint import Checkpoints, inspect, verify
from shardwise.cli.main import main
from shardwise.demo.run import Keeping, train_in_processes, train_simulated
from shardwise.demo.tasks import MIXED_PLAN, Recommending
from shardwise.errors import LaunchError

pytestmark = pytest.mark.processes

NUM_STEPS, EVERY, RANKS = 60, 3, 2
SEED = 11


def silent(*_):
    pass


def kill_rank(rank):
    for process in multiprocessing.active_children():
        if process.name == f"rank-{rank}":
            os.kill(process.pid, signal.SIGKILL)


def ranks_left():
    return [p.name for p in multiprocessing.active_children() if p.name.startswith("rank-")]


class KillAtStep:
    """Kills a rank when the training tells of a step."""

    def __init__(self, rank, step):
        self.rank, self.step = rank, step

    def __call__(self, step, loss, speed):
        if step == self.step:
            kill_rank(self.rank)


class KillDuringSave(KillAtStep):
    """Kills a rank a moment after the folder of a save that is not whole has appeared."""

    def __init__(self, rank, step, folder, delay_s):
        super().__init__(rank, step)
        self.folder, self.delay_s = folder, delay_s

    def __call__(self, step, loss, speed):
        if step == self.step:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if list(self.folder.glob(".step-*.half-*")):
                time.sleep(self.delay_s)
                kill_rank(self.rank)
                return
            time.sleep(0.0005)


def test_killed_ten_times_the_losses_are_those_of_a_run_that_was_not(tmp_path):
    task = Recommending(NUM_STEPS, 0, MIXED_PLAN, size=48)
    straight = train_in_processes(task, RANKS, silent, Keeping(str(tmp_path / "straight"), EVERY))
    folder = tmp_path / "killed"
    series, keeping = Checkpoints(folder, keep=2), Keeping(str(folder), EVERY, resume=True)
    chance = random.Random(SEED)
    for number in range(10):
        begun = series.latest() or 0
        rank, during_save = chance.randrange(RANKS), number % 2 == 1
        # The next checkpoint is saved after the first step that EVERY divides.
        step = begun + chance.randint(1, 2 * EVERY)
        killer = KillAtStep(rank, step)
        if during_save:
            step = begun + EVERY
            killer = KillDuringSave(rank, begun + 1, folder, chance.random() * 0.01)
        print(f"round {number}: rank {rank} at step {step}{' in its save' * during_save}")
        start = time.monotonic()
        with pytest.raises(LaunchError, match=f"^Rank {rank} was killed by SIGKILL; the other"):
            train_in_processes(task, RANKS, killer, keeping)
        assert time.monotonic() - start < 60
        assert not ranks_left()
        # Nothing but the steps since the last whole checkpoint is lost, and none is half there.
        assert (series.latest() or 0) >= (step - 1) // EVERY * EVERY
        for saved in series.steps():
            assert verify(series.path(saved)).ok
    latest = series.latest()
    print(f"killed ten times, {latest} of {NUM_STEPS} steps done")
    assert 0 < latest < NUM_STEPS
    shutil.copytree(folder, tmp_path / "other")
    run = train_in_processes(task, RANKS, silent, keeping)
    assert run.num_resumed == latest
    assert run.losses == straight.losses
    assert inspect(series.path(NUM_STEPS)).state["losses"] == straight.losses
    for name, value in straight.parameters.items():
        assert run.parameters[name].equal(value), name
    # On another number of ranks, played ones too, sums come in another order.
    for train, num_ranks in ((train_in_processes, 3), (train_simulated, 2)):
        shutil.copytree(tmp_path / "other", tmp_path / f"other-{num_ranks}")
        other = Keeping(str(tmp_path / f"other-{num_ranks}"), EVERY, resume=True)
        found = train(task, num_ranks, silent, other)
        assert found.num_resumed == latest
        assert found.losses == pytest.approx(straight.losses, rel=1e-4)


def test_the_command_ends_with_an_error_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def kill_after_the_first_checkpoint():
        for _ in range(6000):
            if Checkpoints("checkpoints").steps():
                kill_rank(2)
                return
            time.sleep(0.01)

    def demo(*words):
        asked = ["demo", "--processes", "4", "--steps", "40", "--checkpoint-every", "2"]
        return CliRunner().invoke(main, [*asked, *words])

    killer = threading.Thread(target=kill_after_the_first_checkpoint)
    killer.start()
    ended = demo()
    killer.join()
    assert ended.exit_code == 3, ended.output
    assert "Error: Rank 2 was killed by SIGKILL; the other ranks were ended." in ended.stderr
    assert "Traceback" not in ended.output
    assert not ranks_left()
    done = Checkpoints("checkpoints").latest()
    again = demo()
    assert again.exit_code == 2
    assert (
        f"checkpoints has a checkpoint of step {done}: go on from it with --resume" in again.stderr
    )
    other = demo("--resume", "--seed", "5")
    assert other.exit_code == 2
    assert "belongs to another training run" in other.stderr
    resumed = demo("--resume")
    assert resumed.exit_code == 0, resumed.output
    assert f"the first {done} steps in an earlier run" in on_one_line(resumed.output)
    finished = demo("--resume")
    assert finished.exit_code == 0, finished.output
    assert "the first 40 steps in an earlier run" in on_one_line(finished.output)


def on_one_line(output):
    """Tables break their lines where the terminal ends."""
    return " ".join(output.split())


def test_under_torchrun_with_restarts(tmp_path, python):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["--max-restarts", "2", "-m", "shardwise.cli.main", "demo", "--steps", "20"]
    words += ["--checkpoint-every", "4", "--resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                   "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                   "PYTHON_EXEC": python}  # fmt: skip
    output, killed = "", False
    with subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as ran:  # fmt: skip
        for line in ran.stdout:
            output += line
            if "step 10/20" in line and not killed:
                tasks = Path(f"/proc/{ran.pid}/task").iterdir()
                found = [(task / "children").read_text().split() for task in tasks]
                os.kill(max(int(pid) for pids in found for pid in pids), signal.SIGKILL)
                killed = True
    assert ran.returncode == 0, output
    assert killed, output
    assert re.search(r"the first (8|12) steps in an earlier run", on_one_line(output)), output
    straight = train_in_processes(Recommending(20, 0, MIXED_PLAN), 2, silent)
    saved = Checkpoints(tmp_path / "checkpoints")
    assert inspect(saved.path(20)).state["losses"] == straight.losses
