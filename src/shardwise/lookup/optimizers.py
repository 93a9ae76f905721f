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

import torch

from shardwise.errors import ArgumentError

State = Mapping[str, torch.Tensor]
#: Elements of rows that are multiplied at a time: 1 MB.
_CHUNK_NUMBERS = 1 << 18


@dataclass
class FusedOptimizer:
    """The settings of an optimizer; `lr` may be changed between steps."""

    lr: float
    weight_decay: float = field(default=0.0, kw_only=True)
    #: name -> whether it has one number per row; otherwise it has the table's shape.
    states: ClassVar[dict[str, bool]] = {}
    #: Whether a row's change is a number times its gradient, given by `row_factors`, which with
    #: `needs_squares` needs the mean square of each row's gradient.
    scales_rows: ClassVar[bool] = False
    needs_squares: ClassVar[bool] = False

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

    def row_factors(self, squares: torch.Tensor | None, state: State) -> float | torch.Tensor:
        """The factor of each row's gradient in its change.

        Updates the state, which is of the same rows as `squares`.
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

    scales_rows: ClassVar[bool] = True

    def row_factors(self, squares: torch.Tensor | None, state: State) -> float | torch.Tensor:
        return -self.lr

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
    scales_rows: ClassVar[bool] = True
    needs_squares: ClassVar[bool] = True

    @property
    def needs_whole_rows(self) -> bool:
        return self.across_columns

    def row_factors(self, squares: torch.Tensor | None, state: State) -> float | torch.Tensor:
        assert squares is not None, "needs_squares is set"
        total = state["sum"].add_(squares)
        return total.sqrt().add_(self.eps).reciprocal_().mul_(-self.lr)

    def change(
        self, weight: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, state: State, step: int
    ) -> None:
        scale_and_add_rows(self, weight, rows, grad, mean_squares(grad), state)


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


def mean_squares(grad: torch.Tensor) -> torch.Tensor:
    """The mean of the squares of each row."""
    return torch.linalg.vector_norm(grad, dim=1).square_().div_(grad.shape[1])


def row_factors_of(
    optimizer: FusedOptimizer, rows: torch.Tensor, squares: torch.Tensor, state: State
) -> torch.Tensor:
    """`row_factors` of distinct rows, from the mean squares of their gradients."""
    here = {name: numbers.index_select(0, rows) for name, numbers in state.items()}
    factors = optimizer.row_factors(squares, here)
    assert isinstance(factors, torch.Tensor), "one factor per row"
    for name, numbers in here.items():
        state[name].index_copy_(0, rows, numbers)
    return factors


def scale_and_add_rows(
    optimizer: FusedOptimizer,
    weight: torch.Tensor,
    rows: torch.Tensor,
    grad: torch.Tensor,
    squares: torch.Tensor,
    state: State,
) -> None:
    """Change distinct rows by `row_factors` times their gradient."""
    factors = row_factors_of(optimizer, rows, squares, state)
    add_distinct_rows(weight, rows, grad.mul_(factors.unsqueeze(1)), 1)


def add_distinct_rows(
    target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, factor: float
) -> torch.Tensor:
    """`target[rows] += factor * values`, for distinct rows in order."""
    if factor == 1 or target.device.type != "cpu":
        return target.index_add_(0, rows, values, alpha=factor)
    # On the CPU torch adds multiples at half the speed. Small products stay in the cache.
    step = max(1, _CHUNK_NUMBERS // max(1, math.prod(values.shape[1:])))
    for some, more in zip(rows.split(step), values.split(step), strict=True):
        target.index_add_(0, some, more * factor)
    return target


def optimizer_settings(optimizer: FusedOptimizer) -> dict[str, Any]:
    """The settings as plain data, for a checkpoint."""
    return dict(vars(optimizer))
