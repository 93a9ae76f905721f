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
from shardwise.shard.tensor import ShardedTensor, functions
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
        if not callable(handler):
            raise ArgumentError(f"custom_sharded_op_impl takes a function, found {handler!r}.")

        def run(_: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            first = next(x for x in _tensors(args, kwargs) if isinstance(x, ShardedTensor))
            return handler(types, args, kwargs, first.process_group)

        functions[func] = run
        return handler

    return register


def _tensors(args: Any, kwargs: Any) -> list[Any]:
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        found += value if isinstance(value, (list, tuple)) else [value]
    return found


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
    theirs = other if other._tiling is tiling else other.reshard(tiling.spec)

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
