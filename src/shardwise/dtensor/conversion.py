"""Conversions: between local and global tensors, to other dtypes, to Python, to pickles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from shardwise.comm.agreement import gather
from shardwise.comm.watch import because, watch
from shardwise.core.layout import (
    Layout,
    Shape,
    contiguous_stride,
    dense_stride,
    make_layout,
    normalize,
)
from shardwise.core.mesh import Grid, grid_like
from shardwise.core.placements import REPLICATE, Placement, Shard, short
from shardwise.core.sizes import Size, as_sizes
from shardwise.core.untraced import SkipsNone
from shardwise.core.world import world_caches
from shardwise.dispatch.propagate import forbid_move
from shardwise.dispatch.shapes import same_stride
from shardwise.dispatch.wrapped import Wrapped
from shardwise.dtensor import autograd
from shardwise.dtensor.snapshots import current
from shardwise.errors import ArgumentError, LayoutError, RankMismatchError, UnsupportedError
from shardwise.redistribute.steps import find_steps
from shardwise.simulation.ranks import (
    check_saved_world,
    is_per_rank,
    my_coordinate,
    one_part,
    pack_parts,
    plain_if_equal,
    rank_values,
    unpack_parts,
)


def local_layout(
    local: torch.Tensor,
    grid: Grid,
    placements: Sequence[Placement] | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> Layout:
    """The layout of the global tensor with `local` as its shards, checked against their shapes."""
    key: Any = None
    plain = type(local) is torch.Tensor or not is_per_rank(local)
    if plain and shape is None and stride is None and placements is not None:
        # The common case: one dictionary lookup.
        given = (placements,) if isinstance(placements, Placement) else placements
        key = (grid, *given, local.shape, local.stride(), local.dtype)
        try:
            found = _known.get(key)
        except TypeError:  # a symbolic size has no hash
            key = found = None
        if found is not None:
            return found
    layout = global_layout(local, grid, placements, shape, stride)
    if shape is not None or gives_sizes(placements):
        check_fits(local, layout)
    if key is not None:
        if len(_known) >= 4096:
            _known.clear()
        _known[key] = layout
    return layout


_known: dict[Any, Layout] = {}
world_caches.append(_known.clear)


def global_layout(
    local: torch.Tensor,
    grid: Grid,
    placements: Sequence[Placement] | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> Layout:
    """Like `local_layout`, unchecked; `local` may be that of a rank outside the mesh."""
    if shape is not None:
        whole: Shape = as_sizes(shape)
        normal = normalize(placements, whole, grid)
    else:
        # With explicit sizes any shard will do: all are checked against the sizes later.
        first = one_part(local) if gives_sizes(placements) else local
        try:
            local_shape = tuple(first.shape)
        except RankMismatchError as error:
            raise RankMismatchError(
                f"{error} For shards of different sizes, give from_local() the sizes, "
                "Shard(dim, sizes=(...)), or shape= and stride= of the whole tensor."
            ) from None
        given = _listed(placements, grid)
        unsized = [Shard(p.dim) if isinstance(p, Shard) else p for p in given]
        # Checks the number of placements and the dims; sizes are checked with the global shape.
        checked = normalize(unsized, local_shape, grid)
        sized = [
            Shard(p.dim, asked.sizes) if isinstance(p, Shard) else p
            for p, asked in zip(checked, given, strict=True)
        ]
        whole = _global_shape(local_shape, sized, grid)
        normal = normalize(sized, whole, grid)
    dense = as_sizes(stride) if stride is not None else stride_like(local, whole)
    return make_layout(grid, normal, whole, dense, local.dtype)


def _listed(placements: Any, grid: Grid) -> list[Any]:
    if placements is None:
        return [REPLICATE] * grid.num_axes
    return [placements] if isinstance(placements, Placement) else list(placements)


def gives_sizes(placements: Any) -> bool:
    """Whether a placement gives explicit shard sizes."""
    given = (placements,) if isinstance(placements, Placement) else placements or ()
    return any(isinstance(placement, Shard) and bool(placement.sizes) for placement in given)


def _global_shape(local_shape: Shape, placements: Sequence[Placement], grid: Grid) -> Shape:
    """The global shape when all ranks hold shards of the same shape."""
    whole = list(local_shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            sizes = placement.sizes
            grown = whole[placement.dim] * grid.shape[axis]
            whole[placement.dim] = sum(sizes) if sizes is not None else grown
    return tuple(whole)


def stride_like(local: torch.Tensor, shape: Sequence[Size]) -> Shape:
    """Dense strides for `shape`, with the dims in the memory order of `local`."""
    if local.is_contiguous() or local.dim() < 2:
        return contiguous_stride(shape)
    local_stride = local.stride()
    outermost_first = sorted(range(local.dim()), key=lambda d: -local_stride[d])
    if not same_stride(local.shape, local_stride, dense_stride(local.shape, outermost_first)):
        return contiguous_stride(shape)  # not dense: no memory order to keep
    return dense_stride(shape, outermost_first)


def own_stride(tensor: torch.Tensor) -> Shape:
    """The strides of `local` if it is dense, also along dims of size 1; else dense strides."""
    dense = stride_like(tensor, tensor.shape)
    return tensor.stride() if same_stride(tensor.shape, tensor.stride(), dense) else dense


def check_plain_part(value: Any, asked: str) -> None:
    """Raise if `value` cannot be a local tensor: not a tensor, a DTensor, or not strided."""
    if type(value) is torch.Tensor and value.layout is torch.strided:
        return
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{asked} takes a tensor, found a {type(value).__name__}.")
    if isinstance(value, Wrapped):
        raise ArgumentError(
            f"{asked} takes a plain tensor, found {value._layout!r}: it is distributed already. "
            "Use it as it is, or redistribute() it; its shard on this rank is to_local()."
        )
    if value.layout is not torch.strided:
        raise ArgumentError(
            f"{asked} takes a strided tensor, found one of layout {value.layout}. "
            "Pass x.to_dense()."
        )


def check_fits(local: torch.Tensor, layout: Layout) -> None:
    """Raise unless every rank present holds a shard of the shape that the layout gives it."""
    if layout.symbolic or any(type(s) is not int for s in torch.Tensor.size(local)):
        return
    for coordinate, part in rank_values(layout.grid, local):
        expected = layout.local_shape(coordinate)
        if tuple(part.shape) != expected:
            raise LayoutError(
                f"The local tensor at mesh coordinate {coordinate} has shape {tuple(part.shape)}, "
                f"but {layout!r} gives it {expected}. Give from_local(..., shape=...) the global "
                "shape, or other placements."
            )


def refuse_traced_check() -> NoReturn:
    raise UnsupportedError(
        "from_local(run_check=True) in compiled code: local tensors are compared in "
        "Python. Check outside torch.compile, and leave run_check out inside."
    )


def check_all_ranks(
    local: torch.Tensor,
    grid: Grid,
    placements: Sequence[Placement] | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> None:
    """Compare shapes, strides, dtypes and requires_grad over all ranks, so that all of them raise.

    No rank may raise before this for a reason that other ranks cannot see.
    """
    rows = all_metas(local, grid, "from_local(run_check=True)")
    first = torch.empty_strided(rows[0].shape, rows[0].stride, dtype=rows[0].dtype, device="meta")
    found = dict(zip(grid.places, rows, strict=True))
    if shape is None and any(row != rows[0] for row in rows):
        unlike = {c: row for c, row in found.items() if row != rows[0]}
        raise LayoutError(
            f"Local tensors differ from rank {grid.ranks[0]}'s {rows[0]}: at mesh "
            f"coordinates {unlike}. Give from_local(..., shape=...) the global shape, or local "
            "tensors of one shape, stride and dtype, and one requires_grad."
        )
    if len({row.requires_grad for row in rows}) > 1:
        grads = {coordinate: row.requires_grad for coordinate, row in found.items()}
        raise LayoutError(
            f"The ranks disagree: requires_grad by mesh coordinate is {grads}: "
            "backward would communicate on some ranks only."
        )
    layout = global_layout(first, grid, placements, shape, stride)
    for coordinate, (dtype, sizes, *_) in found.items():
        expected = layout.local_shape(coordinate)
        if sizes != expected or dtype != layout.dtype:
            raise LayoutError(
                f"The ranks disagree: at mesh coordinate {coordinate} the local tensor is {dtype} "
                f"of shape {sizes}, but {layout!r} gives it {layout.dtype} of shape {expected}. "
                "Give from_local(..., shape=...) the global shape."
            )


class LocalMeta(NamedTuple):
    """What the ranks compare of their local tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool


