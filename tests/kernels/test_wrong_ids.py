"""An id out of range fails on the device, as in torch's own lookups."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
    pytest.skip("needs Triton and a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("wrong_id_program.py")
NUM_ROWS = 11


def run(way: str, wrong: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, way, str(wrong)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("way", ["pooled", "pooled_in_two_launches", "one_by_one", "sharded_bag"])
def test_a_wrong_id_is_an_error(way):
    for wrong in (-1, NUM_ROWS):
        done = run(way, wrong)
        assert done.returncode != 0, done.stdout
        assert "device-side assert" in done.stderr, done.stderr[-2000:]
        assert "no error" not in done.stdout
    assert run(way, NUM_ROWS - 1).stdout == "no error\n"
