"""Styles of layers: parameters sharded by rows or columns, or whole with sharded activations."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.mesh import Coordinate
from shardwise.core.placements import REPLICATE, Partial, Placement, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, UnsupportedError
from shardwise.parallel.boundary import ModuleBoundary
from shardwise.parallel.style import (
    ParallelStyle,
    append_output_hook,
    first_input,
    only_output,
    prepend_input_hook,
)
from shardwise.simulation.ranks import on_plain_ranks


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether a module is Hugging Face's `Conv1D`: a Linear whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


class _MatrixStyle(ParallelStyle):
    """A style for `nn.Linear`, `nn.Embedding` and Hugging Face's `Conv1D`."""

    decides = ("parameters", "input", "output")

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        for name, layout in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            if layout is not None and not isinstance(layout, Placement):
                raise ArgumentError(
                    f"{type(self).__name__}({name}=...) takes one placement, found {layout!r}."
                )
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    def check(self, module: nn.Module) -> None:
        if not isinstance(module, (nn.Linear, nn.Embedding)) and not is_transposed_linear(module):
            raise UnsupportedError(
                f"{self.where} is a {type(module).__name__}; {type(self).__name__} is for "
                "nn.Linear and nn.Embedding. Name the layers inside it in the plan, or write a "
                "ParallelStyle of your own."
            )
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise UnsupportedError(
                f"{self.where} has max_norm={module.max_norm}: rows are scaled when they are "
                "looked up, which a sharded table does not do. Make it without max_norm."
            )
        super().check(module)

    def _input_placements(self, module: nn.Module) -> tuple[Placement, Placement]:
        """The default placement of a plain input, and the placement that the layer needs."""
        raise NotImplementedError

    def _default_output(self) -> Placement:
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        boundary = self.boundary(device_mesh)
        self.place_parameters(module, boundary)
        default, wanted = self._input_placements(module)
        given = self.input_layouts or default
        if isinstance(module, nn.Linear):
            given = _sized_features(boundary, given, module.in_features)
        elif is_transposed_linear(module):
            given = _sized_features(boundary, given, module.get_parameter("weight").shape[0])
        prepend_input_hook(module, first_input(boundary, given, wanted))
        output = self.output_layouts or self._default_output()
        append_output_hook(module, only_output(boundary, output, self.use_local_output))
        return module


def _sized_features(boundary: ModuleBoundary, given: Placement, num_features: int) -> Placement:
    """A shard of the last dim, with uneven sizes where the number of features does not divide."""
    return boundary.sized(given, num_features) if given == Shard(-1) else given


class ColwiseParallel(_MatrixStyle):
    """Shard the outputs of a layer: the rows of a Linear's weight, the columns of a table.

    The input is whole on every rank, and by default the output is sharded along its last dim. A
    plain input has the placement `input_layouts` and is redistributed to `Replicate()`; the output
    is redistributed to `output_layouts` (`Shard(-1)`), and is a plain tensor unless
    `use_local_output` is False.

    >>> import shardwise, torch
    >>> from shardwise.parallel import ColwiseParallel, parallelize_module
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     layer = parallelize_module(
    ...         torch.nn.Linear(3, 4), mesh, ColwiseParallel(use_local_output=False)
    ...     )
    ...     y = layer(torch.ones(5, 3))
    >>> layer.weight.placements, y.placements
    ((Shard(0),), (Shard(1),))
    """

    def parameter_placements(self, module: nn.Module) -> Mapping[str, Placement]:
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(1)}
        return {"weight": Shard(1 if is_transposed_linear(module) else 0), "bias": Shard(0)}

    def _input_placements(self, module: nn.Module) -> tuple[Placement, Placement]:
        return REPLICATE, REPLICATE

    def _default_output(self) -> Placement:
        return Shard(-1)


class SharedHeads(ColwiseParallel):
    """A colwise layer with fewer heads than ranks: whole parameters, several ranks use one head.

    `parallelize_module` takes it for keys and values where a plan says colwise. Each rank computes
    all heads, which are few, and passes one on; the gradients of the parameters are Partial.
    `group` query heads of a rank use that one.
    """

    def __init__(self, asked: ColwiseParallel, num_heads: int, group: int) -> None:
        super().__init__(input_layouts=asked.input_layouts)
        self.path, self.src_data_rank = asked.path, asked.src_data_rank
        self.num_heads, self.group = num_heads, group

    def regroup(self, root: nn.Module) -> None:
        """Tell a module of Hugging Face how many query heads use one key head here."""
        parent: Any = root.get_submodule(self.path.rpartition(".")[0])
        if hasattr(parent, "num_key_value_groups"):
            parent.num_key_value_groups = self.group

    def parameter_placements(self, module: nn.Module) -> Mapping[str, Placement]:
        return {"weight": REPLICATE, "bias": REPLICATE}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        boundary = self.boundary(device_mesh)
        self.place_parameters(module, boundary)
        given = self.input_layouts or REPLICATE
        prepend_input_hook(module, first_input(boundary, given, REPLICATE))
        append_output_hook(module, functools.partial(_take_head, boundary, self.num_heads))
        return module


