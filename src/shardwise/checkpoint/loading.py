"""Loading: match a state with the saved tree, check what it needs on all ranks, then copy it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.crew import Crew, current_crew, is_partial, pieces_of
from shardwise.checkpoint.index import Index, SavedTensor, read_index
from shardwise.checkpoint.read import Reader, ReadRequest
from shardwise.checkpoint.saving import wait_for_saves
from shardwise.checkpoint.tree import (
    Fit,
    Node,
    OwnParameter,
    SavedOptimizer,
    children,
    decode,
    fit,
    is_optimizer,
    is_stateful,
    is_tensor,
    joined,
    module_state,
    own_parameters,
    saved_optimizer,
    why_not_of,
)
from shardwise.core.layout import contiguous_stride, make_layout
from shardwise.core.placements import REPLICATE
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import CheckpointError, CheckpointWarning
from shardwise.random import new_parts

#: Saved names, and the targets to fill with them.
Targets = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class _Loading:
    """A call of an object's `load_state_dict`, and the call that undoes it."""

    what: str
    load: Callable[[], Any]
    unload: Callable[[], Any]
    #: Whether to load it once more when all tensors are filled: the first time only shows whether
    #: it refuses something.
    again: bool = False


class Matching:
    """Matches a state with the saved tree: which saved tensor goes into which target."""

    index: Index
    #: The state with the plain values that were saved; its tensors are yet to be filled.
    state: Any

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.warnings: list[str] = []
        self.unused: dict[str, frozenset[Any]] = {}
        #: Targets of objects, which are filled first, and all others.
        self.object_targets: Targets = []
        self.targets: Targets = []
        self._faults: list[str] = []
        #: id of a tensor -> the names that it was saved under.
        self._names: dict[int, list[str]] = {}
        self._optimizers: list[tuple[Any, Node, str]] = []
        self._objects: list[_Loading] = []
        self._loaded: list[_Loading] = []

    def match_all(self, state: Any) -> None:
        """Match a state with the index; optimizers last, as their parameters need names."""
        self.state = self._match(state, self.index.node, "")
        for optimizer, node, name in self._optimizers:
            self._match_optimizer(optimizer, node, name)

    def load_objects(self) -> None:
        for each in self._objects:
            self._loaded.append(each)
            _call(each)

    def unload_objects(self) -> None:
        """Undo `load_objects`."""
        for each in reversed(self._loaded):
            with contextlib.suppress(Exception):  # the error that led here is the one to raise
                each.unload()

    def load_rest(self) -> None:
        for each in self._objects:
            if each.again:
                _call(each)

    def raise_faults(self) -> None:
        if self._faults:
            shown = "\n".join(self._faults[:12])
            more = f"\n… and {len(self._faults) - 12} more" if len(self._faults) > 12 else ""
            raise CheckpointError(
                f"The state does not fit the checkpoint in {self.index.folder}:\n{shown}{more}"
            )

    def requests(self, crew: Crew, targets: Targets) -> list[ReadRequest]:
        """The boxes that the ranks present need; shared memory is read once."""
        requests: list[ReadRequest] = []
        seen: set[tuple[Any, ...]] = set()
        for name, target in targets:
            saved = self.index.tensor(name)
            for piece in pieces_of(target, name, crew.present):
                memory = piece.tensor
                place = (memory.device, memory.data_ptr(), memory.shape, memory.stride())
                key = (*place, piece.offset)
                if piece.rank not in crew.present or not memory.numel() or key in seen:
                    continue
                seen.add(key)
                if not _is_writable(memory):
                    raise CheckpointError(
                        f"{name} cannot be written to: its elements share memory, as expand() "
                        "makes them, or it is a conjugate or negative view. Clone it first."
                    )
                requests.append(ReadRequest(name, saved, piece.box, memory))
        return requests

    # -- walking -----------------------------------------------------------------------------

    def _match(self, state: Any, node: Node, name: str) -> Any:
        """Collect the tensors of `state`; returns it with the plain values that were saved."""
        if isinstance(state, nn.Module):
            self._match_module(state, node, name)
        elif is_tensor(state):
            self._match_tensor(state, node, name)
        elif is_optimizer(state):
            self._optimizers.append((state, node, name))
        elif is_stateful(state):
            self._match_stateful(state, node, name)
        elif isinstance(state, Mapping):
            return self._match_table(state, node, name)
        elif isinstance(state, (list, tuple)) and any(map(_has_targets, state)):
            return self._match_list(state, node, name)
        else:
            return self._restored(state, node, self.targets)
        return state

    def _differs(self, name: str, kind: str) -> None:
        self._faults.append(f"{name or 'The state'} is {kind} here, but not as saved.")

    def _match_tensor(self, state: Any, node: Node, name: str) -> None:
        if not (isinstance(node, dict) and "tensor" in node):
            self._differs(name, "a tensor")
        else:
            self._add_target(node["tensor"], state, self.targets)

    def _add_target(self, saved_name: str, target: Any, targets: Targets) -> None:
        saved = self.index.tensor(saved_name)
        self._names.setdefault(id(target), []).append(self.index.ties.get(saved_name, saved_name))
        shape = tuple(target.shape)
        if shape != saved.shape:
            self._faults.append(f"{saved_name} has shape {saved.shape}, asked for {shape}.")
        elif not _converts(saved.dtype, target.dtype):
            self._faults.append(f"{saved_name} is {saved.dtype}, asked for {target.dtype}.")
        else:
            targets.append((saved_name, target))

    def _match_table(self, state: Mapping[Any, Any], node: Node, name: str) -> Any:
        rows = children(node)
        if rows is None:
            self._differs(name, "a table")
            return state
        found = dict(state)
        for key, value in state.items():
            if key in rows:
                found[key] = self._match(value, rows[key], joined(name, key))
            elif self.strict:
                self._faults.append(f"{joined(name, key)} was not saved.")
        return found

    def _match_list(self, state: Any, node: Node, name: str) -> Any:
        items = (node.get("list") or node.get("tuple")) if isinstance(node, dict) else None
        if items is None or len(items) != len(state):
            self._differs(name, f"a list of {len(state)}")
            return state
        found = [self._match(v, items[i], joined(name, i)) for i, v in enumerate(state)]
        return _as(state, found)

    def _match_module(self, module: nn.Module, node: Node, name: str) -> None:
        rows = children(node)
        if rows is None:
            self._differs(name, "a module")
            return
        mine = module_state(module)
        if self.strict:
            tied = _tied(mine)
            missing = [k for k in mine if k not in rows and tied[k] not in rows]
            self._faults += [f"{joined(name, k)} was not saved." for k in missing]
            odd = [k for k in rows if k not in mine]
            self._faults += [f"{joined(name, k)} was saved and is not in the module." for k in odd]
        own = {id(t) for t in (*module.parameters(), *module.buffers())}
        before = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in mine.items()}
        filled: dict[str, Any] = {}
        in_place = True
        for key, value in mine.items():
            if key not in rows:
                continue
            if is_tensor(value) and isinstance(rows[key], dict) and "tensor" in rows[key]:
                is_own = id(value) in own
                self._add_target(
                    rows[key]["tensor"], value, self.targets if is_own else self.object_targets
                )
                filled[key] = before[key]
                in_place &= is_own
            else:
                filled[key] = self._restored(value, rows[key], self.object_targets)
                in_place = False
        if not in_place:
            # The module's own tensors are filled in place; extra state, and what a hook made, go
            # through its load_state_dict.
            self._objects.append(
                _Loading(
                    name,
                    lambda: module.load_state_dict(filled, strict=self.strict),
                    lambda: module.load_state_dict(before, strict=False),
                    again=True,
                )
            )

    def _match_stateful(self, state: Any, node: Node, name: str) -> None:
        before = _copied(state.state_dict())
        tree = self._restored(before, node, self.object_targets)
        load, unload = (functools.partial(state.load_state_dict, each) for each in (tree, before))
        self._objects.append(_Loading(name, load, unload))

    def _match_optimizer(self, optimizer: Any, node: Node, name: str) -> None:
        now = optimizer.state_dict()
        own = own_parameters(optimizer, now, lambda p: self._names.get(id(p), ()))
        saved = saved_optimizer(node)
        if own is None:
            self._match_stateful(optimizer, node, name)
            return
        if saved is None:
            self._differs(name, "an optimizer")
            return
        try:
            fitted = fit(own, len(now["param_groups"]), [g.keys for g in saved.groups], self.strict)
        except CheckpointError as error:
            self._faults.append(f"{name or 'The optimizer'} {error}.")
            return
        if fitted.by_position:
            self._check_shapes(own, saved, fitted.keys)
        if fitted.by_position and len(own) > 1:
            self.warnings.append(
                f"{name or 'The optimizer'} in {self.index.folder} was loaded by the order of its "
                "parameters, not by their names: parameters of one shape that have changed places "
                "have each other's state. Save it together with the modules of its parameters, and "
                "load it with them."
            )
        self.unused[name] = fitted.unused
        trees = (self._optimizer_tree(now, own, saved, fitted), _copied(now))
        load, unload = (functools.partial(optimizer.load_state_dict, tree) for tree in trees)
        self._objects.append(_Loading(name, load, unload, again=True))

    def _optimizer_tree(
        self, now: Any, own: Sequence[OwnParameter], saved: SavedOptimizer, fitted: Fit
    ) -> dict[str, Any]:
        """The saved state, in the optimizer's own keys and groups."""
        targets, states = self.targets, now["state"]
        entries = {
            each.key: self._restored(states.get(each.key), saved.state[key], targets, each.tensor)
            for each in own
            if (key := fitted.keys.get(each.key)) in saved.state
        }
        of_parameters = {key for group in saved.groups for key in group.keys}
        for key, row in saved.state.items():
            if key not in of_parameters:
                entries[key] = self._restored(states.get(key), row, targets)
        groups = []
        for number, group in enumerate(now["param_groups"]):
            place = fitted.groups[number]
            settings = saved.groups[place].settings if place < len(saved.groups) else {}
            found = {k: self._restored(group.get(k), row, targets) for k, row in settings.items()}
            groups.append({**group, **found})
        others = {k: self._restored(now.get(k), row, targets) for k, row in saved.others.items()}
        return {**others, "state": entries, "param_groups": groups}

    def _check_shapes(
        self, own: Sequence[OwnParameter], saved: SavedOptimizer, keys: Mapping[Any, Any]
    ) -> None:
        for each in own:
            for row in (children(saved.state.get(keys[each.key])) or {}).values():
                if isinstance(row, dict) and "tensor" in row:
                    saved_shape = self.index.tensor(row["tensor"]).shape
                    why = why_not_of(saved_shape, each.tensor)
                    if why is not None:
                        self._faults.append(f"{row['tensor']} {why}.")

    def _restored(
        self,
        now: Any,
        node: Node,
        targets: Targets,
        parameter: torch.Tensor | None = None,
    ) -> Any:
        """The saved tree of an object, with the tensors of `now` or new ones as targets.

        `parameter` is the one whose state this is.
        """
        if isinstance(node, dict) and "tensor" in node:
            name = node["tensor"]
            usable = is_tensor(now) and not is_partial(now)
            target = now if usable else tensor_like(parameter, self.index.tensor(name))
            self._add_target(name, target, targets)
            return target
        rows = children(node)
        if rows is not None:
            items = now if isinstance(now, Mapping) else {}
            return {
                key: self._restored(items.get(key), row, targets, parameter)
                for key, row in rows.items()
            }
        if isinstance(node, dict) and ("list" in node or "tuple" in node):
            ((kind, rows),) = node.items()
            here = now[: len(rows)] if isinstance(now, (list, tuple)) else ()
            pairs = itertools.zip_longest(here, rows)
            found = [self._restored(item, row, targets, parameter) for item, row in pairs]
            alike = isinstance(now, tuple) and len(now) == len(rows)
            return found if kind == "list" else _as(now if alike else (), found)
        return decode(node, _no_tensor)


