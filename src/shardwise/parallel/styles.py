"""Styles: parameters by rows or columns, sharded activations, layouts of inputs and outputs."""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.functions import tree_flatten
from shardwise.core.mesh import Coordinate, Grid, grid_of
from shardwise.core.placements import REPLICATE, Partial, Placement, Replicate, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError, UnsupportedError
from shardwise.parallel.style import (
    Hook,
    ModuleBoundary,
    ParallelStyle,
    append_output_hook,
    one_per_tensor,
    prepend_input_hook,
)
from shardwise.simulation.ranks import on_plain_ranks, one_part


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether a module is Hugging Face's `Conv1D`: a Linear whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


class _LayerStyle(ParallelStyle):
    """A style that places all parameters of a module with one input and one output."""

    decides = ("parameters", "input", "output")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        boundary = self.boundary(device_mesh)
        self.place_parameters(module, boundary)
        given, wanted = self._inputs(module, boundary)
        prepend_input_hook(module, functools.partial(boundary.enter_first, given, wanted))
        append_output_hook(module, self._output_hook(boundary))
        return module

    @abc.abstractmethod
    def _inputs(self, module: nn.Module, boundary: ModuleBoundary) -> tuple[Placement, Placement]:
        """The placement of a plain input, and the one that the module needs."""

    @abc.abstractmethod
    def _output_hook(self, boundary: ModuleBoundary) -> Hook: ...


class _MatrixStyle(_LayerStyle):
    """A style for `nn.Linear`, `nn.Embedding` and Hugging Face's `Conv1D`."""

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

    #: The default placements of a layer's input and output.
    _input: Placement = REPLICATE
    _output: Placement = REPLICATE

    def _inputs(self, module: nn.Module, boundary: ModuleBoundary) -> tuple[Placement, Placement]:
        wanted = REPLICATE if isinstance(module, nn.Embedding) else self._input
        given = self.input_layouts or wanted
        if given == Shard(-1) and not isinstance(module, nn.Embedding):
            # The number of features is known, so that shards may be uneven.
            if isinstance(module, nn.Linear):
                num_features = module.in_features
            else:
                num_features = module.get_parameter("weight").shape[0]
            given = boundary.sized(given, num_features)
        return given, wanted

    def _output_hook(self, boundary: ModuleBoundary) -> Hook:
        wanted = self.output_layouts or self._output
        return functools.partial(boundary.leave, wanted=wanted, local=self.use_local_output)


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

    _output = Shard(-1)

    def parameter_placements(self, module: nn.Module) -> Mapping[str, Placement]:
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(1)}
        return {"weight": Shard(1 if is_transposed_linear(module) else 0), "bias": Shard(0)}


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

    def _output_hook(self, boundary: ModuleBoundary) -> Hook:
        return functools.partial(_take_head, boundary, self.num_heads)


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

    _input = Shard(-1)

    def parameter_placements(self, module: nn.Module) -> Mapping[str, Placement]:
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(0)}
        return {"weight": Shard(0 if is_transposed_linear(module) else 1), "bias": REPLICATE}


