"""Fused kernels over all the embedding tables that a rank holds, in Triton.

Its modules are imported only to run on a GPU: Triton is not a dependency of the package.
"""

import functools
import importlib.util

import torch

#: The dtypes that tables may have, by their number in the kernels.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
