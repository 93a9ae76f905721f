"""What each rank should hold, found with torch.chunk and torch.split alone.

Nothing here uses the library's own arithmetic: it is what the library is compared with.
"""

import torch

from shardwise import DTensor, LocalTensor
from shardwise.core.layout import contiguous_stride, make_layout, normalize
from shardwise.core.mesh import grid_of


def pieces(tensor, shard, parts):
    """The pieces of one split, one per coordinate; torch.chunk leaves empty ones out."""
    dim = shard.dim
    if shard.sizes is not None:
        return tensor.split(list(shard.sizes), dim)
    found = list(tensor.chunk(parts, dim))
    empty = tensor.narrow(dim, tensor.shape[dim], 0)
    return found + [empty] * (parts - len(found))


def terms(value, parts, reduce_op):
    """Different tensors, one per coordinate, that reduce to `value`; exact for small integers."""
    if parts == 1:
        return [value]
    if reduce_op in ("sum", "avg"):
        found = [torch.randint(-9, 9, value.shape).to(value.dtype) for _ in range(parts - 1)]
        scale = parts if reduce_op == "avg" else 1
        return [*found, value * scale - sum(found)]
    if reduce_op == "product":
        return [
            value * 2,
            value.new_full(value.shape, 0.5),
            *[torch.ones_like(value)] * (parts - 2),
        ]
    sign = -1 if reduce_op == "max" else 1
    found = [value + sign * torch.randint(0, 9, value.shape) for _ in range(parts)]
    winner = torch.randint(0, parts, value.shape)
    return [torch.where(winner == i, value, term) for i, term in enumerate(found)]


def blocks(whole, mesh_shape, placements, order=None):
    """{coordinate: the tensor that it holds}. Partial axes hold random terms."""
    order = tuple(range(len(mesh_shape))) if order is None else order
    by_place = {(None,) * len(mesh_shape): whole}
    # Terms first: each of them is then cut like the whole.
    partial = [axis for axis in order if placements[axis].is_partial()]
    for axis in [*partial, *(axis for axis in order if axis not in partial)]:
        placement, parts = placements[axis], mesh_shape[axis]
        grown = {}
        for place, held in by_place.items():
            if placement.is_partial():
                shares = terms(held, parts, placement.reduce_op)
            elif placement.is_shard():
                shares = pieces(held, placement, parts)
            else:
                shares = [held] * parts
            for number, share in enumerate(shares):
                grown[(*place[:axis], number, *place[axis + 1 :])] = share
        by_place = grown
    return by_place


def lay(whole, mesh, placements, order=None):
    """A DTensor of the simulated world whose global value is `whole`."""
    grid = grid_of(mesh)
    normal = normalize(placements, whole.shape, grid, order)
    layout = make_layout(
        grid, normal, whole.shape, contiguous_stride(whole.shape), whole.dtype, order
    )
    held = blocks(whole, grid.shape, normal, layout.order)
    local = LocalTensor.per_rank(lambda rank: held[grid.coordinates[rank]].clone(), grid.ranks)
    return DTensor._wrap(local, layout)


_REDUCE = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.sum(0) / len(stack),
    "product": lambda stack: stack.prod(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
}


def value(x):
    """The global value of a DTensor of the simulated world, put together from its parts.

    Replicas must agree to the bit.
    """
    grid = grid_of(x.device_mesh)
    local = x.to_local().detach()
    held = {grid.coordinates[rank]: local.on_rank(rank) for rank in grid.ranks}
    for axis in reversed([a for a in x._layout.order if x.placements[a].is_shard()]):
        held = _join(held, axis, lambda parts, dim=x.placements[axis].dim: torch.cat(parts, dim))
    for axis, placement in enumerate(x.placements):
        if placement.is_partial():
            reduce = _reduction(placement)
            held = _join(held, axis, lambda parts, reduce=reduce: reduce(torch.stack(parts)))
    first, *others = held.values()
    for other in others:
        torch.testing.assert_close(first, other, rtol=0, atol=0, equal_nan=True)
    return first


def _reduction(placement):
    if placement.reduce_op == "norm":
        return lambda stack: torch.linalg.vector_norm(stack, placement.norm_type, 0)
    return _REDUCE[placement.reduce_op]


def _join(held, axis, join):
    """Give every coordinate the join of those that differ from it only along `axis`."""
    lines = {}
    for place in sorted(held):
        lines.setdefault(place[:axis] + place[axis + 1 :], []).append(held[place])
    joined = {line: join(parts) for line, parts in lines.items()}
    return {place: joined[place[:axis] + place[axis + 1 :]] for place in held}
