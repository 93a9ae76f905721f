"""shard_module: parameters, modules and outputs sharded by a plan; ShardedOptimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.comm.agreement import agree, is_agreed
from shardwise.core.mesh import Grid
from shardwise.dtensor.autograd import refuse_hooks
from shardwise.errors import (
    ArgumentError,
    PathError,
    PlanError,
    ShardwiseError,
    UnsupportedError,
    WorldError,
)
from shardwise.plans import check_conflicts, find_module, find_tensor, owners_of
from shardwise.shard.create import (
    check_grad_reduction,
    check_shardable,
    comparable,
    describe_tensor,
    place_tensor,
)
from shardwise.shard.outputs import OutputPlan, lay_out, output_form
from shardwise.shard.plan import Sharder, ShardingPlan
from shardwise.shard.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    device_type_of,
)
from shardwise.shard.tensor import ShardedTensor, group_of_load
from shardwise.shard.tiling import group_grid, group_ranks, is_outside


@dataclass(frozen=True, slots=True)
class OutputHook:
    """A forward hook that lays out a module's output as the plan says.

    Pickling keeps the ranks of its group; loading takes the group of the load, as tensors do.
    """

    plan: OutputPlan
    process_group: Any
    #: The plan as text, for compiled graphs.
    form: str

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return lay_out(output, self.plan, self.process_group, self.form)

    def __deepcopy__(self, memo: Any) -> OutputHook:
        return self  # a group stands for processes, which are not copied

    def __reduce__(self) -> Any:
        return _restored, (self.plan, group_ranks(self.process_group))


def output_hook(plan: OutputPlan, process_group: Any) -> OutputHook:
    return OutputHook(plan, process_group, output_form(plan, process_group))


def _restored(plan: OutputPlan, ranks: tuple[int, ...]) -> OutputHook:
    return output_hook(plan, group_of_load(ranks, f"The output plan of {plan.where!r}"))


def shard_module(
    module: nn.Module,
    plan: ShardingPlan,
    src_rank: int | None = 0,
    process_group: Any = None,
    *,
    grad_reduction: str = "mean",
) -> nn.Module:
    """Shard a module as the plan says, in place, and return it.

    Parameters get the values of rank `src_rank` of the group; with None, each rank takes its shards
    of its own values. Lookups and linear layers then take each rank's own plain batch, and their
    weight's gradient is that of the mean of the ranks' losses, or of the sum
    (`grad_reduction="sum"`). A module that a sharder returns without defining `forward` keeps that
    of the module it replaces.

    The ranks compare their arguments before anything is sent: if they differ, or one rank finds a
    mistake, all of them raise and no parameter is changed.

    >>> import shardwise
    >>> from shardwise.shard import ChunkShardingSpec, ShardingPlan, shard_module
    >>> tower = nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum"), nn.ReLU())
    >>> ids = torch.tensor([[1, 9], [4, 4]])
    >>> expected = tower(ids)
    >>> with shardwise.simulate(4):
    ...     rows = ChunkShardingSpec(dim=0, placements=[f"rank:{i}/cpu" for i in range(4)])
    ...     _ = shard_module(tower, ShardingPlan({"0.weight": rows}))
    ...     torch.testing.assert_close(tower(ids).agreed(), expected)
    """
    if is_outside(process_group):
        _apply(module, plan, src_rank, process_group, grad_reduction)
        return module
    problem: Exception | None = None
    try:
        _check(module, plan, src_rank, process_group)
        check_grad_reduction(grad_reduction)
    except Exception as error:  # of any kind: the other ranks wait for this one
        problem = error
    try:
        grid = group_grid(process_group)
    except WorldError as error:
        raise problem or error from None
    request = [
        *_described(module, plan),
        f"src_rank={src_rank}",
        f"grad_reduction={grad_reduction}",
    ]
    agree(grid, "shard_module", "\n".join(request), problem)
    _apply(module, plan, src_rank, process_group, grad_reduction)
    return module


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int | None = 0,
    process_group: Any = None,
    *,
    grad_reduction: str = "mean",
) -> None:
    """Shard one parameter of a module, in place."""
    plan = ShardingPlan({param_name: sharding_spec})
    shard_module(module, plan, src_rank, process_group, grad_reduction=grad_reduction)


def _check(module: nn.Module, plan: ShardingPlan, src_rank: int | None, process_group: Any) -> None:
    """Raise for any mistake in a plan, conflicts between its entries first."""
    if not isinstance(plan, ShardingPlan) or not isinstance(plan.plan, Mapping):
        raise ArgumentError(
            f"shard_module takes a ShardingPlan of a dict, found {type(plan).__name__}."
        )
    sharders = [path for path, entry in plan.plan.items() if isinstance(entry, Sharder)]
    check_conflicts(plan.plan, sharders)
    if "" in sharders:
        raise PathError("path must not be empty for custom sharder!")
    placed: dict[int, tuple[str, ShardingSpec]] = {}
    for path, entry in plan.plan.items():
        if isinstance(entry, Sharder):
            find_module(module, path)
            continue
        if not isinstance(entry, ShardingSpec):
            given = f"the class {entry.__name__}" if isinstance(entry, type) else f"{entry!r}"
            raise ArgumentError(
                f"Only `ShardingSpec` and `Sharder` are supported to shard {path!r}: the plan "
                f"gives it {given}, not an instance of one."
            )
        _, _, tensor = find_tensor(module, path)
        check_shardable(tensor, repr(path), entry, src_rank, process_group)
        first, spec = placed.setdefault(id(tensor), (path, entry))
        if spec != entry:
            raise PlanError(
                f"{first!r} and {path!r} are one parameter, and the plan gives it two specs: "
                f"{spec} and {entry}."
            )
    for path, spec in (plan.output_plan or {}).items():
        find_module(module, path)
        if not isinstance(spec, ShardingSpec):
            raise ArgumentError(
                f"Only `ShardingSpec` is supported as output_plan for {path!r}, found {spec!r}."
            )
        if not isinstance(spec, (ChunkShardingSpec, EnumerableShardingSpec)):
            raise UnsupportedError(
                f"output_plan gives {path!r} a spec of your own class, {spec!r}: outputs are laid "
                "out by a ChunkShardingSpec or an EnumerableShardingSpec."
            )
        device_type_of(spec)
    for path in plan.return_local_tensor or ():
        find_module(module, path)


def _described(module: nn.Module, plan: Any) -> list[str]:
    """The plan as lines that the ranks compare."""
    lines = []
    entries = getattr(plan, "plan", None)
    for path, entry in entries.items() if isinstance(entries, Mapping) else ():
        if isinstance(entry, Sharder):
            lines.append(f"{path}: {comparable(entry)}")
            continue
        try:
            tensor = find_tensor(module, path)[2]
        except ShardwiseError:
            tensor = None
        lines.append(describe_tensor(path, tensor, entry))
    for path, spec in (getattr(plan, "output_plan", None) or {}).items():
        lines.append(f"output of {path!r}: {comparable(spec)}")
    lines += [f"local output of {p!r}" for p in getattr(plan, "return_local_tensor", None) or ()]
    return lines


def _apply(
    module: nn.Module,
    plan: ShardingPlan,
    src_rank: int | None,
    process_group: Any,
    grad_reduction: str,
) -> None:
    """Make everything first, then assign it: a failure leaves the parameters unchanged."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for path, entry in plan.plan.items():
        if isinstance(entry, ShardingSpec):
            _, _, tensor = find_tensor(module, path)
            if id(tensor) not in made:
                refuse_hooks(tensor, f"Parameter {path!r}")
                new = place_tensor(tensor, entry, src_rank, process_group, grad_reduction)
                is_parameter, grad = isinstance(tensor, nn.Parameter), tensor.requires_grad
                made[id(tensor)] = (tensor, nn.Parameter(new, grad) if is_parameter else new)
    replaced: dict[str, nn.Module] = {}
    for path, entry in plan.plan.items():
        if isinstance(entry, Sharder):
            before = find_module(module, path)
            make = functools.partial(_sharded_by, entry, before, path)
            replaced[path] = _agreed_by_all(group_grid(process_group), path, make)
    for whole, sharded in made.values():
        for owner, name in owners_of(module, whole):
            owner[name] = sharded
    for path, new_module in replaced.items():
        parent, _, name = path.rpartition(".")
        find_module(module, parent)._modules[name] = new_module
    _hook_outputs(module, plan, process_group, grad_reduction)


