"""Reading a DTensor into Python or numpy: all ranks get the whole, as with `item()` a number."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from shardwise.comm.watch import because, watch
from shardwise.dtensor import autograd
from shardwise.dtensor.strict import forbid_move
from shardwise.errors import UnsupportedError
from shardwise.redistribute.search import find_steps
from shardwise.simulation.ranks import one_for_all


def whole_values(x: Any, asked: str) -> torch.Tensor:
    """The whole tensor as a plain one, outside autograd; in strict mode only where it lies so."""
    target = autograd.whole_layout(x._layout)
    if watch.strict and x._layout is not target:
        forbid_move(f"DTensor.{asked}", 0, find_steps(x._layout, target), target)
    with because(f"DTensor.{asked}", implicit=True):
        return one_for_all(autograd.redistribute(x.detach(), target)._local)


def as_numpy(x: Any, force: bool) -> Any:
    if x.requires_grad and not force:
        return torch.empty(0, requires_grad=True).numpy()  # torch says what is wrong
    # A copy also where the tensor is replicated: ranks that wrote to their own would differ.
    return whole_values(x, "numpy").resolve_conj().resolve_neg().clone().numpy(force=force)


def refuse_memory(asked: str) -> NoReturn:
    """What would read or write memory at an address: a DTensor has none of its own."""
    raise UnsupportedError(
        f"DTensor.{asked} has no meaning: the memory is that of the local tensors. Call it on "
        "x.to_local() or on x.full_tensor()."
    )
