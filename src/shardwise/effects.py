"""Eager code as one op of a compiled graph, which the compiler does not move or drop.

Note [Effect ops]
Some code sends data-dependent messages, so it cannot be traced into a graph. An `EffectOp` is a
graph op that runs such code eagerly when the graph runs, collectives included; a bad batch raises
the same error on all ranks as in eager code. A declaration says how to run the code and which
shapes it returns. The compiler keeps these ops in program order, whatever the sizes on a rank: they
are ops with effects (Note [Order]).

An op of a graph takes tensors, numbers and strings. A call is encoded as a string that is the same
in every process; a tensor of a simulated world is passed as one tensor per rank.

Backward is an op too, which runs eager backward. Its state lives as long as the state id that the
forward op returns, an int tensor that compiled code saves for backward. So nothing runs twice,
backward may run again if the graph is retained, and nothing is left if backward never runs.
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
from shardwise._torch.effects import (
    current_compilation,
    is_checkpointed,
    is_imported,
    let_decide,
    lower_in_order,
    mark_ordered,
    require_effects,
)
from shardwise.comm.watch import watch
from shardwise.core.encode import decode_grid, encode_grid, source_digest
from shardwise.core.mesh import Grid
from shardwise.core.sizes import Size
from shardwise.core.untraced import UntracedFunction, differentiated_once, untraced
from shardwise.core.world import world_caches
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ShardwiseError, UnsupportedError
from shardwise.lookup.exchange import ranks_present
from shardwise.ops.lookup.rank_bags import unknown_length
from shardwise.ops.lookup.row_sparse import RowSparse
from shardwise.simulation.ranks import one_tensor, part_per_rank

# -- ordering ------------------------------------------------------------------------------------
# Installing ops with effects, which the compiler keeps in program order.
#
# Note [Order]
# Each op runs collectives, so all ranks must run them in one order, whatever their sizes. Graphs
# keep that order. But torch 2.13 passes it to inductor's scheduler under names that the scheduler
# does not look up, and where it sorts kernels to save memory it may swap two of them, on one rank
# and not on another. So the lowering of these ops declares which kernel comes first.
#
# Note [Cached code]
# Torch does not cache the code of a graph with an op with effects on disk: its wrapper
# `with_effects` is not marked as cacheable. The ops of this package depend on nothing but the
# graph: what they run is a name and a string, which includes the version of this package. So their
# graphs may be cached; about others torch decides.


#: The compilations that contain an op of this package.
_compiling: weakref.WeakSet[Any] = weakref.WeakSet()
#: Ops that inductor does not know yet, which may not be imported.
_unordered: list[Any] = []


def install(
    library: torch.library.Library, name: str, fn: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Give an op of this package its kernel and its fake kernel, and mark it as ordered."""
    library.impl(name, fn, "CompositeExplicitAutograd")
    watch.kernels[getattr(torch.ops.shardwise, name)] = fn
    mark_ordered(f"shardwise::{name}", library)
    torch.library.register_fake(f"shardwise::{name}", fake, lib=library)
    _unordered.append(getattr(torch.ops.shardwise, name).default)


def check_place(what: str, instead: str) -> None:
    """Raise where an op with effects cannot be; called wherever one is traced.

    `instead` says what can be exported.
    """
    require_effects()
    while _unordered and is_imported():  # see Note [Order]
        lower_in_order(_unordered.pop())
    compilation = current_compilation()
    if compilation is not None:  # see Note [Cached code]
        _compiling.add(compilation)
        let_decide(_OF_THIS_PACKAGE)
    if torch.compiler.is_exporting():
        raise UnsupportedError(
            f"torch.export of {what}: an exported graph cannot ask other ranks. Use torch.compile"
            f"{instead}."
        )
    if torch.is_grad_enabled() and is_checkpointed():
        raise UnsupportedError(
            f"{what[0].upper()}{what[1:]} inside activation checkpointing, in compiled code: torch "
            "saves for backward that it ran, and fails. Checkpoint the code around it, or compile "
            "without it."
        )


