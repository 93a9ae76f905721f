"""Jobs of several processes: they give what their ranks return, or end as a whole."""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import late_program
import launch_programs as programs
import pytest
import torch

import shardwise
from shardwise.launch import LOOPBACK, launch

pytestmark = pytest.mark.processes


def ranks_left():
    return [p.name for p in multiprocessing.active_children() if p.name.startswith("rank-")]


def test_every_rank_returns_and_may_send_notes():
    assert launch(programs.total, 3, 10) == [(0, 33), (1, 33), (2, 33)]
    notes = []
    launch(programs.noted_total, 2, 5, on_note=lambda rank, value: notes.append((rank, value)))
    assert sorted(notes) == [(0, 0), (1, 1)]
    assert not ranks_left()


def test_a_function_may_end_the_process_group():
    assert launch(programs.end_the_group, 2) == [0, 1]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("signal", "^Rank 1 was killed by SIGKILL; the other ranks were ended"),
        ("exit", "^Rank 1 ended with exit status 7"),
        ("error", "^Rank 1 failed: ValueError: nothing good; the other ranks were ended"),
    ],
)
def test_a_rank_that_ends_is_named_and_the_others_end(kind, words):
    start = time.monotonic()
    with pytest.raises(shardwise.LaunchError, match=words) as caught:
        launch(programs.die, 3, 1, kind)
    assert ("launch_programs.py" in str(caught.value.__cause__)) == (kind == "error")
    assert time.monotonic() - start < 60, "the others waited for the rank that was gone"
    assert not ranks_left()


def test_an_error_of_ours_is_raised_as_it_is():
    with pytest.raises(shardwise.LayoutError, match="no room") as caught:
        launch(programs.die, 3, 1, "ours")
    assert caught.value.__notes__ == ["On rank 1; the other ranks were ended."]
    assert not ranks_left()


def test_a_rank_that_never_finishes():
    with pytest.raises(shardwise.LaunchError, match=r"^Rank 1 did not finish within 3 s"):
        launch(programs.sleep, 2, 1, timeout_s=3)
    assert not ranks_left()


def test_a_rank_that_starts_late_or_never(monkeypatch):
    monkeypatch.setenv("LATE_RANK", "rank-1")
    monkeypatch.setenv("LATE_S", "2")
    assert launch(late_program.nothing, 2, collective_timeout_s=1) == ["2", "2"]
    monkeypatch.setenv("LATE_S", "600")
    with pytest.raises(shardwise.LaunchError, match=r"^Rank 1 did not start within 2 s"):
        launch(late_program.nothing, 2, start_timeout_s=2)
    assert not ranks_left()


def test_what_cannot_be_sent_is_said_before_anything_starts():
    with pytest.raises(shardwise.ArgumentError, match="cannot be sent to other processes"):
        launch(lambda: 1, 2)


def test_a_port_in_use():
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(shardwise.LaunchError, match=f"{LOOPBACK}:{port}: Address already in"):
            launch(programs.total, 2, 1, port=port)


def test_only_this_machine_can_reach_the_ranks():
    """Neither the launcher nor a rank listens anywhere but on the loopback interface."""
    loopback = f"{int.from_bytes(socket.inet_aton(LOOPBACK), sys.byteorder):08X}"
    for addresses in launch(programs.where_it_listens, 2):
        assert set(addresses) <= {loopback}
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    found = []
    launch(
        programs.noted_total, 1, 1, on_note=lambda *_: found.extend(programs.listening()), port=port
    )
    assert [address for address, at in found if at == port] == [loopback]


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_launched_processes_can_use_a_gpu():
    """In a new process: what these tests import where processes are forked may have asked CUDA."""
    code = "import launch_programs as p; print(p.launch(p.sum_on_a_gpu, 2))"
    folder = Path(__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True
    )
    assert found.stdout == "[3.0, 3.0]\n", found.stderr
