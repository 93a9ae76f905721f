"""Redistribution and conversions with their gradients; reduction of Partial gradients.

Note [Gradients are global]
The gradient of a DTensor is a DTensor whose global value is one device's gradient; its layout is
whatever was cheapest. Only conversions from and to local tensors have to choose a layout:

    forward placement   default gradient placement
    Shard               Shard
    Replicate           Replicate
    Partial             Replicate

Note [The gradient of a gradient]
The two conversions are each other's derivative, at any order. A conversion gives a local tensor
placements A and its gradient placements B. The gradient of that gradient has the placements of the
tensor itself, A. So the backward of `to_local` with (A, B) is `from_local` with (B, A), and the
other way round; docs/concepts/gradients.md works it out.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch.autograd import (
    current_node,
    current_transform,
    have_tangents,
    is_legacy_batch,
    is_transformed,
    own_hook,
    users_hooks,
)
from shardwise.comm import collectives
from shardwise.comm.collectives import Pending, alias_for_outside, finished_like
from shardwise.comm.watch import because, watch
from shardwise.core.layout import (
    Layout,
    contiguous_stride,
    dense_stride,
    make_layout,
    normalize,
    replicated_layout,
)
from shardwise.core.mesh import Grid
from shardwise.core.placements import REPLICATE, Partial, Placement
from shardwise.core.untraced import UntracedFunction, untraced, without_autocast
from shardwise.core.world import world_caches
from shardwise.dispatch.propagate import forbid_leaf_move
from shardwise.dispatch.wrapped import Wrapped, begin_lending, lend, recall
from shardwise.dtensor.snapshots import current
from shardwise.errors import UnsupportedError
from shardwise.redistribute.execute import Run, copied, in_memory_order, prepare, prepare_async
from shardwise.redistribute.steps import find_steps
from shardwise.simulation.ranks import (
    LENT,
    each_rank,
    is_per_rank,
    localize,
    no_values,
    parts_of,
    plain_if_equal,
    sized_copy,
    split_row,
)


def gradient_layout(layout: Layout) -> Layout:
    """The default layout of the gradient of a tensor in `layout`."""
    return (unexpanded(layout) if layout.expanded else layout).reduced()


#: Indexed by `layout.symbolic`: cached for layouts without symbols.
gradient_layout_of = (functools.lru_cache(maxsize=4096)(gradient_layout), gradient_layout)
world_caches.append(gradient_layout_of[0].cache_clear)


def unexpanded(layout: Layout) -> Layout:
    """`layout` without expanded dims: for a clone, and for a gradient.

    Entries that share memory have separate gradients.
    """
    if not layout.expanded:
        return layout
    return layout.with_sizes(layout.shape, contiguous_stride(layout.shape))


def placed(
    layout: Layout, placements: Sequence[Placement], order: Sequence[int] | None = None
) -> Layout:
    """`layout` with a user's placements, checked; `order` is the default one if not given."""
    axes = None if order is None else tuple(order)
    if not isinstance(placements, Placement):
        placements = tuple(placements)
    if layout.symbolic:
        return _placed(layout, placements, axes)
    return _cached_placed(layout, placements, axes)


def _placed(layout: Layout, placements: Any, order: tuple[int, ...] | None) -> Layout:
    order = order or tuple(range(layout.grid.num_axes))
    normal = normalize(placements, layout.shape, layout.grid, order)
    return layout.with_placements(normal, order)


_cached_placed = functools.lru_cache(maxsize=4096)(_placed)
world_caches.append(_cached_placed.cache_clear)


def whole_layout(layout: Layout) -> Layout:
    """The same tensor, replicated over all axes."""
    return placed(layout, (REPLICATE,) * len(layout.placements))


def move(x: Any, target: Layout, *, own: bool = False, async_op: bool = False) -> Any:
    """`x` in another layout, below autograd. With `own`, the result never shares memory with `x`.

    With `async_op`, the last collective may still be running; see `Pending`.
    """
    if x._layout.snapshot:
        current(x)
    if async_op and type(x._local) is torch.Tensor and not target.grid.outside:
        return _move_apart(x, target, own=own)
    symbolic = target.symbolic or x._layout.symbolic
    travel, stays = (_route if symbolic else _cached_route)(x._layout, target)
    if watch.on:
        with because("redistribute", implicit=False):
            local = travel(x._local)
    else:
        local = travel(x._local)
    if own and stays:
        local = copied(local, target) if target.expanded else local.clone()
    return type(x)._wrap(local, target)