def _as(like: Any, items: list[Any]) -> Any:
    """The items in a list or tuple of the type of `like`, such as a named tuple."""
    return getattr(type(like), "_make", type(like))(items)


def _call(loading: _Loading) -> None:
    try:
        loading.load()
    except Exception as error:
        what = f"{loading.what or 'The state'} refuses what was saved"
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error


def _copied(tree: Any) -> Any:
    """A copy of the tree's dicts and lists, with the same leaves."""
    if isinstance(tree, Mapping):
        return {key: _copied(item) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_copied(item) for item in tree])
    return tree


def _no_tensor(name: str) -> Any:
    raise AssertionError(f"{name} is a tensor, not a plain value")


def _has_targets(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_targets, value))
    return is_tensor(value) or is_stateful(value) or isinstance(value, Mapping)


def _tied(state: Mapping[str, Any]) -> dict[str, str]:
    """Per name, the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in state.items()}


def _converts(saved: torch.dtype, target: torch.dtype) -> bool:
    """Floating-point dtypes convert into each other; others must be the same."""
    return saved == target or (saved.is_floating_point and target.is_floating_point)


def tensor_like(parameter: torch.Tensor | None, saved: SavedTensor) -> torch.Tensor:
    """An empty tensor for state that is not there yet, such as moments of a new optimizer.

    Optimizer state of the parameter's shape gets the parameter's layout. State of another shape is
    replicated over the parameter's mesh; a scalar, such as the step count, is a plain tensor on the
    CPU, as in torch. Anything else is a plain tensor too.
    """
    if parameter is not None and tuple(parameter.shape) == saved.shape:
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
    if saved.shape and isinstance(parameter, DTensor):
        grid = parameter._layout.grid
        whole = (REPLICATE,) * grid.num_axes
        stride = contiguous_stride(saved.shape)
        layout = make_layout(grid, whole, saved.shape, stride, saved.dtype)
        return DTensor._wrap(new_parts(layout, torch.device(grid.device_type)), layout)
    device = parameter.device if parameter is not None and saved.shape else torch.device("cpu")
    return torch.empty(saved.shape, dtype=saved.dtype, device=device)


def _is_writable(memory: torch.Tensor) -> bool:
    """Whether bytes can be copied to a tensor: no two elements share memory."""
    pairs = zip(memory.shape, memory.stride(), strict=True)
    shared = any(size > 1 and not stride for size, stride in pairs)
    return not (shared or memory.is_conj() or memory.is_neg())


# -- loading -------------------------------------------------------------------------------------
# Note [Nothing is half loaded]
# Names, shapes, groups of optimizers and the checksums of all needed bytes are checked on every
# rank before the first value is written. Then objects with their own `load_state_dict` are loaded:
# if one fails on any rank, all ranks restore their objects. Tensors of modules, plain tensors and
# the state of optimizers come last, when nothing is left that could refuse them. If one rank finds
# a fault, all ranks raise it.


def load(state: Any, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Read a checkpoint into a state, and return the state with the plain values that were saved.

    Tensors are written in place, in their present layout, mesh and world; the `load_state_dict` of
    objects is called. Every rank calls `load`, and reads the bytes of its own shards. A dict may
    have fewer keys than were saved; within a module and an optimizer, names must match unless
    `strict` is False. The state of an optimizer is matched by the names of its parameters in the
    modules of `state`. Hugging Face's folders and single safetensors files are read too.
    """
    crew = current_crew()
    matching = Matching(strict)

    def look_up() -> _Found:
        wait_for_saves()
        matching.index = read_index(Path(path).absolute())
        matching.match_all(state)
        matching.raise_faults()
        return _Found(os.fspath(path), matching.index.digest, matching.unused)

    found = crew.alike(look_up)
    for rank, each in enumerate(found):
        if (each.path, each.digest) != (found[0].path, found[0].digest):
            raise CheckpointError(
                f"Ranks 0 and {rank} see different checkpoints: {found[0].path} and {each.path}."
            )
    if strict:
        _check_all_used(found)
    with Reader(matching.index) as reader:
        _fill(matching, reader, crew)
    for text in matching.warnings if crew.leads else ():
        warnings.warn(text, CheckpointWarning, stacklevel=2)
    return matching.state


