"""Functions of torch with code of their own for sharded tensors; `F.linear` of local inputs.

`F.embedding` and `F.embedding_bag` look up each rank's local ids in a sharded table; their results
equal those of one device that holds the whole table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn import functional as F

from shardwise.comm import collectives
from shardwise.comm.agreement import gather_numbers
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.core.placements import Partial
from shardwise.core.untraced import UntracedFunction, differentiated_once
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, UnsupportedError
from shardwise.lookup.ids import has_values
from shardwise.shard import dispatch, table_lookup
from shardwise.shard.moves import exchanged
from shardwise.shard.spec import DimSplit, ShardingSpec, Tiling, local_of_shards, natural_spec
from shardwise.shard.table_lookup import (
    BagBatch,
    LayerCall,
    Lookup,
    Stage,
    declare,
    like,
    split_of,
    traced,
)
from shardwise.shard.tensor import ShardedTensor, first_sharded, functions, spec_functions
from shardwise.simulation.ranks import agreed, each_rank, localize, sized

# The weight stays where it is: inputs are gathered on all ranks, each computes with its shard, and
# results are sent back. Backward runs the same steps in reverse. Each rank has its own loss. Its
# input gets the gradient of that loss; the weight gets that of the mean of the losses, or of their
# sum, as the tensor's `grad_reduction` says.


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`F.linear` for each rank's local plain inputs; weight, bias or both are sharded."""
    x = input
    whole = gather_whole(bias) if isinstance(bias, ShardedTensor) else bias
    if not isinstance(weight, ShardedTensor):
        return F.linear(x, weight, whole)
    what = "F.linear"
    split = split_of(weight, what)
    if not has_values(weight._local):
        return traced(_LINEAR, weight, {}, input=x, bias=whole)
    grid, in_features = weight._tiling.grid, weight._tiling.shape[1]
    trains = x.requires_grad and torch.is_grad_enabled()

    def describe(mine: torch.Tensor) -> tuple[Sequence[int], str | None]:
        if not mine.dim() or mine.shape[-1] != in_features or mine.dtype != weight.dtype:
            return [0, 0], (
                f"inputs have shape (..., {in_features}) and dtype {weight.dtype}; found "
                f"{tuple(mine.shape)}, {mine.dtype}."
            )
        return [mine.numel() // in_features if in_features else 0, trains], None

    counts, train = zip(*gather_numbers(grid, what, describe, x), strict=True)
    if any(train) and not trains:  # backward of other ranks needs this one's
        x = x.detach().requires_grad_()
    route = ToEveryone(weight._tiling, split, counts)
    return _Linear.apply(weight, route, x, whole)


@dataclass(frozen=True, slots=True)
class ToEveryone:
    """Every rank gets all inputs.

    Ranks compute columns of the result, which are concatenated (`joined`), or terms of a sum.
    """

    tiling: Tiling
    split: DimSplit
    #: The rows of each rank's input.
    num_rows: tuple[int, ...]

    @property
    def grid(self) -> Grid:
        return self.tiling.grid

    @property
    def joined(self) -> bool:
        return self.split.dim == 0

    @property
    def num_columns(self) -> int:
        return self.tiling.shape[0]

    def send(self, x: torch.Tensor) -> torch.Tensor:
        return all_gather_uneven(localize(self.grid, x), self.num_rows, self.grid)

    def send_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_uneven(localize(self.grid, grad), self.num_rows, self.grid)

    def _columns(self, rank: int) -> int:
        """How many columns of the result a rank computes."""
        return self.split.intervals[rank][1] if self.joined else self.num_columns

    def reply(self, results: torch.Tensor) -> torch.Tensor:
        if not self.joined:
            return reduce_scatter_uneven(results, self.num_rows, self.grid)
        grid = self.grid
        ranks = grid.ranks
        counts = [[n * self._columns(sender) for n in self.num_rows] for sender in ranks]
        arrived = exchanged(each_rank(grid, lambda _, r: r.reshape(-1), results), counts, grid)

        def join(place: Any, flat: torch.Tensor) -> torch.Tensor:
            mine = self.num_rows[place[0]]
            parts = flat.split([mine * self._columns(sender) for sender in ranks])
            out = flat.new_empty(mine, self.num_columns)
            for sender, part in zip(ranks, parts, strict=True):
                start, length = self.split.intervals[sender]
                out[:, start : start + length] = part.view(mine, length)
            return out

        return each_rank(grid, join, arrived)

    def reply_grad(self, grad: torch.Tensor) -> torch.Tensor:
        if not self.joined:
            return all_gather_uneven(localize(self.grid, grad), self.num_rows, self.grid)
        grid = self.grid
        ranks, total = grid.ranks, sum(self.num_rows)
        counts = [[n * self._columns(owner) for owner in ranks] for n in self.num_rows]

        def part(_: Any, mine: torch.Tensor) -> torch.Tensor:
            columns = []
            for owner in ranks:
                start, length = self.split.intervals[owner]
                columns.append(mine[:, start : start + length].reshape(-1))
            return torch.cat(columns)

        arrived = exchanged(each_rank(grid, part, grad), counts, grid)

        def stack(place: Any, flat: torch.Tensor) -> torch.Tensor:
            return flat.view(total, self._columns(ranks[place[0]]))

        return each_rank(grid, stack, arrived)


class _Linear(UntracedFunction):
    """`apply(weight, route, x, bias)`: inputs travel to the shards, results travel back."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: ShardedTensor,
        route: ToEveryone,
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        grid, needs = route.grid, ctx.needs_input_grad
        in_features = weight._tiling.shape[1]
        ctx.weight, ctx.route, ctx.x, ctx.bias = weight, route, x.detach(), bias
        ctx.on_holder = Stage((needs[0], needs[2]))
        ctx.at_home = Stage((any(needs), *([] if bias is None else [needs[3]])))

        def compute(place: Any, held: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            rank = grid.ranks[place[0]]
            start, length = route.split.intervals[rank]

            def local(shard: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor]:
                mine = rows if route.joined else rows[:, start : start + length]
                return (F.linear(mine, shard),)

            return ctx.on_holder.run(rank, local, [weight._tiling.shard(rank, held), rows])[0]

        def finish(place: Any, rows: torch.Tensor, x: torch.Tensor, *bias: Any) -> torch.Tensor:
            def local(rows: torch.Tensor, *bias: torch.Tensor) -> tuple[torch.Tensor]:
                rows = rows + bias[0] if bias else rows
                return (rows.view(*x.shape[:-1], rows.shape[-1]),)

            return ctx.at_home.run(grid.ranks[place[0]], local, [rows, *bias])[0]

        with because("F.linear", implicit=False):
            flat = each_rank(grid, lambda _, mine: mine.reshape(-1, in_features), ctx.x)
            results = each_rank(grid, compute, weight._local, route.send(flat))
            rows = route.reply(results)
        return sized(each_rank(grid, finish, rows, ctx.x, *([] if bias is None else [bias])))

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        route, weight, needs = ctx.route, ctx.weight, ctx.needs_input_grad
        grid = route.grid
        rows, *of_bias = ctx.at_home.backward(grid, grad)
        with because("F.linear", implicit=False):
            shard, flat = ctx.on_holder.backward(grid, route.reply_grad(localize(grid, rows)))
            of_weight = of_x = None
            if needs[0]:
                if weight.grad_reduction == "mean":
                    shard = each_rank(grid, lambda _, g: g / len(grid.ranks), shard)
                held = local_of_shards(weight._tiling, shard)
                of_weight = ShardedTensor.over(held, weight._tiling, like=weight)
            if needs[2]:
                flat = route.send_grad(flat)
                of_x = each_rank(grid, lambda _, g, x: g.reshape(x.shape), flat, ctx.x)
        return (
            of_weight,
            None,
            like(of_x, ctx.x),
            like(of_bias[0] if needs[3] else None, ctx.bias),
        )


def all_gather_uneven(x: torch.Tensor, counts: tuple[int, ...], grid: Grid) -> torch.Tensor:
    """The ranks' rows, concatenated; rank i of the group has `counts[i]` of them.

    They are padded to the largest count while they are sent.
    """
    longest = max(counts)
    if longest == 0:
        return x
    if min(counts) == longest:
        return collectives.all_gather(x, grid, 0)
    padded = each_rank(grid, lambda _, mine: _padded(mine, longest), x)
    gathered = collectives.all_gather(padded, grid, 0)

    def compact(_: Any, rows: torch.Tensor) -> torch.Tensor:
        parts = rows.split(longest)
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    return each_rank(grid, compact, gathered, axes=())


def reduce_scatter_uneven(x: torch.Tensor, counts: tuple[int, ...], grid: Grid) -> torch.Tensor:
    """The sum of the ranks' rows, of which rank i of the group gets `counts[i]`."""
    longest = max(counts)
    if longest == 0:
        return x
    if min(counts) == longest:
        return collectives.reduce_scatter(x, "sum", grid, 0)

    def spread(_: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([_padded(part, longest) for part in rows.split(list(counts))])

    reduced = collectives.reduce_scatter(each_rank(grid, spread, x), "sum", grid, 0)
    return each_rank(grid, lambda place, rows: rows[: counts[place[0]]], reduced)


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    if x.shape[0] == length:
        return x.contiguous()
    out = x.new_zeros((length, *x.shape[1:]))
    out[: x.shape[0]] = x
    return out


def gather_whole(x: ShardedTensor) -> torch.Tensor:
    """The whole tensor, for each rank's local loss."""
    ordered = x if x._tiling.natural else x.resharded(natural_spec(x._tiling))
    whole = ordered.full_tensor(grad_placements=[Partial("sum")])
    if x.grad_reduction == "sum" or not whole.requires_grad:
        return whole
    return DivideGradient.apply(whole, len(x._tiling.grid.ranks))


class DivideGradient(UntracedFunction):
    """The identity; the gradient is divided by a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, divisor: int) -> torch.Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad / ctx.divisor, None


def _outputs_of(
    call: LayerCall, weight: torch.Tensor, input: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    dtype = weight.dtype if call.autocast_dtype is None else getattr(torch, call.autocast_dtype)
    if bias is not None:
        dtype = torch.promote_types(dtype, bias.dtype)
    return weight.new_empty((*input.shape[:-1], call.tiling.shape[0]), dtype=dtype)


_LINEAR = declare("linear", linear, _outputs_of)


MODES = ("sum", "mean", "max")


def embedding(
    input: torch.Tensor,
    weight: ShardedTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """`F.embedding` for each rank's local plain ids."""
    what = "F.embedding"
    lookup = _lookup(what, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if not all(weight._tiling.shape):
        return F.embedding(input, gather_whole(weight), **lookup.options())
    if not has_values(weight._local):
        return traced(_EMBEDDING, weight, lookup.options(), input=input)
    return table_lookup.embedding(lookup, input)


def embedding_bag(
    input: torch.Tensor,
    weight: ShardedTensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """`F.embedding_bag` for each rank's local plain bags."""
    what = "F.embedding_bag"
    lookup = _lookup(what, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    _check_mode(what, mode, per_sample_weights, scale_grad_by_freq, sparse)
    options = lookup.options() | {"mode": mode, "include_last_offset": include_last_offset}
    tensors: dict[str, Any] = {"offsets": offsets, "per_sample_weights": per_sample_weights}
    if not all(weight._tiling.shape):
        return F.embedding_bag(input, gather_whole(weight), **options, **tensors)
    if not has_values(weight._local):
        return traced(_EMBEDDING_BAG, weight, options, input=input, **tensors)
    batch = BagBatch(input, offsets, per_sample_weights, include_last_offset, mode, weight.dtype)
    return table_lookup.embedding_bag(lookup, batch)


def _lookup(
    what: str,
    weight: ShardedTensor,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    by_frequency: bool,
    sparse: bool,
) -> Lookup:
    split = split_of(weight, what)
    if sparse and not weight._tiling.natural:
        raise UnsupportedError(
            f"{what} has sparse gradients only for shards in the order of ranks, found "
            f"{weight.sharding_spec()}. Use sparse=False, or reshard(spec) first."
        )
    if max_norm is not None and not norm_type > 0:
        raise ArgumentError(f"{what}: norm_type is a positive number, found {norm_type}.")
    padding = _row(padding_idx, weight, what)
    return Lookup(what, weight, split, padding, max_norm, norm_type, by_frequency, sparse)


def _row(padding_idx: int | None, weight: ShardedTensor, what: str) -> int | None:
    num_rows = weight._tiling.shape[0]
    if padding_idx is None:
        return None
    if not -num_rows <= padding_idx < num_rows:
        raise ArgumentError(
            f"{what}: padding_idx={padding_idx} is not a row of a table of {num_rows} rows."
        )
    return padding_idx % num_rows


def _check_mode(
    what: str, mode: str, weights: torch.Tensor | None, scale_grad_by_freq: bool, sparse: bool
) -> None:
    if mode not in MODES:
        raise ArgumentError(f"{what}: mode is one of {', '.join(MODES)}; found {mode!r}.")
    if weights is not None and mode != "sum":
        raise UnsupportedError(f"{what}: per_sample_weights go with mode='sum', found {mode!r}.")
    if mode == "max" and scale_grad_by_freq:
        raise ArgumentError(f"{what}: mode='max' has no scale_grad_by_freq, as in torch.")
    if mode == "max" and sparse:
        raise ArgumentError(f"{what}: mode='max' has no sparse gradients, as in torch.")


# The results' shapes, for compiled graphs.


def _rows_of(call: LayerCall, weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return weight.new_empty((*input.shape, call.tiling.shape[1]))


def _bags_of(
    call: LayerCall,
    weight: torch.Tensor,
    input: torch.Tensor,
    offsets: torch.Tensor | None = None,
    per_sample_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    num_bags = input.shape[0]
    if offsets is not None:
        num_bags = offsets.shape[0] - int(call.options["include_last_offset"])
    return weight.new_empty((num_bags, call.tiling.shape[1]))


_EMBEDDING = declare("embedding", embedding, _rows_of)
_EMBEDDING_BAG = declare("embedding_bag", embedding_bag, _bags_of)


Handler = TypeVar("Handler", bound=Callable[..., Any])


def custom_sharded_op_impl(func: Any) -> Callable[[Handler], Handler]:
    """Run a function of your own when `func` of torch meets a ShardedTensor.

    It is called as `handler(types, args, kwargs, process_group)`. A later registration replaces an
    earlier one.

    >>> from shardwise.shard import custom_sharded_op_impl
    >>> @custom_sharded_op_impl(torch.linalg.svdvals)
    ... def largest_first(types, args=(), kwargs=None, process_group=None):
    ...     return torch.linalg.svdvals(args[0].full_tensor(), **kwargs)
    """

    def register(handler: Handler) -> Handler:
        functions[func] = _caller(handler, "custom_sharded_op_impl")
        return handler

    return register


def custom_sharding_spec_op(sharding_spec_class: type, func: Any) -> Callable[[Handler], Handler]:
    """`custom_sharded_op_impl` for tensors whose spec is of one class; it comes before the other.

    >>> from shardwise.shard import EnumerableShardingSpec, custom_sharding_spec_op
    >>> @custom_sharding_spec_op(EnumerableShardingSpec, torch.linalg.svdvals)
    ... def svdvals(types, args, kwargs, process_group):
    ...     return torch.linalg.svdvals(args[0].full_tensor(), **kwargs)
    """
    if not (
        isinstance(sharding_spec_class, type) and issubclass(sharding_spec_class, ShardingSpec)
    ):
        raise ArgumentError(
            "custom_sharding_spec_op takes a class of sharding specs, found "
            f"{sharding_spec_class!r}."
        )

    def register(handler: Handler) -> Handler:
        made = _caller(handler, "custom_sharding_spec_op")
        spec_functions.setdefault(func, {})[sharding_spec_class] = made
        return handler

    return register


def _caller(handler: Any, asked: str) -> Callable[..., Any]:
    """Calls a user's function as torch does."""
    if not callable(handler):
        raise ArgumentError(f"{asked} takes a function, found {handler!r}.")
    signature = inspect.signature(handler)
    try:
        signature.bind((), (), {}, None)
    except TypeError as error:
        raise ArgumentError(
            f"{asked} expects signature (types, args, kwargs, process_group); "
            f"{getattr(handler, '__name__', handler)} has {signature}."
        ) from error

    def run(_: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return handler(types, args, kwargs, first_sharded(args, kwargs).process_group)

    return run


def _for_local_batch(ours: Callable[..., Any]) -> Callable[..., Any]:
    """Our function for a plain input, torch's for a DTensor."""
    signature = inspect.signature(ours)

    def run(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        sharded = isinstance(given["weight"], ShardedTensor) or ours is linear
        if isinstance(given["input"], DTensor) or not sharded:
            return func(*args, **kwargs)
        return ours(**given)

    return run


def _equal(_: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return _compare(torch.equal, *args, **kwargs)


def _allclose(_: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return _compare(torch.allclose, *args, **kwargs)


def _compare(fn: Any, input: Any, other: Any, *options: Any, **named: Any) -> bool:
    """Whether two sharded tensors agree on every rank; `other` is resharded if need be."""
    for x in (input, other):
        if not isinstance(x, ShardedTensor):
            raise ArgumentError(
                f"torch.{fn.__name__} compares a ShardedTensor with another one, found "
                f"{type(x).__name__}. Use full_tensor() to compare with a plain tensor."
            )
    if input.shape != other.shape or (fn is torch.equal and input.dtype != other.dtype):
        return False
    tiling = input._tiling
    theirs = other if other._tiling is tiling else other.resharded(tiling.spec)

    def same(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tensor([fn(a, b, *options, **named)], dtype=torch.uint8, device=a.device)

    answers = each_rank(tiling.grid, same, input._local.detach(), theirs._local.detach())
    with because(fn, implicit=False):
        joint = collectives.all_reduce(answers, "min", tiling.grid, 0)
    return bool(agreed(joint).item())


def _over_all(ours: Callable[..., Any]) -> Callable[..., Any]:
    """Our reduction of all values for an unbacked tensor, torch's elsewhere."""

    def run(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1 and kwargs.keys() <= {"dtype"} and dispatch.is_unbacked(args[0]):
            return ours(args[0], **kwargs)
        return func(*args, **kwargs)

    return run


def _new_tensor(_: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor of the same dtype; torch's own fails on the dispatch key of DTensors."""
    like, data = args
    return torch.tensor(data, **({"dtype": like.dtype, "device": like.device} | kwargs))


functions.update(
    {
        F.embedding: _for_local_batch(embedding),
        F.embedding_bag: _for_local_batch(embedding_bag),
        F.linear: _for_local_batch(linear),
        torch.sum: _over_all(dispatch.summed),
        torch.Tensor.sum: _over_all(dispatch.summed),
        torch.mean: _over_all(dispatch.mean),
        torch.Tensor.mean: _over_all(dispatch.mean),
        torch.Tensor.new_tensor: _new_tensor,
        torch.equal: _equal,
        torch.Tensor.equal: _equal,
        torch.allclose: _allclose,
        torch.Tensor.allclose: _allclose,
    }
)
