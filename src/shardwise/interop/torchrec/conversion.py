"""torchrec's plans, tables, and optimizer state, from and to collections.

Names in state dicts are the same on both sides: `embedding_bags.user.weight`.

Note [Row-wise state of column shards]
torchrec's row-wise Adagrad keeps a sum for each column shard of a row, over the squares of its own
columns. The sum of the whole row is their mean, weighted by the numbers of columns: that is what a
table without column shards gets, and every table of `RowWiseAdagrad(across_columns=True)`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch.c10d import sharded_tensors, sharding_specs
from shardwise.core.placements import Shard
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.embedding.collection import EmbeddingBagCollection, EmbeddingCollection
from shardwise.embedding.plan import Plan
from shardwise.errors import ArgumentError, LayoutError, UnsupportedError
from shardwise.interop.dtensors import is_alone
from shardwise.lookup.tiling import Table

Collection = EmbeddingBagCollection | EmbeddingCollection

#: torchrec's names of a state, in the order of the search.
_STATES = {
    "sum": ("momentum1",),
    "exp_avg": ("exp_avg", "momentum1"),
    "exp_avg_sq": ("exp_avg_sq", "momentum2"),
}


def tables_from_torchrec(configs: Any) -> list[Table]:
    """The tables of a torchrec collection, or of its list of configs."""
    if hasattr(configs, "embedding_bag_configs"):
        configs = configs.embedding_bag_configs()
    elif hasattr(configs, "embedding_configs"):
        configs = configs.embedding_configs()
    return [
        Table(
            config.name,
            config.num_embeddings,
            config.embedding_dim,
            features=tuple(config.feature_names),
            pooling=getattr(getattr(config, "pooling", None), "name", "SUM").lower(),
        )
        for config in configs
    ]


# -- plans -----------------------------------------------------------------------------------


def plan_from_torchrec(plan: Any, path: str | None = None) -> Plan:
    """The plan of one module of a torchrec `ShardingPlan`, or a module's plan itself.

    `path` names the module; it may be left out where the plan has only one.
    """
    modules = getattr(plan, "plan", None)
    if modules is not None:
        if path is None and len(modules) == 1:
            (path,) = modules
        if path not in modules:
            raise ArgumentError(
                f"The plan has modules {sorted(modules)}, asked for {path!r}: give `path` one of "
                "them."
            )
        plan = modules[path]
    return Plan({table: _entry(table, sharding) for table, sharding in plan.items()})


def _entry(table: str, sharding: Any) -> Any:
    kind, ranks = sharding.sharding_type, sharding.ranks
    if kind in ("data_parallel", "row_wise"):
        return kind
    if kind == "table_wise":
        return {"kind": kind, "rank": ranks[0]}
    if kind in ("column_wise", "table_column_wise"):
        if len(set(ranks)) != len(ranks):
            raise UnsupportedError(
                f"Table {table!r} has several column shards on one rank, {ranks}: here a rank has "
                "one shard of a table. Name each rank once."
            )
        return {"kind": "column_wise", "ranks": list(ranks)}
    if kind == "table_row_wise":
        spec = getattr(sharding, "sharding_spec", None)
        if spec is not None:
            ranks = [shard.placement.rank() for shard in spec.shards]
        return {"kind": "grid", "ranks": list(ranks)}
    raise UnsupportedError(
        f"Table {table!r} is {kind!r}, which has no counterpart: shard it row_wise, column_wise or "
        "table_row_wise."
    )


def plan_to_torchrec(
    plan: Plan | str | Mapping[str, Any],
    tables: Iterable[Table],
    num_ranks: int,
    *,
    device: str = "cpu",
    compute_kernel: str = "fused",
) -> Any:
    """torchrec's plan of one module, for `ShardingPlan(plan={path: ...})`.

    Replicated tables get the kernel "dense", as torchrec wants it.
    """
    types: Any = importlib.import_module("torchrec.distributed.types")
    specs = sharding_specs()
    tables = list(tables)
    tiling = Plan.of(plan).tiling(tables, num_ranks)
    found = types.EmbeddingModuleShardingPlan()
    for table, split in zip(tables, tiling.splits, strict=True):
        if split.kind == "data_parallel":
            ranks = list(range(num_ranks))
            found[table.name] = types.ParameterSharding("data_parallel", "dense", ranks)
            continue
        shards, at = [], 0
        for rank, length in enumerate(split.sizes):
            if length:
                offsets, sizes = [0, 0], [table.num_embeddings, table.embedding_dim]
                offsets[split.by_columns], sizes[split.by_columns] = at, length
                shards.append(specs.ShardMetadata(offsets, sizes, f"rank:{rank}/{device}"))
                at += length
        kind = "table_row_wise" if split.kind == "grid" else split.kind
        found[table.name] = types.ParameterSharding(
            kind,
            compute_kernel,
            [shard.placement.rank() for shard in shards],
            specs.EnumerableShardingSpec(shards),
        )
    return found


# -- tables and optimizer state --------------------------------------------------------------


def load_torchrec(
    collection: Collection,
    state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any] | None = None,
    *,
    prefix: str = "",
) -> None:
    """Take over the tables of a torchrec model, and the state of its fused optimizer.

    `state` is a state dict of torchrec, sharded by any plan or whole; `optimizer_state` is that of
    `model.fused_optimizer`. `prefix` comes before the names: "ebc." for a collection `model.ebc`.
    Call it on all ranks, which need not have all entries: torchrec gives a rank the optimizer state
    of its own tables. Tables are gathered one at a time.
    """
    optimizer = collection.optimizer
    if optimizer_state is not None and optimizer is None:
        raise ArgumentError(
            "The collection has no fused optimizer to take over the state: give it "
            "`optimizer=RowWiseAdagrad(...)`, or leave optimizer_state out."
        )
    states = {} if optimizer_state is None else optimizer_state["state"]
    saved: dict[str, dict[str, Any]] = {}
    for table in collection.tables:
        name = f"{prefix}{collection._child}.{table.name}.weight"
        weight: Any = collection.parameter(table.name)
        whole = _gathered(state.get(name), name)
        _check_shape(name, whole, (table.num_embeddings, table.embedding_dim))
        with torch.no_grad():
            weight.copy_(_laid_out(whole, weight))
        if optimizer_state is None or optimizer is None:
            continue
        mine = saved[table.name] = {}
        for key, target in optimizer.state[table.name].items():
            per_row = optimizer.settings.states[key]
            mine[key] = _state_of(table, name, key, states.get(name, {}), per_row, target)
    if saved and optimizer is not None:
        content = optimizer.state_dict()
        optimizer.load_state_dict({**content, "state": saved})


def _check_shape(name: str, found: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(found.shape) != expected:
        raise LayoutError(f"{name} has shape {tuple(found.shape)}, the collection {expected}.")


def _state_of(
    table: Table, name: str, key: str, states: Mapping[str, Any], per_row: bool, target: Any
) -> torch.Tensor:
    """One state of a table, whole; see Note [Row-wise state of column shards]."""
    value = next(
        (states[f"{table.name}.{n}"] for n in _STATES[key] if f"{table.name}.{n}" in states), None
    )
    whole = _gathered(value, f"the state {_STATES[key][0]} of {name}", optional=True)
    if whole is None:  # a replicated table, which torchrec leaves to another optimizer
        return target
    if not per_row:
        _check_shape(f"The state of {name}", whole, (table.num_embeddings, table.embedding_dim))
        return whole
    # One sum per row, for each column shard after the other; torchrec's shards are equally wide.
    sums = whole.view(-1, table.num_embeddings).t()
    num_columns = target.shape[1]
    return (
        sums if sums.shape[1] == num_columns else sums.mean(1, keepdim=True).expand(-1, num_columns)
    )


def _gathered(value: Any, name: str, *, optional: bool = False) -> Any:
    """The whole tensor of all ranks' shards; ranks without an entry bring none."""
    shape, shards = _shards(value)
    everyones: list[Any]
    if is_alone():
        everyones = [(shape, shards)]
    else:
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, (shape, shards))
    shapes = {shape for shape, _ in everyones if shape is not None}
    if optional and not shapes:
        return None
    if len(shapes) != 1:
        found = f"shapes {sorted(shapes)}" if shapes else "nothing"
        raise LayoutError(f"The state dict has {found} for {name} on the ranks.")
    found_shape = shapes.pop()
    like = next(part for _, parts in everyones for _, part in parts)
    whole = torch.zeros(found_shape, dtype=like.dtype)
    for _, parts in everyones:
        for offsets, part in parts:
            places = zip(offsets, part.shape, strict=True)
            whole[tuple(slice(at, at + size) for at, size in places)] = part
    return whole


