"""torch's pytree functions, for nested arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise._torch.compat import Names, Probe

_names = Names()

if TYPE_CHECKING:
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_iter as tree_iter
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_unflatten as tree_unflatten
else:
    _WITHOUT = "ops that take or return lists of tensors cannot be planned"
    tree_flatten = _names.find("torch.utils._pytree.tree_flatten", _WITHOUT)
    tree_iter = _names.find("torch.utils._pytree.tree_iter", _WITHOUT)
    tree_leaves = _names.find("torch.utils._pytree.tree_leaves", _WITHOUT)
    tree_map = _names.find("torch.utils._pytree.tree_map", _WITHOUT)
    tree_map_only = _names.find("torch.utils._pytree.tree_map_only", _WITHOUT)
    tree_unflatten = _names.find("torch.utils._pytree.tree_unflatten", _WITHOUT)


def probe() -> Probe:
    return _names.probe(_walks, "nested arguments do not round-trip")


def _walks() -> bool:
    nested = [1, (2, {"a": 3})]
    leaves, spec = tree_flatten(nested)
    doubled = tree_map_only(int, lambda x: 2 * x, nested)
    same = tree_unflatten(leaves, spec) == tree_map(lambda x: x, nested) == nested
    return same and list(tree_iter(doubled)) == tree_leaves(doubled) == [2, 4, 6]
