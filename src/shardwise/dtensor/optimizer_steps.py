"""Steps of torch's optimizers on local tensors.

Note [A step on local tensors]
Most optimizers treat every element alone, so what they do to a shard is what they do to the whole.
For those, `step` runs on a twin of the optimizer that holds local tensors where the optimizer holds
DTensors; the state that the step leaves is wrapped again. The optimizer itself stays as it was, and
so does everything that is read from it: groups, state, schedulers, checkpoints. Ops on DTensors
cost more than the update of a small tensor, and a step makes a dozen for each.

The twin's tensors are found once; a later step only looks whether they are still the same.

torch offers hooks around every step, and the one before may exchange the arguments, the optimizer
among them. Any other optimizer, and any case that is not plain (other hooks, a gradient that lies
elsewhere), steps through DTensors.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch.optim import optimizer as hooks

from shardwise._torch.functions import others_watch_steps
from shardwise.comm.watch import watch
from shardwise.core.layout import Layout
from shardwise.dispatch.foreach import count_writes
from shardwise.dispatch.wrapped import is_partial
from shardwise.dtensor.autograd import with_dtype
from shardwise.dtensor.gradients import reduce_gradients
from shardwise.dtensor.tensor import DTensor
from shardwise.simulation.parts import from_parts, held_like, parts_of, roster_of
from shardwise.simulation.roster import Roster

#: The optimizers whose update of an element looks at nothing but that element and its state.
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
#: What these optimizers keep once per parameter; all else of a state is shaped like the parameter.
NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})


def register() -> None:
    """Ask torch to call us around every step. An optimizer without DTensors is left alone."""
    hooks.register_optimizer_step_pre_hook(_before_step)
    hooks.register_optimizer_step_post_hook(_after_step)


def _before_step(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if torch.compiler.is_compiling() or not any(type(p) is DTensor for p in parameters):
        return None
    elementwise = type(optimizer) in ELEMENTWISE and not optimizer.defaults.get("differentiable")
    if elementwise and (len(args) > 1 or kwargs):
        args, kwargs = _with_loss(*args, **kwargs)
    if not watch.strict:
        _reduce(parameters)
    if elementwise and not _others_look(optimizer):
        twin = _lendings.setdefault(optimizer, _Lending()).twin(optimizer)
        if twin is not None:
            args = (twin, *args[1:])
    return args, kwargs


def _with_loss(
    optimizer: Any, closure: Callable[[], Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run the closure now: these optimizers would do it once, before they look at a gradient."""
    if closure is None:
        return (optimizer,), {}
    with torch.enable_grad():
        loss = closure()
    return (optimizer, lambda: loss), {}


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args[0] is not optimizer and optimizer in _lendings:
        _lendings[optimizer].take_back(optimizer, args[0])


def _reduce(parameters: Iterable[Any]) -> None:
    """Reduce what is Partial, all at once: an optimizer would do so one by one."""
    pending = []
    for parameter in parameters:
        gradient = parameter.grad
        if (
            type(gradient) is DTensor
            and gradient._layout is not parameter._layout
            and is_partial(gradient._layout)
        ):
            pending.append(parameter)
    if pending:
        reduce_gradients(pending)


def _others_look(optimizer: Any) -> bool:
    """Whether someone else's hooks would see the twin, or a state that is not wrapped yet."""
    return others_watch_steps(optimizer)


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
    shares: list[dict[str, Any]]
    #: What stood in the parameter's state, and in the first share, after the last step.
    known: list[Any]
    lent: list[Any]


