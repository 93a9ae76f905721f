"""Without a GPU the kernels' tests run through Triton's interpreter, in a process of their own.

Triton decides at import whether kernels are compiled or interpreted, for all that it decorates.
One process runs all files: each would import torch and collect anew.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

FILES = ("test_kernels.py", "test_backend.py", "test_sharded_bags.py", "test_one_rank.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels' own tests run on the GPU")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_pass_their_tests_when_interpreted():
    files = [Path(__file__).with_name(name) for name in FILES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
