"""Jobs of several processes: they give what their ranks return, or end as a whole."""

import os
import subprocess
import sys
import time
from pathlib import Path

import launch_programs as programs
import pytest
import torch.distributed as dist

import shardwise
from shardwise.launch import launch

pytestmark = pytest.mark.processes


def children():
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    pids = [pid for task in tasks for pid in (task / "children").read_text().split()]
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
    return [c for c in commands if "spawn_main" in c]


def test_every_rank_returns():
    before = len(children())
    assert launch(programs.total, 3, 10) == [(0, 33), (1, 33), (2, 33)]
    assert len(children()) == before


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("signal", "Rank 1 was killed by SIGKILL"),
        ("exit", "Rank 1 ended with exit status 7"),
        ("error", "ValueError: nothing good"),
    ],
)
def test_a_rank_that_ends_is_named_and_the_others_end(kind, words):
    before = len(children())
    start = time.monotonic()
    with pytest.raises(shardwise.LaunchError, match=words):
        launch(programs.die, 3, 1, kind)
    assert time.monotonic() - start < 90, "the others waited for the rank that was gone"
    assert len(children()) == before


def test_a_rank_that_never_finishes():
    with pytest.raises(shardwise.LaunchError, match=r"Ranks? .*1 did not (finish|start) within"):
        launch(programs.sleep, 2, 1, timeout_s=60)


def test_a_port_in_use():
    taken = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(shardwise.LaunchError, match=f"127.0.0.1:{taken.port}"):
        launch(programs.total, 2, 1, port=taken.port)


def test_processes_end_with_their_launcher(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    launcher = subprocess.Popen([sys.executable, programs.__file__, str(tmp_path)], env=environment)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline, "the processes did not start"
        time.sleep(0.1)
    time.sleep(0.2)
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    launcher.kill()
    launcher.wait()
    while any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process outlived its launcher"
        time.sleep(0.1)


def _is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
