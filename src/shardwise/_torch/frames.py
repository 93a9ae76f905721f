"""The only module that inspects Python's stack.

Three questions can be answered in no other way. Which modules run now? (torch.compile would trace
hooks on all modules, and each CommDebugMode would recompile the model.) Who reads the size of a
tensor whose shards differ, the compiler or a program? (Only a program gets an error.) Who made a
plain tensor that meets a DTensor: one of torch's own functions, or a program that forgot its
layout?
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardwise._torch.compat import Names, Probe

_names = Names()
_frame: Any = _names.find(
    "sys._getframe",
    "CommDebugMode cannot say where a collective comes from, and uneven tensors cannot be compiled",
)
_frames_of_threads: Any = _names.find(
    "sys._current_frames", "collectives of backward have no line", instead=dict
)

# -- modules and lines -----------------------------------------------------------------------

#: Packages whose lines are not reported: torch and what it generates, this one, and those through
#: which they call each other. Code without a module name is generated.
_INSIDE = frozenset(
    {"torch", "shardwise", "click", "contextlib", "functools", "typing_extensions", ""}
)
_MODULE_FILE = nn.modules.module.__file__


def running_modules() -> list[nn.Module]:
    """The modules whose forward runs now, innermost first.

    Excludes modules that only wait for a backward pass that they started.
    """
    found = []
    frame: FrameType | None = _frame(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name == "_wrapped_call_impl" and frame.f_code.co_filename == _MODULE_FILE:
            module = frame.f_locals["self"]
            if not type(module).__module__.startswith("torch.fx"):  # a graph of torch.compile
                found.append(module)
        elif name == "_engine_run_backward":
            break
        frame = frame.f_back
    return found


def line_outside(thread: int | None = None) -> str | None:
    """The line of the program that led here, or where a thread is; None if there is none."""
    frame: FrameType | None = _frame(1) if thread is None else _frames_of_threads().get(thread)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _INSIDE:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


# -- functions of torch ----------------------------------------------------------------------

#: Where torch keeps its Python decompositions.
_DECOMPOSITIONS = ("torch._decomp.", "torch._refs")


def maker(makers: Mapping[tuple[str, str], bool]) -> tuple[list[Any], bool] | None:
    """The arguments of the torch function that may have made a tensor for the op that runs now.

    The function is one of `makers`, by module and name, with whether it draws; or, if none of them
    runs, the outermost decomposition. None where a program called the op itself.
    """
    frame: FrameType | None = _frame(1)
    decomposition: FrameType | None = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        draws = makers.get((module, frame.f_code.co_qualname))
        if draws is not None:
            return _arguments(frame), draws
        if module.startswith(_DECOMPOSITIONS):
            decomposition = frame  # the outermost: it passes what it made to others
        if not module.startswith(("torch.", "shardwise.")):
            break
        frame = frame.f_back
    return None if decomposition is None else (_arguments(decomposition), False)


def _arguments(frame: FrameType) -> list[Any]:
    """The arguments of a running function."""
    code = frame.f_code
    num_open = bool(code.co_flags & inspect.CO_VARARGS) + bool(
        code.co_flags & inspect.CO_VARKEYWORDS
    )
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + num_open]
    return [frame.f_locals.get(name) for name in names]


# -- the compiler ----------------------------------------------------------------------------

_TORCH = os.path.dirname(torch.__file__) + os.sep


def _places(*names: str) -> tuple[str, ...]:
    return tuple(_TORCH + name.replace("/", os.sep) for name in names)


#: Not all of `_functorch`: vmap and other transforms run in eager code, and compute with sizes.
_COMPILER = _places(
    "_dynamo",
    "_functorch/_aot_autograd",
    "_functorch/aot_autograd.py",
    "_functorch/partitioners.py",
    "_subclasses",
    "fx",
    "utils/_python_dispatch.py",
)
_FORMULAS = _places(
    "_decomp", "_refs", "nn/functional.py", "nn/modules/transformer.py", "utils/checkpoint.py"
)
#: Of these, norms, which may refuse a rank's tensor for its size alone.
_NORMS = frozenset({"batch_norm", "group_norm"})
#: And one that gives sizes to an op that takes the same on every rank.
_GIVES_SIZES = frozenset({"instance_norm"})
#: Files used by the compiler and by programs, and the compiler's function in each.
_SHARED = dict(
    zip(
        (*_places("_prims_common/__init__.py", "autograd/__init__.py"), "<string>"),
        ("suggest_memory_format", "_make_grads", "guard"),
        strict=True,
    )
)
#: Where the compiler reads a size for the program that it traces.
_FOR_THE_PROGRAM = frozenset({"_method_size_stride", "method_attr_shape"})
#: The function that looks for constants, and how many frames below it sizes are read.
_LOOKS_FOR_CONSTANTS, _DEPTH = "specialize", 6


class Asker(Enum):
    """Who reads a size."""

    PROGRAM = auto()
    #: The compiler, for its records.
    COMPILER = auto()
    #: The compiler, looking for sizes that never change.
    FOR_CONSTANTS = auto()
    #: One of torch's formulas or layers in Python.
    FORMULA = auto()
    #: Of these, a norm, which refuses a batch of one.
    NORM = auto()


def asker(own_file: str) -> Asker:
    """Who reads a size: the first caller outside of `own_file`."""
    frame: Any = _frame(1)
    while frame.f_code.co_filename == own_file:
        frame = frame.f_back
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if file.startswith(_FORMULAS) and name not in _GIVES_SIZES:
        return Asker.NORM if name in _NORMS else Asker.FORMULA
    if not file.startswith(_COMPILER):
        above = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        # A guard is evaluated again, to say why it failed.
        again = name == "<module>" and above.startswith(_COMPILER)
        return Asker.COMPILER if again or _SHARED.get(file) == name else Asker.PROGRAM
    for _ in range(_DEPTH):
        if frame is not None and frame.f_code.co_name == _LOOKS_FOR_CONSTANTS:
            return Asker.FOR_CONSTANTS
        frame = None if frame is None else frame.f_back
    return Asker.PROGRAM if name in _FOR_THE_PROGRAM else Asker.COMPILER


def probe() -> Probe:
    return _names.probe(_sees, "CommDebugMode cannot say for which module a collective runs")


class _Asks(nn.Module):
    def forward(self) -> list[nn.Module]:
        return running_modules()


def _sees() -> bool:
    module = _Asks()
    # The compiler's files are where they were.
    known = (*_COMPILER, *_FORMULAS, *(file for file in _SHARED if file != "<string>"))
    there = all(os.path.exists(file) for file in known)
    return there and module()[:1] == [module] and asker("") is Asker.PROGRAM
