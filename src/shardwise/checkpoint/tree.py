"""States as JSON trees: modules, optimizers, dicts of them and of plain values.

A tree has dicts, lists, tuples, plain values and tensors. In JSON, a plain value is itself and
everything else is an object whose only key names its kind:

    {"dict": [["step", 3], ["model", {"dict": [["weight", {"tensor": "model.weight"}]]}]]}
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.errors import CheckpointError

Node = Any
_PLAIN = (type(None), bool, int, str)


@dataclass(slots=True)
class Tree:
    """A state as JSON, and its tensors by name."""

    node: Node = None
    tensors: dict[str, Any] = field(default_factory=dict)
    #: Tied names: name -> the name that the tensor has in `tensors`.
    ties: dict[str, str] = field(default_factory=dict)


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


def make_tree(state: Any) -> Tree:
    """Encode a state.

    >>> make_tree({"lr": 0.5, "betas": (1, 2)}).node
    {'dict': [['lr', 0.5], ['betas', {'tuple': [1, 2]}]]}
    """
    tree = Tree()
    seen: dict[int, str] = {}
    tree.node = _encode(state, "", tree, seen)
    return tree


def _encode(value: Any, name: str, tree: Tree, seen: dict[int, str]) -> Node:
    if isinstance(value, nn.Module):
        value = module_state(value)
    elif is_stateful(value):
        value = value.state_dict()
    if is_tensor(value):
        return _encode_tensor(value, name or "tensor", tree, seen)
    if isinstance(value, Mapping):
        rows = []
        for key, item in value.items():
            if not isinstance(key, (bool, int, str, float)):
                raise CheckpointError(f"{name or 'The state'} has the key {key!r}: use text.")
            rows.append([key, _encode(item, joined(name, key), tree, seen)])
        return {"dict": rows}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, joined(name, i), tree, seen) for i, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    return _encode_plain(value, name)


def _encode_tensor(value: Any, name: str, tree: Tree, seen: dict[int, str]) -> Node:
    if name in tree.tensors or name in tree.ties:
        raise CheckpointError(f"Two tensors of the state are called {name!r}: rename a key.")
    first = seen.setdefault(id(value), name)
    if first == name:
        tree.tensors[name] = value
    else:
        tree.ties[name] = first
    return {"tensor": name}


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
    """Raise unless a node is one that `make_tree` could have made, of tensors among `names`."""
    if type(node) in (*_PLAIN, float):
        return
    if not isinstance(node, dict) or len(node) != 1:
        raise CheckpointError(f"{where} is damaged: {str(node)[:60]} is no value of a state.")
    ((word, content),) = node.items()
    if word == "dict" and isinstance(content, list):
        for row in content:
            if not (isinstance(row, list) and len(row) == 2):
                raise CheckpointError(f"{where} is damaged: a table has {str(row)[:60]}.")
            if not isinstance(row[0], (bool, int, str, float)):
                raise CheckpointError(f"{where} is damaged: {str(row[0])[:60]} is no key.")
            check_node(row[1], where, names)
    elif word in ("list", "tuple") and isinstance(content, list):
        for item in content:
            check_node(item, where, names)
    elif not _is_sound_leaf(word, content, names):
        raise CheckpointError(f"{where} is damaged: {str(node)[:60]} is no value of a state.")


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