def _agreed_by_all(grid: Grid, path: str, make: Callable[[], nn.Module]) -> nn.Module:
    """The result of `make`; if it fails on some rank, all ranks raise.

    A rank that fails meets the others here, or in a nested `shard_module` of theirs that compares
    plans.
    """
    made, problem = None, None
    try:
        made = make()
    except Exception as error:
        if is_agreed(error):
            raise
        problem = error
    agree(grid, "shard_module", f"the sharder of {path!r} is done", problem)
    assert made is not None, "a rank that failed has raised"
    return made


def _sharded_by(sharder: Sharder, before: nn.Module, path: str) -> nn.Module:
    after = sharder.shard(before)
    if not isinstance(after, nn.Module):
        raise ArgumentError(
            f"{type(sharder).__name__}.shard({path!r}) returned {type(after).__name__}; it returns "
            "the module that replaces it."
        )
    if after is not before and type(after).forward is nn.Module.forward:
        # A container of sharded modules: it keeps the forward of the module that it replaces.
        after.forward = functools.partial(type(before).forward, after)
    return after


def _hook_outputs(
    module: nn.Module, plan: ShardingPlan, process_group: Any, grad_reduction: str
) -> None:
    specs, local = dict(plan.output_plan or {}), set(plan.return_local_tensor or ())
    for path in dict.fromkeys([*specs, *(plan.return_local_tensor or ())]):
        laid_out = OutputPlan(path, specs.get(path), path in local, grad_reduction)
        find_module(module, path).register_forward_hook(output_hook(laid_out, process_group))


