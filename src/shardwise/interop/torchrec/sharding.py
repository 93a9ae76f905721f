"""torchrec's plans, sharders, planner and DistributedModelParallel by its names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.errors import ArgumentError, UnsupportedError
from shardwise.interop.torchrec.collections import (
    CHOSEN,
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from shardwise.interop.torchrec.conversion import plan_from_torchrec
from shardwise.lookup.optimizers import SGD, Adagrad, Adam, FusedOptimizer, RowWiseAdagrad
from shardwise.lookup.tiling import Table
from shardwise.planner.planning import plan as find_plan
from shardwise.training import data_parallel as training

Collection = EmbeddingBagCollection | EmbeddingCollection


# -- plans -----------------------------------------------------------------------------------


@dataclass
class ParameterSharding:
    """How one table is sharded."""

    sharding_type: str
    #: "fused": updated in backward; "dense": its gradient is for an optimizer of torch.
    compute_kernel: str
    ranks: list[int] | None = None


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """The tables of one collection."""

    def __init__(self, tables: Mapping[str, ParameterSharding] | None = None) -> None:
        super().__init__(tables or {})


@dataclass
class ShardingPlan:
    """The collections of a model, by their paths."""

    plan: dict[str, EmbeddingModuleShardingPlan]

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        return self.plan.get(module_path)


#: Makes the sharding of a table out of the ranks of a host and of all hosts.
Generator = Callable[[int, int], ParameterSharding]


def _generator(
    kind: str, compute_kernel: str | None, ranks: Callable[[int, int], list[int] | None]
) -> Generator:
    kernel = _checked_kernel(compute_kernel or "fused")
    return lambda local, world: ParameterSharding(kind, kernel, ranks(local, world))


def _checked_kernel(kernel: str) -> str:
    if kernel not in ("fused", "dense"):
        raise UnsupportedError(
            f"compute_kernel={kernel!r} is not supported: tables are in the memory of their rank's "
            "device. Write 'fused', or 'dense' for gradients."
        )
    return kernel


def data_parallel() -> Generator:
    """A table that every rank has; its gradient is for an optimizer of torch."""
    return _generator("data_parallel", "dense", lambda local, world: list(range(world)))


def row_wise(sizes_placement: Any = None, compute_kernel: str | None = None) -> Generator:
    """Rows over all ranks."""
    if sizes_placement is not None:
        raise UnsupportedError("row_wise() splits rows evenly: leave sizes_placement out.")
    return _generator("row_wise", compute_kernel, lambda local, world: list(range(world)))


def table_wise(
    rank: int, device: str | None = None, compute_kernel: str | None = None
) -> Generator:
    """The whole table on one rank. `device` is that of the mesh."""
    return _generator("table_wise", compute_kernel, lambda local, world: [rank])


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
) -> Generator:
    """Columns over some ranks, each named once."""
    if size_per_rank is not None:
        raise UnsupportedError("column_wise() splits columns evenly: name ranks instead.")
    given = None if ranks is None else list(ranks)
    return _generator(
        "column_wise", compute_kernel, lambda local, world: given or list(range(world))
    )


def table_row_wise(host_index: int) -> Generator:
    """Rows over the ranks of one host."""
    return _generator(
        "table_row_wise",
        None,
        lambda local, world: list(range(host_index * local, (host_index + 1) * local)),
    )


def grid_shard(host_indexes: Sequence[int]) -> Generator:
    """Not supported: raises, and says what to write instead."""
    raise UnsupportedError(
        f"grid_shard({list(host_indexes)}) has no counterpart: a table is split by rows or by "
        "columns. Write table_row_wise(host_index) or column_wise(ranks)."
    )


def construct_module_sharding_plan(
    module: Collection,
    per_param_sharding: Mapping[str, Generator],
    sharder: Any = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """The plan of one collection. `device_type` is that of the mesh."""
    names = [table.name for table in module.tables]
    if sorted(per_param_sharding) != sorted(names):
        raise ArgumentError(
            f"The plan names {sorted(per_param_sharding)}, the collection has {sorted(names)}."
        )
    world = world_size or dist.get_world_size()
    local = local_size or world
    return EmbeddingModuleShardingPlan(
        {name: per_param_sharding[name](local, world) for name in names}
    )


# -- optimizers in backward ------------------------------------------------------------------


class EmbOptimType(Enum):
    """fbgemm's names of optimizers; those that this package has."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"

    def __str__(self) -> str:
        return self.value


#: fbgemm's names of an optimizer's settings, and ours.
_SETTINGS = {"learning_rate": "lr", "eps": "eps", "weight_decay": "weight_decay"}


