"""Worker processes: one that does not answer, one that ends, and one that was stopped for long."""

import os
import signal
import subprocess
import sys
import time

import pytest

from shardwise.testing.workers import Lost, ask

pytestmark = pytest.mark.slow

#: Answers each name once a file of that name exists.
WORKER = """
import os, sys, time
for name in sys.argv[1:]:
    while not os.path.exists(name):
        time.sleep(0.05)
    print("found", name, flush=True)
"""


def test_a_worker_that_does_not_answer(tmp_path):
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.touch()
    found = list(ask([sys.executable, "-c", WORKER], [str(there), str(missing)], 2.0))
    assert found[0] == (str(there), f"found {there}\n")
    assert found[1:] == [(str(missing), Lost("no answer in 2 s", late=True))]


def test_a_worker_that_ends(tmp_path):
    found = list(ask([sys.executable, "-c", "raise SystemExit('no')"], ["name"], 20.0))
    assert found == [("name", Lost("no\n", late=False))]


def test_time_in_which_all_were_stopped_does_not_count(tmp_path):
    name = tmp_path / "name"
    program = f"""
from shardwise.testing.workers import ask
print("asked", flush=True)
print(list(ask({[sys.executable, "-c", WORKER]!r}, [{str(name)!r}], 4.0)))
"""
    job = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert job.stdout.readline() == "asked\n"
    time.sleep(0.5)
    os.killpg(job.pid, signal.SIGSTOP)
    time.sleep(5.0)
    os.killpg(job.pid, signal.SIGCONT)
    time.sleep(0.5)
    name.touch()
    assert "found" in job.communicate()[0]