def _shards(
    value: Any,
) -> tuple[tuple[int, ...] | None, list[tuple[tuple[int, ...], torch.Tensor]]]:
    """The shape of a tensor, and this rank's shards of it with their offsets."""
    if value is None:
        return None, []
    if hasattr(value, "local_shards"):
        found = [
            (tuple(shard.metadata.shard_offsets), shard.tensor.detach().cpu())
            for shard in value.local_shards()
        ]
        return tuple(value.shape), found
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return tuple(whole.shape), [((0,) * whole.dim(), whole.detach().cpu())]


def _laid_out(whole: torch.Tensor, like: Any) -> torch.Tensor:
    whole = whole.to(like.dtype)
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def state_dicts_to_torchrec(
    collection: Collection, *, prefix: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """State dicts for torchrec: of the tables, and of the fused optimizer.

    Tables are torch's ShardedTensors, replicated ones plain tensors, as torchrec has them. They
    share their memory with the collection. A torchrec model sharded by `plan_to_torchrec` loads
    them with `load_state_dict`. Call it on all ranks.
    """
    state: dict[str, Any] = {}
    states: dict[str, Any] = {}
    optimizer = collection.optimizer
    for table in collection.tables:
        name = f"{prefix}{collection._child}.{table.name}.weight"
        weight: Any = collection.parameter(table.name)
        state[name] = _as_sharded(weight)
        if optimizer is None or not _is_split(weight):
            continue
        mine = {}
        for key, value in optimizer.state[table.name].items():
            per_row = optimizer.settings.states[key]
            mine[f"{table.name}.{_STATES[key][0]}"] = _as_sharded(
                value, weight if per_row else None
            )
        held: Any = weight.detach().to_local()
        if held.numel():
            states[name] = mine
    return state, {"state": states}


def _is_split(x: Any) -> bool:
    return isinstance(x, DTensor) and any(isinstance(p, Shard) for p in x.placements)


def _as_sharded(x: Any, table: Any = None) -> Any:
    """A DTensor as torch's ShardedTensor; of a state per row, the shards of its `table`."""
    model = x if table is None else table
    if not _is_split(model):
        local: Any = x.detach()
        return local.to_local() if isinstance(x, DTensor) else local
    api, specs = sharded_tensors(), sharding_specs()
    layout, rank = model._layout, dist.get_rank()
    num_rows, by_columns = layout.shape[0], layout.placements[0].dim == 1
    metadata, columns = {}, 0
    for owner, coordinate in layout.grid.coordinates.items():
        offsets, sizes = map(list, layout.box(coordinate))
        if 0 in sizes:
            continue
        if table is not None:
            # One sum per row: torchrec has those of column shards one after the other.
            offsets = [offsets[0] + (num_rows * columns if by_columns else 0)]
            sizes, columns = [sizes[0]], columns + 1
        metadata[owner] = specs.ShardMetadata(
            offsets, sizes, f"rank:{owner}/{layout.grid.device_type}"
        )
    size = list(layout.shape) if table is None else [num_rows * (columns if by_columns else 1)]
    mine: Any = x.detach().to_local()
    if rank in metadata:
        mine = mine[:, 0].contiguous() if table is not None else mine
    properties = api.TensorProperties(dtype=x.dtype)
    whole = api.ShardedTensorMetadata(list(metadata.values()), torch.Size(size), properties)
    shards = [api.Shard(mine, metadata[rank])] if rank in metadata else []
    make: Callable[..., Any] = api.ShardedTensor._init_from_local_shards_and_global_metadata
    return make(shards, sharded_tensor_metadata=whole)