class _WholeParameters(_LayerStyle):
    """Whole parameters; input and output have the placement `activations`."""

    activations: Placement
    use_local_output: bool

    def parameter_placements(self, module: nn.Module) -> Mapping[str, Placement]:
        return {name: REPLICATE for name, _ in module.named_parameters()}

    def _inputs(self, module: nn.Module, boundary: ModuleBoundary) -> tuple[Placement, Placement]:
        return self.activations, self.activations

    def _output_hook(self, boundary: ModuleBoundary) -> Hook:
        local = self.use_local_output
        return functools.partial(boundary.leave, wanted=self.activations, local=local)


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
    """Whole parameters and activations; every rank's heads use the last columns of the output.

    For the layer of multi-head latent attention that computes the compressed keys and values, and
    the rotary part of the keys, which all heads share. The compressed columns go to a colwise
    layer, which adds the ranks' gradients; those of the last `width` columns are added here. By
    default `width` is `qk_rope_head_dim` of the module around the layer.

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

    def __init__(self, *, width: int | None = None) -> None:
        self.width = width

    def _output_hook(self, boundary: ModuleBoundary) -> Hook:
        return functools.partial(_share_columns, boundary, self.width or 0)


def _share_columns(boundary: ModuleBoundary, width: int, output: DTensor) -> torch.Tensor:
    """The output as a plain tensor, with the gradients of its last columns added up."""
    grads = list(output.placements)
    grads[boundary.axis] = Partial()
    own, shared = output.split([output.shape[-1] - width, width], -1)
    return torch.cat([boundary.to_local(own), boundary.to_local(shared, grads)], -1)


Layouts = Placement | tuple[Placement | None, ...]
KwargLayouts = Mapping[str, Placement]


class UnequalLengths(LayoutError, AssertionError):
    """Two lists of layouts that belong together differ in length; torch raises AssertionError."""


class PrepareModuleInput(ParallelStyle):
    """Redistribute a module's inputs to `desired_input_layouts` before its forward.

    One layout for each positional input; None leaves an input unchanged. A plain tensor has the
    placement that `input_layouts` gives. Keyword inputs are named in `input_kwarg_layouts` and
    `desired_input_kwarg_layouts`. With `use_local_output`, the module sees plain tensors.

    >>> import shardwise, torch
    >>> from shardwise import Replicate, Shard
    >>> from shardwise.parallel import PrepareModuleInput, parallelize_module
    >>> style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     y = parallelize_module(torch.nn.Identity(), mesh, style)(torch.ones(3, 4))
    >>> tuple(y.shape), y.placements
    ((6, 4), (Replicate(),))
    """

    decides = ("input",)

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: KwargLayouts | None = None,
        desired_input_kwarg_layouts: KwargLayouts | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts, self.desired_input_layouts = _pairs(
            input_layouts, desired_input_layouts, "input_layouts", "desired_input_layouts"
        )
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise UnequalLengths(
                f"input_kwarg_layouts names {sorted(self.input_kwarg_layouts)}, but "
                "desired_input_kwarg_layouts names "
                f"{sorted(self.desired_input_kwarg_layouts)}: name the same keywords in both."
            )
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        boundary = self.boundary(device_mesh)
        prepend_input_hook(module, functools.partial(self._inputs, boundary))
        return module

    def _inputs(
        self, boundary: ModuleBoundary, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._positional(boundary, args), self._keywords(boundary, kwargs)

    def _positional(self, boundary: ModuleBoundary, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.input_layouts is None or self.desired_input_layouts is None:
            return args
        if len(args) != len(self.input_layouts):
            raise LayoutError(
                f"{boundary.where} was called with {len(args)} positional inputs, but "
                f"input_layouts has {len(self.input_layouts)}: {self.input_layouts}. Give one "
                "layout for each, None for those to leave alone, input_kwarg_layouts for keywords."
            )
        layouts = zip(args, self.input_layouts, self.desired_input_layouts, strict=True)
        return tuple(
            _moved(boundary, x, given, wanted, f"input {number}", self.use_local_output)
            for number, (x, given, wanted) in enumerate(layouts)
        )

    def _keywords(self, boundary: ModuleBoundary, kwargs: dict[str, Any]) -> dict[str, Any]:
        changed = dict(kwargs)
        for name, given in self.input_kwarg_layouts.items():
            if name in kwargs and kwargs[name] is not None:
                x, wanted = kwargs[name], self.desired_input_kwarg_layouts[name]
                label = f"input {name!r}"
                changed[name] = _moved(boundary, x, given, wanted, label, self.use_local_output)
        return changed


class PrepareModuleOutput(ParallelStyle):
    """Redistribute a module's outputs to `desired_output_layouts` after its forward.

    One layout for each output; None leaves an output unchanged. A plain output has the placement
    that `output_layouts` gives. The result is a plain tensor unless `use_local_output` is False.

    >>> import shardwise, torch
    >>> from shardwise import Replicate, Shard
    >>> from shardwise.parallel import PrepareModuleOutput, parallelize_module
    >>> style = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     y = parallelize_module(torch.nn.Identity(), mesh, style)(torch.arange(4))
    >>> y
    LocalTensor(
      rank 0: tensor([0, 1])
      rank 1: tensor([2, 3])
    )
    """

    decides = ("output",)

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        given, wanted = _pairs(
            output_layouts, desired_output_layouts, "output_layouts", "desired_output_layouts"
        )
        if given is None or wanted is None:
            raise ArgumentError("PrepareModuleOutput needs output_layouts.")
        self.output_layouts, self.desired_output_layouts = given, wanted
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        boundary = self.boundary(device_mesh)
        append_output_hook(module, functools.partial(self._outputs, boundary))
        return module

    def _outputs(self, boundary: ModuleBoundary, output: Any) -> Any:
        several = isinstance(output, (tuple, list))
        outputs = list(output) if several else [output]
        if len(outputs) != len(self.output_layouts):
            raise LayoutError(
                f"{boundary.where} returned {len(outputs)} outputs, but output_layouts has "
                f"{len(self.output_layouts)}: {self.output_layouts}. Give one layout for each, "
                "None for those to leave alone."
            )
        layouts = zip(outputs, self.output_layouts, self.desired_output_layouts, strict=True)
        moved = [
            _moved(boundary, x, given, wanted, f"output {number}", self.use_local_output)
            for number, (x, given, wanted) in enumerate(layouts)
        ]
        make = getattr(type(output), "_make", type(output))  # of a named tuple
        return make(moved) if several else moved[0]


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one, with their arguments.

    `use_local_input` is the `use_local_output` of the first.

    >>> import shardwise, torch
    >>> from shardwise import Replicate, Shard
    >>> from shardwise.parallel import PrepareModuleInputOutput, parallelize_module
    >>> style = PrepareModuleInputOutput(
    ...     input_layouts=Shard(0), desired_input_layouts=Replicate(),
    ...     output_layouts=Replicate(), desired_output_layouts=Shard(1),
    ... )
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     y = parallelize_module(torch.nn.Identity(), mesh, style)(torch.ones(3, 4))
    >>> y.shape
    torch.Size([6, 2])
    """

    decides = ("input", "output")

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: KwargLayouts | None = None,
        desired_input_kwarg_layouts: KwargLayouts | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )
        self.use_local_input = use_local_input

    def __getattr__(self, name: str) -> Any:
        """The layouts are those of the two styles within."""
        if name.startswith("prepare_"):  # not there yet
            raise AttributeError(name)
        within = self.prepare_module_input if "input" in name else self.prepare_module_output
        return getattr(within, name)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in (self.prepare_module_input, self.prepare_module_output):
            style.path = self.path
            style._apply(module, device_mesh)
        return module


