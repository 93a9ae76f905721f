"""Pending: the result of a collective that is still running, as a tensor.

The first op on it waits for the collective and finishes the rest; then the DTensor that holds it
gets the result itself. A Pending that no DTensor holds, such as the plain result of a parallel
module, passes every op on to the result. A simulated world has none, since its collectives are
synchronous, and neither has compiled code, where the compiler decides when to wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch.dispatch import make_wrapper, no_torch_function
from shardwise._torch.functions import tree_map_only
from shardwise.simulation.local_tensor import sized_copy

Run = Callable[[torch.Tensor], torch.Tensor]


class Pending(torch.Tensor):
    """The result of `finish(started)`, computed when it is first needed."""

    __slots__ = ("_finish", "_holder", "_result", "_started")
    _started: torch.Tensor
    _finish: Run
    _result: torch.Tensor | None
    _holder: weakref.ref[Any] | None

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, started: torch.Tensor, finish: Run, like: torch.Tensor) -> Pending:
        """`like` has the shape, strides and dtype of the result; see `finished_like`."""
        self = make_wrapper(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=started.device
        )
        self._started, self._finish = started, finish
        self._result = self._holder = None
        return self

    def held_by(self, holder: Any) -> None:
        """`holder._local` is this tensor, and is replaced by the result."""
        self._holder = weakref.ref(holder)

    def share(self) -> Pending:
        """Another Pending of the same result; outside autograd."""
        return Pending(self, _detached_result, self)

    def result(self) -> torch.Tensor:
        """The result; waits for it the first time."""
        if self._result is None:
            self._result = self._finish(self._started)
            # Frees the memory that they hold.
            del self._started, self._finish
            holder = self._holder() if self._holder is not None else None
            if holder is not None and holder._local is self:
                holder._local = self._result
        return self._result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs or list in map(type, args):
            args, kwargs = tree_map_only(Pending, Pending.result, (args, kwargs or {}))
            return func(*args, **kwargs)
        return func(*[arg.result() if type(arg) is Pending else arg for arg in args])

    # -- torch.compile -----------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        self.result()
        return ["_result"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _: None, *__: Any) -> Pending:
        result = inner["_result"]
        made = Pending(result, _itself, result)
        made.result()
        return made

    def __coerce_same_metadata_as_tangent__(
        self, context: Any, expected_type: type | None = None
    ) -> torch.Tensor:
        """The gradient of an output of compiled code, which is plain."""
        return self.result()

    # -- reading memory without an op ---------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        return self.detach().numpy(force=force)

    def tolist(self) -> Any:
        return self.detach().tolist()

    def data_ptr(self) -> int:
        return self.result().data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._result is not None:
            return repr(self._result)
        return f"Pending(shape={tuple(self.shape)}, dtype={self.dtype})"


def finished_like(started: torch.Tensor, finish: Run) -> torch.Tensor:
    """`finish(started)` on the meta device: its sizes can be read without waiting."""
    return finish(torch.empty_like(started, device="meta"))


def _itself(result: torch.Tensor) -> torch.Tensor:
    return result


def _detached_result(other: torch.Tensor) -> torch.Tensor:
    assert isinstance(other, Pending), "only a Pending is shared"
    return other.result().detach()


def later(local: torch.Tensor) -> torch.Tensor:
    """A DTensor's local tensor for use outside it; a pending one stays pending."""
    return local.share() if type(local) is Pending else sized_copy(local, True)
