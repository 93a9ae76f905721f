"""Eager code as one op of a compiled graph.

Note [Effect ops]
What a rank sends to whom depends on values, so such code cannot be taken apart into a graph. An
`EffectOp` puts it into one as it is: the op runs eager code when the graph runs, collectives
included, and a bad batch raises the same error on all ranks as it does there. Who declares one says
how to run it, and which shapes come out. The compiler keeps these ops in the order of the program,
whatever the sizes on a rank: they count as ops with effects (and `lowering` sees to it that
inductor does).

An op of a graph takes tensors, numbers and texts. A call is described by a text that is the same in
every process; a tensor of a simulated world is given as one tensor per rank.

Backward is an op too: it runs eager backward. What that needs lives as long as the number that the
first op put out, which compiled code saves for backward. So nothing is run twice, backward may run
again where the graph is retained, and nothing is left where backward does not come.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch.dispatch import with_autograd
from shardwise.core.code_version import source_digest
from shardwise.core.encode import decode_grid, encode_grid
from shardwise.core.mesh import Grid
from shardwise.core.once import differentiated_once
from shardwise.core.sizes import Size
from shardwise.core.untraced import UntracedFunction, untraced
from shardwise.core.world import world_caches
from shardwise.dtensor.tensor import DTensor
from shardwise.effects.ordering import check_place, install
from shardwise.errors import ShardwiseError
from shardwise.lookup.exchange import ranks_present
from shardwise.ops.lookup.embedding_rules import unknown_length
from shardwise.ops.lookup.row_sparse import RowSparse
from shardwise.simulation.ranks import one_tensor, part_per_rank

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("effect(str call, bool[] needs, SymInt[] sizes, Tensor[] inputs) -> Tensor[]")
_library.define(
    "effect_(str call, bool[] needs, SymInt[] sizes, Tensor(a!)[] written, Tensor(b!)[] out, "
    "Tensor[] inputs) -> Tensor"
)
_library.define(
    "effect_backward(str call, bool[] needs, Tensor number, bool[] present, Tensor[] grads, "
    "SymInt[] sizes) -> Tensor[]"
)
_ops: Any = torch.ops.shardwise

#: Where compiled code expects the first number of a tensor.
ALIGNED_BYTES = 16
_declared: dict[str, EffectOp] = {}


def _unchanged(known: Any, tensors: Any) -> Any:
    return tensors


@dataclass(frozen=True, slots=True)
class EffectOp:
    """Eager code that graphs hold as one op; see Note [Effect ops].

    `known` is what `decode(options, grid)` makes of the options of a call, which JSON can hold.
    """

    name: str
    #: What it is part of, and what can be exported in its place, for errors.
    what: str
    #: `run(known, **inputs)`: the outputs of eager code, under autograd.
    run: Callable[..., Sequence[torch.Tensor]]
    #: `fake(known, sizes, ranks)`: for each rank, given its inputs by name, its empty outputs.
    fake: Callable[
        [Any, Sequence[Size], Sequence[dict[str, Any]]], Sequence[Sequence[torch.Tensor]]
    ]
    instead: str = ""
    decode: Callable[[Any, Grid | None], Any] = lambda options, grid: options
    #: `enter(known, inputs)`: the inputs as `run` takes them, out of local tensors.
    enter: Callable[[Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]] = _unchanged
    #: `gradient(known, input, *local tensors)`: the gradient of a DTensor.
    gradient: Callable[..., torch.Tensor] | None = None
    #: The input that stands for what is no input, such as tables that backward updates: the same on
    #: every rank, with a gradient of zeros, so that torch calls backward.
    handle: str | None = None

    def __post_init__(self) -> None:
        _declared[self.name] = self

    def __call__(
        self,
        grid: Grid | None,
        options: Any,
        inputs: Mapping[str, torch.Tensor | None],
        *,
        sizes: Sequence[Size] = (),
        row_sparse: bool = False,
        writes: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """The outputs, while a compiler traces. `grid` is None on one device.

        `row_sparse`: so is the gradient of the first input. `writes`: to the first input.
        """
        check_place(self.what, self.instead)
        given = {name: x for name, x in inputs.items() if x is not None}
        call = {
            "what": self.name,
            "code": source_digest(),
            "grid": None if grid is None else encode_grid(grid),
            "inputs": {name: _description(_local(x)) for name, x in given.items()},
            "row_sparse": row_sparse,
            "options": options,
        }
        trains = torch.is_grad_enabled()
        return _Effect.apply(json.dumps(call), sizes, writes, trains, *given.values())


def _local(x: Any) -> torch.Tensor:
    return x._local if isinstance(x, DTensor) else x


def _description(x: torch.Tensor) -> tuple[int, str, str]:
    return x.dim(), str(x.dtype).removeprefix("torch."), x.device.type


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, but for its tensors."""

    op: EffectOp
    known: Any
    grid: Grid | None
    #: Number of dims, dtype and device of each input.
    inputs: dict[str, tuple[int, str, str]]
    row_sparse: bool

    def num_parts(self, name: str = "") -> int:
        """How many tensors an input or an output is given as: one per rank present."""
        if self.grid is None or name == self.op.handle:
            return 1
        return len(ranks_present(self.grid))

    def num_pieces(self, name: str) -> int:
        """How many tensors a gradient consists of: one, or row numbers and values."""
        return 2 if self.row_sparse and name == next(iter(self.inputs)) else 1

    def parts(self, x: torch.Tensor, name: str = "") -> list[torch.Tensor]:
        return [x] if self.grid is None or name == self.op.handle else part_per_rank(self.grid, x)

    def joined(
        self, parts: Iterator[torch.Tensor], name: str = "", sized: bool = True
    ) -> torch.Tensor:
        """The next tensor of all ranks; not `sized` where it goes into a distributed one."""
        if self.grid is None or name == self.op.handle:
            return next(parts)
        return one_tensor(self.grid, _next(parts, self.num_parts()), sized=sized)


