"""Pending: the result of a collective that still runs, behind the face of a tensor.

The first op on it awaits the collective and finishes what is left to do; from then on the tensor
that holds it has the result itself. There is none in a simulated world, where a collective is over
when it returns, nor in compiled code, where the compiler decides how late to wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

Run = Callable[[torch.Tensor], torch.Tensor]


class Pending(torch.Tensor):
    """What `finish` will make of `started` once that has arrived."""

    __slots__ = ("_finish", "_holder", "_result", "_started")
    _started: torch.Tensor
    _finish: Run
    _result: torch.Tensor | None
    _holder: weakref.ref[Any] | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, started: torch.Tensor, finish: Run) -> Pending:
        # What comes out is found without data, so that sizes can be read without waiting.
        like = finish(torch.empty_like(started, device="meta"))
        self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=started.device
        )
        self._started, self._finish = started, finish
        self._result = self._holder = None
        return self

    def held_by(self, holder: Any) -> None:
        """`holder._local` is this tensor; it gets the result in its place."""
        self._holder = weakref.ref(holder)

    def result(self) -> torch.Tensor:
        """The tensor itself; waits for it the first time."""
        if self._result is None:
            self._result = self._finish(self._started)
            # What was started and what finishes it hold memory that nobody needs any more.
            del self._started, self._finish
            holder = self._holder() if self._holder is not None else None
            if holder is not None and holder._local is self:
                holder._local = self._result
        return self._result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Pending, Pending.result, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._result is not None:
            return repr(self._result)
        return f"Pending(shape={tuple(self.shape)}, dtype={self.dtype})"
