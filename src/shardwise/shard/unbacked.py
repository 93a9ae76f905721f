"""Sharded tensors whose size is data-dependent when compiled: what they are, and their few ops."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from shardwise._torch.functions import tree_flatten, tree_map_only, tree_unflatten
from shardwise.core.layout import Layout, contiguous_stride, make_layout
from shardwise.core.mesh import Grid
from shardwise.core.placements import Partial
from shardwise.core.placements import Shard as ShardPlacement
from shardwise.core.sizes import Size, unrecorded
from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import UnsupportedError
from shardwise.shard.moves import is_replicated, sharded_like
from shardwise.shard.spec import ChunkShardingSpec, ShardingSpec
from shardwise.shard.tiling import local_of_shards, make_tiling, shards_of
from shardwise.simulation.ranks import from_parts, localize, parts_of, sized

if TYPE_CHECKING:
    from shardwise.shard.tensor import ShardedTensor

aten = torch.ops.aten

# Note [Unbacked tilings]
# An output that a plan lays out is as long as the outputs of all ranks together. While a compiler
# traces, that length is an unbacked symbol. The sharded tensor then has an `UnbackedTiling`: its
# spec and a symbolic shape. Its local tensor is this rank's shard, whatever the tiling turns out to
# be (see Note [Natural, permuted and loose tilings]). Torch tracks an unbacked symbol only as the
# size of an inner tensor: the `extent`, an inner tensor as long as the whole one. When the code
# runs, the shape is known, and the tensor gets an ordinary tiling.
#
# Until then a sharded tensor supports elementwise ops, sums and means, and returns its ranks'
# shards.


#: Elementwise ops that torch does not tag as pointwise.
_ELEMENTWISE = {
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.full_like.default,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.ones_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
    aten._to_copy.default,
    aten.lerp_.Scalar,
    aten.lerp_.Tensor,
}


@functools.lru_cache(maxsize=1024)
def is_elementwise(op: Any) -> bool:
    return op in _ELEMENTWISE or torch.Tag.pointwise in getattr(op, "tags", ())


@dataclass(frozen=True, slots=True)
class UnbackedSpec:
    """The part of an unbacked tiling that does not depend on sizes."""

    spec: ShardingSpec
    grid: Grid


@dataclass(frozen=True, slots=True, eq=False)
class UnbackedTiling:
    """See Note [Unbacked tilings]. All other attributes of a tiling raise."""

    known: UnbackedSpec
    shape: tuple[Size, ...]
    extent: torch.Tensor

    natural = False
    split = None

    @property
    def spec(self) -> ShardingSpec:
        return self.known.spec

    @property
    def grid(self) -> Grid:
        return self.known.grid

    def layout(self, dtype: torch.dtype) -> Layout:
        """For shape, dtype and mesh only: the placement is not that of the local tensor."""
        stride = contiguous_stride(self.shape)
        return make_layout(self.grid, (ShardPlacement(0),), self.shape, stride, dtype)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unsupported(f"{name} of the tiling", self)


def check_backed(x: Any, asked: str) -> None:
    if is_unbacked(x):
        raise _unsupported(asked, x._tiling)


def _unsupported(asked: Any, tiling: UnbackedTiling) -> UnsupportedError:
    return UnsupportedError(
        f"{asked} in compiled code, of an output that is laid out as {tiling.spec}: its size "
        "depends on what other ranks put out. It takes elementwise ops, sums and means; do the "
        "rest outside torch.compile, or use return_local_tensor."
    )


def has_one_shard(spec: ShardingSpec) -> bool:
    """Whether every rank has one shard, whatever the size of the tensor."""
    if not isinstance(spec, ChunkShardingSpec):
        return False
    ranks = [place.rank for place in spec.placements]
    return len(ranks) == len(set(ranks))


def unflattened(kind: type[ShardedTensor], inner: Any, context: Any, shape: Any) -> ShardedTensor:
    """The tensor from a graph's inner tensors; if those have values, with an ordinary tiling."""
    known, roster = context.tiling, context.flat.roster
    *parts, extent = inner.values()
    local = from_parts(parts, roster)
    if type(extent) is not torch.Tensor:
        return make_unbacked(kind, local, UnbackedTiling(known, tuple(shape), extent), context)
    tiling = make_tiling(known.spec, tuple(map(int, shape)), known.grid)
    return kind.over(local_of_shards(tiling, local), tiling, like=context)