def input_reshard(
    module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None
) -> nn.Module:
    """Keep a module's replicated inputs sharded along a dim until backward; returns the module.

    Each rank keeps only its shard of the replicated DTensors on `tp_device_mesh` that autograd
    saves, and of plain inputs, which must then be equal on every rank. Backward gathers them again.
    With `input_reshard_dim=None` nothing is changed.

    >>> import shardwise, torch
    >>> from shardwise.parallel import ColwiseParallel, input_reshard, parallelize_module
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     layer = parallelize_module(torch.nn.Linear(4, 4), mesh, ColwiseParallel())
    ...     layer = input_reshard(layer, mesh, input_reshard_dim=0)
    ...     layer(torch.ones(6, 4)).sum().backward()
    ...     layer.weight.grad.placements
    (Shard(0),)
    """
    if input_reshard_dim is None:
        return module
    grid = grid_of(tp_device_mesh)
    if grid.num_axes != 1:
        raise LayoutError(
            f"input_reshard() takes a mesh with one axis, found {grid!r}: give mesh['tp']."
        )
    keep = KeptInputs(grid, input_reshard_dim)
    module.register_forward_pre_hook(keep.enter, with_kwargs=True)
    module.register_forward_hook(keep.leave, always_call=True)
    return module


class KeptInputs:
    """Hooks that shard what autograd saves while a module runs."""

    def __init__(self, grid: Grid, dim: int) -> None:
        self.grid, self.dim = grid, dim
        #: Of each running call, the memory of its plain inputs and the hooks around it.
        self._running: list[tuple[set[int], Any]] = []

    def enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        plain = {_memory(x) for x in given if not isinstance(x, DTensor)}
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._running.append((plain, hooks))
        hooks.__enter__()

    def leave(self, _: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()[1].__exit__(None, None, None)

    def _pack(self, x: torch.Tensor) -> Any:
        if not -x.dim() <= self.dim < x.dim() or (x.is_leaf and x.requires_grad):
            return x  # a parameter stays anyway
        if type(x) is DTensor:
            whole = x._layout.grid is self.grid and all(p.is_replicate() for p in x.placements)
            if not whole or x._layout.snapshot:
                return x
            return _KeptShard(x.detach().redistribute(placements=[Shard(self.dim)]), plain=False)  # type: ignore[attr-defined]
        if not self._running or _memory(x) not in self._running[-1][0]:
            return x
        distributed = DTensor.from_local(x.detach(), self.grid.mesh, [Replicate()])
        return _KeptShard(distributed.redistribute(placements=[Shard(self.dim)]), plain=True)

    def _unpack(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, _KeptShard):
            return kept
        whole = kept.shard.redistribute(placements=[Replicate()])
        return whole.to_local() if kept.plain else whole


@dataclass(frozen=True, slots=True)
class _KeptShard:
    """A saved tensor, sharded."""

    shard: DTensor
    plain: bool


def _memory(x: torch.Tensor) -> int:
    return one_part(x).data_ptr()


def _pairs(given: Any, wanted: Any, given_name: str, wanted_name: str) -> tuple[Any, Any]:
    """Both layouts as tuples of one length, or None twice."""
    if given is None and wanted is None:
        return None, None
    if given is None or wanted is None:
        raise ArgumentError(f"{given_name} and {wanted_name} go together; one of them is missing.")
    first, second = one_per_tensor(given, given_name), one_per_tensor(wanted, wanted_name)
    if len(first) != len(second):
        raise UnequalLengths(
            f"{given_name} and {wanted_name} should have same length! Found {len(first)} and "
            f"{len(second)} layouts: give one of each for every tensor."
        )
    return first, second


def _moved(
    boundary: ModuleBoundary,
    x: Any,
    given: Placement | None,
    wanted: Placement | None,
    name: str,
    local: bool,
) -> Any:
    """One input or output, redistributed to `wanted`; a plain tensor when `local`."""
    if given is None or wanted is None:
        return x
    moved = boundary.enter(x, given, wanted, name)
    return boundary.to_local(moved) if local else moved
