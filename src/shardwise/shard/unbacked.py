"""Sharded tensors whose size a graph learns when it runs.

Note [Tilings to come]
What a plan lays out is as long as what all ranks put out together. While a compiler goes through
the program that is a symbol, which may have no value yet. Then a sharded tensor has a tiling to
come: its spec and a symbolic shape. What it holds is this rank's block, whatever the tiling will be
called (see Note [Natural, permuted and loose tilings]). Torch finds a symbol without a value only
as the size of a tensor inside: so there is one, the `extent`, as long as the whole is. When the
code runs, the shape has come, and the tensor is put out as any other.

Meanwhile values can be worked on where they are: elementwise, and summed up to one; or handed on as
the ranks' blocks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from shardwise._torch.pytree import tree_flatten, tree_map_only, tree_unflatten
from shardwise.core.layout import Layout, contiguous_stride, make_layout
from shardwise.core.mesh import Grid
from shardwise.core.placements import Partial
from shardwise.core.placements import Shard as ShardPlacement
from shardwise.core.sizes import Size, unrecorded
from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import UnsupportedError
from shardwise.shard.moves import with_spec
from shardwise.shard.spec import ChunkShardingSpec, ShardingSpec
from shardwise.shard.tiling import blocks_of, cut_whole, held_blocks, make_tiling
from shardwise.simulation.parts import from_parts, parts_of, sized
from shardwise.simulation.ranks import localize

if TYPE_CHECKING:
    from shardwise.shard.tensor import ShardedTensor


# Ops that do the same to every value.

aten = torch.ops.aten

#: Such ops that torch does not tag as pointwise.
_EACH_VALUE = {
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
    aten._to_copy.default,
    aten.lerp_.Scalar,
    aten.lerp_.Tensor,
}


@functools.lru_cache(maxsize=1024)
def is_elementwise(op: Any) -> bool:
    return op in _EACH_VALUE or torch.Tag.pointwise in getattr(op, "tags", ())


@dataclass(frozen=True, slots=True)
class UnbackedSpec:
    """What is known of a tiling to come: the part that is the same for all sizes."""

    spec: ShardingSpec
    grid: Grid


@dataclass(frozen=True, slots=True, eq=False)
class UnbackedTiling:
    """See Note [Tilings to come]. Whatever else a tiling has is an error."""

    known: UnbackedSpec
    shape: tuple[Size, ...]
    extent: torch.Tensor

    natural = False
    blocks = None

    @property
    def spec(self) -> ShardingSpec:
        return self.known.spec

    @property
    def grid(self) -> Grid:
        return self.known.grid

    def layout(self, dtype: torch.dtype) -> Layout:
        """Not how it is held: what a layout is asked for besides."""
        stride = contiguous_stride(self.shape)
        return make_layout(self.grid, (ShardPlacement(0),), self.shape, stride, dtype)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _not_yet(f"{name} of the tiling", self)


def check_has_come(x: Any, asked: str) -> None:
    if has_tiling_to_come(x):
        raise _not_yet(asked, x._tiling)


def _not_yet(asked: Any, tiling: UnbackedTiling) -> UnsupportedError:
    return UnsupportedError(
        f"{asked} in compiled code, of an output that is laid out as {tiling.spec}: how it is cut "
        "depends on what other ranks put out. It takes elementwise ops, sums and means; do the "
        "rest outside torch.compile, or use return_local_tensor."
    )


def has_one_block(spec: ShardingSpec) -> bool:
    """Whether every rank has one block, however large the tensor is."""
    if not isinstance(spec, ChunkShardingSpec):
        return False
    ranks = [place.rank for place in spec.placements]
    return len(ranks) == len(set(ranks))


# -- between graphs and programs -----------------------------------------------------------------


def unflattened(kind: type[ShardedTensor], inner: Any, context: Any, shape: Any) -> ShardedTensor:
    """The tensor out of what a graph has: with a tiling where there are values."""
    known, roster = context.tiling, context.flat.roster
    *parts, extent = inner.values()
    local = from_parts(parts, roster)
    if type(extent) is not torch.Tensor:
        return over(kind, local, UnbackedTiling(known, tuple(shape), extent), context)
    tiling = make_tiling(known.spec, tuple(map(int, shape)), known.grid)
    return kind.over(held_blocks(tiling, local), tiling, like=context)


def over(
    kind: type[ShardedTensor], local: torch.Tensor, tiling: UnbackedTiling, like: Any
) -> ShardedTensor:
    """A tensor with a tiling to come out of the ranks' blocks; `like` has its grad_reduction."""
    # The part of a tiling that it asks for is there.
    return unrecorded(kind.over, local, tiling, None, like)


