"""Collections in compiled code.

Note [Collections in compiled code]
What a rank sends whom depends on its ids. What it gets does not: a row for each of its bags. So a
graph holds a lookup as one op, `look_up_tables`, which runs what eager code does when it runs: the
same collectives, and for a bad batch the same error on all ranks.

The tables are no inputs of the graph. The op finds the collection by a number, the value of a small
tensor that is one; and since that requires grad, torch calls backward. Backward is an op too, and
runs what eager code does: it updates rows, or adds to the `.grad` of the parameters, sparse or not.
So no compiled code depends on where the tables lie, on what is trained, or on gradients that wait.

What eager autograd keeps for backward lives as long as the number that the first op puts out, which
compiled code saves for backward.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.core.sources import source_digest
from shardwise.core.untraced import UntracedFunction, untraced
from shardwise.core.world import current_world, world_caches
from shardwise.embedding.jagged import Jagged
from shardwise.errors import ShardwiseError, UnsupportedError
from shardwise.exchange.effects import check_place, install, with_autograd
from shardwise.simulation.local_tensor import collective_handlers
from shardwise.simulation.parts import (
    from_parts,
    held_like,
    is_per_rank,
    on_rank,
    parts_of,
    roster_of,
)
from shardwise.simulation.roster import Roster, make_roster

if TYPE_CHECKING:
    from shardwise.embedding.collection import _Collection

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    "collection(Tensor handle, str form, str code, str[] features, str? problem, SymInt[] sizes, "
    "Tensor values, Tensor lengths, Tensor? first, Tensor? weights, Tensor? batch_sizes) "
    "-> Tensor[]"
)
_library.define(
    "look_up_tables(Tensor handle, str call, bool[] needs, SymInt[] sizes, Tensor[] given) "
    "-> Tensor[]"
)
_library.define(
    "look_up_tables_backward(Tensor handle, str call, bool[] needs, Tensor number, "
    "bool[] present, Tensor[] grads, Tensor[] weights) -> Tensor[]"
)
_ops: Any = torch.ops.shardwise

#: The size of a result that is known only when ids are.
NOT_KNOWN = -1
#: Where compiled code expects the first number of a tensor.
ALIGNED_BYTES = 16
#: Collections by number.
_collections: weakref.WeakValueDictionary[int, _Collection] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def enroll(collection: _Collection) -> torch.Tensor:
    """A handle: what stands for the collection in a graph."""
    number = next(_numbers)
    _collections[number] = collection
    # Of one dim: what has none, torch.compile takes for a number.
    return torch.tensor([number], dtype=torch.float64, device="cpu", requires_grad=True)


def form_of(
    dims: Sequence[int], dtype: torch.dtype, device: torch.device, ranks: Sequence[int] | None
) -> str:
    """What is known of results: their widths, and the ranks of a simulated world that get one."""
    name = str(dtype).removeprefix("torch.")
    return json.dumps(
        {"dims": dims, "dtype": name, "device": device.type, "ranks": ranks and list(ranks)}
    )


# -- while tracing -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, but for its tensors. Its text is the same in every process."""

    form: dict[str, Any]
    features: tuple[str, ...]
    problem: str | None
    #: Names of the tensors of the batch, and who holds which part: None for a plain tensor.
    given: dict[str, Roster | None]

    def text(self) -> str:
        given = {name: r and (r.ranks, r.index) for name, r in self.given.items()}
        return json.dumps([self.form, self.features, self.problem, given, source_digest()])

    def whole(self) -> Roster | None:
        """Each rank has a part of its own."""
        ranks = self.form["ranks"]
        if ranks is None:
            return None
        return make_roster(current_world(), tuple(ranks), tuple(range(len(ranks))))

    def batch(self, parts: Sequence[torch.Tensor]) -> Jagged:
        left = iter(parts)
        tensors: dict[str, Any] = {name: _joined(left, r) for name, r in self.given.items()}
        first = tensors.pop("first", None)
        batch = Jagged(self.features, tensors.pop("values"), **tensors)
        batch.first, batch.problem = first, self.problem
        return batch


@functools.lru_cache(maxsize=1024)
def _read_call(text: str) -> _Call:
    form, features, problem, given, _ = json.loads(text)
    rosters = {
        name: spelled and make_roster(current_world(), *map(tuple, spelled))
        for name, spelled in given.items()
    }
    return _Call(form, tuple(features), problem, rosters)


