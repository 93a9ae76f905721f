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
from pathlib import Path

import numpy as np
import torch

from shardwise.errors import ArgumentError
from shardwise.lookup.backends.backend import Query
from shardwise.lookup.backends.torch_kernels import ByRow, Part, TorchBackend, in_parts
from shardwise.lookup.optimizers import RowUpdate, RowWiseAdagrad

#: Rows of a table per id of a batch, up to which counting is the faster way to sort.
_ROWS_PER_ID = 8
_SOURCE = Path(__file__).with_name("row_wise_adagrad.c")
_TIMEOUT_S = 60
_OPTIONS = ["-O3", "-march=native", "-shared", "-fPIC"]
_POINTER, _INTEGER, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "row_wise_adagrad": [*[_POINTER] * 7, *[_INTEGER] * 2, *[_NUMBER] * 2],
    "sort_by_row": [*[_POINTER] * 4, _INTEGER, ctypes.c_int32, _INTEGER, *[_POINTER] * 4],
}


class CompiledBackend(TorchBackend):
    """torch's kernels, and one of our own for row-wise Adagrad of float32 tables."""

    name = "compiled"

    def __init__(self) -> None:
        super().__init__()
        _kernels()  # raises where there is no compiler

    def update(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor, rule: RowUpdate
    ) -> None:
        if not takes(weight, rule) or query.ids.shape[0] >= 2**31:
            super().update(weight, query, grad, rule)
            return
        grad, asked = grad.contiguous(), _as_the_kernel_takes_it(query)
        for part in in_parts(query, weight.shape[0]):
            first, last = part.first_row, part.last_row
            _update(weight[first:last], _by_row(part, asked), grad, rule.on(first, last))
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


def _as_the_kernel_takes_it(query: Query) -> Query:
    lengths, weights = query.lengths, query.weights
    return Query(
        query.ids.int().contiguous(),
        None if lengths is None else lengths.int().contiguous(),
        None if weights is None else weights.float().contiguous(),
    )


def _by_row(part: Part, query: Query) -> ByRow:
    """As `part.by_row`."""
    num_rows = part.last_row - part.first_row
    both = zip(part.bags, part.ids, strict=True)
    spans = np.array([(b.start, b.stop, i.start, i.stop) for b, i in both], dtype=np.int64)
    num_ids = int((spans[:, 3] - spans[:, 2]).sum())
    if num_rows > _ROWS_PER_ID * num_ids:
        return part.by_row(query)
    ends = torch.zeros(num_rows, dtype=torch.int32)
    ids, bags = (torch.empty(num_ids, dtype=torch.int32) for _ in range(2))
    weights = None if query.weights is None else query.weights.new_empty(num_ids)
    given = _pointers(query.ids, query.lengths, query.weights)
    found = _pointers(ends, ids, bags, weights)
    rows = (spans.ctypes.data, len(spans), part.first_row, num_rows)
    _kernels().sort_by_row(*given, *rows, *found)
    return ByRow(ids, bags, weights)


def _update(weight: torch.Tensor, looked_up: ByRow, grad: torch.Tensor, rule: RowUpdate) -> None:
    optimizer, (num_ids,) = rule.optimizer, looked_up.ids.shape
    assert isinstance(optimizer, RowWiseAdagrad), "the only one that the kernel takes"
    row = weight.new_empty(weight.shape[1])
    lookups = (looked_up.ids, looked_up.bags, looked_up.weights)
    pointers = _pointers(weight, rule.state["sum"], *lookups, grad, row)
    update = _kernels().row_wise_adagrad
    update(*pointers, num_ids, weight.shape[1], optimizer.lr, optimizer.eps)


def _pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    return [None if x is None else x.data_ptr() for x in tensors]


@functools.cache
def _kernels() -> ctypes.CDLL:
    command = shlex.split(os.environ.get("CC", "")) or _installed_compiler()
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "row_wise_adagrad.so")
        try:
            subprocess.run(
                [*command, *_OPTIONS, str(_SOURCE), "-o", library, "-lm"],
                check=True,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=_TIMEOUT_S,
            )
            found = ctypes.CDLL(library)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise ArgumentError(
                f"backend='compiled': {shlex.join(command)} did not compile the kernel of row-wise "
                f"Adagrad: {said.strip()}. Set CC to a C compiler, or use backend='torch'."
            ) from error
    for name, arguments in _ARGUMENTS.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    return found


def _installed_compiler() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if (found := shutil.which(name)) is not None:
            return [found]
    raise ArgumentError(
        "backend='compiled' needs a C compiler, found none of cc, gcc and clang: install one, set "
        "CC, or use backend='torch'."
    )