def _move_apart(x: Any, target: Layout, *, own: bool) -> Any:
    if not any(step.communicates for step in find_steps(x._layout, target)):
        return move(x, target, own=own)
    start, finish, known = _cached_halves(x._layout, target)
    with because("redistribute", implicit=False):
        started = start(x._local)
    shape = (started.shape, started.stride())
    like = known.get(shape)
    if like is None:
        like = known[shape] = finished_like(started, finish)
    local = Pending(started, finish, like)
    moved = type(x)._wrap(local, target)
    local.held_by(moved)
    return moved


def _halves(source: Layout, target: Layout) -> tuple[Run, Run, dict[Any, torch.Tensor]]:
    """Functions that start and finish a move, and a cache for fakes of the results."""
    return *prepare_async(find_steps(source, target)), {}


_cached_halves = functools.lru_cache(maxsize=4096)(_halves)
world_caches.append(_cached_halves.cache_clear)


def _route(source: Layout, target: Layout) -> tuple[Run, bool]:
    """A function that moves a local tensor, and whether its result may share the memory."""
    steps = find_steps(source, target)
    return prepare(steps), not any(step.communicates for step in steps)


_cached_route = functools.lru_cache(maxsize=4096)(_route)
world_caches.append(_cached_route.cache_clear)


def bare_apply(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without its Python layer, which only looks for functorch transforms.

    The layer around `backward` is skipped too. The caller has made snapshots `current`: `forward`
    cannot tell whether a gradient is needed.
    """
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def direct_apply(function: type[torch.autograd.Function]) -> Any:
    """Like `bare_apply`, but first makes snapshots among the arguments `current`."""
    apply = bare_apply(function)

    def applied(*args: Any) -> Any:
        for arg in args:
            if isinstance(arg, Wrapped) and arg._layout.snapshot:
                current(arg)
        return apply(*args)

    return untraced(applied)


def _as_dtensor(grad: Any, layout: Layout, cls: Any) -> Any:
    """A gradient as a DTensor: some of torch's formulas give plain zeros."""
    if isinstance(grad, Wrapped):
        return grad
    dense = grad.contiguous()
    return cls._wrap(localize(layout.grid, dense), replicated_layout(layout.grid, dense))


class Redistribute(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, x: Any, target: Layout, async_op: bool) -> Any:
        ctx.set_materialize_grads(False)  # torch's zeros would be a plain tensor
        ctx.cls, ctx.layout, ctx.async_op = type(x), x._layout, async_op
        return move(x, target, own=True, async_op=async_op)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None
        grad = _as_dtensor(grad, ctx.layout, ctx.cls)
        target = placed_like(gradient_layout(ctx.layout), grad._layout)
        return redistribute(grad, target, ctx.async_op), None, None


def redistribute(x: Any, target: Layout, async_op: bool = False) -> Any:
    """`x` in layout `target`, differentiable; `x` itself if that is its layout."""
    if x._layout is target:
        return x
    refuse_tangent(x, "redistribute()")
    if x.is_sparse:
        x = x.terms()  # row-sparse gradients are moved dense
    if torch.is_grad_enabled() and x.requires_grad:
        if x._layout.snapshot:
            current(x)
        return _apply_redistribute(x, target, async_op)
    return move(x, target, own=True, async_op=async_op)


def in_formula() -> bool:
    """Whether one of torch's backward formulas is running.

    Some make plain tensors (zeros, a range), which are the same on every rank.
    """
    node = current_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)


def _is_batch(grad: torch.Tensor) -> bool:
    """Whether `grad` is a batch of gradients, as under torch.vmap; it wraps a DTensor."""
    return is_legacy_batch(grad) or is_transformed(grad)


def refuse_transformed(x: torch.Tensor, where: str) -> None:
    """Raise for a tensor of torch.func or torch.vmap, which hides what it wraps."""
    if is_legacy_batch(x) or is_transformed(x) or current_transform() is not None:
        raise UnsupportedError(
            f"{where}: torch.func's transforms, torch.vmap, vectorize=True and is_grads_batched "
            "do not pass between plain and distributed tensors. Make DTensors before the "
            "transform, or use torch.autograd.grad(..., create_graph=True), or "
            "torch.autograd.functional.hessian and hvp."
        )