world_caches.append(_read_call.cache_clear)


def _parts(x: torch.Tensor) -> list[torch.Tensor]:
    return list(parts_of(x))


def _joined(parts: Any, roster: Roster | None) -> torch.Tensor:
    num = 1 if roster is None else roster.num_parts
    return from_parts([next(parts) for _ in range(num)], roster, sized=True)


@untraced
def _traced(
    handle: torch.Tensor,
    form: str,
    code: str,
    features: Sequence[str],
    problem: str | None,
    sizes: Sequence[int],
    values: torch.Tensor,
    lengths: torch.Tensor,
    first: torch.Tensor | None,
    weights: torch.Tensor | None,
    batch_sizes: torch.Tensor | None,
) -> list[torch.Tensor]:
    if type(handle) is torch.Tensor and not torch.compiler.is_exporting():  # nothing is traced
        own = Jagged(features, values, lengths=lengths, weights=weights, batch_sizes=batch_sizes)
        own.first, own.problem = first, problem
        return list(_collections[int(handle)]._run(own)[1])
    check_place("a collection", "")
    tensors = {"values": values, "lengths": lengths, "first": first, "batch_sizes": batch_sizes}
    given = {name: x for name, x in tensors.items() if x is not None}
    # It stands last: the only one that may have a gradient.
    given |= {} if weights is None else {"weights": weights}
    rosters = {name: roster_of(x) for name, x in given.items()}
    call = _Call(json.loads(form), tuple(features), problem, rosters)
    simulated = call.form["ranks"] is not None
    if weights is not None and weights.requires_grad and simulated and not rosters["weights"]:
        raise UnsupportedError(
            "Weights of ids that require grad and are one plain tensor on all ranks, in compiled "
            "code: their gradient differs between ranks. Give a LocalTensor, one tensor per rank."
        )
    trains = torch.is_grad_enabled()
    return list(_TracedLookup.apply(handle, call, sizes, trains, weights, *given.values()))


class _TracedLookup(UntracedFunction):
    """`apply(handle, call, sizes, trains, weights, *given)`; see the note at the top."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: torch.Tensor,
        call: _Call,
        sizes: Sequence[int],
        trains: bool,
        weights: torch.Tensor | None,
        *given: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        needs = [trains and ctx.needs_input_grad[place] for place in (0, 4)]
        parts = [part for x in given for part in _parts(x)]
        *found, number = _ops.look_up_tables(handle, call.text(), needs, sizes, parts)
        ctx.call, ctx.needs, ctx.num_given = call, needs, len(given)
        ctx.save_for_backward(handle, number, *([weights] if needs[1] else []))
        left, whole = iter(found), call.whole()
        return tuple(_unsized(_joined(left, whole)) for _ in sizes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call: _Call = ctx.call
        handle, number, *weights = ctx.saved_tensors
        whole = call.whole()
        held = [g if g is None or whole is None else _held_like(g, whole) for g in grads]
        parts = [part for g in held if g is not None for part in _parts(g)]
        own = [part for x in weights for part in _parts(x)]
        present = [g is not None for g in held]
        start, *found = _ops.look_up_tables_backward(
            handle, call.text(), ctx.needs, number, present, parts, own
        )
        of_weights = _unsized(_joined(iter(found), call.given["weights"])) if weights else None
        return start, None, None, None, of_weights, *([None] * ctx.num_given)


def _unsized(x: torch.Tensor) -> torch.Tensor:
    return from_parts(parts_of(x), roster_of(x))


def _held_like(grad: torch.Tensor, whole: Roster) -> torch.Tensor:
    if is_per_rank(grad):
        return held_like(grad, whole)
    return from_parts([grad] * whole.num_parts, whole)


_library.impl("collection", _traced, "CompositeImplicitAutograd")
# Without autograd a LocalTensor is asked first.
collective_handlers[_ops.collection.default] = lambda func, args, kwargs: _traced(*args, **kwargs)


# -- what the ops do -----------------------------------------------------------------------------


class _Kept(bytearray):
    """What eager autograd needs for backward; the memory of the number that it goes by."""

    outputs: tuple[torch.Tensor, ...]
    weights: torch.Tensor | None


_kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()


def _keep(outputs: tuple[torch.Tensor, ...], weights: torch.Tensor | None) -> torch.Tensor:
    """A number; what is kept is forgotten when nobody holds it any more."""
    number = next(_numbers)
    kept = _Kept(number.to_bytes(8, sys.byteorder))
    kept.outputs, kept.weights = outputs, weights
    _kept[number] = kept
    return torch.frombuffer(kept, dtype=torch.int64)


@untraced
def _forward(
    handle: torch.Tensor,
    text: str,
    needs: Sequence[bool],
    sizes: Sequence[int],
    given: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    call = _read_call(text)
    collection = _collections[int(handle)]
    batch = call.batch(given)
    weights = batch.weights
    if needs[1]:
        assert weights is not None, "weights that need a gradient are there"
        weights = batch.weights = weights.detach().requires_grad_()
    with with_autograd(any(needs)):
        _, outputs = collection._run(batch)
    found = _apart([part for out in outputs for part in _per_rank(out.detach(), call)])
    number = _keep(outputs, weights) if any(needs) else _no_number()
    return [*found, number]


def _per_rank(out: torch.Tensor, call: _Call) -> list[torch.Tensor]:
    whole = call.whole()
    if whole is None:
        return [out]
    parts = [on_rank(out, rank) for rank in whole.ranks]
    if any(part.shape != parts[0].shape for part in parts):
        raise UnsupportedError(
            f"In a simulated world one graph cannot have a size per rank, and ranks get results of "
            f"shapes {[tuple(part.shape) for part in parts]}. Give batches of one size, or leave "
            "the collection uncompiled."
        )
    return parts


def _apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As compiled code expects the results of an op: contiguous, aligned, each in its own memory.

    Rows of several features may have come in one message.
    """
    found, seen = [], set[int]()
    for x in tensors:
        memory = x.untyped_storage()._cdata
        aligned = x.storage_offset() * x.element_size() % ALIGNED_BYTES == 0
        if memory in seen or not aligned or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        seen.add(memory)
        found.append(x)
    return found