class _OfThisPackage:
    """True while a graph is compiled that holds an op of this package."""

    def __bool__(self) -> bool:
        return current_compilation() in _compiling


_OF_THIS_PACKAGE = _OfThisPackage()


# -- effect op -----------------------------------------------------------------------------------


_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("effect(str call, bool[] needs, SymInt[] sizes, Tensor[] inputs) -> Tensor[]")
_library.define(
    "effect_(str call, bool[] needs, SymInt[] sizes, Tensor(a!)[] written, Tensor(b!)[] out, "
    "Tensor[] inputs) -> Tensor"
)
_library.define(
    "effect_backward(str call, bool[] needs, Tensor state_id, bool[] present, Tensor[] grads, "
    "SymInt[] sizes) -> Tensor[]"
)
_ops: Any = torch.ops.shardwise

#: The alignment of tensors that compiled code expects.
ALIGNED_BYTES = 16
_declared: dict[str, EffectOp] = {}


@dataclass(frozen=True, slots=True, eq=False)
class EffectOp:
    """Eager code as one op of a graph; see Note [Effect ops].

    The functions get `known`: what `decode(options, grid)` makes of an encoded call.
    """

    name: str
    #: What it is part of, for errors; `instead` says what can be exported in its place.
    what: str
    #: `run(known, **inputs)`: the outputs of eager code, under autograd.
    run: Callable[..., Sequence[torch.Tensor]]
    #: `fake(known, sizes, ranks)`: for each rank, given its inputs by name, its empty outputs.
    fake: Callable[
        [Any, Sequence[Size], Sequence[dict[str, Any]]], Sequence[Sequence[torch.Tensor]]
    ]
    instead: str = ""
    decode: Callable[[Any, Grid | None], Any] = lambda options, grid: options
    #: `enter(known, inputs)`: from local tensors to the inputs of `run`.
    enter: Callable[[Any, dict[str, torch.Tensor]], dict[str, Any]] = lambda known, inputs: inputs
    #: `gradient(known, input, *local tensors)`: the gradient of an input that is a DTensor.
    gradient: Callable[..., torch.Tensor] | None = None
    #: The input that stands for state such as tables that backward updates: the same on every rank,
    #: with a gradient of zeros, so that torch calls backward.
    handle: str | None = None

    def __post_init__(self) -> None:
        _declared[self.name] = self

    def encode(self, grid: Grid | None, options: dict[str, Any]) -> str:
        """A call but for its tensors, on one device if `grid` is None; the options are JSON.

        The text is the same in every process that runs this version of the package.
        """
        place = None if grid is None else encode_grid(grid)
        return json.dumps([source_digest(), place, options])

    def __call__(
        self,
        form: str,
        inputs: Mapping[str, torch.Tensor | None],
        *,
        more: str = "{}",
        sizes: Sequence[Size] = (),
        row_sparse: bool = False,
        writes: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """The outputs, while a compiler traces, of an encoded call with `more` options.

        `row_sparse`: the first input's gradient is. `writes`: the op writes to the first input.
        """
        check_place(self.what, self.instead)
        given = {name: x for name, x in inputs.items() if x is not None}
        descriptions = {name: _description(_local(x)) for name, x in given.items()}
        if row_sparse:  # row ids and values
            descriptions[next(iter(given))]["num_grads"] = 2
        call = {"what": self.name, "form": form, "more": more, "inputs": descriptions}
        trains = torch.is_grad_enabled()
        return _Effect.apply(json.dumps(call), sizes, writes, trains, *given.values())


def _local(x: Any) -> torch.Tensor:
    return x._local if isinstance(x, DTensor) else x


def _description(x: torch.Tensor) -> dict[str, Any]:
    dtype = str(x.dtype).removeprefix("torch.")
    return {"ndim": x.dim(), "dtype": dtype, "device": x.device.type, "num_grads": 1}


@dataclass(frozen=True, slots=True)
class _Call:
    """One call without its tensors."""

    op: EffectOp
    grid: Grid | None
    known: Any
    #: Number of dims, dtype and device of each input, and of how many tensors a gradient consists.
    inputs: dict[str, dict[str, Any]]

    def num_parts(self, name: str = "") -> int:
        """How many tensors an input or an output has: one per rank present."""
        if self.grid is None or name == self.op.handle:
            return 1
        return len(ranks_present(self.grid))

    def parts(self, x: torch.Tensor, name: str = "") -> list[torch.Tensor]:
        return [x] if self.grid is None or name == self.op.handle else part_per_rank(self.grid, x)

    def joined(
        self, parts: Iterator[torch.Tensor], name: str = "", sized: bool = True
    ) -> torch.Tensor:
        """The next tensor of all ranks; not `sized` if it goes into a DTensor."""
        if self.grid is None or name == self.op.handle:
            return next(parts)
        return one_tensor(self.grid, _next(parts, self.num_parts()), sized=sized)


def _next(items: Iterator[Any], num: int) -> list[Any]:
    return list(itertools.islice(items, num))


@functools.lru_cache(maxsize=1024)
def _decode(text: str) -> _Call:
    call = json.loads(text)
    op = _declared[call["what"]]
    return _Call(op, *decode_call(op, call["form"], call["more"]), call["inputs"])


@functools.lru_cache(maxsize=1024)
def decode_call(op: EffectOp, form: str, more: str = "{}") -> tuple[Grid | None, Any]:
    """The mesh of an encoded call, and what is known of it."""
    _, place, options = json.loads(form)
    grid = None if place is None else decode_grid(place)
    return grid, op.decode(options | json.loads(more), grid)


world_caches.extend((_decode.cache_clear, decode_call.cache_clear))


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
        call = _decode(text)
        needs = [trains and need for need in ctx.needs_input_grad[4:]]
        per_input = [
            call.parts(_local(x), name) for name, x in zip(call.inputs, inputs, strict=True)
        ]
        first, *others = per_input
        rest = [part for parts in others for part in parts]
        if writes:
            # The compiler takes no op that writes and returns a list.
            *out, state_id = _fake_forward(text, needs, sizes, [*first, *rest])
            state_id = _ops.effect_(text, needs, sizes, first, out, rest)
        else:
            *out, state_id = _ops.effect(text, needs, sizes, [*first, *rest])
        ctx.text, ctx.needs = text, needs
        needed = [parts for parts, need in zip(per_input, needs, strict=True) if need]
        ctx.sizes = [size for parts in needed for part in parts for size in part.shape]
        # The inputs are saved for the trace only: the graph does not use their values.
        ctx.save_for_backward(state_id, *inputs)
        left = iter(out)
        return tuple(call.joined(left) for _ in range(len(out) // call.num_parts()))

    @staticmethod
    @differentiated_once("an exchange between ranks")
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call = _decode(ctx.text)
        state_id, *inputs = ctx.saved_tensors
        parts = [part for grad in grads if grad is not None for part in call.parts(grad)]
        present = [grad is not None for grad in grads]
        found = iter(_ops.effect_backward(ctx.text, ctx.needs, state_id, present, parts, ctx.sizes))
        given = zip(call.inputs, inputs, ctx.needs, strict=True)
        own = [_gradient(call, name, x, found) if need else None for name, x, need in given]
        return None, None, None, None, *own


def _gradient(call: _Call, name: str, x: Any, found: Iterator[torch.Tensor]) -> torch.Tensor:
    if not isinstance(x, DTensor):
        return call.joined(found, name)
    assert call.op.gradient is not None, "an op with DTensor inputs has a gradient function"
    num = call.inputs[name]["num_grads"]
    tensors = [call.joined(found, sized=False) for _ in range(num)]
    return call.op.gradient(call.known, x, *tensors)


# -- kernels -------------------------------------------------------------------------------------


class _Kept(bytearray):
    """The state of eager autograd for backward; also the memory of its id."""

    outputs: Sequence[torch.Tensor]
    leaves: Sequence[torch.Tensor]


_kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _keep(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """The id of the state, which lives as long as this tensor."""
    number = next(_numbers)
    kept = _Kept(number.to_bytes(8, sys.byteorder))
    kept.outputs, kept.leaves = outputs, leaves
    _kept[number] = kept
    return torch.frombuffer(kept, dtype=torch.int64)


def _no_state_id() -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@untraced
def _forward(
    text: str, needs: Sequence[bool], sizes: Sequence[Size], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    call, left = _decode(text), iter(inputs)
    tensors = {name: call.joined(left, name).detach() for name in call.inputs}
    tensors = call.op.enter(call.known, tensors)
    for x, need in zip(tensors.values(), needs, strict=True):
        x.requires_grad_(need)
    with with_autograd(any(needs)):
        outputs = call.op.run(call.known, **tensors)
    found = [part for out in outputs for part in call.parts(out.detach())]
    state_id = _keep(outputs, list(tensors.values())) if any(needs) else _no_state_id()
    return [*_unaliased(found, inputs), state_id]


def _unaliased(
    tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Results as compiled code expects them: contiguous, aligned, each in its own memory.

    Several may be views of one message.
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
    *found, state_id = _forward(text, needs, sizes, [*written, *inputs])
    for target, part in zip(out, found, strict=True):
        target.copy_(part)
    return state_id


@untraced
def _backward(
    text: str,
    needs: Sequence[bool],
    state_id: torch.Tensor,
    present: Sequence[bool],
    grads: Sequence[torch.Tensor],
    sizes: Sequence[Size],
) -> list[torch.Tensor]:
    call, kept = _decode(text), _kept.get(int(state_id))
    if kept is None:
        raise ShardwiseError(
            f"Backward of {call.op.what} in compiled code does not find what forward kept for it: "
            "that lives as long as the tensors that torch saved, which were copied (by a hook "
            "for saved tensors, such as save_on_cpu in pinned memory). Run it outside such hooks."
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
            for tensor in _local_grads(torch.zeros_like(leaf) if grad is None else grad):
                results += [part.clone() for part in call.parts(tensor, name)]
    return results


def _local_grads(grad: torch.Tensor) -> list[torch.Tensor]:
    """The local tensors of a gradient."""
    return [grad._rows, grad._local] if isinstance(grad, RowSparse) else [_local(grad)]


# -- fake kernels --------------------------------------------------------------------------------


def _fake_forward(
    text: str, needs: Sequence[bool], sizes: Sequence[Size], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    call, left = _decode(text), iter(inputs)
    given = {name: _next(left, call.num_parts(name)) for name in call.inputs}
    ranks = [
        {name: parts[place % len(parts)] for name, parts in given.items()}
        for place in range(call.num_parts())
    ]
    outputs = zip(*call.op.fake(call.known, sizes, ranks), strict=True)
    return [*(part for output in outputs for part in output), _no_state_id()]


def _fake_backward(
    text: str,
    needs: Sequence[bool],
    state_id: torch.Tensor,
    present: Sequence[bool],
    grads: Sequence[torch.Tensor],
    sizes: Sequence[Size],
) -> list[torch.Tensor]:
    call, left = _decode(text), iter(sizes)
    here = {grad.device.type: grad.device for grad in grads}
    results: list[torch.Tensor] = []
    for (name, like), need in zip(call.inputs.items(), needs, strict=True):
        if not need:
            continue
        device = here.get(like["device"], torch.device(like["device"]))
        shapes = [_next(left, like["ndim"]) for _ in range(call.num_parts(name))]
        if like["num_grads"] == 2:
            nums = [unknown_length(state_id) for _ in shapes]
            results += [torch.empty(num, dtype=torch.int64, device=device) for num in nums]
            shapes = [[num, *shape[1:]] for num, shape in zip(nums, shapes, strict=True)]
        options: Any = {"dtype": getattr(torch, like["dtype"]), "device": device}
        results += [torch.empty(shape, **options) for shape in shapes]
    return results


install(_library, "effect", _forward, _fake_forward)
install(_library, "effect_", _forward_into, lambda *_: _no_state_id())
install(_library, "effect_backward", _backward, _fake_backward)