def refuse_tangent(x: torch.Tensor, asked: str) -> None:
    """Raise for a tensor with a tangent of torch's forward mode, which a conversion would lose."""
    if have_tangents((x,)):
        raise UnsupportedError(
            f"{asked} of a tensor with a tangent: forward mode does not pass through it. Convert "
            "the value and the tangent of torch.autograd.forward_ad.unpack_dual(x), one after the "
            "other, and make_dual() them again; or convert before the tensor gets its tangent."
        )


@own_hook
@untraced
def to_leaf_layout(cls: Any, layout: Layout, grad: Any) -> Any:
    """A hook that moves a gradient to the layout of its leaf; None if nothing changes.

    The gradient stays Partial over axes that replicate the leaf, and is reduced when it is used. A
    plain gradient comes from one of torch's formulas and counts as replicated.
    """
    if type(grad) is cls and grad._layout is layout:  # nearly always
        return None
    if grad is None:
        return None
    if not isinstance(grad, cls):
        if _is_batch(grad):
            return None
        made = replicated_layout(layout.grid, grad)
        if torch.is_grad_enabled() and grad.requires_grad:
            wrapped = from_local(grad, from_local_layouts(made, made, cls))
        else:
            wrapped = cls._wrap(localize(layout.grid, grad), made)
        return redistribute(wrapped, made.with_placements(layout.placements, layout.order))
    if grad._layout is layout:  # a subclass, which may have no placements to compare
        return None
    target = tuple(
        found if own.is_replicate() and found.is_partial() else own
        for found, own in zip(grad.placements, layout.placements, strict=True)
    )
    if grad.placements == target and grad._layout.order == layout.order:
        # A gradient may be written to, and a snapshot should not be.
        return grad.clone() if grad._layout.snapshot else None
    wanted = grad._layout.with_placements(target, layout.order)
    if watch.strict:
        forbid_leaf_move(grad._layout, wanted)
    with because("the gradient of a leaf", implicit=True):
        return redistribute(grad, wanted)


_apply_redistribute = bare_apply(Redistribute)


