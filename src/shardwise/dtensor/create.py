"""`distribute_tensor`, `distribute_module` and the factories."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.autograd import current_transform, outside_transforms
from shardwise.comm import collectives
from shardwise.comm.watch import because, watch
from shardwise.core.encode import encode_mesh, encode_placements
from shardwise.core.layout import Layout, contiguous_stride, make_layout, normalize
from shardwise.core.mesh import Grid, current_mesh, grid_of
from shardwise.core.placements import REPLICATE, Placement, Replicate, Shard, short
from shardwise.core.sizes import as_sizes
from shardwise.core.untraced import breaks_graph
from shardwise.dtensor.autograd import refuse_hooks, refuse_transformed
from shardwise.dtensor.compile import define, is_traceable, is_traced
from shardwise.dtensor.conversion import check_plain_part, own_stride
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError, LeafError, UnsupportedError
from shardwise.random import Draw, draw_of, draw_parts, new_parts
from shardwise.redistribute.execute import execute, in_memory_order
from shardwise.redistribute.steps import find_steps
from shardwise.simulation.ranks import each_rank, localize, no_values

aten = torch.ops.aten


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Shard a tensor that every rank has over a mesh, as a new leaf.

    Every rank receives its shard of the values at coordinate `src_data_rank` of each mesh axis, and
    nothing else. With None, each rank takes its shard of its own values and nothing is
    communicated. A tensor on the meta device stays there: `Module.to_empty` and `reset_parameters`
    give it memory and values.

    >>> import shardwise, torch
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     x = shardwise.distribute_tensor(torch.eye(2), mesh, [shardwise.Shard(0)])
    ...     x.full_tensor().agreed()
    tensor([[1., 0.],
            [0., 1.]])
    """
    if is_traced():
        if tensor.requires_grad and not isinstance(tensor, DTensor):
            raise UnsupportedError(
                "distribute_tensor() in compiled code, of a tensor that requires grad: it makes a "
                "new leaf. Call it outside torch.compile; inside, "
                "DTensor.from_local(x, mesh, [Replicate()]) and redistribute() take what each rank "
                "holds, and stay differentiable."
            )
        mesh = encode_mesh(device_mesh if device_mesh is not None else current_mesh())
        placed = encode_placements(placements)
        return torch.ops.shardwise.distribute(tensor, mesh, placed, src_data_rank)
    grid = grid_of(device_mesh if device_mesh is not None else current_mesh())
    if isinstance(tensor, DTensor):
        return _already_there(tensor, grid, placements)
    check_plain_part(tensor, "distribute_tensor(tensor, ...)")
    if current_transform() is not None:
        refuse_transformed(tensor, "distribute_tensor() inside of a transform")
    if not tensor.is_leaf:
        raise LeafError(
            "distribute_tensor() makes a leaf, but the tensor has a history in autograd: detach() "
            "it first, or use DTensor.from_local() to stay differentiable."
        )
    normal = normalize(placements, tensor.shape, grid)
    if src_data_rank is not None and src_data_rank not in range(min(grid.shape)):
        raise LayoutError(
            f"src_data_rank={src_data_rank} is not a coordinate on every axis of {grid!r}."
        )
    requires_grad = tensor.requires_grad
    if tensor.is_meta:
        dense = own_stride(tensor)
        layout = make_layout(grid, normal, tensor.shape, dense, tensor.dtype)
        return DTensor._wrap(new_parts(layout, tensor.device), layout).requires_grad_(requires_grad)
    if grid.outside:
        layout = make_layout(grid, normal, tensor.shape, own_stride(tensor), tensor.dtype)
        return DTensor._wrap(no_values(grid, tensor.dtype), layout).requires_grad_(requires_grad)
    local = localize(grid, tensor.detach().to(grid.device_type))
    dense = own_stride(tensor)
    layout = make_layout(grid, (REPLICATE,) * grid.num_axes, tensor.shape, dense, tensor.dtype)
    if watch.record is not None:
        watch.record(f"distribute_tensor as {layout.with_placements(normal)!r}")
    if src_data_rank is not None:
        with because("distribute_tensor", implicit=False):
            local, layout = _sent_out(local, layout, normal, src_data_rank)
    target = layout.with_placements(normal)
    local, layout = execute(local, find_steps(layout, target)), target
    if src_data_rank is None:
        # Copied: a view would keep the whole tensor alive.
        local = each_rank(grid, lambda _, part: part.clone(), local, axes=())
    # Not a view of a message: inductor fails on a view whose gradient is none.
    local = each_rank(grid, lambda _, part: in_memory_order(part, layout).detach(), local, axes=())
    return DTensor._wrap(local, layout).requires_grad_(requires_grad)