@untraced
def _backward(
    handle: torch.Tensor,
    text: str,
    needs: Sequence[bool],
    number: torch.Tensor,
    present: Sequence[bool],
    grads: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    call, kept = _read_call(text), _kept.get(int(number))
    if kept is None:
        raise ShardwiseError(
            "A compiled collection does not find what its forward kept for backward: it lives as "
            "long as what torch saved, and that was copied (a hook for saved tensors, such as "
            "save_on_cpu in pinned memory). Leave the collection out of those."
        )
    left, whole = iter(grads), call.whole()
    pairs = [
        (out, _joined(left, whole))
        for out, there in zip(kept.outputs, present, strict=True)
        if there
    ]
    trained = [(out, grad) for out, grad in pairs if out.requires_grad]
    if trained:
        with with_autograd(enabled=False):
            torch.autograd.backward(
                [out for out, _ in trained], [grad for _, grad in trained], retain_graph=True
            )
    results = [torch.zeros_like(handle)]
    if needs[1]:
        assert kept.weights is not None, "weights that need a gradient are there"
        grad, kept.weights.grad = kept.weights.grad, None
        held = torch.zeros_like(kept.weights) if grad is None else grad
        roster = call.given["weights"]
        if roster is not None:
            held = _held_like(held, roster)
        results += [part.clone() for part in _parts(held)]
    return results


def _no_number() -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


# -- what the ops would do: shapes alone ---------------------------------------------------------


def _forward_shapes(
    handle: torch.Tensor,
    text: str,
    needs: Sequence[bool],
    sizes: Sequence[int],
    given: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    form = _read_call(text).form
    dtype = getattr(torch, form["dtype"])
    num_parts = 1 if form["ranks"] is None else len(form["ranks"])
    found = []
    for size, dim in zip(sizes, form["dims"], strict=True):
        num = torch.library.get_ctx().new_dynamic_size() if _is_unknown(size) else size
        found += [
            torch.empty((num, dim), dtype=dtype, device=form["device"]) for _ in range(num_parts)
        ]
    return [*found, _no_number()]


def _is_unknown(size: Any) -> bool:
    return type(size) is int and size == NOT_KNOWN  # a symbol is not asked


def _backward_shapes(
    handle: torch.Tensor,
    text: str,
    needs: Sequence[bool],
    number: torch.Tensor,
    present: Sequence[bool],
    grads: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    of_weights = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in weights]
    return [torch.empty_like(handle), *of_weights]


install(_library, "look_up_tables", _forward, _forward_shapes)
install(_library, "look_up_tables_backward", _backward, _backward_shapes)
