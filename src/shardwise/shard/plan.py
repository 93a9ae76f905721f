"""ShardingPlan: a spec per parameter, a Sharder per module; its report, and plans in files.

Files have the format of tensor-parallel plans:

    format = "shardwise plan 1"

    [modules]
    "table.weight" = { style = "ChunkShardingSpec", dim = 0, placements = ["rank:0/cpu", …] }
    "tower" = { style = "Output", local = true, spec = { style = "ChunkShardingSpec", … } }
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.errors import ArgumentError, LayoutError, ShardwiseError
from shardwise.plans import Entry, find_tensor, read_plan_file, write_plan_file
from shardwise.shard.spec import (
    SHARD_OPTIONS,
    SPEC_OPTIONS,
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    ShardMetadata,
    decode_spec,
    encode_spec,
    split_dims,
)

#: The style of an entry for a module's output.
_OUTPUT = "Output"


@dataclass(frozen=True, slots=True)
class UnitTraffic:
    """One collective of a forward: its bytes per id, bag or row."""

    kind: str
    num_bytes: int
    per: str

    def __str__(self) -> str:
        return f"{self.kind} {self.num_bytes:,} B per {self.per}"


@dataclass(frozen=True, slots=True)
class ShardingPlanReport:
    """What a plan would do to a module. Printed, it is a table."""

    #: For each parameter of the plan: its shape, how it is split, and its bytes on each rank.
    sharded: Mapping[str, tuple[tuple[int, ...], str, tuple[int, ...]]]
    #: Paths that the plan leaves to sharders, and the sharders' names.
    sharders: Mapping[str, str]
    #: Parameters that every rank keeps whole.
    whole: tuple[str, ...]
    #: Bytes of parameters on each rank, without what sharders shard.
    bytes_per_rank: tuple[int, ...]
    #: What a forward of each module sends, besides a few numbers.
    forwards: Mapping[str, tuple[str, tuple[UnitTraffic, ...]]]

    @property
    def balance(self) -> float:
        """The bytes of the fullest rank, over the average."""
        average = sum(self.bytes_per_rank) / len(self.bytes_per_rank)
        return max(self.bytes_per_rank) / average if average else 1.0

    def __str__(self) -> str:
        lines = [
            f"{path} {shape} {how}: {_listed(sizes)}"
            for path, (shape, how, sizes) in self.sharded.items()
        ]
        lines += [f"{path} is left to {name}" for path, name in self.sharders.items()]
        if self.whole:
            lines.append(f"whole on every rank: {', '.join(self.whole)}")
        lines.append(
            f"parameters per rank: {_listed(self.bytes_per_rank)}; the largest holds "
            f"{self.balance:.2f} times the average"
        )
        for path, (kind, traffic) in self.forwards.items():
            lines.append(f"forward of {path} ({kind}):")
            lines += [f"  {each}" for each in traffic]
        return "\n".join(lines)


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(f"{size:,} B" for size in sizes)


def report(
    module: nn.Module, plan: Mapping[str, Any], world_size: int | None
) -> ShardingPlanReport:
    specs = {path: entry for path, entry in plan.items() if isinstance(entry, ShardingSpec)}
    owners = {path: find_tensor(module, path) for path in specs}
    boxes = {path: spec.boxes(tuple(owners[path][2].shape)) for path, spec in specs.items()}
    named = [box.rank for each in boxes.values() for box in each]
    num_ranks = world_size or max(named, default=0) + 1
    sharders = {path: type(e).__name__ for path, e in plan.items() if path not in specs}
    sharded, forwards, totals = {}, {}, [0] * num_ranks
    for path, (owner, name, tensor) in owners.items():
        sizes = _bytes(tensor, boxes[path], num_ranks)
        sharded[path] = (tuple(tensor.shape), _how(boxes[path], tuple(tensor.shape)), sizes)
        totals = [a + b for a, b in zip(totals, sizes, strict=True)]
        traffic = _traffic(owner, name, tensor, boxes[path])
        if traffic:
            forwards[path.rpartition(".")[0]] = (type(owner).__name__, traffic)
    ids = {id(tensor) for _, _, tensor in owners.values()}
    whole = []
    for path, tensor in module.named_parameters():
        if id(tensor) not in ids and not any(path.startswith(f"{s}.") for s in sharders):
            whole.append(path)
            totals = [size + tensor.numel() * tensor.element_size() for size in totals]
    return ShardingPlanReport(sharded, sharders, tuple(whole), tuple(totals), forwards)


def _bytes(
    tensor: torch.Tensor, boxes: tuple[ShardMetadata, ...], num_ranks: int
) -> tuple[int, ...]:
    sizes = [0] * num_ranks
    for box in boxes:
        sizes[box.rank] += box.numel * tensor.element_size()
    return tuple(sizes)


def _how(boxes: tuple[ShardMetadata, ...], shape: tuple[int, ...]) -> str:
    dims = split_dims(boxes, shape)
    if not dims:
        return "whole on one rank"
    return f"split along dim {', '.join(map(str, sorted(dims)))}"


def _traffic(
    owner: nn.Module, name: str, tensor: torch.Tensor, boxes: tuple[ShardMetadata, ...]
) -> tuple[UnitTraffic, ...]:
    dims = split_dims(boxes, tensor.shape)
    if name != "weight" or tensor.dim() != 2 or len(dims) > 1:
        return ()
    by_columns = dims == {1}
    if isinstance(owner, nn.Linear):
        return _linear(tensor, boxes, by_columns)
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        return _lookup(owner, tensor, boxes, by_columns)
    return ()


def _linear(
    weight: torch.Tensor, boxes: tuple[ShardMetadata, ...], by_columns: bool
) -> tuple[UnitTraffic, ...]:
    (num_outputs, num_inputs), item = weight.shape, weight.element_size()
    if by_columns:
        widest = max(box.shard_sizes[1] for box in boxes)
        inputs = UnitTraffic("all_to_all", widest * item, "row of this rank, to each rank")
        return inputs, UnitTraffic("reduce_scatter", num_outputs * item, "row of all ranks")
    inputs = UnitTraffic("all_gather", num_inputs * item, "row of this rank")
    outputs = max(box.shard_sizes[0] for box in boxes)
    return inputs, UnitTraffic("all_to_all", outputs * item, "row of all ranks")


def _lookup(
    owner: nn.Embedding | nn.EmbeddingBag,
    weight: torch.Tensor,
    boxes: tuple[ShardMetadata, ...],
    by_columns: bool,
) -> tuple[UnitTraffic, ...]:
    width = max(box.shard_sizes[1] for box in boxes) * weight.element_size()
    id_bytes = (torch.int32 if weight.shape[0] < 2**31 else torch.int64).itemsize
    holders = {box.rank for box in boxes if box.numel}
    # An id goes to every rank that has columns of its row.
    id_bytes *= len(holders) if by_columns else 1
    norms: list[UnitTraffic] = []
    if owner.max_norm is not None and by_columns:
        norm = UnitTraffic("all_reduce", weight.element_size(), "different id of all ranks")
        norms = [UnitTraffic("all_reduce", 8, "lookup"), norm]
    if not _is_pooled_by_owners(owner):
        ids, rows = "different id of this rank", "different id that this rank is asked for"
    elif by_columns or len(holders) < 2:
        ids, rows = "id and bag of this rank", "bag of all ranks"
    else:
        ids = "different id of this rank; in long bags, per id and bag"
        rows = "different id that this rank is asked for; in long bags, per bag of all ranks"
    return UnitTraffic("all_to_all", id_bytes, ids), *norms, UnitTraffic("all_to_all", width, rows)


def _is_pooled_by_owners(owner: nn.Embedding | nn.EmbeddingBag) -> bool:
    if not isinstance(owner, nn.EmbeddingBag) or owner.scale_grad_by_freq or owner.mode == "max":
        return False
    return owner.padding_idx is None or owner.max_norm is None


class Sharder(ABC):
    """Shards a module by custom code."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The module that replaces `module`; may be the same. May call `shard_module`."""


