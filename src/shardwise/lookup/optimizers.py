"""Updates that are fused into the backward pass: one rule per optimizer.

Each follows the formula of torch's optimizer of that name, on the rows that a batch looked up: SGD
and Adagrad as with a dense gradient (rows without one do not change), Adam as
`torch.optim.SparseAdam` (moments of other rows do not change). Row-wise Adagrad keeps one number
per row: the running sum of the mean square of the row's gradient. `weight_decay` adds that times
the row to its gradient first; rows that were not looked up do not decay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from shardwise.errors import ArgumentError
from shardwise.lookup.ids import segment_sums

State = Mapping[str, torch.Tensor]
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
        self, weight: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, state: State, step: int
    ) -> None:
        """Change `rows` of `weight` and of the state; `grad` is scratch afterwards."""
        raise NotImplementedError


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
        self.optimizer.decay(weight, rows, grad)
        self.optimizer.change(weight, rows, grad, self.state, self.step)


@dataclass
class SGD(FusedOptimizer):
    """`w -= lr g`"""

    def change(
        self, weight: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, state: State, step: int
    ) -> None:
        add_distinct_rows(weight, rows, grad, -self.lr)


@dataclass
class Adagrad(FusedOptimizer):
    """`s += g²; w -= lr g / (√s + eps)`"""

    eps: float = 1e-10
    states: ClassVar[dict[str, bool]] = {"sum": False}

    def change(
        self, weight: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, state: State, step: int
    ) -> None:
        total = state["sum"].index_select(0, rows).addcmul_(grad, grad)
        state["sum"].index_copy_(0, rows, total)
        add_distinct_rows(weight, rows, grad.div_(total.sqrt_().add_(self.eps)), -self.lr)


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
        return self._factors(rows, state["sum"].index_select(0, rows).add_(squares), state)

    def _factors(self, rows: torch.Tensor, total: torch.Tensor, state: State) -> torch.Tensor:
        state["sum"].scatter_(0, rows, total)  # faster than `index_copy_`
        return total.sqrt_().add_(self.eps).reciprocal_().mul_(-self.lr)

    def change(
        self, weight: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, state: State, step: int
    ) -> None:
        norms, total = torch.linalg.vector_norm(grad, dim=1), state["sum"].index_select(0, rows)
        total.addcmul_(norms, norms, value=1 / grad.shape[1])
        add_distinct_rows(weight, rows, grad, self._factors(rows, total, state))


@dataclass
class Adam(FusedOptimizer):
    """As `torch.optim.SparseAdam`: moments of the rows that were looked up."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    states: ClassVar[dict[str, bool]] = {"exp_avg": False, "exp_avg_sq": False}

    def change(
        self, weight: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, state: State, step: int
    ) -> None:
        beta1, beta2 = self.betas
        first = state["exp_avg"].index_select(0, rows).lerp_(grad, 1 - beta1)
        second = state["exp_avg_sq"].index_select(0, rows)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        state["exp_avg"].index_copy_(0, rows, first)
        state["exp_avg_sq"].index_copy_(0, rows, second)
        size = self.lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        add_distinct_rows(weight, rows, first.div_(second.sqrt_().add_(self.eps)), -size)


def add_distinct_rows(
    target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, factor: float | torch.Tensor
) -> torch.Tensor:
    """`target[rows] += factor * values`, for distinct rows in order, with a factor for each row or
    one for all."""
    if not (_is_plain(target) and values.numel()):
        if isinstance(factor, torch.Tensor):
            values, factor = values * factor.unsqueeze(1), 1
        return target.index_add_(0, rows, values, alpha=factor)
    # On the CPU torch adds row by row, through a general kernel for each. To take rows out and put
    # them back is faster, where they stay in the cache in between.
    step = min(rows.shape[0], max(1, _CHUNK_NUMBERS // math.prod(target.shape[1:])))
    one_each = torch.arange(step + 1)
    # Rows are put back as bytes: one copy for each.
    places, whole = rows.numpy(), _as_bytes(target)
    for start in range(0, rows.shape[0], step):
        some, more = rows[start : start + step], values[start : start + step]
        if target.dtype == torch.float32 and target.dim() == 2:
            # As bags of one id: unlike `index_select`, its kernel fetches rows ahead.
            held = segment_sums(target, some, one_each[: some.shape[0] + 1])
        else:
            held = target.index_select(0, some)
        if isinstance(factor, torch.Tensor):
            held.addcmul_(more, factor[start : start + step].unsqueeze(1))
        else:
            held.add_(more, alpha=factor)
        np.put(whole, places[start : start + step], _as_bytes(held), mode="clip")
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


def optimizer_settings(optimizer: FusedOptimizer) -> dict[str, Any]:
    """The settings as plain data, for a checkpoint."""
    return dict(vars(optimizer))