def make_unbacked(
    kind: type[ShardedTensor], local: torch.Tensor, tiling: UnbackedTiling, like: Any
) -> ShardedTensor:
    """An unbacked tensor from the ranks' shards, with the grad_reduction of `like`."""
    return unrecorded(kind.over, local, tiling, None, like)


def new_extent(like: torch.Tensor, length: Size) -> torch.Tensor:
    return torch.empty(length, dtype=torch.uint8, device=like.device)


def as_tangent(x: Any, kind: type[ShardedTensor], context: Any) -> ShardedTensor:
    """An eager gradient, as the graph expects that of an unbacked tensor."""
    known: UnbackedSpec = context.tiling
    tiling = make_tiling(known.spec, tuple(x.shape), known.grid)
    shards: Any = shards_of(tiling, sharded_like(x, tiling, kind)._local)
    if context.flat.roster is not None:
        shards = shards.held_like(context.flat.roster)
    extent = new_extent(shards, tiling.shape[0])
    return make_unbacked(kind, shards, UnbackedTiling(known, tiling.shape, extent), context)


def dispatch_unbacked(
    kind: type[ShardedTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an op with unbacked operands, while tracing."""
    leaves, tree = tree_flatten((args, kwargs))
    first = next(x for x in leaves if is_unbacked(x))
    tags = getattr(func, "tags", ())
    if not is_elementwise(func) or torch.Tag.nondeterministic_seeded in tags:
        raise _unsupported(func, first._tiling)
    locals_ = [
        x if not isinstance(x, torch.Tensor) else matching_local(x, first, func) for x in leaves
    ]
    new_args, new_kwargs = tree_unflatten(locals_, tree)
    result = func(*new_args, **new_kwargs)
    if func._schema.is_mutable:
        return args[0]

    return tree_map_only(
        torch.Tensor, lambda local: make_unbacked(kind, local, first._tiling, first), result
    )


def is_unbacked(x: Any) -> bool:
    return type(getattr(x, "_tiling", None)) is UnbackedTiling


def matching_local(x: Any, like: Any, asked: Any) -> torch.Tensor:
    """The local tensor of an operand that is laid out like `like`, or of a scalar."""
    tiling: UnbackedTiling = like._tiling
    if is_unbacked(x) and x._tiling.known == tiling.known:
        return x._local
    if not x.dim() and not isinstance(x, DTensor):
        return x
    if not x.dim() and is_replicated(x):
        return x._local
    raise _unsupported(f"{asked} of it and {type(x).__name__} of shape {tuple(x.shape)},", tiling)


class UnbackedToLocal(UntracedFunction):
    """The shards as plain tensors; see `moves.ToLocalShard`."""

    @staticmethod
    def forward(ctx: Any, x: ShardedTensor) -> torch.Tensor:
        ctx.like = x
        local: Any = x._local.detach()
        shapes = [tuple(part.shape) for part in parts_of(local)]
        if any(shape != shapes[0] for shape in shapes[1:]):
            raise UnsupportedError(size_mismatch_text(f"local_tensor() of {x.sharding_spec()}"))
        return sized(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.like
        return make_unbacked(type(x), localize(x._tiling.grid, grad), x._tiling, x)


def size_mismatch_text(asked: str) -> str:
    """The error text for sizes that differ between simulated ranks in compiled code."""
    return (
        f"{asked}, of another size on each simulated rank, in compiled code: one graph cannot have "
        "a size per rank. Compile without fullgraph=True, or choose a spec that gives every rank "
        "the same size."
    )


class UnbackedSum(UntracedFunction):
    """The sum of all values. Torch's own would expand the gradient to the whole shape."""

    @staticmethod
    def forward(ctx: Any, x: ShardedTensor, dtype: torch.dtype | None) -> DTensor:
        ctx.like = x
        local = x._local.detach().sum(dtype=dtype)
        layout = make_layout(x._tiling.grid, (Partial("sum"),), (), (), local.dtype)
        return DTensor._wrap(local, layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x = ctx.like
        value = matching_local(grad, x, "The gradient of a sum")
        spread = torch.ones_like(x._local) * value.to(x.dtype)
        return make_unbacked(type(x), spread, x._tiling, x), None


def summed(x: ShardedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return UnbackedSum.apply(x, dtype)


def mean(x: ShardedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return summed(x, dtype) / x.numel()
