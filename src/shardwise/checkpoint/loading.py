"""Loading: match a state with the index, check what it needs on all ranks, then copy it.

Note [Nothing is half loaded]
Names, shapes and the checksums of all needed bytes are checked on every rank before the first value
is written; what one rank finds wrong, all raise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.crew import Crew, current_crew
from shardwise.checkpoint.index import Index, SavedTensor, read_index
from shardwise.checkpoint.pieces import is_partial, pieces_of
from shardwise.checkpoint.read import Reader, ReadRequest
from shardwise.checkpoint.saving import wait_for_saves
from shardwise.checkpoint.tree import (
    Node,
    children,
    decode,
    is_stateful,
    is_tensor,
    joined,
    module_state,
)
from shardwise.core.layout import contiguous_stride, make_layout
from shardwise.core.placements import REPLICATE
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import CheckpointError
from shardwise.random.draws import new_parts

Finish = Callable[[], Any]


def load(state: Any, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Read a checkpoint into a state, and return the state with the plain values that were saved.

    Tensors are written in place, in whatever layout, mesh and world they have now; objects get
    their `load_state_dict`. Every rank calls it and reads what its own shards need. A dict may have
    fewer keys than were saved; within a module, names must match unless `strict` is False.
    Hugging Face's folders and single safetensors files are read too.
    """
    wait_for_saves()
    crew = current_crew()
    matching = _Matching(strict)
    index: list[Index] = []

    def look_up() -> list[int]:
        index.append(read_index(Path(path).absolute()))
        matching.index = index[0]
        matching.finish = matching.match(state, index[0].node, "")
        matching.raise_faults()
        return [index[0].digest] * len(crew.present)

    digests = crew.together(look_up)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise CheckpointError(f"Ranks 0 and {rank} see different checkpoints at {path}.")
    with Reader(index[0]) as reader:
        requests: list[ReadRequest] = []

        def check() -> list[None]:
            requests.extend(matching.requests(crew))
            reader.check(requests)
            return [None] * len(crew.present)

        def fill() -> list[None]:
            with torch.no_grad():
                reader.fill(requests)
            return [None] * len(crew.present)

        crew.together(check)
        crew.together(fill)
    return matching.finish()