class _Lending:
    """What an optimizer has lent to its twins."""

    def __init__(self) -> None:
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.loans: dict[int, _Loan] = {}
        #: The loans of the step that runs, and the tensors that stand in for their gradients.
        self.current: list[_Loan] = []
        self.gradients: list[Sequence[torch.Tensor]] = []

    def twin(self, optimizer: Any) -> Any | None:
        """The optimizer with local tensors in place of DTensors; None where that is not plain."""
        self.current, self.gradients = [], []
        groups = []
        for group in optimizer.param_groups:
            params = self._lend(group["params"], optimizer.state)
            if params is None:
                self._forget()
                return None
            groups.append({**group, "params": params})
        for loan, terms in zip(self.current, self.gradients, strict=True):
            for part, term in zip(loan.parts, terms, strict=True):
                part.grad = term
        twin = object.__new__(type(optimizer))
        twin.__dict__.update(optimizer.__dict__)
        twin.state, twin.param_groups = self.state, groups
        return twin

    def _forget(self) -> None:
        self.state, self.loans = defaultdict(dict), {}

    def _lend(self, parameters: Sequence[Any], states: Any) -> list[torch.Tensor] | None:
        """The local tensors of the parameters that have gradients."""
        params: list[torch.Tensor] = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            state = states[parameter]
            if type(parameter) is not DTensor:
                params.append(parameter)
                self.state[parameter] = state
                continue
            loan = self.loans.get(id(parameter))
            if (
                loan is None
                or len(loan.parts) > 1  # copies of a number do not follow the number
                or loan.local is not parameter._local
                or len(state) != len(loan.known)
                or not all(map(is_, state.values(), loan.known))
            ):
                loan = _make_loan(parameter, state)
                if loan is None:
                    return None
                self.loans[id(parameter)] = loan
                self.state.update(zip(loan.parts, loan.shares, strict=True))
            if type(gradient) is not DTensor or not _meets(gradient._layout, loan.layout):
                return None
            params += loan.parts
            self.current.append(loan)
            self.gradients.append(_parts(gradient._local, loan.roster))
        return params

    def take_back(self, optimizer: Any, twin: Any) -> None:
        """Note down what the twin's step has done."""
        for loan in self.current:
            for part in loan.parts:
                part.grad = None
            share = loan.shares[0]
            if len(share) != len(loan.lent) or not all(map(is_, share.values(), loan.lent)):
                _adopt(loan, optimizer.state[loan.parameter])
        count_writes([loan.parameter for loan in self.current])
        own = {"state", "param_groups"}
        optimizer.__dict__.update({k: v for k, v in twin.__dict__.items() if k not in own})
        if len(self.loans) > len(self.current):
            self._forget()  # parameters may have left the optimizer; those that did not come again
        self.current, self.gradients = [], []


_lendings: weakref.WeakKeyDictionary[Any, _Lending] = weakref.WeakKeyDictionary()


def _meets(gradient: Layout, layout: Layout) -> bool:
    return gradient is layout or (gradient.dtype == layout.dtype and _same_places(gradient, layout))


def _same_places(layout: Layout, other: Layout) -> bool:
    """Whether local tensors of both meet element by element."""
    return layout is other or (
        layout.placements == other.placements
        and layout.grid is other.grid
        and layout.order == other.order
        and layout.shape == other.shape
    )


def _parts(local: Any, roster: Roster | None) -> Sequence[torch.Tensor]:
    """The tensors behind a local tensor, held by the ranks as `roster` says."""
    return parts_of(held_like(local, roster))


def _make_loan(parameter: DTensor, state: dict[str, Any]) -> _Loan | None:
    layout, local = parameter._layout, parameter._local
    roster = roster_of(local)
    parts = _parts(local, roster)
    # The update of a term is no term of the update; and what a compiler traces is no plain tensor.
    if is_partial(layout) or type(parts[0]) is not torch.Tensor:
        return None
    shares: list[dict[str, Any]] = [{} for _ in parts]
    for name, value in state.items():
        values = _shares(name, value, layout, roster, len(parts))
        if values is None:
            return None
        for share, each in zip(shares, values, strict=True):
            share[name] = each
    known, lent = list(state.values()), list(shares[0].values())
    return _Loan(parameter, layout, local, parts, roster, shares, known, lent)


def _shares(
    name: str, value: Any, layout: Layout, roster: Roster | None, num: int
) -> Sequence[Any] | None:
    """What each part gets of an entry of the state; None where the entry lies otherwise."""
    if not isinstance(value, torch.Tensor):
        return [value] * num
    if name in NUMBERS:
        # One per parameter: the first part writes to it, the others to copies.
        return [value, *(value.clone() for _ in range(num - 1))]
    if type(value) is DTensor and _same_places(value._layout, layout):
        return _parts(value._local, roster)
    return None


def _adopt(loan: _Loan, state: dict[str, Any]) -> None:
    """Put what is new in the shares into the parameter's state."""
    before = dict(zip(map(id, loan.lent), loan.known, strict=True))
    for name, value in loan.shares[0].items():
        if id(value) in before:
            state[name] = before[id(value)]
        elif name in NUMBERS or not isinstance(value, torch.Tensor):
            state[name] = value
        else:
            for share, part in zip(loan.shares, loan.parts, strict=True):
                share[name] = _strided_like(share[name], part)
            parts = [share[name] for share in loan.shares]
            local = from_parts(parts, loan.roster)
            state[name] = DTensor._wrap(local, with_dtype(loan.layout, value.dtype))
    loan.known, loan.lent = list(state.values()), list(loan.shares[0].values())


def _strided_like(value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A momentum may be strided like the gradient it was copied from; its layout says otherwise."""
    if value.stride() == part.stride():
        return value
    return torch.empty_like(part, dtype=value.dtype).copy_(value)