def all_metas(local: torch.Tensor, grid: Grid, cause: str) -> list[LocalMeta]:
    """The metadata of the local tensor on every rank of the mesh."""
    grad = local.requires_grad

    def describe(_: Any, part: torch.Tensor) -> list[int]:
        ndim, fill = part.dim(), [0] * (14 - part.dim())
        needs = grad or part.requires_grad
        sizes = [*part.shape, *fill, *part.stride(), *fill]
        return [_DTYPES.index(part.dtype), needs, ndim, *sizes]

    rows = gather(grid, cause, describe, local).tolist()
    return [
        LocalMeta(_DTYPES[dtype], tuple(sizes[:ndim]), tuple(sizes[14 : 14 + ndim]), bool(needs))
        for dtype, needs, ndim, *sizes in rows
    ]


_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)


# -- redistribution in another dtype ---------------------------------------------------------


class CastShards(SkipsNone):
    """Cast each rank's shard; the terms of a Partial are cast before they are added."""

    @staticmethod
    def forward(ctx: Any, x: Any, dtype: torch.dtype) -> Any:
        ctx.dtype = x.dtype
        layout = autograd.with_dtype(autograd.unexpanded(x._layout), dtype)
        return type(x)._wrap(current(x).to(dtype), layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _cast(grad, ctx.dtype), None


class CastAndMove(SkipsNone):
    """Cast and redistribute in one node: between two, autograd would cast the gradient back."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, target: Layout, dtype: torch.dtype, back: torch.dtype, async_op: bool
    ) -> Any:
        ctx.layout, ctx.back, ctx.async_op = x._layout, back, async_op
        cast = _cast(x, dtype)
        moved = autograd.redistribute(cast, autograd.placed_like(target, cast._layout), async_op)
        return moved.clone() if moved is x else moved

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        cast = _cast(grad, ctx.back)
        target = autograd.placed_like(autograd.gradient_layout(ctx.layout), cast._layout)
        moved = autograd.redistribute(cast, target, ctx.async_op)
        return _cast(moved, ctx.layout.dtype), None, None, None, None


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x if x.dtype == dtype else CastShards.apply(x, dtype)


def redistribute_as(
    x: Any,
    target: Layout,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
    async_op: bool,
) -> Any:
    """`x` in the placements of `target` and in `forward_dtype`; the gradient has `x`'s dtype.

    Both are cast before they are sent, the gradient to `backward_dtype`.
    """
    for name, dtype in (("forward_dtype", forward_dtype), ("backward_dtype", backward_dtype)):
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ArgumentError(f"{name} is a torch.dtype or None, found {dtype!r}.")
    own = x.dtype
    return CastAndMove.apply(x, target, forward_dtype or own, backward_dtype or own, async_op)


# -- values for Python and numpy -------------------------------------------------------------


def whole_values(x: Any, asked: str) -> torch.Tensor:
    """The whole tensor as a plain one, outside autograd, on every rank.

    In strict mode, only if it is replicated.
    """
    target = autograd.whole_layout(x._layout)
    if x._layout.grid.outside:
        my_coordinate(x._layout.grid)  # raises: there is no value
    if watch.strict and x._layout is not target:
        forbid_move(f"DTensor.{asked}", 0, find_steps(x._layout, target), target)
    with because(f"DTensor.{asked}", implicit=True):
        return plain_if_equal(autograd.redistribute(x.detach(), target)._local)


def as_numpy(x: Any, force: bool) -> Any:
    if x.requires_grad and not force:
        return torch.empty(0, requires_grad=True).numpy()  # raises torch's error
    # Copied even if replicated: writes of one rank would make the replicas differ.
    return whole_values(x, "numpy").resolve_conj().resolve_neg().clone().numpy(force=force)


def refuse_memory(asked: str) -> NoReturn:
    """Raise for a method that needs an address in memory, which a DTensor does not have."""
    raise UnsupportedError(
        f"DTensor.{asked} has no meaning: a DTensor has no memory of its own. Call it on "
        "x.to_local() or on x.full_tensor()."
    )


# -- pickles, and torch.distributed.checkpoint ---------------------------------------------------
# A pickle keeps the mesh by value, since its world may be gone. torch.distributed.checkpoint asks a
# tensor for its chunks and for the memory of a chunk; in a simulated world the chunks of all ranks
# are offered. It is imported when it asks: it brings torch's own DTensor along.


def packed(local: torch.Tensor, layout: Layout) -> tuple[Any, Any, Any]:
    return (
        pack_parts(local),
        layout.grid.identity,
        (layout.placements, layout.order, layout.shape, layout.stride, layout.dtype),
    )


def unpacked(tensor: Any, mesh: Any, layout: Any) -> tuple[torch.Tensor, Layout]:
    """The tensor in the current world: all ranks' shards if it is simulated, else one.

    Raises unless the shards are those that the layout says.
    """
    check_saved_world(tensor, both=True)
    grid = grid_like(*mesh)
    placements, order, shape, stride, dtype = layout
    if len(stride) != len(shape) or any(type(n) is not int or n < 0 for n in (*shape, *stride)):
        raise LayoutError(f"The file has a tensor of shape {shape} with strides {stride}.")
    placements = normalize(placements, shape, grid, order)
    found = make_layout(grid, placements, shape, stride, dtype, order)
    return checked_local(tensor, found), found


def checked_local(held: Any, layout: Layout) -> torch.Tensor:
    """The local tensors of a file; raises unless they are those of the layout."""
    grid = layout.grid
    if held[0] == "simulated":
        _, parts, ranks, index = held
        known = len(index) == len(ranks) and all(0 <= place < len(parts) for place in index)
        if not known or not set(grid.ranks) <= set(ranks):
            raise LayoutError(
                f"The file has {len(parts)} tensors of ranks {list(ranks)[:8]}, which are not "
                f"those of the mesh, {list(grid.ranks)[:8]}."
            )
    local = unpack_parts(held, grid)
    for coordinate, part in rank_values(grid, local):
        expected = layout.local_shape(coordinate)
        if grid.world.absent:  # the file does not say whose shard it is
            shapes = [layout.local_shape(each) for each in grid.places]
            expected = tuple(part.shape) if tuple(part.shape) in shapes else expected
        if (tuple(part.shape), part.dtype) != (expected, layout.dtype):
            raise LayoutError(
                f"The file contradicts itself: at {coordinate}, {layout} has {layout.dtype} of "
                f"shape {expected}, and the tensor that is there is {part.dtype} of shape "
                f"{tuple(part.shape)}."
            )
        if part.layout is not torch.strided:
            raise LayoutError(
                f"The file contradicts itself: {layout} is strided, and the tensor that is there "
                f"at {coordinate} is {part.layout}."
            )
    return local


Chunk = tuple[tuple[int, ...], torch.Tensor]


def local_chunks(local: torch.Tensor, layout: Layout) -> list[Chunk]:
    """The offset and the memory of each chunk on the ranks present, without repeats."""
    if any(p.is_partial() for p in layout.placements):
        raise UnsupportedError(
            f"A tensor that is {short(layout.placements)} has terms, not chunks: redistribute() it "
            "to Shard or Replicate before saving or loading."
        )
    chunks: dict[tuple[int, ...], torch.Tensor] = {}
    for coordinate, part in rank_values(layout.grid, local):
        # Chunks are identified by offset; an empty one has the offset of another.
        if part.numel() or not math.prod(layout.shape):
            chunks.setdefault(layout.box(coordinate)[0], part)
    return list(chunks.items())


def write_items(name: str, x: torch.Tensor, chunks: Sequence[Chunk]) -> list[Any]:
    """The write items of a tensor for torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=x.dtype)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=x.shape),
        )
        for chunk in chunk_list(chunks)
    ]


def chunk_list(chunks: Sequence[Chunk]) -> list[Any]:
    """The metadata of the local chunks for torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(offsets=torch.Size(offset), sizes=part.shape)
        for offset, part in chunks
    ]


def chunk_memory(chunks: Sequence[Chunk], index: Any) -> torch.Tensor:
    """The memory of the chunk that `index` names."""
    if index.offset is None and len(chunks) == 1:
        return chunks[0][1]
    for offset, part in chunks:
        if index.offset is not None and tuple(index.offset) == offset:
            return part
    raise UnsupportedError(f"No rank here holds a chunk of {index.fqn} at {index.offset}.")