class _Matching:
    """Matches a state with the saved tree: which saved tensor goes into which target."""

    index: Index
    finish: Finish

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._targets: list[tuple[str, Any]] = []
        self._faults: list[str] = []

    def raise_faults(self) -> None:
        if self._faults:
            shown = "\n".join(self._faults[:12])
            more = f"\n… and {len(self._faults) - 12} more" if len(self._faults) > 12 else ""
            raise CheckpointError(
                f"The state does not fit the checkpoint in {self.index.folder}:\n{shown}{more}"
            )

    def requests(self, crew: Crew) -> list[ReadRequest]:
        """The boxes that the ranks present need; shared memory is read once."""
        requests: list[ReadRequest] = []
        seen: set[tuple[Any, ...]] = set()
        for name, target in self._targets:
            saved = self.index.tensor(name)
            assert saved is not None, "a target without a saved tensor is a fault"
            for piece in pieces_of(target, name, crew.present).pieces:
                memory = piece.tensor
                key = (
                    memory.device,
                    memory.data_ptr(),
                    memory.shape,
                    memory.stride(),
                    piece.offset,
                )
                if piece.rank not in crew.present or not memory.numel() or key in seen:
                    continue
                seen.add(key)
                requests.append(ReadRequest(name, saved, piece.box, memory))
        return requests

    # -- walking -----------------------------------------------------------------------------

    def match(self, state: Any, node: Node, name: str) -> Finish:
        """Collect the tensors of `state`; the result returns the state once they are filled."""
        if isinstance(state, nn.Module):
            return self._match_module(state, node, name)
        if is_tensor(state):
            return self._match_tensor(state, node, name)
        if is_stateful(state):
            return self._match_stateful(state, node, name)
        if isinstance(state, Mapping):
            return self._match_table(state, node, name)
        if isinstance(state, (list, tuple)) and any(map(_has_targets, state)):
            return self._match_list(state, node, name)
        values = self._restored(None, state, node)
        return lambda: values

    def _match_tensor(self, state: Any, node: Node, name: str) -> Finish:
        if not (isinstance(node, dict) and "tensor" in node):
            self._faults.append(f"{name or 'The state'} is a tensor here, but not as saved.")
        else:
            self._want(node["tensor"], state)
        return lambda: state

    def _want(self, saved_name: str, target: Any) -> None:
        saved = self.index.tensor(saved_name)
        assert saved is not None, "the index was checked"
        shape = tuple(target.shape)
        if shape != saved.shape:
            self._faults.append(f"{saved_name} has shape {saved.shape}, asked for {shape}.")
        elif not _converts(saved.dtype, target.dtype):
            self._faults.append(f"{saved_name} is {saved.dtype}, asked for {target.dtype}.")
        else:
            self._targets.append((saved_name, target))

    def _match_table(self, state: Mapping[Any, Any], node: Node, name: str) -> Finish:
        rows = children(node)
        if rows is None:
            self._faults.append(f"{name or 'The state'} is a table here, but not as saved.")
            return lambda: state
        finishes = {}
        for key, value in state.items():
            if key in rows:
                finishes[key] = self.match(value, rows[key], joined(name, key))
            elif self.strict:
                self._faults.append(f"{joined(name, key)} was not saved.")
        return lambda: {k: finishes[k]() if k in finishes else v for k, v in state.items()}

    def _match_list(self, state: Any, node: Node, name: str) -> Finish:
        items = (node.get("list") or node.get("tuple")) if isinstance(node, dict) else None
        if items is None or len(items) != len(state):
            self._faults.append(f"{name} is a list of {len(state)} here, but not as saved.")
            return lambda: state
        finishes = [self.match(v, items[i], joined(name, i)) for i, v in enumerate(state)]
        return lambda: type(state)([finish() for finish in finishes])

    def _match_module(self, module: nn.Module, node: Node, name: str) -> Finish:
        rows = children(node)
        if rows is None:
            self._faults.append(f"{name or 'The state'} is a module here, but not as saved.")
            return lambda: module
        mine = module_state(module)
        if self.strict:
            tied = _tied(mine)
            missing = [k for k in mine if k not in rows and tied[k] not in rows]
            self._faults += [f"{joined(name, k)} was not saved." for k in missing]
            odd = [k for k in rows if k not in mine]
            self._faults += [f"{joined(name, k)} was saved and is not in the module." for k in odd]
        own = {id(t) for t in (*module.parameters(), *module.buffers())}
        filled: dict[str, Any] = {}
        in_place = True
        for key, value in mine.items():
            if key not in rows:
                continue
            if is_tensor(value) and isinstance(rows[key], dict) and "tensor" in rows[key]:
                self._want(rows[key]["tensor"], value)
                filled[key] = value.detach() if isinstance(value, torch.Tensor) else value
                in_place &= id(value) in own
            else:
                filled[key] = self._restored(None, value, rows[key])
                in_place = False

        def finish() -> nn.Module:
            # The module's own tensors are filled in place; extra state, and what a hook made, go
            # through its load_state_dict.
            if not in_place:
                module.load_state_dict(filled, strict=self.strict)
            return module

        return finish

    def _match_stateful(self, state: Any, node: Node, name: str) -> Finish:
        tree = self._restored(state, state.state_dict(), node)

        def finish() -> Any:
            state.load_state_dict(tree)
            return state

        return finish

    def _restored(self, owner: Any, now: Any, node: Node, path: tuple[Any, ...] = ()) -> Any:
        """The saved tree of an object, with the tensors of `now` or new ones as targets."""
        if isinstance(node, dict) and "tensor" in node:
            name = node["tensor"]
            saved = self.index.tensor(name)
            assert saved is not None, "the index was checked"
            usable = is_tensor(now) and not is_partial(now)
            target = now if usable else tensor_like(owner, path, saved)
            self._want(name, target)
            return target
        rows = children(node)
        if rows is not None:
            items = now if isinstance(now, Mapping) else {}
            return {
                key: self._restored(owner, items.get(key), row, (*path, key))
                for key, row in rows.items()
            }
        if isinstance(node, dict) and ("list" in node or "tuple" in node):
            kind = list if "list" in node else tuple
            items_now = now if isinstance(now, (list, tuple)) else ()
            return kind(
                self._restored(
                    owner, items_now[i] if i < len(items_now) else None, item, (*path, i)
                )
                for i, item in enumerate(next(iter(node.values())))
            )
        return decode(node, _no_tensor)


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


def tensor_like(owner: Any, path: tuple[Any, ...], saved: SavedTensor) -> torch.Tensor:
    """An empty tensor for state that `owner` does not have yet, such as moments of a new optimizer.

    Optimizer state of the parameter's shape gets the parameter's layout. State of another shape is
    replicated over the parameter's mesh; a scalar, such as the step count, is a plain tensor on the
    CPU, as in torch. Anything else is a plain tensor too.
    """
    parameter = _parameter(owner, path)
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


def _parameter(owner: Any, path: tuple[Any, ...]) -> torch.Tensor | None:
    """The parameter that an entry of an optimizer's state belongs to."""
    if len(path) < 3 or path[0] != "state" or not hasattr(owner, "param_groups"):
        return None
    key = path[1]
    named = getattr(owner, "named_params", None)
    if isinstance(key, str) and named is not None:
        return dict(named).get(key)
    unique = {id(p): p for group in owner.param_groups for p in group["params"]}
    parameters = list(unique.values())
    return parameters[key] if isinstance(key, int) and 0 <= key < len(parameters) else None