def fused_optimizer(fused_params: Mapping[str, Any]) -> FusedOptimizer:
    """The optimizer that `fused_params` of a sharder describe; fbgemm's defaults otherwise."""
    given = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.01, **fused_params}
    kind = getattr(given.pop("optimizer"), "value", None)
    betas = given.pop("beta1", 0.9), given.pop("beta2", 0.999)
    unknown = sorted(set(given) - set(_SETTINGS))
    if unknown:
        raise UnsupportedError(
            f"fused_params has {', '.join(unknown)}: leave them out. There are optimizer, beta1, "
            f"beta2, {', '.join(_SETTINGS)}."
        )
    settings = {_SETTINGS[name]: value for name, value in given.items()}
    if kind in ("sgd", "exact_sgd"):
        settings.pop("eps", None)
        return SGD(**settings)
    settings.setdefault("eps", 1e-8)
    if kind == "exact_row_wise_adagrad":
        return RowWiseAdagrad(**settings, across_columns=False)
    if kind == "exact_adagrad":
        return Adagrad(**settings)
    if kind == "adam":
        return Adam(**settings, betas=betas)
    raise UnsupportedError(
        f"The optimizer {kind!r} is not among {[each.name for each in EmbOptimType]}. Give the "
        "tables compute_kernel='dense', and an optimizer of torch."
    )


_OF_TORCH = {
    "SGD": EmbOptimType.EXACT_SGD,
    "Adagrad": EmbOptimType.EXACT_ADAGRAD,
    "RowWiseAdagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "Adam": EmbOptimType.ADAM,
}


def apply_optimizer_in_backward(
    optimizer_class: Any,
    params: Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any],
) -> None:
    """Update these tables in backward, before and after `DistributedModelParallel` shards them.

    `optimizer_class` is SGD, Adagrad or Adam of torch, or `RowWiseAdagrad`.
    """
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    if name not in _OF_TORCH:
        raise UnsupportedError(
            f"Tables are updated in backward by {', '.join(_OF_TORCH)}; found {name}."
        )
    given = dict(optimizer_kwargs)
    fused = {"optimizer": _OF_TORCH[name], "learning_rate": given.pop("lr", 0.01)}
    fused |= dict(zip(("beta1", "beta2"), given.pop("betas", ()), strict=False))
    settings = fused_optimizer(fused | given)
    for parameter in params:
        parameter.__dict__[CHOSEN] = settings


# -- sharders and the planner ----------------------------------------------------------------


class _Sharder:
    module_type: type[Any]

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> None:
        if qcomm_codecs_registry is not None:
            raise UnsupportedError(
                "qcomm_codecs_registry is not supported: collections of shardwise.embedding have "
                "shard(mesh, plan, exchange_dtype=torch.bfloat16)."
            )
        self.fused_params = dict(fused_params or {})


class EmbeddingBagCollectionSharder(_Sharder):
    """The optimizer for the tables of `EmbeddingBagCollection`s."""

    module_type = EmbeddingBagCollection


class EmbeddingCollectionSharder(_Sharder):
    """The optimizer for the tables of `EmbeddingCollection`s."""

    module_type = EmbeddingCollection


