"""States as JSON trees: modules, optimizers, dicts of them and of plain values.

A tree has dicts, lists, tuples, plain values and tensors. In JSON, a plain value is itself and
everything else is an object whose only key names its kind:

    {"dict": [["step", 3], ["model", {"dict": [["weight", {"tensor": "model.weight"}]]}]]}
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.errors import CheckpointError

Node = Any
_PLAIN = (type(None), bool, int, str)
#: How many lists and tables may be inside each other. Two levels of JSON for each must stay below
#: Python's limit of recursion when the state is read, however deep in the program that is.
MAX_DEPTH = 200


def is_tensor(value: Any) -> bool:
    """Whether a value is saved as a tensor; see Note [Pieces]."""
    return isinstance(value, torch.Tensor) or hasattr(value, "__checkpoint_pieces__")


def is_stateful(value: Any) -> bool:
    """Whether a value has `state_dict` and `load_state_dict`."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def module_state(module: nn.Module) -> dict[str, Any]:
    """The state dict with the parameters themselves, so that ties and owners can be seen."""
    return dict(module.state_dict(keep_vars=True))


class Tree:
    """A state as JSON, and its tensors by name.

    >>> Tree({"lr": 0.5, "betas": (1, 2)}).node
    {'dict': [['lr', 0.5], ['betas', {'tuple': [1, 2]}]]}
    """

    def __init__(self, state: Any) -> None:
        self.tensors: dict[str, Any] = {}
        #: Tied names: name -> the name that the tensor has in `tensors`.
        self.ties: dict[str, str] = {}
        self.modules: dict[str, nn.Module] = {}
        #: Each with its node and its name. Encoded last, when their parameters have names.
        self.optimizers: list[tuple[dict[str, Any], Any, str]] = []
        #: id of a tensor -> its name.
        self._names: dict[int, str] = {}
        self.node: Node = self._encode(state, "")
        for node, optimizer, name in self.optimizers:
            node.update(self._encode(keyed_by_name(optimizer, self._names_of), name))

    def _names_of(self, tensor: Any) -> list[str]:
        return [self._names[id(tensor)]] if id(tensor) in self._names else []

    def _encode(self, value: Any, name: str, depth: int = 0) -> Node:
        if depth > MAX_DEPTH:
            raise CheckpointError(
                f"{name[:60]}… is more than {MAX_DEPTH} lists and tables deep; a checkpoint holds "
                "no deeper ones. Save it as a tensor or as text."
            )
        if isinstance(value, nn.Module):
            self.modules[name] = value
            value = module_state(value)
        elif is_optimizer(value):
            self.optimizers.append(({}, value, name))
            return self.optimizers[-1][0]
        elif is_stateful(value):
            value = value.state_dict()
        if is_tensor(value):
            return self._encode_tensor(value, name or "tensor")
        if isinstance(value, Mapping):
            rows = []
            for key, item in value.items():
                if not _is_key(key):
                    raise CheckpointError(f"{name or 'The state'} has the key {key!r}: use text.")
                rows.append([key, self._encode(item, joined(name, key), depth + 1)])
            return {"dict": rows}
        if isinstance(value, (list, tuple)):
            items = [self._encode(v, joined(name, i), depth + 1) for i, v in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
        return _encode_plain(value, name)

    def _encode_tensor(self, value: Any, name: str) -> Node:
        if name in self.tensors or name in self.ties:
            raise CheckpointError(f"Two tensors of the state are called {name!r}: rename a key.")
        first = self._names.setdefault(id(value), name)
        if first == name:
            self.tensors[name] = value
        else:
            self.ties[name] = first
        return {"tensor": name}


def _is_key(key: Any) -> bool:
    return isinstance(key, (bool, int, str)) or (isinstance(key, float) and math.isfinite(key))


def _encode_plain(value: Any, name: str) -> Node:
    if type(value) in _PLAIN:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise CheckpointError(
        f"{name or 'The state'} is a {type(value).__name__}, which a checkpoint cannot hold. It "
        "holds tensors, numbers, text, lists, tuples, dicts, and objects with state_dict() and "
        "load_state_dict()."
    )


def merge(one: Node, other: Node, where: str = "") -> Node:
    """Merge the trees of two ranks: dicts may have keys that the other lacks.

    >>> merge({"dict": [["a", 1]]}, {"dict": [["a", 1], ["b", 2]]})
    {'dict': [['a', 1], ['b', 2]]}
    """
    if one == other:
        return one
    rows, others = children(one), children(other)
    if rows is None or others is None:
        raise CheckpointError(
            f"Ranks hold different values: {where or 'the state'} is {str(one)[:60]} on one and "
            f"{str(other)[:60]} on another. Plain values are saved once, for all ranks."
        )
    both = {
        key: merge(row, others[key], joined(where, key)) if key in others else row
        for key, row in rows.items()
    }
    return {"dict": [[key, row] for key, row in {**others, **both}.items()]}


def children(node: Node) -> dict[Any, Node] | None:
    """The items of a dict, by key; None for anything else."""
    if isinstance(node, dict) and isinstance(node.get("dict"), list):
        return dict(node["dict"])
    return None


def saved_optimizer(node: Node) -> SavedOptimizer | None:
    """The parts of an optimizer as saved, in either format; None for anything else."""
    rows = children(node) or {}
    state = children(rows.pop("state", None))
    groups = _rows(rows.pop("param_groups", None))
    if state is None or groups is None:
        return None
    found = []
    for group in groups.values():
        settings = children(group) or {}
        listed = settings.pop("params", None)
        rows_by_key, items = children(listed), _rows(listed)
        if items is None:
            return None
        # Format 1 has lists of groups and of parameters.
        keys = list(items.values() if rows_by_key is None else rows_by_key)
        if not all(isinstance(key, (int, str)) for key in keys):
            return None
        settings.pop("param_names", None)
        found.append(SavedGroup(keys, settings))
    return SavedOptimizer(state, found, rows)


def _rows(node: Node) -> dict[Any, Node] | None:
    """The items of a table by key, or of a list by number; None for anything else."""
    if isinstance(node, dict) and isinstance(node.get("list"), list):
        return dict(enumerate(node["list"]))
    return children(node)


def decode(node: Node, tensor_of: Callable[[str], Any]) -> Any:
    """The value of a node; `tensor_of` returns the tensor of a name."""
    if not isinstance(node, dict):
        return node
    ((word, content),) = node.items()
    if word == "tensor":
        return tensor_of(content)
    if word == "dict":
        return {key: decode(item, tensor_of) for key, item in content}
    if word == "list":
        return [decode(item, tensor_of) for item in content]
    if word == "tuple":
        return tuple(decode(item, tensor_of) for item in content)
    if word == "float":
        return float(content)
    if word == "bytes":
        return base64.b64decode(content)
    return getattr(torch, content)


def check_node(node: Node, where: str, names: set[str]) -> None:
    """Raise unless a node is one that a state could have, of tensors among `names`."""
    if type(node) in (*_PLAIN, float):
        return
    if not isinstance(node, dict) or len(node) != 1:
        raise CheckpointError(f"{where} is damaged: {str(node)[:60]} is not a value of a state.")
    ((word, content),) = node.items()
    if word == "dict" and isinstance(content, list):
        for row in content:
            if not (isinstance(row, list) and len(row) == 2):
                raise CheckpointError(f"{where} is damaged: a table has {str(row)[:60]}.")
            if not _is_key(row[0]):
                raise CheckpointError(f"{where} is damaged: {str(row[0])[:60]} is not a key.")
            check_node(row[1], where, names)
    elif word in ("list", "tuple") and isinstance(content, list):
        for item in content:
            check_node(item, where, names)
    elif not _is_sound_leaf(word, content, names):
        raise CheckpointError(f"{where} is damaged: {str(node)[:60]} is not a value of a state.")


def _is_sound_leaf(word: str, content: Any, names: set[str]) -> bool:
    if not isinstance(content, str):
        return False
    if word == "tensor":
        return content in names
    if word == "float":
        return content in ("nan", "inf", "-inf")
    if word == "dtype":
        return isinstance(getattr(torch, content, None), torch.dtype)
    if word == "bytes":
        try:
            base64.b64decode(content, validate=True)
        except ValueError:
            return False
        return True
    return False


# -- optimizers ----------------------------------------------------------------------------------
# Optimizers in checkpoints: their state and groups by the names of parameters.
#
# Note [State by name]
# torch keys an optimizer's state by the position of each parameter. In a checkpoint the key is the
# name that the parameter is saved under; else the optimizer's own name for it (as of
# `SGD(model.named_parameters())`); and its position only if there is neither. So a model may list
# its parameters in another order, and ranks may train different ones. Files of format 1 have
# positions. Shapes can show that an order is wrong, not that it is right: such a file is loaded
# with a warning.


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
    return isinstance(getattr(value, "param_groups", None), list) and is_stateful(value)


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
