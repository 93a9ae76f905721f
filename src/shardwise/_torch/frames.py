"""Who called: the only place that looks at Python's stack.

Three questions have no other answer. Which modules run now: hooks on all modules would be traced by
torch.compile, and each CommDebugMode would compile the model anew. Whether the compiler or a
program asks for the size of a tensor whose shards differ: only a program may be refused.
Whether a plain tensor that meets a DTensor was made by one of torch's own functions: it looks like
one that a program forgot to lay out.
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

#: Packages whose lines nobody asks for: torch with what it compiles, this one, and what they call
#: each other through. Code without a name was made by a program.
_INSIDE = frozenset({"torch", "shardwise", "contextlib", "functools", "typing_extensions", ""})
_MODULE_FILE = nn.modules.module.__file__


def running_modules() -> list[nn.Module]:
    """The modules whose forward runs now, innermost first.

    Those that merely wait for a backward pass that they started are left out.
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
    """The line of the program that led here, or that a thread is at; None where there is none."""
    frame: FrameType | None = _frame(1) if thread is None else _frames_of_threads().get(thread)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _INSIDE:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


# -- functions of torch ----------------------------------------------------------------------

#: Where torch keeps the Python functions that take an op apart.
_TAKEN_APART = ("torch._decomp.", "torch._refs")


def maker(makers: Mapping[tuple[str, str], bool]) -> tuple[list[Any], bool] | None:
    """What a function of torch was given that may have made a tensor for the op that runs now.

    It is one of `makers`, by module and name, with whether it draws; or, if none of them runs, the
    outermost function that takes an op apart. None where a program called the op itself.
    """
    frame: FrameType | None = _frame(1)
    takes_apart: FrameType | None = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        draws = makers.get((module, frame.f_code.co_qualname))
        if draws is not None:
            return _given(frame), draws
        if module.startswith(_TAKEN_APART):
            takes_apart = frame  # the outermost counts: it hands what it made to others
        if not module.startswith(("torch.", "shardwise.")):
            break
        frame = frame.f_back
    return None if takes_apart is None else (_given(takes_apart), False)


def _given(frame: FrameType) -> list[Any]:
    """The arguments of a function that runs."""
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


#: Not all of `_functorch`: vmap and its kin run in eager code, and compute with the sizes they get.
_BOOKS = _places(
    "_dynamo",
    "_functorch/_aot_autograd",
    "_functorch/aot_autograd.py",
    "_functorch/partitioners.py",
    "_subclasses",
    "fx",
    "utils/_python_dispatch.py",
)
_FORMULAS = _places("_decomp", "_refs")
#: Files that the compiler shares with programs, and the function of it that asks from there.
_SHARED = dict(
    zip(
        (*_places("_prims_common/__init__.py", "autograd/__init__.py"), "<string>"),
        ("suggest_memory_format", "_make_grads", "guard"),
        strict=True,
    )
)
#: Where the compiler answers a program that it reads.
_FOR_THE_PROGRAM = frozenset({"_method_size_stride", "method_attr_shape"})
#: Where it looks for constants, to answer later without asking again; how far below that it asks.
_LOOKS_FOR_CONSTANTS, _DEPTH = "specialize", 6


class Asker(Enum):
    """Who wants to know a size."""

    PROGRAM = auto()
    #: The compiler, for its books.
    COMPILER = auto()
    #: The compiler, which wants to know what will never change.
    FOR_CONSTANTS = auto()
    #: One of torch's own formulas, written in Python.
    FORMULA = auto()


def asker(own_file: str) -> Asker:
    """Who asks: the first caller outside of `own_file`."""
    frame: Any = _frame(1)
    while frame.f_code.co_filename == own_file:
        frame = frame.f_back
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if file.startswith(_FORMULAS):
        return Asker.FORMULA
    if not file.startswith(_BOOKS):
        above = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        # A guard is evaluated once more, to say why it failed.
        again = name == "<module>" and above.startswith(_BOOKS)
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
    # The files whose questions are the compiler's are where they were.
    known = (*_BOOKS, *_FORMULAS, *(file for file in _SHARED if file != "<string>"))
    there = all(os.path.exists(file) for file in known)
    return there and module()[:1] == [module] and asker("") is Asker.PROGRAM
