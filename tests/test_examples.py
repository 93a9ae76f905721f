"""Every example runs: simulated, in processes, and as two hosts that are both this one."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != "worlds.py")


def run(*words, **extra):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **extra}
    return subprocess.Popen(
        [*map(str, words)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finished(process):
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def needs(name):
    if name == "hugging_face.py" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")


@pytest.mark.parametrize("name", SCRIPTS)
def test_simulated(name):
    needs(name)
    assert finished(run(sys.executable, EXAMPLES / name)).strip()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["dlrm.py", "custom_sharder.py"])
def test_under_torchrun(name):
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert finished(run(sys.executable, *words, EXAMPLES / name)).strip()


@pytest.mark.processes
def test_two_hosts():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    hosts = [
        run(
            EXAMPLES / "multi_host.sh",
            EXAMPLES / "gpt.py",
            NODES="2",
            NODE=str(node),
            HEAD="127.0.0.1",
            PORT=port,
            RANKS="1",
            PYTHON=sys.executable,
        )
        for node in range(2)
    ]
    outputs = [finished(host) for host in hosts]
    assert "step 10: loss" in outputs[0]
