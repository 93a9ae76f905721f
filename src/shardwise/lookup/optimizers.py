"""Updates that are fused into the backward pass: one rule per optimizer.

Each follows the formula of torch's optimizer of that name, on the rows that a batch looked up: SGD
and Adagrad as with a dense gradient (rows without one do not change), Adam as
`torch.optim.SparseAdam` (moments of other rows do not change). Row-wise Adagrad keeps one number
per row: the running sum of the mean square of the row's gradient. `weight_decay` adds that times
the row to its gradient first; rows that were not looked up do not decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from shardwise.errors import ArgumentError
from shardwise.lookup.ids import segment_sums

State = Mapping[str, torch.Tensor]
#: Gradients of some rows, each with the slice of the rows that it belongs to.
Chunks = Iterable[tuple[slice, torch.Tensor]]
#: Elements of rows that are changed at a time: 1 MB.
_CHUNK_NUMBERS = 1 << 18


@dataclass
class FusedOptimizer:
    """The settings of an optimizer; `lr` may be changed between steps."""

    lr: float
    weight_decay: float = field(default=0.0, kw_only=True)
    #: name -> whether it has one number per row; otherwise it has the table's shape.
    states: ClassVar[dict[str, bool]] = {}

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "eps"):
            value = getattr(self, name, 0)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
                raise ArgumentError(
                    f"{type(self).__name__}: {name} is a number from 0 on, found {value!r}."
                )

    @property
    def needs_whole_rows(self) -> bool:
        """Whether ranks that hold columns of a table have to add up the squares of its rows."""
        return False

    def decay(self, weight: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor) -> None:
        """Add the weight decay of `rows` to their gradient."""
        if self.weight_decay:
            grad.add_(weight.index_select(0, rows), alpha=self.weight_decay)

    def row_factors(self, rows: torch.Tensor, squares: torch.Tensor, state: State) -> torch.Tensor:
        """The factor of each row's gradient in its change, from its mean square.

        Only of optimizers that may need whole rows. Updates the state of `rows`, which are
        distinct.
        """
        raise NotImplementedError

    def change(
        self, weight: torch.Tensor, rows: torch.Tensor, grads: Chunks, state: State, step: int
    ) -> None:
        """Change `rows` of `weight` and of the state; gradients are scratch afterwards."""
        raise NotImplementedError


def check_fused(optimizer: Any) -> None:
    """Raise unless `optimizer` is a fused optimizer or None."""
    if optimizer is None or isinstance(optimizer, FusedOptimizer):
        return
    is_class = isinstance(optimizer, type)
    kind = optimizer if is_class else type(optimizer)
    found = f"{'the class' if is_class else 'an object of'} {kind.__module__}.{kind.__qualname__}"
    if issubclass(kind, FusedOptimizer):
        advice = f"Make an instance: {kind.__name__}(lr=0.1)."
    else:
        advice = (
            "An optimizer of torch takes the parameters of a collection without optimizer=: "
            "torch.optim.SGD(collection.parameters(), lr=0.1)."
        )
    raise ArgumentError(
        "optimizer= is an instance of SGD, Adagrad, RowWiseAdagrad or Adam of shardwise.embedding, "
        f"whose updates are part of backward; found {found}. {advice}"
    )


@dataclass
class RowUpdate:
    """What a backend does with the gradient of some rows: an optimizer and a stack's state."""

    optimizer: FusedOptimizer
    state: State
    #: The number of this update, from 1 on; Adam needs it.
    step: int

    def on(self, first_row: int, last_row: int) -> RowUpdate:
        """The same for a range of rows of the stack, numbered from `first_row`."""
        state = {name: numbers[first_row:last_row] for name, numbers in self.state.items()}
        return RowUpdate(self.optimizer, state, self.step)

    def apply(self, weight: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor) -> None:
        """Change `rows` (each once) of the weight; `grad` is scratch afterwards."""
        self.apply_chunks(weight, rows, [(slice(0, rows.shape[0]), grad)])

    def apply_chunks(self, weight: torch.Tensor, rows: torch.Tensor, grads: Chunks) -> None:
        """The same with some gradients at a time, in order, which cover the rows."""
        if self.optimizer.weight_decay:
            grads = self._decayed(weight, rows, grads)
        self.optimizer.change(weight, rows, grads, self.state, self.step)

    def _decayed(
        self, weight: torch.Tensor, rows: torch.Tensor, grads: Chunks
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        for some, grad in grads:
            self.optimizer.decay(weight, rows[some], grad)
            yield some, grad
            del grad  # as in `add_chunks`


@dataclass
class SGD(FusedOptimizer):
    """`w -= lr g`"""

    def change(
        self, weight: torch.Tensor, rows: torch.Tensor, grads: Chunks, state: State, step: int
    ) -> None:
        add_chunks(weight, rows, grads, -self.lr)


@dataclass
class Adagrad(FusedOptimizer):
    """`s += g²; w -= lr g / (√s + eps)`"""

    eps: float = 1e-10
    states: ClassVar[dict[str, bool]] = {"sum": False}

    def change(
        self, weight: torch.Tensor, rows: torch.Tensor, grads: Chunks, state: State, step: int
    ) -> None:
        for some, grad in grads:
            chosen = rows[some]
            total = state["sum"].index_select(0, chosen).addcmul_(grad, grad)
            state["sum"].index_copy_(0, chosen, total)
            grad.div_(total.sqrt_().add_(self.eps))
            add_distinct_rows(weight, chosen, grad, -self.lr)


@dataclass
class RowWiseAdagrad(FusedOptimizer):
    """`s += mean(g²)` over the row; `w -= lr g / (√s + eps)`

    On a table split by columns, one all-reduce per update sums the ranks' shares of the mean. With
    `across_columns=False` each rank keeps the mean over its own columns, as torchrec does: nothing
    more is sent, but the results differ from one device's.
    """

    eps: float = 1e-8
    across_columns: bool = True
    states: ClassVar[dict[str, bool]] = {"sum": True}

    @property
    def needs_whole_rows(self) -> bool:
        return self.across_columns

    def row_factors(self, rows: torch.Tensor, squares: torch.Tensor, state: State) -> torch.Tensor:
        total = state["sum"].index_select(0, rows).add_(squares)
        state["sum"].scatter_(0, rows, total)  # faster than `index_copy_`
        return self._scales(total).mul_(-self.lr)

    def _scales(self, total: torch.Tensor) -> torch.Tensor:
        return total.sqrt().add_(self.eps).reciprocal_()

    def change(
        self, weight: torch.Tensor, rows: torch.Tensor, grads: Chunks, state: State, step: int
    ) -> None:
        total = state["sum"].index_select(0, rows)

        def scales(some: slice, grad: torch.Tensor) -> torch.Tensor:
            norms = torch.linalg.vector_norm(grad, dim=1)
            return self._scales(total[some].addcmul_(norms, norms, value=1 / grad.shape[1]))

        add_chunks(weight, rows, grads, -self.lr, scales)
        state["sum"].scatter_(0, rows, total)  # faster than `index_copy_`


@dataclass
class Adam(FusedOptimizer):
    """As `torch.optim.SparseAdam`: moments of the rows that were looked up."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    states: ClassVar[dict[str, bool]] = {"exp_avg": False, "exp_avg_sq": False}

    def change(
        self, weight: torch.Tensor, rows: torch.Tensor, grads: Chunks, state: State, step: int
    ) -> None:
        beta1, beta2 = self.betas
        size = self.lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        for some, grad in grads:
            chosen = rows[some]
            first = state["exp_avg"].index_select(0, chosen).lerp_(grad, 1 - beta1)
            second = state["exp_avg_sq"].index_select(0, chosen)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            state["exp_avg"].index_copy_(0, chosen, first)
            state["exp_avg_sq"].index_copy_(0, chosen, second)
            add_distinct_rows(weight, chosen, first.div_(second.sqrt_().add_(self.eps)), -size)


def add_distinct_rows(
    target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, factor: float | torch.Tensor
) -> torch.Tensor:
    """`target[rows] += factor * values`, for distinct rows in order, with a factor for each row or
    one for all."""
    size = rows.shape[0]
    if _is_plain(target):
        size = _CHUNK_NUMBERS // max(1, math.prod(target.shape[1:]))
    size = max(1, size)
    chunks = (slice(at, at + size) for at in range(0, rows.shape[0], size))
    changes = ((some, values[some]) for some in chunks)
    if isinstance(factor, torch.Tensor):
        return add_chunks(target, rows, changes, 1.0, lambda some, _: factor[some])
    return add_chunks(target, rows, changes, factor)


def add_chunks(
    target: torch.Tensor,
    rows: torch.Tensor,
    changes: Chunks,
    alpha: float,
    factors: Callable[[slice, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """`target[rows] += alpha * changes`, for distinct rows in order, some at a time; times a factor
    for each row, if they are given."""
    if not (_is_plain(target) and target[:1].numel()):
        for some, values in changes:
            if factors is not None:
                values = values * factors(some, values).unsqueeze(1)
            target.index_add_(0, rows[some], values, alpha=alpha)
        return target
    # On the CPU torch adds row by row, through a general kernel for each. To take rows out and put
    # them back is faster, where they stay in the cache in between.
    places, whole, counts = rows.numpy(), _as_bytes(target), torch.arange(1)
    for some, values in changes:
        chosen = rows[some]
        if target.dtype == torch.float32 and target.dim() == 2:
            # As bags of one id: unlike `index_select`, its kernel fetches rows ahead.
            num = chosen.shape[0]
            counts = counts if num < counts.shape[0] else torch.arange(num + 1)
            held = segment_sums(target, chosen, counts[: num + 1])
        else:
            held = target.index_select(0, chosen)
        if factors is None:
            held.add_(values, alpha=alpha)
        else:
            held.addcmul_(values, factors(some, values).unsqueeze(1), value=alpha)
        # Rows are put back as bytes: one copy for each.
        whole.put(places[some], _as_bytes(held), mode="clip")
        del values, held  # the next ones get their memory, which is in the cache
    if not target.is_inference():
        torch.autograd.graph.increment_version(target)
    return target


def _is_plain(target: torch.Tensor) -> bool:
    return target.is_cpu and type(target) is torch.Tensor and target.is_contiguous()


def _as_bytes(rows: torch.Tensor) -> np.ndarray:
    """An array with an item for each row."""
    num_bytes = math.prod(rows.shape[1:]) * rows.element_size()
    if rows.dtype == torch.bfloat16:  # which numpy does not have
        rows = rows.view(torch.int16)
    return rows.numpy().reshape(-1).view(f"V{num_bytes}")
