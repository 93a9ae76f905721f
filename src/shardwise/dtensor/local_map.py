"""local_map: a function of local tensors, called with DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.functions import tree_flatten, tree_unflatten
from shardwise.core.encode import encode_mesh, encode_placements
from shardwise.core.layout import Layout, normalize
from shardwise.core.mesh import Grid, grid_of
from shardwise.core.placements import Placement, Shard, short
from shardwise.core.sizes import Size, lengths
from shardwise.dtensor.compile import define, is_traced
from shardwise.dtensor.conversion import all_metas
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError, UnsupportedError
from shardwise.simulation.ranks import is_per_rank, rank_values

Placements = Sequence[Placement] | None


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """`func`, which works on local tensors, as a function of DTensors.

    `out_placements` are the placements of the results: one list for all, or a tuple with a list for
    each, and None for a result that is not a tensor. `in_placements` are the placements that each
    argument must have, None for any; an argument with others raises, or is redistributed with
    `redistribute_inputs`. `in_grad_placements` are the placements of the gradients that `func`
    returns. Without DTensors among the arguments, `func` is called as it is. On a rank outside the
    mesh it gets zeros, and its results are dropped. Also a decorator.
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    options = (in_placements, in_grad_placements, redistribute_inputs)
    chosen = None if device_mesh is None else grid_of(device_mesh)

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten(args)
        given = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        if not given:
            return func(*args, **kwargs)
        grid = given[0]._layout.grid if chosen is None else chosen
        _check_count(func, "in_placements", in_placements, len(leaves))
        _check_count(func, "in_grad_placements", in_grad_placements, len(leaves))
        local = [_local(func, i, leaf, grid, *options) for i, leaf in enumerate(leaves)]
        result = func(*tree_unflatten(local, tree), **kwargs)
        even = grid.outside or all(_is_even(x._layout) for x in given)
        return _distributed(func, result, out_placements, grid.mesh, even)

    return mapped


def _check_count(func: Any, name: str, given: Any, num: int) -> None:
    if isinstance(given, Placement):
        raise ArgumentError(
            f"{name} is {given!r}: give a tuple with the placements of each argument of "
            f"{_name(func)}, None for no requirement."
        )
    if given is not None and len(given) != num:
        raise ArgumentError(
            f"{name} has {len(given)} entries, but {_name(func)} was called with {num} arguments: "
            "give one for each, None for no requirement."
        )


def _name(func: Any) -> str:
    return getattr(func, "__name__", repr(func))


def _local(
    func: Any,
    number: int,
    leaf: Any,
    grid: Grid,
    in_placements: Any,
    in_grad_placements: Any,
    redistribute_inputs: bool,
) -> Any:
    wanted = _entry(in_placements, number)
    if not isinstance(leaf, DTensor):
        if wanted is not None and isinstance(leaf, torch.Tensor):
            raise ArgumentError(
                f"Argument {number} of {_name(func)} is a plain tensor of shape "
                f"{tuple(leaf.shape)}, but in_placements asks for {wanted!r}: give a DTensor, or "
                "None as its placements."
            )
        return leaf
    if wanted is not None:
        leaf = _as_wanted(func, number, leaf, grid, wanted, redistribute_inputs)
    local = leaf.to_local(grad_placements=_entry(in_grad_placements, number))
    return _stand_in(leaf._layout, local) if grid.outside else local


def _stand_in(layout: Layout, local: torch.Tensor) -> torch.Tensor:
    """The argument on a rank outside the mesh: zeros of the first rank's shape.

    So the function runs there too, and its results have shapes; their values are dropped.
    """
    first = layout.grid.coordinates[layout.grid.ranks[0]]
    shape = layout.local_shape(first)
    # With the history of the empty tensor, so that what is computed requires a gradient.
    return local.sum() + torch.zeros(shape, dtype=local.dtype, device=local.device)