@torch.no_grad()
def _fill(matching: Matching, reader: Reader, crew: Crew) -> None:
    """See Note [Nothing is half loaded]."""
    first: list[ReadRequest] = []
    last: list[ReadRequest] = []

    def check() -> None:
        first.extend(matching.requests(crew, matching.object_targets))
        last.extend(matching.requests(crew, matching.targets))
        reader.check([*first, *last])

    crew.alike(check)
    before = [torch.clone(request.target) for request in first]

    def load_objects() -> None:
        reader.fill(first)
        matching.load_objects()

    def load_rest() -> None:
        reader.fill(last)
        matching.load_rest()

    try:
        crew.alike(load_objects)
    except BaseException:
        for request, value in zip(first, before, strict=True):
            request.target.copy_(value)
        matching.unload_objects()
        raise
    crew.alike(load_rest)


@dataclass(frozen=True, slots=True)
class _Found:
    """A rank's view: the checkpoint, and per optimizer the saved keys that it does not use."""

    path: str
    digest: int
    unused: dict[str, frozenset[Any]]


def _check_all_used(found: Sequence[_Found]) -> None:
    """Raise if an optimizer's saved state has parameters that no rank has."""
    names = dict.fromkeys(name for each in found for name in each.unused)
    for name in names:
        left = frozenset.intersection(*(e.unused[name] for e in found if name in e.unused))
        if left:
            shown = ", ".join(map(str, sorted(left, key=str)[:6]))
            raise CheckpointError(
                f"{name or 'The optimizer'} was saved with {len(left)} parameters that it does not "
                f"have here, such as {shown}. Load with strict=False to leave them out."
            )