def _already_there(tensor: DTensor, grid: Grid, placements: Sequence[Placement] | None) -> DTensor:
    """`tensor` itself, if it has the given mesh and placements; else raises."""
    if tensor._layout.grid is not grid:
        raise LayoutError(
            f"The tensor is distributed already, as {tensor._layout!r}; it cannot be distributed "
            f"to a different device mesh, {grid!r}. Go through full_tensor()."
        )
    normal = normalize(placements, tensor.shape, grid)
    if tensor.placements != normal or not tensor._layout.in_default_order:
        raise LayoutError(
            f"The tensor is distributed already, as {tensor._layout!r}; distribute_tensor() does "
            f"not bring it to different placements, {short(normal)}: use redistribute()."
        )
    return tensor


def _sent_out(
    local: torch.Tensor, layout: Layout, placements: Sequence[Placement], source: int
) -> tuple[torch.Tensor, Layout]:
    """The values at coordinate `source` of each axis: scattered first, the rest broadcast."""
    grid = layout.grid
    sharded = [axis for axis, p in enumerate(placements) if isinstance(p, Shard)]
    for axis in sharded:
        shard = placements[axis]
        assert isinstance(shard, Shard), "only shards are scattered"
        local = collectives.scatter(local, shard.dim, shard.sizes, source, grid, axis)
    for axis in range(grid.num_axes):
        if axis not in sharded:
            local = collectives.broadcast(local, source, grid, axis)
    kept = tuple(p if isinstance(p, Shard) else REPLICATE for p in placements)
    return local, layout.with_placements(kept)


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
) -> nn.Module:
    """Make the parameters and buffers of a module DTensors, in place.

    `partition_fn(name, submodule, mesh)` is called for every submodule and may register DTensor
    parameters; all others are replicated. `input_fn(module, inputs, mesh)` runs before the module's
    forward and `output_fn(module, outputs, mesh)` after it.
    """
    mesh = device_mesh if device_mesh is not None else current_mesh()
    grid = grid_of(mesh)
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"distribute_module() takes a module, found a {type(module).__name__}.")
    # A tensor shared by several modules stays shared.
    made: dict[torch.Tensor, torch.Tensor] = {}
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        _replicate_rest(submodule, mesh, made)
    if input_fn is not None:
        enter = _with_module(input_fn, "input_fn", "inputs")
        module.register_forward_pre_hook(functools.partial(_call_hook, enter, grid))
    if output_fn is not None:
        leave = _with_module(output_fn, "output_fn", "outputs")
        module.register_forward_hook(functools.partial(_call_hook, leave, grid))
    return module


def _with_module(fn: Callable[..., Any], name: str, tensors: str) -> Callable[..., Any]:
    """`fn(module, tensors, mesh)`; torch once called it without the module."""
    try:
        inspect.signature(fn).bind(None, None)
    except (TypeError, ValueError):
        return fn
    warnings.warn(
        f"{name}({tensors}, mesh) of distribute_module is deprecated: write "
        f"{name}(module, {tensors}, mesh).",
        FutureWarning,
        stacklevel=3,
    )
    return functools.partial(_without_module, fn)


def _without_module(fn: Callable[..., Any], _: nn.Module, tensors: Any, mesh: DeviceMesh) -> Any:
    return fn(tensors, mesh)