def _as_wanted(
    func: Any, number: int, x: DTensor, grid: Grid, wanted: Any, redistribute_inputs: bool
) -> DTensor:
    given = (wanted,) if isinstance(wanted, Placement) else tuple(wanted)
    layout = x._layout
    here = layout.grid is grid and layout.in_default_order
    # Usually they are equal, and a compiler has less to trace.
    if here and tuple(x.placements) == given:
        return x
    normal = normalize(given, layout.shape, grid)
    if here and tuple(x.placements) == normal:
        return x
    if not redistribute_inputs:
        raise LayoutError(
            f"Argument {number} of {_name(func)} has placements {short(x.placements)}"
            f"{layout.other_order()}, but in_placements asks for {short(normal)}. Redistribute it "
            "first, or set redistribute_inputs=True."
        )
    return x.redistribute(grid.mesh, normal)


def _entry(given: Any, number: int) -> Any:
    return given[number] if given is not None and number < len(given) else None


def _is_even(layout: Layout) -> bool:
    """Whether all ranks' shards have one shape."""
    # Compared, not put in a set: hashing would specialise symbols.
    first, *others = (layout.local_shape(c) for c in layout.grid.places)
    return all(shape == first for shape in others)


def _distributed(func: Any, result: Any, out_placements: Any, mesh: DeviceMesh, even: bool) -> Any:
    leaves, tree = tree_flatten(result)
    if isinstance(out_placements, Placement):
        out_placements = (out_placements,)
    alike = out_placements is None or all(isinstance(p, Placement) for p in out_placements)
    listed = [out_placements] * len(leaves) if alike else list(out_placements)
    _check_count(func, "out_placements", listed, len(leaves))
    wrapped = []
    for leaf, placements in zip(leaves, listed, strict=True):
        if not isinstance(leaf, torch.Tensor):
            if placements is not None and not alike:
                raise ArgumentError(
                    f"out_placements has {placements!r} for {leaf!r}, which {_name(func)} returned "
                    "and which is not a tensor: give None."
                )
            wrapped.append(leaf)
        elif placements is None:
            raise ArgumentError(
                f"{_name(func)} returned a tensor of shape {tuple(leaf.shape)}, but out_placements "
                "is None for it: give its placements."
            )
        elif even:
            wrapped.append(DTensor.from_local(leaf, mesh, placements))
        else:
            wrapped.append(_from_uneven(leaf, mesh, placements))
    return tree_unflatten(wrapped, tree)


def _from_uneven(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The DTensor of shards whose shapes may differ: the ranks exchange their shapes."""
    if is_traced() and is_per_rank(local):
        placed = encode_placements(placements)
        return torch.ops.shardwise.from_uneven(local, encode_mesh(mesh), placed)
    rows = [meta.shape for meta in all_metas(local, grid_of(mesh), "local_map")]
    return _from_shapes(local, mesh, placements, rows)


def _from_present(local: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The same in a traced simulated world: all ranks are present, sizes may be symbolic."""
    shapes = {at: tuple(part.shape) for at, part in rank_values(grid_of(mesh), local)}
    return _from_shapes(local, mesh, placements, [shapes[at] for at in grid_of(mesh).places])


define("from_uneven(Tensor local, str mesh, int[] placements) -> Tensor", _from_present)


def _from_shapes(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    rows: Sequence[Sequence[Size]],
) -> DTensor:
    grid = grid_of(mesh)
    shapes = dict(zip(grid.places, rows, strict=True))
    whole = list(rows[0])
    found: list[Placement] = list(placements)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            dim = placement.dim % len(whole)
            if sum(isinstance(p, Shard) and p.dim % len(whole) == dim for p in placements) > 1:
                return DTensor.from_local(local, mesh, placements)  # says what does not fit
            sizes = tuple(
                shapes[tuple(i if a == axis else 0 for a in range(grid.num_axes))][dim]
                for i in range(grid.shape[axis])
            )
            whole[dim] = sum(sizes)
            same = sizes == lengths(whole[dim], grid.shape[axis], None)
            found[axis] = Shard(dim) if same else _explicit(dim, sizes)
    return DTensor.from_local(local, mesh, found, shape=whole)


def _explicit(dim: int, sizes: Sequence[Size]) -> Shard:
    if all(type(size) is int for size in sizes):
        return Shard(dim, tuple(sizes))
    raise UnsupportedError(
        f"A function of local_map returned shards of sizes {list(sizes)} along dim {dim}, which is "
        "not how Shard splits; such sizes belong to the placement, and in compiled code they "
        "cannot change from call to call. Compile with dynamic=False, or return shards as Shard "
        "splits them."
    )