def get_default_sharders() -> list[Any]:
    """One sharder for each kind of collection, with fbgemm's default optimizer: SGD, lr 0.01."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


@dataclass
class ShardingEnv:
    """The ranks that share the tables."""

    process_group: Any = None

    @classmethod
    def from_process_group(cls, pg: Any) -> ShardingEnv:
        return cls(pg)

    def mesh(self, device_type: str) -> DeviceMesh:
        if self.process_group is None or self.process_group is dist.GroupMember.WORLD:
            return init_device_mesh(device_type, (dist.get_world_size(),))
        return DeviceMesh.from_group(self.process_group, device_type)


@dataclass
class Topology:
    """The ranks to plan for; what they can is measured by `shardwise calibrate`."""

    world_size: int
    compute_device: str = "cpu"
    local_world_size: int | None = None
    hbm_cap: int | None = None


@dataclass
class ParameterConstraints:
    """Constraints on the plan of a table: here, one sharding type and one kernel."""

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    pooling_factors: list[float] = field(default_factory=list)


class EmbeddingShardingPlanner:
    """Plans the tables of all collections of a model with `shardwise.planner`."""

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        **others: Any,
    ) -> None:
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise UnsupportedError(
                f"EmbeddingShardingPlanner({', '.join(given)}=...) is not supported: use "
                "shardwise.planner.plan, which searches otherwise and proves a bound."
            )
        self._topology, self._batch_size = topology, batch_size
        self._constraints = dict(constraints or {})

    def collective_plan(
        self, module: nn.Module, sharders: Sequence[Any] | None = None, pg: Any = None
    ) -> ShardingPlan:
        """The first rank plans, and all get its plan."""
        kind = "cpu" if self._topology is None else self._topology.compute_device
        mesh = ShardingEnv(pg).mesh(kind)
        found = named_collections(module)
        return ShardingPlan({path: self._planned(each, mesh) for path, each in found.items()})

    plan = collective_plan

    def _planned(self, collection: Collection, mesh: DeviceMesh) -> EmbeddingModuleShardingPlan:
        local = self._topology.local_world_size if self._topology is not None else None
        fixed: dict[str, ParameterSharding] = {}
        free: list[Table] = []
        for table in collection.tables:
            types = self._types(table.name)
            if types is None:
                free.append(table)
            else:
                fixed[table.name] = types(local or mesh.size(), mesh.size())
        if free:
            memory = self._topology.hbm_cap if self._topology is not None else None
            factors = {
                feature: float(c.pooling_factors[0])
                for table in free
                if (c := self._constraints.get(table.name)) is not None and c.pooling_factors
                for feature in table.features
            }
            batch = None if self._batch_size is None else self._batch_size * mesh.size()
            planned = find_plan(
                free, mesh, batch=batch, memory=memory, ids_per_bag=factors or None
            ).plan
            fixed |= {
                name: _from_entry(entry, self._kernel(name))
                for name, entry in planned.entries.items()
            }
        return EmbeddingModuleShardingPlan({t.name: fixed[t.name] for t in collection.tables})

    def _types(self, table: str) -> Generator | None:
        constraint = self._constraints.get(table)
        if constraint is None or not constraint.sharding_types:
            return None
        kernel = self._kernel(table)
        given: dict[str, Generator] = {
            "row_wise": row_wise(compute_kernel=kernel),
            "column_wise": column_wise(compute_kernel=kernel),
            "data_parallel": data_parallel(),
        }
        kinds = constraint.sharding_types
        if len(kinds) > 1 or kinds[0] not in given:
            raise UnsupportedError(
                f"The constraints of table {table!r} name sharding_types={kinds}: the planner "
                f"takes one of {', '.join(given)}, or chooses freely. Leave them out, or write a "
                "plan."
            )
        return given[kinds[0]]

    def _kernel(self, table: str) -> str:
        constraint = self._constraints.get(table)
        kernels = constraint.compute_kernels if constraint is not None else None
        return _checked_kernel(kernels[0] if kernels else "fused")


def _from_entry(entry: Any, kernel: str) -> ParameterSharding:
    options: dict[str, Any] = {"kind": entry} if isinstance(entry, str) else dict(entry)
    kind = options["kind"]
    ranks = [options["rank"]] if "rank" in options else options.get("ranks")
    # Replicated tables may be fused too: a collection updates all its tables in backward.
    return ParameterSharding("table_row_wise" if kind == "grid" else kind, kernel, ranks)


def named_collections(module: nn.Module) -> dict[str, Any]:
    """The collections of a model, by their paths."""
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    return {path: each for path, each in module.named_modules() if isinstance(each, kinds)}


def device_of(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# -- DistributedModelParallel --------------------------------------------------------------------


class DistributedModelParallel(nn.Module):
    """A model whose collections are sharded by a plan, and whose other parameters are replicated.

    `plan` is one of this module or of torchrec; without one the planner finds it. Each rank gives
    its own batch, and gradients are those of the mean of the ranks' losses. Names of parameters and
    in state dicts are those of the model inside, which is `module`. Tables keep their values.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[Any] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: Any = None,
    ) -> None:
        super().__init__()
        if data_parallel_wrapper is not None:
            raise UnsupportedError(
                "data_parallel_wrapper is not supported: gradients are reduced by "
                "shardwise.parallel.data_parallel, whose bucket_bytes= is the one setting."
            )
        self.device = device_of(device)
        env = env or ShardingEnv()
        self._mesh = env.mesh(self.device.type)
        sharders = get_default_sharders() if sharders is None else sharders
        if plan is None:
            topology = Topology(self._mesh.size(), self.device.type)
            planner = EmbeddingShardingPlanner(topology)
            plan = planner.collective_plan(module, sharders, env.process_group)
        self.plan = plan
        self.module = module
        collections = named_collections(module)
        unknown = sorted(set(plan.plan) - set(collections))
        if unknown:
            raise ArgumentError(
                f"The plan names {unknown}, but the collections of the model are at "
                f"{sorted(collections)}."
            )
        if init_parameters:
            _give_memory(module, self.device)
        #: The collections whose tables are updated in backward.
        self._fused: dict[str, Any] = {}
        for path in plan.plan:
            self._shard(path, collections[path], plan.plan[path], sharders)
        if init_data_parallel:
            self.init_data_parallel()

    def _shard(self, path: str, collection: Any, plan: Any, sharders: Sequence[Any]) -> None:
        optimizer = _optimizer_of(path, collection, plan, sharders)
        collection.fuse(optimizer)
        collection.shard(self._mesh, plan_from_torchrec(plan))
        if optimizer is not None:
            self._fused[path] = collection
            for parameter in collection.parameters():
                parameter._in_backward_optimizers = [collection.optimizer]

    def init_data_parallel(self) -> None:
        """Reduce the gradients of parameters that are not sharded."""
        training.data_parallel(self.module, self._mesh)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @property
    def fused_optimizer(self) -> FusedOptimizers:
        """The optimizers that update the tables."""
        return FusedOptimizers(self._fused)

    # -- by the names of the model inside ----------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)


