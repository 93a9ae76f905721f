"""Own batches in compiled code.

Note [Sharded modules in compiled code]
What a rank sends whom depends on its ids, and how much others bring is not known before they say
so. Results are not like that: a lookup has a row for each of this rank's ids, a gradient the shape
of this rank's block. (A sparse one has a length that is known when it runs; nothing in the graph
depends on it.) So in a graph each lookup or linear layer is one op, `own_batch`, which does when it
runs what eager code does, collectives included; batches may differ in size between ranks, and a bad
one is the same error on all of them.

The compiler keeps these ops in order, whatever the sizes on a rank: they count as ops with effects
(and `lowering` sees to it that inductor does).

Backward is an op too. It finds what forward has kept by the number that forward put out. Only few
are kept. Where it is gone (forward ran many times before, or backward runs twice) the exchange runs
again; that depends on the order of calls alone, so all ranks do the same.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.core.once import differentiated_once
from shardwise.core.untraced import UntracedFunction
from shardwise.core.world import world_caches
from shardwise.dtensor.row_sparse import RowSparse
from shardwise.dtensor.row_sparse import make as make_row_sparse
from shardwise.exchange.effects import check_place, install, with_autograd
from shardwise.rules.picked_rows import unknown_length
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.traced_call import Call, joined, read_call
from shardwise.simulation.parts import from_parts, held_like, on_rank, one_part, parts_of, roster_of
from shardwise.simulation.roster import Roster

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("own_batch(str call, bool[] needs, Tensor[] held, Tensor[] given) -> Tensor[]")
_library.define(
    "own_batch_(str call, bool[] needs, Tensor(a!)[] held, Tensor(b!)[] out, Tensor[] given) "
    "-> Tensor"
)
_library.define(
    "own_batch_backward(str call, bool[] needs, Tensor number, Tensor[] grads, Tensor[] held, "
    "Tensor[] given) -> Tensor[]"
)
_ops: Any = torch.ops.shardwise

#: What can be exported, beside what is compiled.
INSTEAD = ", or export a module on DTensors (distribute_module)"
#: What to run eagerly, by name: `fn(weight=..., **tensors, **options)`. Filled by those who trace.
eager: dict[str, Callable[..., torch.Tensor]] = {}
#: An empty tensor like one rank's result: `fn(call, what it holds, **its tensors)`.
hollow: dict[str, Callable[..., torch.Tensor]] = {}


def is_traced(x: Any) -> bool:
    """Whether a compiler goes through the program with tensors that have no values."""
    local = x._local
    return type(one_part(local)) is not torch.Tensor


# -- while tracing -------------------------------------------------------------------------------


def traced(
    what: str,
    weight: ShardedTensor,
    options: dict[str, Any],
    **given: torch.Tensor | None,
) -> torch.Tensor:
    """What eager code gives, as one op of a graph."""
    check_place("a sharded module", INSTEAD)
    brought = {name: x for name, x in given.items() if x is not None}
    call = Call(
        what,
        weight._tiling,
        weight.grad_reduction,
        options.get("max_norm") is not None,
        options,
        {name: roster_of(x) for name, x in brought.items()},
        roster_of(weight._local),
        _autocast_dtype(weight._tiling.grid.device_type),
    )
    return TracedOwnBatch.apply(weight, call, torch.is_grad_enabled(), *brought.values())


def _autocast_dtype(device_type: str) -> str | None:
    if not torch.is_autocast_enabled(device_type):
        return None
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


class TracedOwnBatch(UntracedFunction):
    """`apply(weight, call, trains, *given)`; see Note [Sharded modules in compiled code]."""

    @staticmethod
    def forward(
        ctx: Any, weight: ShardedTensor, call: Call, trains: bool, *given: torch.Tensor
    ) -> torch.Tensor:
        wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]]
        needs = [trains and want for want in wanted]
        text, parts = call.text(), [part for x in given for part in parts_of(x)]
        held = parts_of(weight._local)
        if call.writes:
            # The compiler takes no op that writes and returns a list.
            *out, number = _forward_shapes(text, needs, held, parts)
            number = _ops.own_batch_(text, needs, held, out, parts)
        else:
            *out, number = _ops.own_batch(text, needs, held, parts)
        ctx.call, ctx.text, ctx.needs = call, text, needs
        ctx.save_for_backward(weight, number, *given)
        return joined(iter(out), call.whole())

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: Any) -> Any:
        call: Call = ctx.call
        weight, number, *given = ctx.saved_tensors
        whole = call.whole()
        grads = parts_of(held_like(grad, whole))
        parts = [part for x in given for part in parts_of(x)]
        found = iter(
            _ops.own_batch_backward(
                ctx.text, ctx.needs, number, grads, parts_of(weight._local), parts
            )
        )
        for_weight = _weight_gradient(call, weight, found) if ctx.needs[0] else None
        own = [joined(found, whole) if need else None for need in ctx.needs[1:]]
        return for_weight, None, None, *own


def _weight_gradient(
    call: Call, weight: ShardedTensor, found: Iterator[torch.Tensor]
) -> torch.Tensor:
    layout = call.tiling.layout(weight.dtype)
    held = [joined(found, call.whole(), sized=False) for _ in range(2 if call.sparse else 1)]
    if call.sparse:
        rows, values = held
        return make_row_sparse(layout, rows, values)
    return ShardedTensor.over(held[0], call.tiling, layout, like=weight)


# -- what the ops do -----------------------------------------------------------------------------

#: What forward keeps for backward: the result and the leaves it came from, by number.
_kept: OrderedDict[int, tuple[torch.Tensor, list[torch.Tensor]]] = OrderedDict()
_MAX_KEPT = 64
_numbers = itertools.count()
world_caches.append(_kept.clear)


def _run(
    call: Call, needs: Sequence[bool], held: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result of eager code, and its leaves, of which those have a gradient that need one."""
    local = joined(iter(held), call.held, sized=False).detach()
    weight = ShardedTensor.over(local, call.tiling)
    weight.grad_reduction = call.grad_reduction
    tensors = {name: x.detach() for name, x in call.sorted_parts(given).items()}
    leaves = [weight, *tensors.values()]
    for leaf, need in zip(leaves, needs, strict=True):
        leaf.requires_grad_(need)
    with with_autograd(any(needs)), call.autocast():
        out = eager[call.what](weight=weight, **tensors, **call.options)
    return out, leaves


