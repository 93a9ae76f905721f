"""The backend of a C kernel that is compiled where it runs, for row-wise Adagrad on a CPU.

Note [Compiled where it runs]
torch has no call that sums, squares and changes a row while it is in the cache, and what inductor
generates takes as long as torch's calls. So `row_wise_adagrad.c` is compiled when the first update
needs it, for this processor: 0.3 s in each process, with `$CC`, cc, gcc or clang. Nothing is
kept on disk. As with Triton on a GPU, no compiler is needed where the package is built.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from shardwise.errors import ArgumentError
from shardwise.lookup.backends.backend import Query
from shardwise.lookup.backends.torch_kernels import ByRow, TorchBackend, in_parts
from shardwise.lookup.optimizers import RowUpdate, RowWiseAdagrad

_SOURCE = Path(__file__).with_name("row_wise_adagrad.c")
_OPTIONS = ["-O3", "-march=native", "-shared", "-fPIC"]
_POINTERS, _INTEGERS, _NUMBERS = 7, 2, 2


class CompiledBackend(TorchBackend):
    """torch's kernels, and one of our own for row-wise Adagrad of float32 tables."""

    name = "compiled"

    def __init__(self) -> None:
        super().__init__()
        _kernel()  # raises where there is no compiler

    def update(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor, rule: RowUpdate
    ) -> None:
        if not takes(weight, rule) or query.ids.shape[0] >= 2**31:
            super().update(weight, query, grad, rule)
            return
        grad = grad.contiguous()
        for part in in_parts(query, weight.shape[0]):
            first, last = part.first_row, part.last_row
            _update(weight[first:last], part.by_row(query), grad, rule.on(first, last))
        if not weight.is_inference():
            torch.autograd.graph.increment_version(weight)


def takes(weight: torch.Tensor, rule: RowUpdate) -> bool:
    """Whether the kernel has this optimizer, and can read the table."""
    tensors = (weight, *rule.state.values())
    return (
        type(rule.optimizer) is RowWiseAdagrad
        and not rule.optimizer.weight_decay
        and weight.shape[0] < 2**31
        and all(x.is_cpu and x.dtype == torch.float32 and x.is_contiguous() for x in tensors)
    )


def _update(weight: torch.Tensor, looked_up: ByRow, grad: torch.Tensor, rule: RowUpdate) -> None:
    optimizer = rule.optimizer
    assert isinstance(optimizer, RowWiseAdagrad), "the only one that the kernel takes"
    ids, weights, num_ids = looked_up.ids.int(), looked_up.weights, looked_up.ids.shape[0]
    weights = None if weights is None else weights.float()
    row = weight.new_empty(weight.shape[1])
    tensors = (weight, rule.state["sum"], ids, looked_up.bags, weights, grad, row)
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    _kernel()(*pointers, num_ids, weight.shape[1], optimizer.lr, optimizer.eps)


@functools.cache
def _kernel() -> Callable[..., None]:
    command = shlex.split(os.environ.get("CC", "")) or _installed_compiler()
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "row_wise_adagrad.so")
        try:
            subprocess.run(
                [*command, *_OPTIONS, str(_SOURCE), "-o", library, "-lm"],
                check=True,
                capture_output=True,
                text=True,
            )
            kernel = ctypes.CDLL(library).row_wise_adagrad
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise ArgumentError(
                f"backend='compiled': {shlex.join(command)} did not compile the kernel of row-wise "
                f"Adagrad: {said.strip()}. Set CC to a C compiler, or use backend='torch'."
            ) from error
    kernel.argtypes = [
        *[ctypes.c_void_p] * _POINTERS,
        *[ctypes.c_int64] * _INTEGERS,
        *[ctypes.c_float] * _NUMBERS,
    ]
    kernel.restype = None
    return kernel


def _installed_compiler() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if (found := shutil.which(name)) is not None:
            return [found]
    raise ArgumentError(
        "backend='compiled' needs a C compiler, found none of cc, gcc and clang: install one, set "
        "CC, or use backend='torch'."
    )