def _give_memory(module: nn.Module, device: torch.device) -> None:
    """Move the dense layers; initialise those on the meta device."""
    collections = set(named_collections(module).values())
    inside = {id(part) for each in collections for part in each.modules()}
    for part in module.modules():
        if id(part) in inside:
            continue
        held = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in held):
            for name, parameter in part.named_parameters(recurse=False):
                parameter.data = part.get_parameter(name).data.to(device)
            for name, buffer in part.named_buffers(recurse=False):
                part._buffers[name] = buffer.to(device)
            continue
        reset = getattr(part, "reset_parameters", None)
        if reset is None:
            raise UnsupportedError(
                f"{type(part).__name__} is on the meta device, and has no reset_parameters(): make "
                "it on a device."
            )
        part.to_empty(device=device, recurse=False)
        reset()


def _optimizer_of(
    path: str, collection: Any, plan: Mapping[str, Any], sharders: Sequence[Any]
) -> FusedOptimizer | None:
    """The optimizer of a collection's tables; None where an optimizer of torch has them."""
    kernels = {sharding.compute_kernel for sharding in plan.values()}
    if kernels == {"dense"}:
        return None
    if kernels != {"fused"}:
        dense = [table for table, each in plan.items() if each.compute_kernel == "dense"]
        raise UnsupportedError(
            f"In the collection {path!r} the tables {dense} are dense (as data_parallel ones are), "
            "and the others fused: here the tables of a collection are updated together. Make two "
            "collections, or give all of them compute_kernel='dense'."
        )
    fitting = [s for s in sharders if isinstance(collection, s.module_type)]
    if not fitting:
        raise ArgumentError(
            f"sharders has none for {type(collection).__name__}, which the plan shards at {path!r}."
        )
    own = collection.chosen_optimizer()
    return fused_optimizer(fitting[0].fused_params) if own is None else own


class FusedOptimizers:
    """The optimizers of sharded collections, by the paths of these.

    Rows are updated in backward, so `step` and `zero_grad` do nothing.
    """

    def __init__(self, collections: Mapping[str, Any]) -> None:
        self.optimizers = {path: each.optimizer for path, each in collections.items()}

    def step(self, closure: Any = None) -> None: ...

    def zero_grad(self, set_to_none: bool = False) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {path: each.state_dict() for path, each in self.optimizers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for path, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state_dict[path])


class KeyedOptimizerWrapper:
    """An optimizer of torch whose state is keyed by the names of its parameters."""

    def __init__(
        self, params: Mapping[str, nn.Parameter], optim_factory: Callable[[Any], Any]
    ) -> None:
        self.params = dict(params)
        self._optimizer = optim_factory(list(self.params.values()))

    @property
    def param_groups(self) -> Any:
        return self._optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self._renamed(self._optimizer.state_dict(), dict(enumerate(self.params)))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        numbers = {name: number for number, name in enumerate(self.params)}
        self._optimizer.load_state_dict(self._renamed(state_dict, numbers))

    @staticmethod
    def _renamed(content: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
        groups = [
            {**group, "params": [names[each] for each in group["params"]]}
            for group in content["param_groups"]
        ]
        state = {names[each]: value for each, value in content["state"].items()}
        return {"state": state, "param_groups": groups}


class CombinedOptimizer:
    """Several optimizers as one."""

    def __init__(self, optims: Sequence[Any]) -> None:
        self._optims = [each[1] if isinstance(each, tuple) else each for each in optims]

    @property
    def optimizers(self) -> list[Any]:
        return self._optims

    def step(self, closure: Any = None) -> None:
        for each in self._optims:
            each.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self._optims:
            each.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {str(number): each.state_dict() for number, each in enumerate(self._optims)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for number, each in enumerate(self._optims):
            each.load_state_dict(state_dict[str(number)])


def in_backward_optimizer_filter(
    named_parameters: Iterator[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are not updated in backward; with `include`, those that are."""
    for name, parameter in named_parameters:
        if hasattr(parameter, "_in_backward_optimizers") == include:
            yield name, parameter