def _call_hook(fn: Callable[..., Any], grid: Grid, module: nn.Module, *tensors: Any) -> Any:
    """`fn` of the inputs, or of the outputs that follow them.

    A grid, unlike a mesh, can be pickled and copied with the module.
    """
    return fn(module, tensors[-1], grid.mesh)


def _replicate_rest(
    module: nn.Module, mesh: DeviceMesh, made: dict[torch.Tensor, torch.Tensor]
) -> None:
    whole = [Replicate()] * mesh.ndim
    for name, parameter in module._parameters.items():
        if parameter is not None and not isinstance(parameter, DTensor):
            if parameter not in made:
                refuse_hooks(parameter, f"Parameter {name!r}")
                placed = distribute_tensor(parameter.data, mesh, whole)
                made[parameter] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[parameter]  # type: ignore[assignment]
    for name, buffer in module._buffers.items():
        if buffer is not None and not isinstance(buffer, DTensor):
            if buffer not in made:
                made[buffer] = distribute_tensor(buffer, mesh, whole)
            module._buffers[name] = made[buffer]


def zeros(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of zeros, laid out over `device_mesh` by `placements`.

    Without `device_mesh` the current mesh is used (`with mesh:`); without placements the tensor is
    replicated.
    """
    if is_traceable(requires_grad):
        return _traced_create(shape_of(size), 0.0, dtype, layout, device_mesh, placements)
    return _create(torch.zeros, size, (), dtype, layout, requires_grad, device_mesh, placements)


def ones(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of ones; options as for `zeros`."""
    if is_traceable(requires_grad):
        return _traced_create(shape_of(size), 1.0, dtype, layout, device_mesh, placements)
    return _create(torch.ones, size, (), dtype, layout, requires_grad, device_mesh, placements)


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor with uninitialised values; options as for `zeros`."""
    if is_traceable(requires_grad):
        return _traced_create(shape_of(size), None, dtype, layout, device_mesh, placements)
    return _create(torch.empty, size, (), dtype, layout, requires_grad, device_mesh, placements)


def full(
    size: int | Sequence[int],
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor filled with one number; options as for `zeros`."""
    if is_traceable(requires_grad):
        return _traced_create(shape_of((size,)), fill_value, dtype, layout, device_mesh, placements)
    return _create(
        torch.full, (size,), (fill_value,), dtype, layout, requires_grad, device_mesh, placements
    )


def rand(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Uniform random numbers, equal to those that one device would draw.

    Options as for `zeros`, and `generator`.
    """
    if is_traceable(requires_grad, generator):
        new = _traced_create(shape_of(size), None, dtype, layout, device_mesh, placements)
        return new.uniform_()
    options = size, dtype, layout, requires_grad, device_mesh, placements
    return _draw_by(aten.uniform_.default, (), generator, *options)


def randn(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Normal random numbers, equal to those that one device would draw; options as for `rand`."""
    if is_traceable(requires_grad, generator):
        new = _traced_create(shape_of(size), None, dtype, layout, device_mesh, placements)
        return new.normal_()
    options = size, dtype, layout, requires_grad, device_mesh, placements
    return _draw_by(aten.normal_.default, (), generator, *options)


def randint(
    low: int,
    high: int,
    size: int | Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Random integers from `low` up to, but not including, `high`; options as for `rand`."""
    dtype = dtype or torch.int64
    if is_traceable(requires_grad, generator):
        new = _traced_create(shape_of((size,)), None, dtype, layout, device_mesh, placements)
        return torch.randint_like(new, low, high)  # type: ignore[return-value]
    options = (size,), dtype, layout, requires_grad, device_mesh, placements
    return _draw_by(getattr(aten.random_, "from"), (low, high), generator, *options)


def randperm(
    n: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A random permutation of the integers from 0 to `n` - 1; options as for `rand`.

    Each rank draws the whole permutation.
    """
    dtype = dtype or torch.int64
    if is_traceable(requires_grad, generator):
        new = _traced_create((n,), None, dtype, layout, device_mesh, placements)
        order = torch.randperm(n, dtype=new.dtype, device=new.device)
        whole = DTensor.from_local(order, new.device_mesh, [REPLICATE] * new.device_mesh.ndim)
        return whole.redistribute(placements=new.placements)
    return _draw_order(n, generator, (n,), dtype, layout, requires_grad, device_mesh, placements)


@breaks_graph
def _draw_by(op: Any, args: tuple[Any, ...], generator: Any, *options: Any) -> DTensor:
    return _draw(draw_of(op, args, generator), *options)


@breaks_graph
def _draw_order(n: int, generator: Any, *options: Any) -> DTensor:
    def write(tensor: torch.Tensor, _: Any) -> None:
        torch.randperm(n, generator=generator, out=tensor)

    return _draw(Draw(write, name=None, generator=generator), *options)


def shape_of(size: tuple[Any, ...]) -> tuple[int, ...]:
    """The sizes that a factory was given, one by one or as one tuple."""
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], (list, tuple)) else tuple(size)


def _layout_for(
    size: tuple[Any, ...],
    dtype: torch.dtype | None,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> tuple[Grid, Layout]:
    grid = grid_of(device_mesh if device_mesh is not None else current_mesh())
    shape = as_sizes(shape_of(size))
    normal = normalize(placements, shape, grid)
    if any(p.is_partial() for p in normal):
        raise LayoutError(f"A new tensor cannot be {short(normal)}: shard or replicate it.")
    dtype = dtype or torch.get_default_dtype()
    return grid, make_layout(grid, normal, shape, contiguous_stride(shape), dtype)


def _traced_create(
    size: Sequence[Any],
    value: Any,
    dtype: torch.dtype | None,
    layout: torch.layout,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> Any:
    """A tensor filled with `value`, or an empty one if that is None; draws then write to it."""
    _check_strided(layout)
    mesh = encode_mesh(device_mesh if device_mesh is not None else current_mesh())
    return torch.ops.shardwise.create(size, value, mesh, encode_placements(placements), dtype)


@breaks_graph
def _create(
    make: Callable[..., torch.Tensor],
    size: tuple[Any, ...],
    values: tuple[Any, ...],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    if current_transform() is not None:
        given = (dtype, layout, requires_grad, device_mesh, placements)
        return cast("DTensor", outside_transforms(_create, make, size, values, *given))
    _check_strided(layout)
    if make is torch.full and dtype is None:
        dtype = torch.full((), *values).dtype
    grid, new = _layout_for(size, dtype, device_mesh, placements)
    axes = [a for a, p in enumerate(new.placements) if p.is_shard()]

    def here(coordinate: Any) -> torch.Tensor:
        shape = new.local_shape(coordinate)
        return make(shape, *values, dtype=new.dtype, device=grid.device_type)

    if grid.outside:
        local = no_values(grid, new.dtype)
    else:
        local = localize(grid, each_rank(grid, here, axes=axes))
    return DTensor._wrap(local, new).requires_grad_(requires_grad)


def _check_strided(layout: torch.layout) -> None:
    if layout is not torch.strided:
        raise ArgumentError(f"A DTensor is strided, but layout={layout} was given.")


def _draw(
    draw: Draw,
    size: tuple[Any, ...],
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> DTensor:
    _check_strided(layout)
    grid, new = _layout_for(size, dtype, device_mesh, placements)
    held = new_parts(new, torch.device(grid.device_type))
    draw_parts(new, held, draw)
    return DTensor._wrap(held, new).requires_grad_(requires_grad)


def _created(size: Sequence[int], value: Any, mesh: DeviceMesh, **options: Any) -> DTensor:
    make, values = (torch.empty, ()) if value is None else (torch.full, (value,))
    return _create(make, (size,), values, device_mesh=mesh, **options)


define(
    "create(SymInt[] size, Scalar? value, str mesh, int[]? placements, ScalarType? dtype)"
    " -> Tensor",
    _created,
)
define(
    "distribute(Tensor x, str mesh, int[]? placements, int? source) -> Tensor",
    lambda x, mesh, placements, source: distribute_tensor(
        x, mesh, placements, src_data_rank=source
    ),
)
