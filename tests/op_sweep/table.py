"""Torch's own table of operators, and its samples."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import random
import sys
import types
import unittest
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.testing.compare import OpCall, full_name, tensors_of
from tests.op_sweep.ways import Pick, evenly

_TABLE = "torch.testing._internal.common_methods_invocations"
#: Ops that run on CUDA alone.
_NOT_ON_CPU = "jiterator"


def operators(patterns: Sequence[str] = ()) -> list[Any]:
    """The entries of torch's table for the CPU whose name matches a pattern."""
    chosen = []
    for entry in _op_db():
        if _dtype_of(entry) is None or _NOT_ON_CPU in entry.name:
            continue
        name = full_name(entry)
        if not patterns or any(
            fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(entry.name, p) for p in patterns
        ):
            chosen.append(entry)
    return chosen


def _dtype_of(entry: Any) -> torch.dtype | None:
    """The dtype that an op is played with: float32, where the op takes it."""
    dtypes = (torch.float32, torch.complex64, torch.int64)
    return next((dtype for dtype in dtypes if entry.supports_dtype(dtype, "cpu")), None)


def _op_db() -> list[Any]:
    # Torch's test helpers import this package; the table only needs its base class.
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: list[Any] = importlib.import_module(_TABLE).op_db
    return found


def samples(entry: Any, count: int, pick: Pick[Any] = evenly) -> list[OpCall]:
    """`count` of the entry's samples, spread over all of them; those without tensors left out."""
    _same_every_time()
    dtype = _dtype_of(entry)
    wants_grad = dtype is not torch.int64
    made = [
        sample
        for sample in entry.sample_inputs("cpu", dtype, requires_grad=wants_grad)
        if _has_dense_tensors(sample)
    ]
    return [_sample(each) for each in pick(made, count)]


@contextlib.contextmanager
def own_seed() -> Iterator[None]:
    """Inside, random ops of the table use the caller's seed.

    The table seeds them itself, in a way that cannot be compiled.
    """
    table: Any = importlib.import_module(_TABLE)

    def unseeded(op: Any, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    seeded, table.wrapper_set_seed = table.wrapper_set_seed, unseeded
    try:
        yield
    finally:
        table.wrapper_set_seed = seeded


def _same_every_time() -> None:
    torch.manual_seed(0)
    random.seed(0)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(0)


def _has_dense_tensors(sample: Any) -> bool:
    found = tensors_of((sample.input, sample.args, sample.kwargs))
    return bool(found) and all(t.layout is torch.strided and t.device.type == "cpu" for t in found)


def _sample(made: Any) -> OpCall:
    args = (made.input, *made.args)
    wants = tuple(t.requires_grad for t in tensors_of((args, made.kwargs)))
    return OpCall(args, dict(made.kwargs), wants, made.output_process_fn_grad)


def error_samples(entry: Any) -> Iterator[tuple[OpCall, type[BaseException]]]:
    """Calls that one device refuses, with the type that it raises."""
    if entry.error_inputs_func is None:
        return
    _same_every_time()
    for each in entry.error_inputs("cpu"):
        made = each.sample_input
        if not _has_dense_tensors(made):
            continue
        sample = _sample(made)
        try:
            entry(*sample.args, **sample.kwargs)
        except Exception as error:
            yield sample, type(error)
