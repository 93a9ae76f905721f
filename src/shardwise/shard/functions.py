"""Functions of torch with code of their own for sharded tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn import functional as F

from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError
from shardwise.shard import unbacked
from shardwise.shard.lookup.functions import embedding, embedding_bag
from shardwise.shard.lookup.linear import linear
from shardwise.shard.spec import ShardingSpec
from shardwise.shard.tensor import ShardedTensor, first_sharded, functions, spec_functions
from shardwise.simulation.parts import agreed
from shardwise.simulation.ranks import each_rank

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
        if len(args) == 1 and kwargs.keys() <= {"dtype"} and unbacked.is_unbacked(args[0]):
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
        torch.sum: _over_all(unbacked.summed),
        torch.Tensor.sum: _over_all(unbacked.summed),
        torch.mean: _over_all(unbacked.mean),
        torch.Tensor.mean: _over_all(unbacked.mean),
        torch.Tensor.new_tensor: _new_tensor,
        torch.equal: _equal,
        torch.Tensor.equal: _equal,
        torch.allclose: _allclose,
        torch.Tensor.allclose: _allclose,
    }
)
