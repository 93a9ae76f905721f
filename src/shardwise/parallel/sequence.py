"""SequenceParallel and ReplicateParallel: whole parameters, activations split or whole."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.parallel.style import (
    ParallelStyle,
    append_output_hook,
    first_input,
    only_output,
    prepend_input_hook,
)


class _WholeParameters(ParallelStyle):
    """Whole parameters; input and output lie as `activations` says."""

    decides = ("parameters", "input", "output")
    activations: Placement
    use_local_output: bool

    def parameter_placements(self, module: nn.Module) -> Mapping[str, Placement]:
        return {name: REPLICATE for name, _ in module.named_parameters()}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        spot = self.spot(device_mesh)
        self.place_parameters(module, spot)
        lie = self.activations
        prepend_input_hook(module, first_input(spot, lie, lie))
        append_output_hook(module, only_output(spot, lie, self.use_local_output))
        return module


class SequenceParallel(_WholeParameters):
    """Whole parameters, activations split along the sequence: for norms and dropout.

    A plain input is each rank's part of `sequence_dim`; a DTensor is brought there. The output
    stays a DTensor unless `use_local_output` is True. Gradients of the parameters are Partial until
    they are used; `shardwise.reduce_gradients` reduces them together.

    >>> import shardwise, torch
    >>> from shardwise.parallel import SequenceParallel, parallelize_module
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     norm = parallelize_module(torch.nn.LayerNorm(4), mesh, SequenceParallel())
    ...     y = norm(torch.ones(3, 5, 4))       # five positions on each rank
    >>> tuple(y.shape), y.placements
    ((3, 10, 4), (Shard(1),))
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_dim = sequence_dim
        self.sequence_sharding = self.activations = Shard(sequence_dim)
        self.use_local_output = use_local_output


class ReplicateParallel(_WholeParameters):
    """Whole parameters, whole activations: every rank does the same, as a DTensor program.

    For a module whose parameters have to be DTensors because an optimizer or a clip takes all
    parameters together.

    >>> import shardwise, torch
    >>> from shardwise.parallel import ReplicateParallel, parallelize_module
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     norm = parallelize_module(torch.nn.LayerNorm(4), mesh, ReplicateParallel())
    ...     y = norm(torch.ones(3, 4))
    >>> norm.weight.placements, type(y).__name__
    ((Replicate(),), 'LocalTensor')
    """

    activations = REPLICATE

    def __init__(self, *, use_local_output: bool = True) -> None:
        self.use_local_output = use_local_output
