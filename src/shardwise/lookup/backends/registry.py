"""The backends by name."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch

from shardwise.errors import ArgumentError
from shardwise.kernels import DTYPES as FUSED_DTYPES
from shardwise.kernels import has_triton
from shardwise.lookup.backends import compiled
from shardwise.lookup.backends.backend import Backend, Query, serving
from shardwise.lookup.backends.fbgemm_cpu import FbgemmBackend
from shardwise.lookup.backends.torch_kernels import TorchBackend
from shardwise.lookup.optimizers import RowUpdate

#: Columns from which on row-wise Adagrad in one pass is faster than torch's kernels, which read the
#: gradients twice.
_ONE_PASS_WIDTH = 16
#: Ids in a batch from which on that is worth a compilation; all later updates use it then.
_COMPILE_FROM = 1 << 12
#: The compiled kernel runs in one thread, and was measured against torch's with up to two: it took
#: 0.3 of their time with one and 0.6 with two, for 200,000 ids of 64 columns.
_COMPILED_THREADS = 2


def make_backend(backend: str | Backend) -> Backend:
    """A backend by name, or the one that was given."""
    if not isinstance(backend, str):
        return backend
    if backend == "auto":
        return ByDevice()
    if backend == "torch":
        return TorchBackend()
    if backend == "fbgemm":
        return FbgemmBackend()
    if backend == "compiled":
        return compiled.CompiledBackend()
    if backend == "triton":
        return _triton()
    raise ArgumentError(
        f"backend={backend!r} is not known: use 'auto', 'torch', 'fbgemm', 'compiled', 'triton' "
        "or an object with the methods of shardwise.embedding.Backend."
    )


def backend_of_copies(backend: Backend) -> Backend:
    """The backend of tables that every rank has: it makes the same update on all.

    Which kernels there are differs between hosts, and a kernel is compiled once a batch of this
    rank was large enough.
    """
    return ByDevice(one_pass=False) if type(backend) is ByDevice else backend


def _triton() -> Backend:
    if not has_triton():
        raise ArgumentError(
            "backend='triton' needs Triton, which is not installed here: pip install triton, or "
            "use backend='torch'."
        )
    # Imported here: nothing else needs Triton.
    from shardwise.lookup.backends.triton_kernels import TritonBackend

    return TritonBackend()


def is_fused(
    backend: Backend, weights: Sequence[torch.Tensor], states: Sequence[torch.Tensor]
) -> bool:
    """Whether the fused kernels serve these tables and their states."""
    if not weights or weights[0].is_meta:
        return False
    return getattr(serving(backend, weights[0], *states), "is_fused", False)


class ByDevice(TorchBackend):
    """The fastest kernels that are there: Triton's for tables on a GPU; for row-wise Adagrad on a
    CPU a compiled one where there is a compiler, or fbgemm's; torch's for all else."""

    name = "auto"

    def __init__(self, *, one_pass: bool = True) -> None:
        super().__init__()
        self._uses_one_pass = one_pass
        self._has_triton = has_triton()
        self._has_fbgemm = importlib.util.find_spec("fbgemm_gpu") is not None
        self._made: dict[str, Backend] = {}

    def serving(self, weight: torch.Tensor, *states: torch.Tensor) -> Backend:
        """The backend of a table and its states."""
        fused = self._has_triton and weight.is_cuda and weight.dtype in FUSED_DTYPES
        fused = fused and all(state.dtype == torch.float32 for state in states)
        return self._known("triton") if fused else self

    def update(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor, rule: RowUpdate
    ) -> None:
        one_pass = self._one_pass(weight, query, rule)
        update = super().update if one_pass is None else one_pass.update
        update(weight, query, grad, rule)

    def _one_pass(self, weight: torch.Tensor, query: Query, rule: RowUpdate) -> Backend | None:
        """What does row-wise Adagrad of wide rows in one pass."""
        if not self._uses_one_pass or weight.shape[1] < _ONE_PASS_WIDTH:
            return None
        if not compiled.takes(weight, rule):
            return None
        is_compiled = "_compiled" in self.__dict__
        found = None
        if torch.get_num_threads() <= _COMPILED_THREADS and (
            is_compiled or query.ids.shape[0] >= _COMPILE_FROM
        ):
            found = self._compiled
        return self._known("fbgemm") if found is None and self._has_fbgemm else found

    @functools.cached_property
    def _compiled(self) -> Backend | None:
        try:
            return make_backend("compiled")
        except ArgumentError:  # no compiler
            return None

    def _known(self, name: str) -> Backend:
        if name not in self._made:
            self._made[name] = make_backend(name)
        return self._made[name]