def _forward(
    text: str, needs: Sequence[bool], held: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    call = read_call(text)
    out, leaves = _run(call, needs, held, given)
    number = next(_numbers)
    if any(needs):
        _kept[number] = out, leaves
        if len(_kept) > _MAX_KEPT:
            _kept.popitem(last=False)
    return [*parts_of(apart(out.detach(), call.whole())), torch.tensor(number)]


def _forward_into(
    text: str,
    needs: Sequence[bool],
    held: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
) -> torch.Tensor:
    *found, number = _forward(text, needs, held, given)
    for target, part in zip(out, found, strict=True):
        target.copy_(part)
    return number


def apart(x: torch.Tensor, whole: Roster | None) -> torch.Tensor:
    """`x`, for each rank a tensor of its own."""
    if whole is None:
        return x
    return from_parts([on_rank(x, rank) for rank in whole.ranks], whole)


def _backward(
    text: str,
    needs: Sequence[bool],
    number: torch.Tensor,
    grads: Sequence[torch.Tensor],
    held: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    call = read_call(text)
    known = _kept.pop(int(number), None)
    out, leaves = _run(_again(call), needs, held, given) if known is None else known
    wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
    with with_autograd(enabled=False):
        found = torch.autograd.grad(out, wanted, joined(iter(grads), call.whole()))
    results = []
    for grad in found:
        for local in _held_by(grad):
            results += [part.clone() for part in parts_of(apart(local, call.whole()))]
    return results


def _held_by(grad: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a gradient holds."""
    if isinstance(grad, RowSparse):
        return [grad._rows, grad._local]
    return [grad._local] if isinstance(grad, ShardedTensor) else [grad]


def _again(call: Call) -> Call:
    """The call once more: rows of a maximal norm have been shortened."""
    if not call.writes:
        return call
    return replace(call, options=call.options | {"max_norm": None})


# -- what the ops would do: shapes alone ---------------------------------------------------------


def _each_rank(call: Call, given: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    tensors, whole = call.sorted_parts(given), call.whole()
    if whole is None:
        return [tensors]
    return [{name: on_rank(x, rank) for name, x in tensors.items()} for rank in call.grid.ranks]


def _forward_shapes(
    text: str, needs: Sequence[bool], held: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    call = read_call(text)
    like = hollow[call.what]
    out = [like(call, held[0], **mine) for mine in _each_rank(call, given)]
    return [*out, _no_number()]


def _no_number() -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _backward_shapes(
    text: str,
    needs: Sequence[bool],
    number: torch.Tensor,
    grads: Sequence[torch.Tensor],
    held: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    call = read_call(text)
    results: list[torch.Tensor] = []
    if needs[0] and call.sparse:
        results += _row_shapes(call, held)
    elif needs[0]:
        results += [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in held]
    ranks = _each_rank(call, given)
    for name, need in zip(call.given, needs[1:], strict=True):
        if need:
            results += [
                torch.empty_like(mine[name], memory_format=torch.contiguous_format)
                for mine in ranks
            ]
    return results


def _row_shapes(call: Call, held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Row numbers of each rank, and the values of theirs: how many, the ids of all ranks decide."""
    parts = parts_of(apart(joined(iter(held), call.held), call.whole()))
    rows = [
        torch.empty(unknown_length(part), dtype=torch.int64, device=part.device) for part in parts
    ]
    values = [
        part.new_empty((r.shape[0], part.shape[1])) for r, part in zip(rows, parts, strict=True)
    ]
    return rows + values


for _name, _fn, _fake in (
    ("own_batch", _forward, _forward_shapes),
    ("own_batch_", _forward_into, lambda *_: _no_number()),
    ("own_batch_backward", _backward, _backward_shapes),
):
    install(_library, _name, _fn, _fake)
