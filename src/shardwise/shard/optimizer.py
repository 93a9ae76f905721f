"""ShardedOptimizer, an optimizer with state by parameter name; hooks for state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.errors import ArgumentError, PathError
from shardwise.shard.tensor import ShardedTensor


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
    """A state tensor, laid out like its parameter if it has the same shape; else a copy."""
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

    For `ShardedOptimizer`. Sharded parameters are parameters, and come once.

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
