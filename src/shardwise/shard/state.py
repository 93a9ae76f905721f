"""Sharded tensors in state dicts.

A sharded parameter is in its module's state dict like any other, and `load_state_dict` takes whole
tensors and tensors of any other spec too. The two hooks are for sharded tensors that are plain
attributes of a module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.shard.tensor import ShardedTensor


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
    """Take them out of a state dict again; an attribute that is there is filled, in its own spec.

    Register it with `module.register_load_state_dict_pre_hook(pre_load_state_dict_hook)`.
    """
    for path, submodule in module.named_modules():
        for name, value in list(vars(submodule).items()):
            key = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
            if isinstance(value, ShardedTensor) and key in state_dict:
                with torch.no_grad():
                    value.copy_(state_dict.pop(key))
