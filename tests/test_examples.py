"""Every example runs: simulated, in processes, and as two hosts that are both this one."""

import contextlib
import importlib.util
import os
import socket
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != "worlds.py")


def run(*words, **extra):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **extra}
    return subprocess.Popen(
        [*map(str, words)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finished(*processes):
    """What each has printed. None is left behind; one that fails is seen beside the others."""
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert not any(codes), "\n".join([f"exit codes {codes}", *(text[-3000:] for text in outputs)])
    return outputs


def needs(name):
    if name == "hugging_face.py" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")


@pytest.mark.parametrize("name", SCRIPTS)
def test_simulated(python, name):
    needs(name)
    (output,) = finished(run(python, EXAMPLES / name))
    assert output.strip()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["dlrm.py", "custom_sharder.py"])
def test_under_torchrun(python, name):
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    (output,) = finished(run(python, *words, EXAMPLES / name, PYTHON_EXEC=python))
    assert output.strip()


@pytest.mark.processes
def test_two_hosts(python):
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
            PYTHON=python,
            PYTHON_EXEC=python,
        )
        for node in range(2)
    ]
    assert "step 10: loss" in finished(*hosts)[0]
