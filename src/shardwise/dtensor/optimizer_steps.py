"""Steps of torch's optimizers on local tensors.

Note [A step on local tensors]
Most optimizers are elementwise, so they can update each shard on its own. For those, `step` runs on
a twin of the optimizer that holds local tensors in place of DTensors; new state is wrapped again.
The optimizer itself does not change, and neither do its groups and state, nor schedulers and
checkpoints that read them. This is faster: an op on DTensors costs more than the update of a small
tensor, and a step runs a dozen for each.

The twin's tensors are found once; a later step only checks that they are still the same.

torch has global hooks around every step, and the hook before it may replace the arguments, the
optimizer among them. Any other optimizer, and any special case (other hooks, a gradient in another
layout), steps through DTensors.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch.optim import optimizer as hooks

from shardwise._torch.autograd import count_versions
from shardwise._torch.functions import others_watch_steps
from shardwise.comm.watch import watch
from shardwise.core.layout import Layout
from shardwise.dispatch.wrapped import count_on_lent, is_partial
from shardwise.dtensor.autograd import reduce_gradients, with_dtype
from shardwise.dtensor.tensor import DTensor
from shardwise.simulation.ranks import LENT, from_parts, held_like, parts_of, roster_of
from shardwise.simulation.roster import Roster

#: The optimizers whose update of an element depends only on that element and its state.
ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
#: State that is one number per parameter; all other state is shaped like the parameter.
NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})


def register() -> None:
    """Register hooks around every step. An optimizer without DTensors is left alone."""
    hooks.register_optimizer_step_pre_hook(_before_step)
    hooks.register_optimizer_step_post_hook(_after_step)


def _before_step(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    for tell in watch.steps:
        tell(optimizer)
    if torch.compiler.is_compiling() or not any(type(p) is DTensor for p in _held(optimizer)):
        return None
    elementwise = type(optimizer) in ELEMENTWISE and not optimizer.defaults.get("differentiable")
    if elementwise and (len(args) > 1 or kwargs):
        args, kwargs = _with_loss(*args, **kwargs)
    # Other hooks would see the twin, or state that is not wrapped yet.
    if elementwise and not others_watch_steps(optimizer):
        lending = _lendings.get(optimizer)
        if lending is None:
            lending = _lendings[optimizer] = _Lending()
        twin = lending.twin(optimizer)
        if twin is not None:
            return (twin, *args[1:]), kwargs
    _reduce(optimizer)
    return args, kwargs


def _held(optimizer: Any) -> Iterator[Any]:
    """The parameters of all groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _with_loss(
    optimizer: Any, closure: Callable[[], Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run the closure now: these optimizers call it once, before they read a gradient."""
    if closure is None:
        return (optimizer,), {}
    with torch.enable_grad():
        loss = closure()
    return (optimizer, lambda: loss), {}


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    lending = _lendings.get(optimizer) if args[0] is not optimizer else None
    if lending is not None:
        lending.take_back(optimizer, args[0])


def _reduce(optimizer: Any) -> None:
    """Reduce Partial gradients together: the optimizer's ops would do so one by one."""
    pending = []
    for parameter in _held(optimizer) if not watch.strict else ():
        gradient = parameter.grad
        if (
            type(gradient) is DTensor
            and gradient._layout is not parameter._layout
            and is_partial(gradient._layout)
        ):
            pending.append(parameter)
    if pending:
        reduce_gradients(pending)


@dataclass(slots=True)
class _Loan:
    """A parameter's local tensors and states, as the twin has them."""

    parameter: DTensor
    layout: Layout
    local: torch.Tensor
    #: One in a real process, one per part in a simulated world.
    parts: Sequence[torch.Tensor]
    roster: Roster | None
    #: The state of each part.
    states: list[dict[str, Any]]
    #: The values of the parameter's state, and of the first part's, after the last step.
    known: list[Any]
    lent: list[Any]
    #: Whether the parameter is a view: writes count on the memory that its base has lent.
    is_view: bool


class _Lending:
    """What an optimizer has lent to its twins."""

    def __init__(self) -> None:
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.loans: dict[int, _Loan] = {}
        #: The loans of the current step, the parts of all of them, and those of their gradients.
        self.current: list[_Loan] = []
        self.parts: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        #: Whether a group of the current step has a fused kernel.
        self.fused = False
        #: Whether there are loans that may share a local tensor.
        self.unchecked = False

    def twin(self, optimizer: Any) -> Any | None:
        """The optimizer with local tensors in place of DTensors; None if there can be no twin."""
        self.current, self.parts, self.gradients, self.fused = [], [], [], False
        groups = []
        for group in optimizer.param_groups:
            if group.get("fused"):
                self.fused = True
            params = self._lend(group["params"], optimizer)
            if params is None:
                self._forget()
                return None
            groups.append({**group, "params": params})
        if self.unchecked and len({id(x.local) for x in self.current}) < len(self.current):
            self._forget()  # parameters that share a local tensor: it has one gradient and state
            return None
        self.unchecked = False
        for part, gradient in zip(self.parts, self.gradients, strict=True):
            part.grad = gradient
        twin = object.__new__(type(optimizer))
        twin.__dict__.update(optimizer.__dict__)
        twin.state, twin.param_groups = self.state, groups
        return twin

    def _forget(self) -> None:
        self.state, self.loans = defaultdict(dict), {}

    def _lend(self, parameters: Sequence[Any], optimizer: Any) -> list[torch.Tensor] | None:
        """The local tensors of the parameters that have gradients."""
        params: list[torch.Tensor] = []
        states, loans = optimizer.state, self.loans
        current, parts, gradients = self.current, self.parts, self.gradients
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            state = states[parameter]
            loan = loans.get(id(parameter))
            if (
                loan is None
                or loan.roster is not None
                or loan.local is not parameter._local
                or type(gradient) is not DTensor
                or gradient._layout is not loan.layout
                or len(state) != len(loan.known)
                or not all(map(is_, state.values(), loan.known))
            ):
                found = self._lend_anew(parameter, state, optimizer)
                if found is None:
                    return None
                params += found
                continue
            # Nearly always. Every parameter pays for every line.
            local = loan.local
            params.append(local)
            parts.append(local)
            gradients.append(gradient._local)
            current.append(loan)
        return params

    def _lend_anew(
        self, parameter: Any, state: dict[str, Any], optimizer: Any
    ) -> Sequence[torch.Tensor] | None:
        """The local tensors of a parameter, in a new loan if there is none or it has changed."""
        if type(parameter) is not DTensor:
            self.state[parameter] = state
            return (parameter,)
        loan = self.loans.get(id(parameter))
        if (
            loan is None
            or len(loan.parts) > 1  # copies of a number do not follow it
            or loan.local is not parameter._local
            or len(state) != len(loan.known)
            or not all(map(is_, state.values(), loan.known))
        ):
            loan = _make_loan(parameter, state)
            if loan is None:
                return None
            self.loans[id(parameter)] = loan
            self.unchecked = True
            self.state.update(zip(loan.parts, loan.states, strict=True))
        gradient: Any = parameter.grad
        if type(gradient) is DTensor and is_partial(gradient._layout):
            _reduce(optimizer)
            gradient = parameter.grad
        if type(gradient) is not DTensor or not _meets(gradient._layout, loan.layout):
            return None
        self.current.append(loan)
        self.parts += loan.parts
        self.gradients += _parts(gradient._local, loan.roster)
        return loan.parts

    def take_back(self, optimizer: Any, twin: Any) -> None:
        """Bring the state after the twin's step back to the optimizer."""
        for part in self.parts:
            part.grad = None
        for loan in self.current:
            state = loan.states[0]
            if len(state) != len(loan.lent) or not all(map(is_, state.values(), loan.lent)):
                _adopt(loan, optimizer.state[loan.parameter])
        self._count_writes()
        own = {"state", "param_groups"}
        optimizer.__dict__.update({k: v for k, v in twin.__dict__.items() if k not in own})
        if len(self.loans) > len(self.current):
            self._forget()  # parameters may have left the optimizer; the others are lent again
        self.current, self.parts, self.gradients = [], [], []

    def _count_writes(self) -> None:
        """Count the step on the parameters: torch has counted it only on their plain local tensors.

        It has not even done that for a fused step, for a base, or for aliases with separate
        counters.
        """
        grids = {loan.layout.grid for loan in self.current}
        for grid in grids:
            grid.num_writes += 1
        for loan in self.current if any(grid.lends for grid in grids) else ():
            lends = loan.layout.grid.lends
            if lends and (self.fused or loan.is_view or loan.local.__dict__.get(LENT)):
                count_on_lent(loan.parameter)
        if not torch.is_inference_mode_enabled():
            count_versions([loan.parameter for loan in self.current])


_lendings: weakref.WeakKeyDictionary[Any, _Lending] = weakref.WeakKeyDictionary()


def _meets(gradient: Layout, layout: Layout) -> bool:
    return gradient is layout or (gradient.dtype == layout.dtype and _same_places(gradient, layout))


def _same_places(layout: Layout, other: Layout) -> bool:
    """Whether the local tensors of both correspond element by element."""
    return layout is other or (
        layout.placements == other.placements
        and layout.grid is other.grid
        and layout.order == other.order
        and layout.shape == other.shape
    )


def _parts(local: Any, roster: Roster | None) -> Sequence[torch.Tensor]:
    """The tensors of a local tensor, one per entry of `roster`."""
    return (local,) if roster is None else parts_of(held_like(local, roster))


def _make_loan(parameter: DTensor, state: dict[str, Any]) -> _Loan | None:
    layout, local = parameter._layout, parameter._local
    roster = roster_of(local)
    parts = _parts(local, roster)
    # Terms of a Partial cannot be updated one by one, and traced tensors are not plain.
    if is_partial(layout) or type(parts[0]) is not torch.Tensor:
        return None
    states: list[dict[str, Any]] = [{} for _ in parts]
    for name, value in state.items():
        values = _split(name, value, layout, roster, len(parts))
        if values is None:
            return None
        for part_state, each in zip(states, values, strict=True):
            part_state[name] = each
    known, lent = list(state.values()), list(states[0].values())
    is_view = parameter._base is not None
    return _Loan(parameter, layout, local, parts, roster, states, known, lent, is_view)


def _split(
    name: str, value: Any, layout: Layout, roster: Roster | None, num: int
) -> Sequence[Any] | None:
    """An entry of the state for each part; None where its layout is not the parameter's."""
    if not isinstance(value, torch.Tensor):
        return [value] * num
    if name in NUMBERS:
        # One per parameter: the first part writes to it, the others to copies.
        return [value, *(value.clone() for _ in range(num - 1))]
    if type(value) is DTensor and _same_places(value._layout, layout):
        return _parts(value._local, roster)
    return None


def _adopt(loan: _Loan, state: dict[str, Any]) -> None:
    """Put new entries of the parts' states into the parameter's state."""
    before = dict(zip(map(id, loan.lent), loan.known, strict=True))
    for name, value in loan.states[0].items():
        if id(value) in before:
            state[name] = before[id(value)]
        elif name in NUMBERS or not isinstance(value, torch.Tensor):
            state[name] = value
        else:
            for part_state, part in zip(loan.states, loan.parts, strict=True):
                part_state[name] = _strided_like(part_state[name], part)
            parts = [part_state[name] for part_state in loan.states]
            local = from_parts(parts, loan.roster)
            state[name] = DTensor._wrap(local, with_dtype(loan.layout, value.dtype))
    loan.known, loan.lent = list(state.values()), list(loan.states[0].values())


def _strided_like(value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """`value` with the strides of the layout; a momentum may have those of the gradient."""
    if value.stride() == part.stride():
        return value
    return torch.empty_like(part, dtype=value.dtype).copy_(value)