class ShardedOptimizer(torch.optim.Optimizer):
    """Any optimizer of torch over named parameters, sharded or not.

    Sharded parameters need no wrapper: `torch.optim.Adam(model.parameters())` works. This adds a
    state dict by name, whose tensors are sharded like their parameters, so that it can be saved
    with the model and loaded into one that is sharded differently.

    >>> layer = torch.nn.Linear(2, 2)
    >>> optimizer = ShardedOptimizer(dict(layer.named_parameters()), torch.optim.SGD, lr=0.1)
    >>> optimizer.state_dict()["param_groups"][0]["params"]
    ['weight', 'bias']
    """

    def __init__(
        self,
        named_params: Mapping[str, torch.Tensor],
        optimizer_class: type[torch.optim.Optimizer],
        *optimizer_args: Any,
        **optimizer_kwargs: Any,
    ) -> None:
        if not isinstance(named_params, Mapping):
            raise ArgumentError(
                "named_params is a dict from names to parameters: dict(model.named_parameters())."
            )
        self.named_params = dict(named_params)
        made: Any = optimizer_class
        self._optim: torch.optim.Optimizer = made(
            list(self.named_params.values()), *optimizer_args, **optimizer_kwargs
        )
        self.param_groups = self._optim.param_groups
        self.state = self._optim.state
        self.defaults = self._optim.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._optim.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """State and groups by parameter name."""
        names = {id(parameter): name for name, parameter in self.named_params.items()}
        groups = [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        state = {names[id(p)]: dict(values) for p, values in self.state.items()}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load state by name; whole tensors and tensors of another spec are resharded."""
        unknown = sorted(set(state_dict["state"]) - set(self.named_params))
        groups = state_dict["param_groups"]
        if unknown or [len(g["params"]) for g in groups] != [
            len(g["params"]) for g in self.param_groups
        ]:
            raise PathError(
                f"The state is of other parameters: it names {unknown or groups}, this optimizer "
                f"has {sorted(self.named_params)}."
            )
        for name, values in state_dict["state"].items():
            parameter = self.named_params[name]
            self.state[parameter] = {key: _like(value, parameter) for key, value in values.items()}
        for own, given in zip(self.param_groups, groups, strict=True):
            own.update({key: value for key, value in given.items() if key != "params"})


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """A state tensor, laid out like its parameter if the shapes are equal; else a copy."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape:
        return value.clone()
    with torch.no_grad():
        return torch.zeros_like(parameter, dtype=value.dtype).copy_(value)


# A sharded parameter is in its module's state dict like any other, and `load_state_dict` takes
# whole tensors and tensors of any other spec too. The two hooks are for sharded tensors that are
# plain attributes of a module.


def state_dict_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Put sharded tensors that are attributes of a module or its submodules into its state dict.

    Register it with `module._register_state_dict_hook(state_dict_hook)`.
    """
    for path, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            if isinstance(value, ShardedTensor):
                destination[f"{prefix}{path}.{name}" if path else f"{prefix}{name}"] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Load such attributes from a state dict, each into its own spec; others are set as they are.

    Register it with `module.register_load_state_dict_pre_hook(pre_load_state_dict_hook)`.
    """
    for path, submodule in module.named_modules():
        for name, value in list(vars(submodule).items()):
            key = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
            if isinstance(value, ShardedTensor) and key in state_dict:
                with torch.no_grad():
                    value.copy_(state_dict.pop(key))
            elif isinstance(state_dict.get(key), ShardedTensor):
                setattr(submodule, name, state_dict.pop(key))


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and parameters of a module, and sharded tensors that are plain attributes of it.

    For `ShardedOptimizer`. Sharded parameters are among the parameters, and listed once.

    >>> layer = torch.nn.Linear(2, 2)
    >>> [name for name, _ in named_params_with_sharded_tensor(layer, "top")]
    ['top.weight', 'top.bias']
    """
    seen = set()
    for path, submodule in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        for name, value in vars(submodule).items():
            if isinstance(value, ShardedTensor) and id(value) not in seen:
                seen.add(id(value))
                yield (f"{path}.{name}" if path else name), value
    yield from module.named_parameters(prefix=prefix, recurse=recurse)