@dataclass
class ShardingPlan:
    """What to shard, by path.

    `plan` maps the path of a parameter to a spec, or the path of a module to a `Sharder`.
    `output_plan` maps the path of a module ("" is the root) to the spec of its output; a plain
    output counts as this rank's part of a batch that all ranks share. `return_local_tensor` lists
    modules whose sharded output is returned as this rank's shard.

    >>> from shardwise.shard import ChunkShardingSpec, ShardingPlan
    >>> rows = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    >>> print(ShardingPlan({"0.weight": rows}).describe(nn.Sequential(nn.Embedding(5, 4))))
    0.weight (5, 4) split along dim 0: 48 B, 32 B
    parameters per rank: 48 B, 32 B; the largest holds 1.20 times the average
    forward of 0 (Embedding):
      all_to_all 4 B per different id of this rank
      all_to_all 16 B per different id that this rank is asked for
    """

    plan: Mapping[str, ShardingSpec | Sharder]
    output_plan: Mapping[str, ShardingSpec] | None = None
    return_local_tensor: Sequence[str] | None = None

    def describe(self, module: nn.Module, world_size: int | None = None) -> ShardingPlanReport:
        """Bytes per rank, the balance, and what each forward communicates.

        Nothing is changed, no world is needed, and the module may be on the meta device.
        """
        return report(module, self.plan, world_size)


