"""PrepareModuleInput and PrepareModuleOutput: layouts of inputs and outputs, no parameters."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.functions import tree_flatten
from shardwise.core.mesh import Grid, grid_of
from shardwise.core.placements import Placement, Replicate, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError
from shardwise.parallel.boundary import ModuleBoundary, one_per_tensor
from shardwise.parallel.style import ParallelStyle, append_output_hook, prepend_input_hook
from shardwise.simulation.parts import one_part

Layouts = Placement | tuple[Placement | None, ...]
KwargLayouts = Mapping[str, Placement]


class UnequalLengths(LayoutError, AssertionError):
    """Two lists of layouts that go together have different lengths; torch asserts it."""


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
        return _like(output, moved) if several else moved[0]


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

    What autograd saves of replicated DTensors on `tp_device_mesh`, and of plain inputs, which are
    then equal on every rank, takes one share of the memory per rank. Backward gathers it again.
    With None nothing is changed.

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
        if x.dim() <= self.dim or (x.is_leaf and x.requires_grad):
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


def _like(output: Any, items: list[Any]) -> Any:
    """`items` in the kind of sequence that the module returned."""
    if hasattr(output, "_fields"):  # a named tuple
        return type(output)(*items)
    return type(output)(items)
