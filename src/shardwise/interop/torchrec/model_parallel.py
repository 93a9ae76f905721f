"""torchrec's DistributedModelParallel by its name, and its optimizers with names of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import ArgumentError, UnsupportedError
from shardwise.interop.torchrec.conversion import plan_from_torchrec
from shardwise.interop.torchrec.sharding import (
    EmbeddingShardingPlanner,
    ShardingEnv,
    ShardingPlan,
    Topology,
    device_of,
    fused_optimizer,
    get_default_sharders,
    named_collections,
)
from shardwise.lookup.optimizers import FusedOptimizer
from shardwise.training.data_parallel import data_parallel


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
                "data_parallel_wrapper is not there: gradients are reduced by "
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
        strange = sorted(set(plan.plan) - set(collections))
        if strange:
            raise ArgumentError(
                f"The plan names {strange}, but the collections of the model are at "
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
        if optimizer is not None:
            collection.fuse(optimizer)
        collection.shard(self._mesh, plan_from_torchrec(plan))
        if optimizer is not None:
            self._fused[path] = collection
            for parameter in collection.parameters():
                parameter._in_backward_optimizers = [collection.optimizer]

    def init_data_parallel(self) -> None:
        """Reduce the gradients of what is not sharded."""
        data_parallel(self.module, self._mesh)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @property
    def fused_optimizer(self) -> FusedOptimizers:
        """What the tables are updated with."""
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
    """Move the dense layers; those on the meta device begin with values of their own."""
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
    own = [getattr(p, "_fused_params", None) for p in collection.parameters()]
    if any(each != own[0] for each in own):
        raise UnsupportedError(
            f"The tables of the collection {path!r} were given different optimizers: make a "
            "collection for each."
        )
    return fused_optimizer(own[0] if own[0] is not None else fitting[0].fused_params)


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
    """An optimizer of torch whose state goes by the names of its parameters."""

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
