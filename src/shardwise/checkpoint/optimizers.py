"""Optimizers in checkpoints: their state and groups by the names of parameters.

Note [State by name]
torch keys an optimizer's state by the position of each parameter. In a checkpoint the key is the
name that the parameter is saved under; else the optimizer's own name for it (as of
`SGD(model.named_parameters())`); and its position only if there is neither. So a model may list its
parameters in another order, and ranks may train different ones. Files of format 1 have positions.
Shapes can show that an order is wrong, not that it is right: such a file is loaded with a warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import CheckpointError

#: The names under which a tensor is saved; none if it is not.
NamesOf = Callable[[torch.Tensor], Sequence[str]]


@dataclass(frozen=True, slots=True)
class OwnParameter:
    """A parameter of an optimizer: its key in the state dict, its group, and possible names."""

    key: Any
    tensor: torch.Tensor
    group: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """How an optimizer fits what was saved: own keys and groups -> those saved."""

    keys: dict[Any, Any]
    groups: dict[int, int]
    by_position: bool
    #: Keys that were saved and that no parameter here has.
    unused: frozenset[Any] = frozenset()


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """The keys of a group's parameters, and its settings as nodes."""

    keys: list[Any]
    settings: dict[Any, Any]


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """A saved optimizer: the nodes of its state by key, its groups, and whatever else it has."""

    state: dict[Any, Any]
    groups: list[SavedGroup]
    others: dict[Any, Any]


def is_optimizer(value: Any) -> bool:
    """Whether a value has groups of parameters and a state dict."""
    groups = getattr(value, "param_groups", None)
    stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return isinstance(groups, list) and stateful


def own_parameters(
    optimizer: Any, state: Any, names_of: NamesOf
) -> tuple[OwnParameter, ...] | None:
    """The parameters in the order of the state dict; None if that is not of torch's form."""
    found = []
    try:
        pairs = zip(state["param_groups"], optimizer.param_groups, strict=True)
        for number, (group, live) in enumerate(pairs):
            given = group.get("param_names", ())
            both = zip(group["params"], live["params"], strict=True)
            for place, (key, tensor) in enumerate(both):
                names = [*names_of(tensor), *([key] if isinstance(key, str) else [])]
                names += given[place : place + 1]
                found.append(OwnParameter(key, tensor, number, tuple(names)))
    except (KeyError, TypeError, ValueError):
        return None
    return tuple(found)


def keyed_by_name(optimizer: Any, names_of: NamesOf) -> dict[str, Any]:
    """The state dict to save; see Note [State by name].

    Groups and their parameters are tables, which differ between ranks where lists may not.
    """
    state: dict[str, Any] = optimizer.state_dict()
    own = own_parameters(optimizer, state, names_of)
    if own is None:
        return state
    keys = {p.key: p.names[0] if p.names else p.key for p in own}
    if len(set(keys.values())) < len(keys):
        keys = {p.key: p.key for p in own}
    groups = {}
    for number, group in enumerate(state["param_groups"]):
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups[number] = {**settings, "params": {keys[key]: None for key in group["params"]}}
    entries = {keys.get(key, key): entry for key, entry in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


def fit(
    own: Sequence[OwnParameter], num_groups: int, saved: Sequence[Sequence[Any]], strict: bool
) -> Fit:
    """Match an optimizer's parameters with the keys of each saved group; raises where they differ.

    Unless `strict`, parameters that were not saved get no state.
    """
    group_of = {key: number for number, keys in enumerate(saved) for key in keys}
    keys = {}
    used: set[Any] = set()
    for each in own:
        names = each.names or (each.key,)
        found = [name for name in names if name in group_of]
        used.update(found)
        if found:
            keys[each.key] = found[0]
    has_names = any(each.names for each in own)
    if not (has_names and any(isinstance(key, str) for key in group_of)):
        return _fit_by_position(own, num_groups, saved)
    missing = [each.names[0] if each.names else each.key for each in own if each.key not in keys]
    if missing and (strict or not keys):
        raise CheckpointError(
            f"was saved without {_some(missing)}; it has {_some(group_of)}. Load it together with "
            "the modules that have its parameters, as it was saved"
        )
    groups = _fit_groups(own, num_groups, keys, group_of)
    return Fit(keys, groups, by_position=False, unused=frozenset(group_of.keys() - used))


def _fit_by_position(
    own: Sequence[OwnParameter], num_groups: int, saved: Sequence[Sequence[Any]]
) -> Fit:
    counts = Counter(each.group for each in own)
    sizes = [counts[number] for number in range(num_groups)]
    if sizes != [len(keys) for keys in saved]:
        raise CheckpointError(
            f"has groups of {sizes} parameters here, and of {[len(keys) for keys in saved]} as "
            "saved"
        )
    keys = (key for group in saved for key in group)
    return Fit(
        {each.key: key for each, key in zip(own, keys, strict=True)},
        {number: number for number in range(num_groups)},
        by_position=True,
    )


def _fit_groups(
    own: Sequence[OwnParameter], num_groups: int, keys: dict[Any, Any], group_of: dict[Any, int]
) -> dict[int, int]:
    """A group is the one that its parameters were saved in; without parameters, that of its place.

    >>> _fit_groups((), 1, {}, {})
    {0: 0}
    """
    saved_in: dict[int, set[int]] = {}
    for each in own:
        if each.key in keys:
            saved_in.setdefault(each.group, set()).add(group_of[keys[each.key]])
    for number, here in saved_in.items():
        if len(here) > 1:
            raise CheckpointError(
                f"has in group {number} parameters that were saved in groups {sorted(here)}"
            )
    groups = {number: min(here) for number, here in saved_in.items()}
    if len(set(groups.values())) < len(groups):
        raise CheckpointError(f"has {num_groups} groups of parameters that were saved as fewer")
    return {number: groups.get(number, number) for number in range(num_groups)}


def _some(names: Any) -> str:
    shown = [str(name) for name in names]
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    return ", ".join(shown[:4]) + more


def why_not_of(shape: Sequence[int], parameter: torch.Tensor) -> str | None:
    """Why state of this shape cannot be of a parameter; None where it can.

    Moments have the parameter's shape, or 1 in some dims; state of another number of dims is any.
    """
    sizes = tuple(parameter.shape)
    if len(shape) != len(sizes) or all(n in (1, m) for n, m in zip(shape, sizes, strict=True)):
        return None
    return (
        f"has shape {tuple(shape)}, and the parameter at its position {sizes}: the parameters are "
        "in another order than when they were saved"
    )