def _next(items: Iterator[Any], num: int) -> list[Any]:
    return list(itertools.islice(items, num))


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> _Call:
    call = json.loads(text)
    op = _declared[call["what"]]
    grid = None if call["grid"] is None else decode_grid(call["grid"])
    known = op.decode(call["options"], grid)
    return _Call(op, known, grid, call["inputs"], call["row_sparse"])


world_caches.append(_read.cache_clear)


# -- while tracing -------------------------------------------------------------------------------


class _Effect(UntracedFunction):
    """`apply(text, sizes, writes, trains, *inputs)`; see Note [Effect ops]."""

    @staticmethod
    def forward(
        ctx: Any,
        text: str,
        sizes: Sequence[Size],
        writes: bool,
        trains: bool,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        call = _read(text)
        needs = [trains and need for need in ctx.needs_input_grad[4:]]
        per_input = [
            call.parts(_local(x), name) for name, x in zip(call.inputs, inputs, strict=True)
        ]
        first, *others = per_input
        rest = [part for parts in others for part in parts]
        if writes:
            # The compiler takes no op that writes and returns a list.
            *out, number = _forward_shapes(text, needs, sizes, [*first, *rest])
            number = _ops.effect_(text, needs, sizes, first, out, rest)
        else:
            *out, number = _ops.effect(text, needs, sizes, [*first, *rest])
        ctx.text, ctx.needs = text, needs
        needed = [parts for parts, need in zip(per_input, needs, strict=True) if need]
        ctx.sizes = [size for parts in needed for part in parts for size in part.shape]
        # The inputs are saved for what traces alone: the graph has no use for their values.
        ctx.save_for_backward(number, *inputs)
        left = iter(out)
        return tuple(call.joined(left) for _ in range(len(out) // call.num_parts()))

    @staticmethod
    @differentiated_once("an exchange between ranks")
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call = _read(ctx.text)
        number, *inputs = ctx.saved_tensors
        parts = [part for grad in grads if grad is not None for part in call.parts(grad)]
        present = [grad is not None for grad in grads]
        found = iter(_ops.effect_backward(ctx.text, ctx.needs, number, present, parts, ctx.sizes))
        given = zip(call.inputs, inputs, ctx.needs, strict=True)
        own = [_gradient(call, name, x, found) if need else None for name, x, need in given]
        return None, None, None, None, *own


def _gradient(call: _Call, name: str, x: Any, found: Iterator[torch.Tensor]) -> torch.Tensor:
    if not isinstance(x, DTensor):
        return call.joined(found, name)
    assert call.op.gradient is not None, "an op says what the gradient of a DTensor is"
    pieces = [call.joined(found, sized=False) for _ in range(call.num_pieces(name))]
    return call.op.gradient(call.known, x, *pieces)


# -- what the ops do -----------------------------------------------------------------------------


class _Kept(bytearray):
    """What eager autograd needs for backward; the memory of the number that it goes by."""

    outputs: Sequence[torch.Tensor]
    leaves: Sequence[torch.Tensor]


_kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _keep(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number; what is kept is forgotten when nobody holds it any more."""
    number = next(_numbers)
    kept = _Kept(number.to_bytes(8, sys.byteorder))
    kept.outputs, kept.leaves = outputs, leaves
    _kept[number] = kept
    return torch.frombuffer(kept, dtype=torch.int64)


def _no_number() -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@untraced
def _forward(
    text: str, needs: Sequence[bool], sizes: Sequence[Size], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    call, left = _read(text), iter(inputs)
    tensors = {name: call.joined(left, name).detach() for name in call.inputs}
    tensors = call.op.enter(call.known, tensors)
    for x, need in zip(tensors.values(), needs, strict=True):
        x.requires_grad_(need)
    with with_autograd(any(needs)):
        outputs = call.op.run(call.known, **tensors)
    found = [part for out in outputs for part in call.parts(out.detach())]
    number = _keep(outputs, list(tensors.values())) if any(needs) else _no_number()
    return [*_apart(found, inputs), number]


def _apart(tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As compiled code expects the results of an op: contiguous, aligned, each in its own memory.

    Several may have come in one message.
    """
    found, seen = [], {x.untyped_storage()._cdata for x in inputs}
    for x in tensors:
        memory = x.untyped_storage()._cdata
        aligned = x.storage_offset() * x.element_size() % ALIGNED_BYTES == 0
        if memory in seen or not aligned or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        seen.add(memory)
        found.append(x)
    return found


@untraced
def _forward_into(
    text: str,
    needs: Sequence[bool],
    sizes: Sequence[Size],
    written: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> torch.Tensor:
    *found, number = _forward(text, needs, sizes, [*written, *inputs])
    for target, part in zip(out, found, strict=True):
        target.copy_(part)
    return number


@untraced
def _backward(
    text: str,
    needs: Sequence[bool],
    number: torch.Tensor,
    present: Sequence[bool],
    grads: Sequence[torch.Tensor],
    sizes: Sequence[Size],
) -> list[torch.Tensor]:
    call, kept = _read(text), _kept.get(int(number))
    if kept is None:
        raise ShardwiseError(
            f"Backward of {call.op.what} in compiled code does not find what forward kept for it: "
            "that lives as long as what torch saved, which was copied (by a hook for saved "
            "tensors, such as save_on_cpu in pinned memory). Run it outside such hooks."
        )
    left = iter(grads)
    there = [out for out, has in zip(kept.outputs, present, strict=True) if has]
    pairs = [(out, call.joined(left)) for out in there]
    trained = [(out, grad) for out, grad in pairs if out.requires_grad]
    if trained:
        with with_autograd(enabled=False):
            torch.autograd.backward(
                [out for out, _ in trained], [grad for _, grad in trained], retain_graph=True
            )
    results: list[torch.Tensor] = []
    for name, leaf, need in zip(call.inputs, kept.leaves, needs, strict=True):
        if need:
            grad, leaf.grad = leaf.grad, None
            for piece in _pieces(torch.zeros_like(leaf) if grad is None else grad):
                results += [part.clone() for part in call.parts(piece, name)]
    return results


def _pieces(grad: torch.Tensor) -> list[torch.Tensor]:
    """The local tensors of a gradient."""
    return [grad._rows, grad._local] if isinstance(grad, RowSparse) else [_local(grad)]


# -- what the ops would do: shapes alone ---------------------------------------------------------


def _forward_shapes(
    text: str, needs: Sequence[bool], sizes: Sequence[Size], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    call, left = _read(text), iter(inputs)
    given = {name: _next(left, call.num_parts(name)) for name in call.inputs}
    ranks = [
        {name: parts[place % len(parts)] for name, parts in given.items()}
        for place in range(call.num_parts())
    ]
    outputs = zip(*call.op.fake(call.known, sizes, ranks), strict=True)
    return [*(part for output in outputs for part in output), _no_number()]


def _backward_shapes(
    text: str,
    needs: Sequence[bool],
    number: torch.Tensor,
    present: Sequence[bool],
    grads: Sequence[torch.Tensor],
    sizes: Sequence[Size],
) -> list[torch.Tensor]:
    call, left = _read(text), iter(sizes)
    here = {grad.device.type: grad.device for grad in grads}
    results: list[torch.Tensor] = []
    for (name, (ndim, dtype, kind)), need in zip(call.inputs.items(), needs, strict=True):
        if not need:
            continue
        device = here.get(kind, torch.device(kind))
        shapes = [_next(left, ndim) for _ in range(call.num_parts(name))]
        if call.num_pieces(name) == 2:
            nums = [unknown_length(number) for _ in shapes]
            results += [torch.empty(num, dtype=torch.int64, device=device) for num in nums]
            shapes = [[num, *shape[1:]] for num, shape in zip(nums, shapes, strict=True)]
        options: Any = {"dtype": getattr(torch, dtype), "device": device}
        results += [torch.empty(shape, **options) for shape in shapes]
    return results


install(_library, "effect", _forward, _forward_shapes)
install(_library, "effect_", _forward_into, lambda *_: _no_number())
install(_library, "effect_backward", _backward, _backward_shapes)