def new_extent(like: torch.Tensor, length: Size) -> torch.Tensor:
    return torch.empty(length, dtype=torch.uint8, device=like.device)


def as_tangent(x: Any, kind: type[ShardedTensor], context: Any) -> ShardedTensor:
    """A gradient from a program, as the graph expects one of a tensor with a tiling to come."""
    known: UnbackedSpec = context.tiling
    tiling = make_tiling(known.spec, tuple(x.shape), known.grid)
    if type(x) is DTensor and all(p.is_replicate() for p in x.placements):
        held = cut_whole(x._local, tiling)
    else:
        held = with_spec(x, kind).reshard(known.spec)._local
    blocks: Any = blocks_of(tiling, held)
    if context.flat.roster is not None:
        blocks = blocks.held_like(context.flat.roster)
    extent = new_extent(blocks, tiling.shape[0])
    return over(kind, blocks, UnbackedTiling(known, tiling.shape, extent), context)


# -- ops, while tracing --------------------------------------------------------------------------


def dispatch(
    kind: type[ShardedTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an op of which some operands have a tiling to come."""
    leaves, tree = tree_flatten((args, kwargs))
    first = next(x for x in leaves if has_tiling_to_come(x))
    tags = getattr(func, "tags", ())
    if not is_elementwise(func) or torch.Tag.nondeterministic_seeded in tags:
        raise _not_yet(func, first._tiling)
    locals_ = [x if not isinstance(x, torch.Tensor) else local_of(x, first, func) for x in leaves]
    new_args, new_kwargs = tree_unflatten(locals_, tree)
    result = func(*new_args, **new_kwargs)
    if func._schema.is_mutable:
        return args[0]

    return tree_map_only(
        torch.Tensor, lambda local: over(kind, local, first._tiling, first), result
    )


def has_tiling_to_come(x: Any) -> bool:
    return type(getattr(x, "_tiling", None)) is UnbackedTiling


def local_of(x: Any, like: Any, asked: Any) -> torch.Tensor:
    """The blocks of an operand that lies as `like` does, or the one value that it consists of."""
    tiling: UnbackedTiling = like._tiling
    if has_tiling_to_come(x) and x._tiling.known == tiling.known:
        return x._local
    if not x.dim() and not isinstance(x, DTensor):
        return x
    if not x.dim() and all(p.is_replicate() for p in x.placements):
        return x._local
    raise _not_yet(f"{asked} of it and {type(x).__name__} of shape {tuple(x.shape)},", tiling)


class BlockToCome(UntracedFunction):
    """The blocks as plain tensors; see `moves.Block`."""

    @staticmethod
    def forward(ctx: Any, x: ShardedTensor) -> torch.Tensor:
        ctx.like = x
        local: Any = x._local.detach()
        shapes = [tuple(part.shape) for part in parts_of(local)]
        if any(shape != shapes[0] for shape in shapes[1:]):
            raise UnsupportedError(one_size(f"local_tensor() of {x.sharding_spec()}"))
        return sized(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.like
        return over(type(x), localize(x._tiling.grid, grad), x._tiling, x)


def one_size(asked: str) -> str:
    """What a simulated world cannot do in compiled code."""
    return (
        f"{asked}, of another size on each simulated rank, in compiled code: one graph cannot have "
        "a size per rank. Compile without fullgraph=True, or choose a spec that gives every rank "
        "as much."
    )


class SumToCome(UntracedFunction):
    """The sum of all values. The gradient of torch's own would be expanded to the whole shape."""

    @staticmethod
    def forward(ctx: Any, x: ShardedTensor, dtype: torch.dtype | None) -> DTensor:
        ctx.like = x
        local = x._local.detach().sum(dtype=dtype)
        layout = make_layout(x._tiling.grid, (Partial("sum"),), (), (), local.dtype)
        return DTensor._wrap(local, layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x = ctx.like
        value = local_of(grad, x, "The gradient of a sum")
        return over(type(x), torch.ones_like(x._local) * value.to(x.dtype), x._tiling, x), None


def summed(x: ShardedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return SumToCome.apply(x, dtype)


def mean(x: ShardedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return summed(x, dtype) / x.numel()
