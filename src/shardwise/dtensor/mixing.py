"""Plain tensors among DTensors: which are fine, and what is said of the others."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from shardwise.comm.agreement import agree_once
from shardwise.comm.watch import watch
from shardwise.dtensor import autograd
from shardwise.dtensor.wrapped import Wrapped
from shardwise.errors import MixedTensorsError
from shardwise.random.generators import generator_digest, generator_kind

aten = torch.ops.aten

#: Arguments, by position, that torch makes itself out of sizes and numbers. They are the same on
#: every rank, so they count as replicated: the offsets of bags of equal length, and the places
#: of fractional pooling, which are drawn from the generator that all ranks keep in step.
_MADE_BY_TORCH: dict[Any, int] = {
    aten.fractional_max_pool2d.default: 3,
    aten.fractional_max_pool3d.default: 3,
    aten.embedding_bag.default: 2,
    aten.embedding_bag.padding_idx: 2,
    aten._embedding_bag.default: 2,
    aten._embedding_bag_forward_only.default: 2,
}


#: Functions of torch, written in Python, that make tensors out of sizes, numbers and the generator
#: and mix them with their arguments, by module and name.
_MIXERS = {
    ("torch._lowrank", "get_approximate_basis"),
    ("torch.functional", "_unravel_index"),
    ("torch.masked._ops", "_std_var"),
    ("torch.nn.modules.transformer", "_detect_is_causal_mask"),
    ("torch.nn.utils.parametrizations", "_is_orthogonal"),
    ("torch.nn.utils.parametrizations", "_Orthogonal.forward"),
}
#: The one of them that draws.
_DRAWS = "get_approximate_basis"


def check_plain(op: Any, value: torch.Tensor, position: int | None = None) -> None:
    """Raise where a plain tensor of one dim or more meets a DTensor, and nobody said how it lies.

    `position` is that of the argument, or None for a keyword.
    """
    if not value.dim() or watch.replicate_plain or autograd.in_formula():
        return
    if position is not None and _MADE_BY_TORCH.get(op) == position:
        return
    if _called_by_mixer():
        return
    raise MixedTensorsError(
        f"{op} got mixed torch.Tensor and DTensor: a plain {type(value).__name__} of shape "
        f"{tuple(value.shape)} as {_named(op, position)}. Wrap it: DTensor.from_local(x, mesh, "
        "[Replicate()]) where each rank holds the same values, or distribute_tensor(x, mesh, "
        "placements) to lay it out; or put the call under `with "
        "shardwise.implicit_replication():`. (Numbers and 0-dim tensors need no wrapping.)"
        + (_COMPILED if type(value).__name__ == "FunctionalTensor" else "")
    )


def _called_by_mixer() -> bool:
    """Whether one of torch's mixing functions made the call, and got no plain tensor itself.

    Then every plain tensor in it is of its own making. Looked for among torch's frames only.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if (module, frame.f_code.co_qualname) in _MIXERS:
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            given = [frame.f_locals.get(name) for name in names]
            if any(map(_is_plain, given)):
                return False
            if code.co_qualname == _DRAWS:
                _check_generators(next(x for x in given if isinstance(x, Wrapped)))
            return True
        if not module.startswith(("torch.", "shardwise.")):
            return False
        frame = frame.f_back
    return False


def _check_generators(x: Wrapped) -> None:
    """What was drawn is the same on every rank where the generators are."""
    kind = generator_kind(x.device, None)
    agree_once(x._layout.grid, kind, lambda: generator_digest(x.device, None))


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, Wrapped)


#: In compiled code all plain tensors look alike: those of the program, and the compiler's own.
_COMPILED = (
    " In compiled code the plain tensor may also be one that torch.compile made: it mixes its own "
    "into the gradient of a tensor that requires grad and that the region writes to. Write to it "
    "outside torch.compile, or under torch.no_grad()."
)


def _named(op: Any, position: int | None) -> str:
    if position is None:
        return "a keyword argument"
    schema = getattr(op, "_schema", None)
    if schema is None or position >= len(schema.arguments):
        return f"argument {position}"
    return f"argument {position} ({schema.arguments[position].name})"