class ToLocal(UntracedFunction):
    """Without `grad_layout`, the local gradient has the default layout.

    With `plain`, equal values of all ranks are one plain tensor in a simulated world too.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, grad_layout: Layout | None, async_op: bool = False, plain: bool = False
    ) -> torch.Tensor:
        ctx.saved = type(x), x._layout, grad_layout, async_op, plain
        # Autograd gives the result a grad_fn; the tensor inside the DTensor must not have one.
        if async_op or not x.is_leaf:
            return _local_for_users(x, async_op, plain)
        # A view: autograd then refuses in-place writes to it, as to a view of a leaf.
        local = x._local
        if type(local) is torch.Tensor and (LENT in local.__dict__ or begin_lending(x)):
            return local[...]
        local = _local_for_users(x, False, plain)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        cls, own_layout, grad_layout, async_op, plain = ctx.saved
        if plain and isinstance(grad, Wrapped):  # a number that met DTensors
            return grad, None, None, None
        if _is_batch(grad):
            refuse_transformed(grad, "The gradient of to_local()")
        if grad_layout is None:
            grad_layout = gradient_layout_of[own_layout.symbolic](own_layout)
        layout = with_dtype(grad_layout, grad.dtype)
        if layout.memory_order or not all(part.is_contiguous() for part in parts_of(grad)):
            # Entries that share memory, as in the gradient of `sum`, cannot be accumulated into.
            layout = _in_order_of(layout, parts_of(grad))
            grad = in_memory_order(grad, layout)
        if torch.is_grad_enabled() and grad.requires_grad:
            source = with_dtype(_linear_terms(own_layout, "to_local()"), grad.dtype)
            given = from_local_layouts(layout, source, cls, async_op)
            return from_local(grad, given), None, None, None
        local = localize(layout.grid, sized_copy(grad, False))
        return cls._wrap(local, layout), None, None, None


def _in_order_of(layout: Layout, grads: Sequence[torch.Tensor]) -> Layout:
    """The layout of a gradient, in its memory order if that is the same on every rank.

    So the gradient of `full_tensor()` has the strides of a copy's gradient on one device.
    """
    whole = all(placement.is_replicate() for placement in layout.placements)
    if not whole or layout.symbolic or layout.grid.outside:
        return layout
    stride = grads[0].stride()
    dense = dense_stride(layout.shape, sorted(range(layout.ndim), key=lambda d: -stride[d]))
    if stride != dense or any(part.stride() != stride for part in grads):
        return layout
    return layout.with_sizes(layout.shape, stride)


class FromLocal(UntracedFunction):
    """`given` is `from_local_layouts(...)`. With `held`, `local` has been through `localize`."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, given: Any, held: bool = False) -> Any:
        ctx.materialize_grads = False  # torch's zeros would be a plain tensor
        ctx.saved = given
        if type(local) is not torch.Tensor and is_per_rank(local):
            ctx.saved = (*given[:-1], False)
        layout, cls = given[0], given[1]
        alias = (local if held else localize(layout.grid, local)).detach()
        return cls._wrap_view(alias, layout) if local.is_leaf else cls._wrap(alias, layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None
        if _is_batch(grad):
            refuse_transformed(grad, "The gradient of from_local()")
        _, cls, terms, grad_layout, weight, async_op, plain = ctx.saved
        grad = _as_dtensor(grad, grad_layout, cls)
        target = placed_like(grad_layout, grad._layout)
        moved = redistribute(grad, target, async_op)
        if torch.is_grad_enabled() and moved.requires_grad:
            source = placed_like(_as_sums(terms), moved._layout)  # `weight` makes them an average
            local = to_local(moved, source, async_op, plain)
        else:
            local = _local_for_users(moved, async_op, plain)
        return local if weight == 1 else local * weight, None, None


class FromOutside(UntracedFunction):
    """`from_local` on a rank outside the mesh: `given` is left out, and its gradient is zero."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, layout: Layout, cls: Any) -> Any:
        ctx.like = given.new_empty(()), given.shape
        return cls._wrap(no_values(layout.grid, given.dtype, given.device), layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        like, shape = ctx.like
        return like.new_zeros(shape), None, None


def _local_for_users(x: Any, async_op: bool, plain: bool) -> torch.Tensor:
    """The local tensor of `x` for use outside of it; see ToLocal."""
    local = alias_for_outside(x._local) if async_op else lend(x)
    if plain:
        return plain_if_equal(local, equal=all(p.is_replicate() for p in x.placements))
    return local


def _linear_terms(layout: Layout, asked: str) -> Layout:
    """`layout`, whose Partials must be differentiable: sums and averages."""
    for placement in layout.placements:
        if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
            raise UnsupportedError(
                f"{asked} of a tensor that requires grad has no gradient through {placement}: "
                "which rank's term counts depends on the values. Use Partial('sum')."
            )
    # Not a MaskPartial.
    terms = (Partial(p.reduce_op) if isinstance(p, Partial) else p for p in layout.placements)
    return layout.with_placements(tuple(terms), layout.order)


def _as_sums(layout: Layout) -> Layout:
    sums = tuple(Partial() if p.is_partial() else p for p in layout.placements)
    return layout.with_placements(sums, layout.order)


def from_local_layouts(
    layout: Layout, grad_layout: Layout | None, cls: Any, async_op: bool = False
) -> tuple[Any, ...]:
    """What `from_local` saves for backward, for a plain tensor.

    Without `grad_layout`, the gradient has its default layout. The weight is that of a rank's term:
    1 in a sum, 1/n in an average.
    """
    terms = _linear_terms(layout, "from_local()")
    placed = zip(layout.placements, layout.grid.shape, strict=True)
    weight = 1 / math.prod(size for p, size in placed if p.is_partial("avg"))
    return layout, cls, terms, grad_layout or gradient_layout(layout), weight, async_op, True


#: By layout: `from_local_layouts(layout, None, DTensor)`, of layouts without symbols.
default_layouts: dict[Layout, tuple[Any, ...]] = {}
world_caches.append(default_layouts.clear)


def placed_like(layout: Layout, other: Layout) -> Layout:
    """`other` with the placements of `layout`: a gradient may differ in stride."""
    return other.with_placements(layout.placements, layout.order)


def with_dtype(layout: Layout, dtype: torch.dtype) -> Layout:
    if layout.dtype == dtype:
        return layout
    return make_layout(
        layout.grid, layout.placements, layout.shape, layout.stride, dtype, layout.order
    )


#: For a DTensor that is not a snapshot, or is current.
current_to_local = bare_apply(ToLocal)
to_local = direct_apply(ToLocal)
from_local = bare_apply(FromLocal)


#: Bytes per collective. Larger saves latency, smaller saves memory.
BUCKET_BYTES = 25 * 1024 * 1024


def refuse_hooks(parameter: torch.Tensor, named: str) -> None:
    """Raise if a parameter that will be replaced has a user's hooks: they would be lost."""
    if any(users_hooks(parameter)):
        raise UnsupportedError(
            f"{named} has hooks, and will be replaced by a sharded one, whose gradients they would "
            "not see. Register hooks on the new parameter, after the module was parallelized."
        )


def reduce_gradients(
    parameters: torch.Tensor | Iterable[torch.Tensor], *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Reduce every gradient that is Partial, in place, with few large collectives.

    Otherwise each Partial gradient is reduced at its first use, with a separate collective.

    >>> import shardwise, torch
    >>> from shardwise.debug import CommDebugMode
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     layer = shardwise.distribute_module(torch.nn.Linear(3, 3), mesh)
    ...     x = shardwise.ones(4, 3, device_mesh=mesh, placements=[shardwise.Shard(0)])
    ...     layer(x).sum().backward()
    ...     with CommDebugMode() as comm:
    ...         shardwise.reduce_gradients(layer.parameters())
    >>> layer.weight.grad.placements, comm.get_total_counts()
    ((Replicate(),), 1)
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    gradients: list[Any] = [p.grad for p in given if hasattr(p.grad, "_layout")]
    for gradient, found in zip(gradients, reduced_together(gradients, bucket_bytes), strict=True):
        gradient._local, gradient._layout = found


def reduced_together(
    tensors: Sequence[Any], bucket_bytes: int = BUCKET_BYTES
) -> list[tuple[torch.Tensor, Layout]]:
    """Local tensor and layout of each DTensor, reduced where it was Partial."""
    held: dict[int, HeldGradient] = {}
    for tensor in tensors:
        known = recall(tensor)
        if known is None or known[1] is not tensor._layout.reduced():
            known = tensor._local, tensor._layout
        held.setdefault(id(tensor), HeldGradient(*known))
    _reduce_all(list(held.values()), bucket_bytes)
    return [(held[id(tensor)].local, held[id(tensor)].layout) for tensor in tensors]


@dataclass(slots=True)
class HeldGradient:
    """The local tensor and layout of a gradient, updated axis by axis."""

    local: torch.Tensor
    layout: Layout


def _reduce_all(gradients: Sequence[HeldGradient], bucket_bytes: int) -> None:
    for axis in range(max((g.layout.grid.num_axes for g in gradients), default=0)):
        alike: dict[Any, list[HeldGradient]] = defaultdict(list)
        for gradient in gradients:
            layout = gradient.layout
            if axis < layout.grid.num_axes and isinstance(layout.placements[axis], Partial):
                reduce_op = layout.placements[axis].reduce_op  # type: ignore[attr-defined]
                alike[layout.grid, reduce_op, layout.dtype].append(gradient)
        for (grid, reduce_op, _), members in alike.items():
            for bucket in _buckets(members, bucket_bytes):
                with because("reduce_gradients", implicit=False):
                    _reduce_bucket(bucket, reduce_op, grid, axis)


def _buckets(gradients: Sequence[HeldGradient], bucket_bytes: int) -> list[list[HeldGradient]]:
    buckets: list[list[HeldGradient]] = []
    room = 0
    for gradient in gradients:
        size = math.prod(gradient.layout.shape) * gradient.layout.dtype.itemsize
        if size > room or not buckets:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(gradient)
        room -= size
    return buckets


@without_autocast
def _reduce_bucket(bucket: Sequence[HeldGradient], reduce_op: str, grid: Grid, axis: int) -> None:
    def flatten(_: Any, *parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.reshape(-1) for part in parts])

    views = locals_ = [gradient.local for gradient in bucket]
    if not grid.outside:
        flat = each_rank(grid, flatten, *locals_, axes=())
        reduced = collectives.all_reduce(flat, reduce_op, grid, axis)
        views, _ = split_row(grid, reduced, locals_)
    for gradient, local in zip(bucket, views, strict=True):
        placements: list[Placement] = list(gradient.layout.placements)
        placements[axis] = REPLICATE
        gradient.local = local
        gradient.layout = gradient.layout.with_placements(tuple(placements))