def _take_head(boundary: ModuleBoundary, num_heads: int, output: DTensor) -> torch.Tensor:
    """The output of the head that this rank uses."""
    grads = list(output.placements)
    grads[boundary.axis] = Partial()
    num_ranks, width = boundary.mesh.size(boundary.axis), output.shape[-1] // num_heads

    def head(coordinate: Coordinate, whole: torch.Tensor) -> torch.Tensor:
        number = coordinate[boundary.axis] * num_heads // num_ranks
        return whole.narrow(-1, number * width, width)

    whole = boundary.move(output, REPLICATE)
    return on_plain_ranks(output._layout.grid, head, boundary.to_local(whole, grads))


class RowwiseParallel(_MatrixStyle):
    """Shard the inputs of a layer: the columns of a Linear's weight, the rows of a table.

    Each rank computes a term of the output, and the terms are added: by an all-reduce to the
    default `output_layouts` of `Replicate()`, by a reduce-scatter to `Shard(...)`. By default a
    plain input is each rank's shard of the last dim (`Shard(-1)`) for a Linear, and whole for an
    Embedding; `input_layouts` overrides that.

    >>> import shardwise, torch
    >>> from shardwise.parallel import RowwiseParallel, parallelize_module
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     table = parallelize_module(torch.nn.Embedding(6, 4), mesh, RowwiseParallel())
    ...     rows = table(torch.tensor([0, 5]))
    >>> table.weight.placements, rows.shape
    ((Shard(0),), torch.Size([2, 4]))
    """

    def parameter_placements(self, module: nn.Module) -> Mapping[str, Placement]:
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(0)}
        return {"weight": Shard(0 if is_transposed_linear(module) else 1), "bias": REPLICATE}

    def _input_placements(self, module: nn.Module) -> tuple[Placement, Placement]:
        if isinstance(module, nn.Embedding):
            return REPLICATE, REPLICATE
        return Shard(-1), Shard(-1)

    def _default_output(self) -> Placement:
        return REPLICATE


class _WholeParameters(ParallelStyle):
    """Whole parameters; input and output have the placement `activations`."""

    decides = ("parameters", "input", "output")
    activations: Placement
    use_local_output: bool

    def parameter_placements(self, module: nn.Module) -> Mapping[str, Placement]:
        return {name: REPLICATE for name, _ in module.named_parameters()}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        boundary = self.boundary(device_mesh)
        self.place_parameters(module, boundary)
        placement = self.activations
        prepend_input_hook(module, first_input(boundary, placement, placement))
        append_output_hook(module, only_output(boundary, placement, self.use_local_output))
        return module


class SequenceParallel(_WholeParameters):
    """Whole parameters, activations sharded along the sequence: for norms and dropout.

    A plain input is each rank's shard along `sequence_dim`; a DTensor is redistributed to it. The
    output stays a DTensor unless `use_local_output` is True. Gradients of the parameters are
    Partial until they are used; `shardwise.reduce_gradients` reduces them together.

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
    """Whole parameters, whole activations: every rank computes the same.

    For a module whose parameters must be DTensors because an optimizer or gradient clipping takes
    all parameters together.

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


class SharedKeyParallel(_WholeParameters):
    """Whole parameters, whole activations, of which each rank's heads use the last columns.

    For the layer of multi-head latent attention that computes compressed keys and values, and
    beside them the rotary part of the keys, which is the same for all heads. What is compressed
    goes on to a colwise layer, which adds the ranks' gradients; those of the last `width` columns
    are added here. By default `width` is `qk_rope_head_dim` of the module around the layer.

    >>> import shardwise, torch
    >>> from shardwise.parallel import parallelize_module
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     plan = {"style": "SharedKeyParallel", "width": 2}
    ...     layer = parallelize_module(torch.nn.Linear(4, 6), mesh, {"": plan})
    ...     layer(torch.ones(1, 4)).sum().backward()
    ...     layer.bias.grad.full_tensor().agreed()
    tensor([1., 1., 1., 1., 2., 2.])
    """

    activations = REPLICATE
    use_local_output = True

    def __init__(self, *, width: int | None = None) -> None:
        self.width = width

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        boundary = self.boundary(device_mesh)
        self.place_parameters(module, boundary)
        prepend_input_hook(module, first_input(boundary, REPLICATE, REPLICATE))
        append_output_hook(module, functools.partial(_share_columns, boundary, self.width or 0))
        return module


def _share_columns(boundary: ModuleBoundary, width: int, output: DTensor) -> torch.Tensor:
    """The output as a plain tensor, with the gradients of its last columns added up."""
    grads = list(output.placements)
    grads[boundary.axis] = Partial()
    own, shared = output.split([output.shape[-1] - width, width], -1)
    return torch.cat([boundary.to_local(own), boundary.to_local(shared, grads)], -1)
