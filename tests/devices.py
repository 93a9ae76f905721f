"""Marks and skips of tests that need a GPU, or Triton."""

import importlib.util
import os

import pytest
import torch

needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

#: Whether Triton's interpreter runs the kernels, on a CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: Of the kernels: their device, and the marks of their tests.
DEVICE = "cpu" if INTERPRETED else "cuda"
of_kernels = [] if INTERPRETED else [pytest.mark.gpu]


def skip_without_triton():
    """Skip the module that calls this where there is no Triton, or nothing that it runs on."""
    if importlib.util.find_spec("triton") is None or not (torch.cuda.is_available() or INTERPRETED):
        pytest.skip("needs Triton, and a GPU or TRITON_INTERPRET=1", allow_module_level=True)
