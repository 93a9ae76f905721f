"""Ops on sharded tensors, below autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch.functions import tree_flatten, tree_unflatten
from shardwise.dispatch.catalog import changes_shape, find_rule
from shardwise.dtensor import snapshots
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import UnsupportedError
from shardwise.shard.moves import is_replicated, move_boxes, sharded_like
from shardwise.shard.tiling import shard_whole
from shardwise.shard.unbacked import dispatch_unbacked, is_elementwise, is_unbacked
from shardwise.simulation.ranks import plain_if_equal

if TYPE_CHECKING:
    from shardwise.shard.tensor import ShardedTensor


aten = torch.ops.aten


def dispatch(
    kind: type[ShardedTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an op with some operands of this `kind`."""
    leaves, spec = tree_flatten((args, kwargs))
    if func is aten.copy_.default:
        if not isinstance(args[0], DTensor):
            return args[0].copy_(plain_if_equal(args[1].full_tensor()))
        if isinstance(args[0], kind):
            leaves[1] = _held_like(args[0], args[1], kind)
    first = next(leaf for leaf in leaves if isinstance(leaf, kind))
    if changes_shape(func) and func is not aten.detach_.default:
        raise UnsupportedError(
            f"{func} would change the shape of a tensor in place, and its spec with it: "
            f"{first.sharding_spec()}. Use the op without the underscore, which returns a DTensor."
        )
    if _draws(func, first):
        return _draw(func, first, args, kwargs)
    if any(isinstance(x, kind) and not x._tiling.natural for x in leaves):
        if any(map(is_unbacked, leaves)):
            return dispatch_unbacked(kind, func, args, kwargs)
        if _takes_lists(func) and len(args[0]) > 1:
            return _one_by_one(func, args, kwargs)
        leaves = [_shard_if_replicated(first, leaf) for leaf in leaves]
        _check_any_order(func, first, leaves, args)
    plain: dict[int, ShardedTensor] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, kind):
            leaves[place] = DTensor._wrap(snapshots.current(leaf), leaf._layout)
            plain[id(leaves[place])] = leaf
    new_args, new_kwargs = tree_unflatten(leaves, spec)
    results, shape = tree_flatten(func(*new_args, **new_kwargs))
    for result in results:
        snapshots.mark_view_of(result, first)
    return tree_unflatten([_rewrapped(r, first, plain) for r in results], shape)


def _takes_lists(op: Any) -> bool:
    """Whether the op updates each tensor of a list by itself, or reduces all values of each."""
    return op._schema.name.startswith(("aten::_foreach_", "aten::_fused_ad", "aten::_fused_sgd"))


def _one_by_one(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensors of a list may have different specs."""
    results = []
    for place in range(len(args[0])):

        def at(value: Any, place: int = place) -> Any:
            return [value[place]] if isinstance(value, (list, tuple)) and value else value

        found = op(*map(at, args), **{name: at(value) for name, value in kwargs.items()})
        results.append(found)
    return [each for found in results for each in found] if op._schema.returns else None


#: Ops that reduce to one value when they get no dims and no keepdim, which come third.
_OVER_ALL = {
    aten.all.default,
    aten.any.default,
    aten.linalg_vector_norm.default,
    aten.max.default,
    aten.mean.default,
    aten.min.default,
    aten.sum.default,
}


def _shard_if_replicated(first: ShardedTensor, x: Any) -> Any:
    """A replicated DTensor, such as the gradient of a sum, sharded like `first`."""
    if type(x) is DTensor and x.shape == first.shape and is_replicated(x):
        return sharded_like(x, first._tiling, type(first))
    return x


def _check_any_order(
    op: Any, first: ShardedTensor, leaves: Sequence[Any], args: Sequence[Any]
) -> None:
    """Raise unless the op is independent of where in the tensor a value belongs."""
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.dim()]
    alike = all(isinstance(x, type(first)) and x._tiling is first._tiling for x in tensors)
    over_all = op in _OVER_ALL and not any(args[2:])
    if not (is_elementwise(op) or _takes_lists(op) or over_all) or not alike:
        specs = "; ".join(
            str(x.sharding_spec()) if isinstance(x, type(first)) else type(x).__name__
            for x in tensors
        )
        raise UnsupportedError(
            f"{op} on {specs}: shards that are not one per rank, in the order of ranks, "
            "allow only elementwise ops among tensors of one spec, and reductions of all values. "
            "Use reshard(spec) first."
        )


def _rewrapped(result: Any, first: ShardedTensor, plain: dict[int, ShardedTensor]) -> Any:
    """A result that is laid out like the first operand gets its spec; others are DTensors."""
    if type(result) is not DTensor:
        return result
    if id(result) in plain:
        return plain[id(result)]
    layout, model = result._layout, first._layout
    if (
        layout.grid is model.grid
        and layout.placements == model.placements
        and layout.shape == model.shape
    ):
        return with_tiling(result, first)
    return result


def with_tiling(x: DTensor, like: ShardedTensor) -> ShardedTensor:
    """A DTensor of the layout of `like` as a sharded tensor of its tiling."""
    found = like.over(x._local, like._tiling, x._layout, like=like)
    snapshots.take_over(found, x)
    return found


def _held_like(target: ShardedTensor, source: Any, kind: type[ShardedTensor]) -> Any:
    """The source of `target.copy_(source)`, laid out like the target where that is possible."""
    tiling = target._tiling
    if isinstance(source, kind):
        if source._tiling is tiling or source._tiling.grid is not tiling.grid:
            return source
        if source._tiling.shape != tiling.shape:
            return source
        local = move_boxes(source._local, source._tiling, tiling, "copy_")
        return type(target).over(local, tiling)
    if tuple(source.shape) != tiling.shape or not source.dim():
        return source
    if isinstance(source, DTensor):
        if tiling.natural and source._layout.grid is tiling.grid:
            return source
        source = plain_if_equal(source.full_tensor())
    return type(target).over(shard_whole(tiling, source), tiling)


def _draws(op: Any, x: ShardedTensor) -> bool:
    """Whether the op fills `x` with random numbers in a way that no rule covers."""
    return (
        torch.Tag.nondeterministic_seeded in op.tags
        and op._schema.is_mutable
        and (not x._tiling.natural or find_rule(op) is None)
    )


def _draw(op: Any, x: ShardedTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> ShardedTensor:
    """Every rank draws the whole tensor, as one device would, and keeps its shards."""
    if args[0] is not x:
        raise UnsupportedError(f"{op} draws random numbers into another tensor than its first.")
    whole = torch.empty(x._tiling.shape, dtype=x.dtype, device=x._tiling.grid.device_type)
    op(whole, *args[1:], **kwargs)
    x._local.copy_(shard_whole(x._tiling, whole))
    x._layout.grid.num_writes += 1
    return x
