"""Sharding plans in files, in the format that tensor-parallel plans have too.

format = "shardwise plan 1"

[modules]
"table.weight" = { style = "ChunkShardingSpec", dim = 0, placements = ["rank:0/cpu", …] }
"tower" = { style = "Output", local = true, spec = { style = "ChunkShardingSpec", … } }
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shardwise.errors import ArgumentError, LayoutError, ShardwiseError
from shardwise.planfile.files import Entry, read_plan_file, write_plan_file
from shardwise.shard.plan import ShardingPlan
from shardwise.shard.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    ShardMetadata,
)

_OUTPUT = "Output"


def save_plan(plan: ShardingPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file that ends in .toml or .json; `load_plan` reads it.

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
    if isinstance(spec, ChunkShardingSpec):
        places = [str(place) for place in spec.placements]
        return {"style": "ChunkShardingSpec", "dim": spec.dim, "placements": places}
    if isinstance(spec, EnumerableShardingSpec):
        shards = [
            {
                "offsets": list(box.shard_offsets),
                "sizes": list(box.shard_sizes),
                "placement": str(box.placement),
            }
            for box in spec.shards
        ]
        return {"style": "EnumerableShardingSpec", "shards": shards}
    raise ArgumentError(
        f"{at!r} has a {type(spec).__name__}, which is code: a file cannot hold it."
    )


def _spec(entry: Any, at: str) -> ShardingSpec:
    style = entry.get("style") if isinstance(entry, Mapping) else entry
    try:
        if style == "ChunkShardingSpec" and isinstance(entry, Mapping):
            _check_options(entry, {"dim", "placements"}, at)
            return ChunkShardingSpec(entry["dim"], entry["placements"])
        if style == "EnumerableShardingSpec" and isinstance(entry, Mapping):
            _check_options(entry, {"shards"}, at)
            return EnumerableShardingSpec([_box(shard, at) for shard in entry["shards"]])
    except ShardwiseError:
        raise
    except KeyError as error:
        raise LayoutError(f"The plan's entry for {at!r} lacks {error}.") from error
    except (TypeError, ValueError) as error:
        raise LayoutError(f"The plan's entry for {at!r} is none: {str(error)[:200]}.") from error
    raise LayoutError(
        f"The plan says {style!r} for {at!r}; here an entry is a table whose style is "
        f"ChunkShardingSpec, EnumerableShardingSpec or {_OUTPUT}. (Styles of tensor parallelism "
        "are for shardwise.parallel.)"
    )


def _box(shard: Any, at: str) -> ShardMetadata:
    if not isinstance(shard, Mapping):
        raise LayoutError(f"The plan's entry for {at!r} has the shard {str(shard)[:60]!r}.")
    _check_options(shard, {"offsets", "sizes", "placement"}, at)
    return ShardMetadata(shard["offsets"], shard["sizes"], shard["placement"])


def _check_options(entry: Mapping[str, Any], known: set[str], at: str) -> None:
    unknown = sorted(set(entry) - known - {"style"})
    if unknown:
        raise LayoutError(f"The plan's entry for {at!r} has {unknown}; it takes {sorted(known)}.")