class ShardingPlanner(ABC):
    """Makes plans."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """A plan for the module."""


def save_plan(plan: ShardingPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a .toml or .json file; `load_plan` reads it.

    Sharders are code: a plan that has one cannot be saved.
    """
    entries: dict[str, Entry] = {at: _entry(spec, at) for at, spec in plan.plan.items()}
    local, outputs = plan.return_local_tensor or (), plan.output_plan or {}
    for at in dict.fromkeys([*outputs, *local]):
        output: dict[str, Any] = {"style": _OUTPUT, "local": at in local}
        if at in outputs:
            output["spec"] = _entry(outputs[at], at)
        if at in entries:
            raise ArgumentError(f"{at!r} names a parameter and a module: a file cannot hold both.")
        entries[at] = output
    write_plan_file(path, entries)


def load_plan(path: str | os.PathLike[str]) -> ShardingPlan:
    """The plan in a TOML or JSON file, ready for `shard_module`.

    >>> import tempfile
    >>> from shardwise.shard import ChunkShardingSpec, ShardingPlan, load_plan, save_plan
    >>> plan = ShardingPlan({"table.weight": ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_plan(plan, f"{folder}/plan.toml")
    ...     load_plan(f"{folder}/plan.toml") == plan
    True
    """
    specs: dict[str, ShardingSpec] = {}
    outputs: dict[str, ShardingSpec] = {}
    local: list[str] = []
    for at, entry in read_plan_file(path).items():
        if isinstance(entry, Mapping) and entry.get("style") == _OUTPUT:
            _check_options(entry, {"local", "spec"}, at)
            if "spec" in entry:
                outputs[at] = _spec(entry["spec"], at)
            if entry.get("local"):
                local.append(at)
        else:
            specs[at] = _spec(entry, at)
    return ShardingPlan(specs, outputs or None, local or None)


def _entry(spec: Any, at: str) -> dict[str, Any]:
    if isinstance(spec, (ChunkShardingSpec, EnumerableShardingSpec)):
        return encode_spec(spec)
    raise ArgumentError(
        f"{at!r} has a {type(spec).__name__}, which is code: a file cannot hold it."
    )


def _spec(entry: Any, at: str) -> ShardingSpec:
    style = entry.get("style") if isinstance(entry, Mapping) else entry
    if not isinstance(entry, Mapping) or style not in list(SPEC_OPTIONS):  # it may have no hash
        raise LayoutError(
            f"The plan says {style!r} for {at!r}; here an entry is a table whose style is "
            f"{', '.join(SPEC_OPTIONS)} or {_OUTPUT}. (Styles of tensor parallelism are for "
            "shardwise.parallel.)"
        )
    _check_options(entry, SPEC_OPTIONS[style], at)
    try:
        for shard in entry.get("shards", ()):
            if not isinstance(shard, Mapping):
                raise LayoutError(f"The plan's entry for {at!r} has the shard {str(shard)[:60]!r}.")
            _check_options(shard, SHARD_OPTIONS, at)
        return decode_spec(entry)
    except ShardwiseError:
        raise
    except KeyError as error:
        raise LayoutError(f"The plan's entry for {at!r} lacks {error}.") from error
    except (TypeError, ValueError) as error:
        raise LayoutError(f"The plan's entry for {at!r} is invalid: {str(error)[:200]}.") from error


def _check_options(entry: Mapping[str, Any], known: Collection[str], at: str) -> None:
    unknown = sorted(set(entry) - {*known, "style"})
    if unknown:
        raise LayoutError(f"The plan's entry for {at!r} has {unknown}; it takes {sorted(known)}.")
