"""Tied parameters: a parameter that several modules share stays shared.

Note [Tied modules]
A plan may name only one of the modules that share a parameter. All others get the DTensor too, even
those outside the module that is parallelized. A module that uses it gets the style with the same
placement and with whole inputs and outputs, so that nothing changes for the code around it; its
other parameters are placed as well, and may be tied in turn. All of this is decided before anything
is changed. A style that a later call names replaces such an automatic one.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.mesh import grid_of
from shardwise.core.placements import REPLICATE
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import UnsupportedError
from shardwise.parallel.resolve import Placed, Target, fits, note_placed
from shardwise.parallel.style import ParallelStyle, is_parallel, tensor_axis
from shardwise.parallel.styles import ColwiseParallel, ReplicateParallel, RowwiseParallel

#: Above it, one search for all modules is faster than one for what refers to the parameters.
FEW = 32


@dataclass(frozen=True, slots=True)
class Owner:
    """A module that holds a parameter under a name."""

    path: str
    module: nn.Module
    name: str

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def parameter(self) -> nn.Parameter | None:
        return self.module._parameters[self.name]


def tied_owners(root: nn.Module) -> list[list[Owner]]:
    """The owners of each tied parameter, in `root` and in modules that share parameters with it."""
    owners: dict[int, list[Owner]] = {}
    for path, module in root.named_modules():
        _add_owner(owners, path, module)
    known = {id(module._parameters) for module in root.modules()}
    held = [group[0].parameter for group in owners.values() if _is_held_elsewhere(group)]
    if held and (len(held) > FEW or _may_have_other_owners(held, known)):
        others = {id(m._parameters): m for m in _live_modules() if id(m._parameters) not in known}
        while True:
            shares = [
                (i, m)
                for i, m in others.items()
                if any(id(p) in owners for p in _parameters(m).values())
            ]
            if not shares:
                break
            # In the same order on every rank, independent of when modules were made.
            for i, module in sorted(shares, key=lambda each: _signature(each[1])):
                _add_owner(owners, f"<a {type(module).__name__} outside>", module)
                del others[i]
    return [group for group in owners.values() if len(group) > 1]


def _signature(module: nn.Module) -> str:
    shapes = [(name, tuple(p.shape)) for name, p in _parameters(module).items()]
    return f"{type(module).__qualname__} {shapes}"


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module._parameters.items() if p is not None}


def _add_owner(owners: dict[int, list[Owner]], path: str, module: nn.Module) -> None:
    for name, parameter in _parameters(module).items():
        owners.setdefault(id(parameter), []).append(Owner(path, module, name))


def _is_held_elsewhere(group: list[Owner]) -> bool:
    """Whether something besides the owners refers to a parameter; usually nothing does."""
    control = {"like": torch.empty(0)}
    alone = sys.getrefcount(control["like"])
    return sys.getrefcount(group[0].module._parameters[group[0].name]) - alone >= len(group)


def _may_have_other_owners(parameters: Sequence[object], known: set[int]) -> bool:
    """Whether a dict that could be a module's refers to one; an optimizer's list does not count.

    This pass over the garbage collector's objects, in C, takes half the time of `_live_modules` for
    one parameter, and less time up to about 50.
    """
    return any(
        isinstance(each, dict) and id(each) not in known and isinstance(next(iter(each)), str)
        for each in gc.get_referrers(*parameters)
    )


def _live_modules() -> Iterator[nn.Module]:
    kinds: set[type] = set()
    pending: list[type] = [nn.Module]
    while pending:
        kind = pending.pop()
        if kind not in kinds:
            kinds.add(kind)
            pending += type.__subclasses__(kind)
    for value in gc.get_objects():
        if type(value) in kinds and "_parameters" in value.__dict__:
            yield value


def tie_again(groups: Iterable[list[Owner]]) -> None:
    """Give all owners the DTensor that replaced the parameter of one of them."""
    for group in groups:
        held = [owner.parameter for owner in group]
        made = next((p for p in held if isinstance(p, DTensor)), None)
        if made is not None:
            for owner in group:
                owner.module._parameters[owner.name] = made


def counterparts(groups: Sequence[list[Owner]], targets: Iterable[Target]) -> list[Target]:
    """Targets for the other modules that share parameters with `targets`.

    Raises where a parameter cannot stay tied; nothing is changed.
    """
    placed: dict[int, Placed] = {}
    covered: set[int] = set()
    for target in filter(fits, targets):
        _note(placed, target)
        if "parameters" in target.style.decides:
            covered.update(map(id, target.module.modules()))
    return _spread(groups, placed, covered)


def _note(placed: dict[int, Placed], target: Target) -> None:
    for contradiction in note_placed(placed, [target]):
        raise contradiction


def distributed_since(
    groups: Sequence[list[Owner]], before: set[int], targets: Iterable[Target], mesh: DeviceMesh
) -> list[Target]:
    """`counterparts` of parameters that styles distributed undeclared, not in `before`."""
    placed: dict[int, Placed] = {}
    covered: set[int] = set()
    for target in targets:
        if "parameters" in target.style.decides or not target.style.decides:
            covered.update(map(id, target.module.modules()))
    for group in groups:
        parameter = group[0].parameter
        if not isinstance(parameter, DTensor) or id(parameter) in before:
            continue
        if parameter._layout.grid is grid_of(mesh):
            where = parameter.placements[tensor_axis(mesh)]
            placed[id(parameter)] = Placed(group[0].full_name, where)
    return _spread(groups, placed, covered)


def _spread(
    groups: Sequence[list[Owner]], placed: dict[int, Placed], covered: set[int]
) -> list[Target]:
    added: list[Target] = []
    seen: set[tuple[int, str]] = set()
    while True:
        open_owners = [
            owner
            for group in groups
            if id(group[0].parameter) in placed
            for owner in group
            if id(owner.module) not in covered and (id(owner.module), owner.name) not in seen
        ]
        if not open_owners:
            return added
        owner = open_owners[0]
        seen.add((id(owner.module), owner.name))
        if is_parallel(owner.module) or not may_read(owner.module, owner.name):
            continue
        target = _counterpart(owner, placed)
        covered.add(id(owner.module))
        added.append(target)
        _note(placed, target)


def _counterpart(owner: Owner, placed: dict[int, Placed]) -> Target:
    """A target for a module that uses a tied parameter, with whole inputs and outputs."""
    module = owner.module
    needed = {
        name: placed[id(parameter)].placement
        for name, parameter in _parameters(module).items()
        if id(parameter) in placed
    }
    for style in _whole_outside(module):
        style.path = owner.path
        target = Target(owner.path, owner.path, module, style)
        if needed.items() <= dict(style.parameter_placements(module)).items() and fits(target):
            return target
    place = placed[id(owner.parameter)]
    raise UnsupportedError(
        f"{owner.full_name!r} and {place.name!r} are one parameter, which the plan places as "
        f"{place.placement}; but {type(module).__name__} uses it as a plain tensor in its own "
        "code, and no style for it is known. Name that module in the plan, with a ParallelStyle "
        "of your own; or give it a separate parameter; or leave the other one out of the plan."
    )


def _whole_outside(module: nn.Module) -> list[ParallelStyle]:
    if next(module.children(), None) is not None:
        return []
    return [
        ReplicateParallel(),
        ColwiseParallel(output_layouts=REPLICATE),
        RowwiseParallel(input_layouts=REPLICATE),
    ]


def may_read(module: nn.Module, name: str) -> bool:
    """Whether the module's own code may read `module.<name>`, rather than only hold it.

    Looks for the name in the bytecode of `forward` and of the methods that it names. Code that
    cannot be inspected counts as use. Functions outside the class are not followed.
    """
    own = [kind for kind in type(module).__mro__ if kind not in nn.Module.__mro__]
    pending: list[Any] = [module.__dict__.get("forward")]
    pending += [kind.__dict__.get("forward") for kind in own]
    pending = [function for function in pending if function is not None]
    if not pending:
        return True  # others use its parameters
    seen: set[str] = {"forward"}
    while pending:
        code = _code(pending.pop())
        if code is None:
            return True
        names = set(_names(code))
        if name in names:
            return True
        for called in names - seen:
            seen.add(called)
            found = [kind.__dict__[called] for kind in own if called in kind.__dict__]
            pending += [each for each in found if _is_code(each)]
    return False


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, (property, staticmethod, classmethod))


def _code(function: Any) -> types.CodeType | None:
    if isinstance(function, property):
        function = function.fget
    if isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    return getattr(function, "__code__", None)


def _names(code: types.CodeType) -> Iterator[str]:
    """The attributes and strings in a function, and in those that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _names(constant)
