"""Recurrent layers and cells (LSTM, GRU, plain), packed sequences: kernels above autograd.

Torch decomposes a recurrent net into its steps, or calls a kernel that takes only plain tensors.
Here a layer is one op: the batch may be sharded, the weights are gathered, and so are packed
sequences. In a cell, torch adds
gates in place into views, which needs all of them on one rank; here they are new tensors, and both
batch and weights may be sharded. See Note [Above autograd].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.comm.watch import implicit_replication
from shardwise.core.placements import REPLICATE, SUM, Partial, Placement
from shardwise.core.untraced import UntracedFunction, differentiated_once
from shardwise.dispatch.rule import (
    Call,
    Choice,
    Rule,
    Table,
    sharded_together,
    table,
    unless_empty,
)
from shardwise.dtensor.autograd import direct_apply
from shardwise.dtensor.operands import check_plain
from shardwise.dtensor.tensor import DTensor, run
from shardwise.lookup.ids import has_values
from shardwise.ops.operands import replicated

aten = torch.ops.aten

#: How many states each kind carries from step to step.
NUM_STATES = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(
    kind: str, has_biases: bool, bidirectional: bool, batch_first: bool, x: Any, *rest: Any
) -> tuple[Any, ...]:
    """The outputs of all steps and the final states. `rest`: initial states, then weights."""
    num = NUM_STATES[kind]
    states, weights = list(rest[:num]), list(rest[num:])
    op = getattr(torch, kind)
    start = states if kind == "lstm" else states[0]
    return op(x, start, weights, has_biases, 1, 0.0, False, bidirectional, batch_first)


def recurrent_grads(
    kind: str,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    *operands: Any,
) -> tuple[Any, ...]:
    """The gradients of input, initial states and weights.

    `operands` are the gradients of the outputs, then the operands of `recurrent`, which runs
    again: what its kernels save for backward differs between devices.
    """
    run_again = functools.partial(recurrent, kind, has_biases, bidirectional, batch_first)
    return _grads(run_again, 1 + NUM_STATES[kind], operands)


def _grads(run_again: Callable[..., Any], num: int, operands: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients of the operands after the first `num`, which are those of the results."""
    grads, inputs = operands[:num], operands[num:]
    if inputs[0].is_meta:
        return tuple(map(torch.empty_like, inputs))
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        found = torch.autograd.grad(run_again(*leaves), leaves, grads)
    # The plan expects the strides of the inputs; kernels return others.
    return tuple(
        g if g.stride() == x.stride() else torch.empty_like(x).copy_(g)
        for g, x in zip(found, inputs, strict=True)
    )


def recurrent_packed(
    kind: str,
    has_biases: bool,
    bidirectional: bool,
    batch_sizes: tuple[int, ...],
    x: Any,
    *rest: Any,
) -> tuple[Any, ...]:
    """As `recurrent`, of packed sequences: `batch_sizes` says how many of them have each step."""
    num = NUM_STATES[kind]
    states, weights = list(rest[:num]), list(rest[num:])
    op = getattr(torch, kind)
    start = states if kind == "lstm" else states[0]
    sizes = torch.tensor(batch_sizes)
    return op(x, sizes, start, weights, has_biases, 1, 0.0, False, bidirectional)


def recurrent_packed_grads(
    kind: str, has_biases: bool, bidirectional: bool, batch_sizes: tuple[int, ...], *operands: Any
) -> tuple[Any, ...]:
    """As `recurrent_grads`."""
    run_again = functools.partial(recurrent_packed, kind, has_biases, bidirectional, batch_sizes)
    return _grads(run_again, 1 + NUM_STATES[kind], operands)


def whole_choices(call: Call) -> Iterator[Choice]:
    """Sequences of different lengths lie one step after the other: no dim is one of a batch."""
    yield call.replicated()


def recurrent_choices(call: Call) -> Iterator[Choice]:
    batch = _batch_dims(call)
    weights = [REPLICATE] * (len(call.inputs) - len(batch))
    yield call.replicated()
    local = unless_empty(recurrent)
    yield from sharded_together(call, (*batch, *weights), batch, local)


def recurrent_grad_choices(call: Call) -> Iterator[Choice]:
    batch = _batch_dims(call)
    num_weights = len(call.inputs) - 2 * len(batch)
    inputs: list[int | Placement] = [*batch, *batch, *[REPLICATE] * num_weights]
    outputs: list[int | Placement] = [*batch, *[SUM] * num_weights]
    yield call.replicated()
    yield from sharded_together(call, inputs, outputs, unless_empty(recurrent_grads))
    for reduce_op in ("sum", "avg"):
        term = Partial(reduce_op)
        others = [REPLICATE] * (len(call.inputs) - len(batch))
        yield Choice((*[term] * len(batch), *others), (term,) * len(call.outputs))


def _batch_dims(call: Call) -> list[int]:
    """The dim of the batch in the steps and in each state."""
    kind, batch_first = call.args[0], call.args[3]
    return [0 if batch_first else 1, *[1] * NUM_STATES[kind]]


# -- layers, above autograd ------------------------------------------------------------------


class Layer(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *operands: Any) -> Any:
        ctx.options = options
        ctx.save_for_backward(*operands)
        return tuple(run(_function(options), *options, *operands))

    @staticmethod
    @differentiated_once("a recurrent layer")
    def backward(ctx: Any, *grads: Any) -> Any:
        like = ctx.saved_tensors[0]
        grads = tuple(distributed(grad, like) for grad in grads)  # zeros for an unused state
        function = recurrent_packed_grads if _is_packed(ctx.options) else recurrent_grads
        return None, *run(function, *ctx.options, *grads, *ctx.saved_tensors)


def _is_packed(options: tuple[Any, ...]) -> bool:
    return isinstance(options[3], tuple)


def _function(options: tuple[Any, ...]) -> Callable[..., Any]:
    return recurrent_packed if _is_packed(options) else recurrent


_apply = direct_apply(Layer)


def _layers(
    kind: str,
    x: Any,
    states: list[Any],
    weights: list[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch: bool | tuple[int, ...],
) -> tuple[Any, ...]:
    """One layer after the other; the states of all layers are stacked along dim 0.

    `batch` says whether the batch is the first dim, or how many packed sequences have each step.
    """
    options = (kind, has_biases, bidirectional, batch)
    each, directions = len(weights) // num_layers, 2 if bidirectional else 1
    states = [distributed(state, x) for state in states]
    last: list[list[Any]] = [[] for _ in states]
    for layer in range(num_layers):
        own = [s.narrow(0, layer * directions, directions) for s in states]
        x, *found = _run(options, x, *own, *weights[layer * each : (layer + 1) * each])
        for kept, state in zip(last, found, strict=True):
            kept.append(state)
        if dropout and train and layer + 1 < num_layers:
            x = F.dropout(x, dropout, True)
    return x, *(kept[0] if num_layers == 1 else torch.cat(kept) for kept in last)


def _run(options: tuple[Any, ...], *operands: Any) -> Any:
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return _apply(options, *operands)
    return run(_function(options), *options, *operands)


def distributed(state: Any, x: Any) -> Any:
    """`state` replicated, if it is zeros: a module or autograd makes them alike on every rank."""
    if isinstance(state, DTensor) or not isinstance(x, DTensor):
        return state
    if not has_values(state) or bool(state.any()):
        return state  # the call raises for a plain tensor
    return replicated(state, x)


def _kernel(kind: str) -> Callable[..., Any]:
    def layers(x: Any, hx: Any, params: list[Any], *options: Any) -> tuple[Any, ...]:
        states = list(hx) if kind == "lstm" else [hx]
        return _layers(kind, x, states, list(params), *options)

    return layers


def _packed_kernel(kind: str) -> Callable[..., Any]:
    def layers(x: Any, batch_sizes: Any, hx: Any, params: Any, *options: Any) -> tuple[Any, ...]:
        states = list(hx) if kind == "lstm" else [hx]
        options = (*options, tuple(batch_sizes.tolist()))
        return _layers(kind, x, states, list(params), *options)

    return layers


# -- packed sequences, above autograd --------------------------------------------------------
#
# They are packed and padded by index, which torch's C++ does step by step in memory. How many
# sequences have each step is a DTensor, so that what torch's Python makes of it is one, too. (On a
# GPU it is plain: torch takes these numbers on the CPU alone.)


def _on_every_rank(numbers: torch.Tensor, like: Any) -> Any:
    return replicated(numbers, like) if like.is_cpu else numbers


def pack_padded(x: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
    op = aten._pack_padded_sequence.default
    if not isinstance(lengths, DTensor):
        check_plain(op, lengths, 1)
    places = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2])
    found, sizes = op(places.unsqueeze(-1), torch.tensor(lengths.tolist()), batch_first)
    with implicit_replication():
        packed = x.flatten(0, 1).index_select(0, found.squeeze(-1).to(x.device))
    return packed, _on_every_rank(sizes, x)


def pad_packed(
    x: Any, batch_sizes: Any, batch_first: bool, value: float, total: int
) -> tuple[Any, Any]:
    sizes = torch.tensor(batch_sizes.tolist())
    places = torch.arange(x.shape[0]).unsqueeze(-1)
    end = float(x.shape[0])  # that of an additional row
    op = aten._pad_packed_sequence.default
    found, lengths = op(places.double(), sizes, batch_first, end, total)
    rows = torch.constant_pad_nd(x, (*(0, 0) * (x.dim() - 1), 0, 1), value)
    shape = tuple(found.shape[:2])
    with implicit_replication():
        padded = rows.index_select(0, found.flatten().long().to(x.device)).unflatten(0, shape)
    return padded, _on_every_rank(lengths, x)


# -- cells, above autograd -------------------------------------------------------------------

#: The number of gates in the rows of each kind's weights.
_NUM_GATES = {"lstm_cell": 4, "gru_cell": 3, "rnn_tanh_cell": 1, "rnn_relu_cell": 1}


def _state(kind: str, x: Any, state: Any, w_ih: Any, w_hh: Any) -> Any:
    """The previous state, distributed if it is plain zeros; torch raises for sizes that misfit."""
    if x.dim() == 2 and state.dim() == 2:
        hidden = w_hh.shape[1]
        fits = (
            tuple(w_hh.shape) == (_NUM_GATES[kind] * hidden, hidden)
            and tuple(w_ih.shape) == (_NUM_GATES[kind] * hidden, x.shape[1])
            and tuple(state.shape) == (x.shape[0], hidden)
        )
        if fits:
            return distributed(state, next(t for t in (x, w_ih, w_hh) if isinstance(t, DTensor)))
    fake = [torch.empty(t.shape, device="meta") for t in (x, state, w_ih, w_hh)]
    fake_state = [fake[1]] * 2 if kind == "lstm_cell" else fake[1]
    getattr(torch, kind)(fake[0], fake_state, *fake[2:])
    return state


def lstm_cell(
    x: Any, hx: list[Any], w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> tuple[Any, Any]:
    h, c = (_state("lstm_cell", x, state, w_ih, w_hh) for state in hx)
    gates = F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)
    enter, keep, new, leave = gates.chunk(4, 1)
    c = keep.sigmoid() * c + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * c.tanh(), c


def gru_cell(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    h = _state("gru_cell", x, hx, w_ih, w_hh)
    of_x = F.linear(x, w_ih, b_ih).chunk(3, 1)
    of_h = F.linear(h, w_hh, b_hh).chunk(3, 1)
    reset, keep = (of_x[0] + of_h[0]).sigmoid(), (of_x[1] + of_h[1]).sigmoid()
    new = (of_x[2] + of_h[2] * reset).tanh()
    return (h - new) * keep + new


def rnn_tanh_cell(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    h = _state("rnn_tanh_cell", x, hx, w_ih, w_hh)
    return (F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).tanh()


def rnn_relu_cell(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    h = _state("rnn_relu_cell", x, hx, w_ih, w_hh)
    return (F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).relu()


RULES: Table = table(
    ((recurrent,), Rule(recurrent_choices, "[t] b [i], [l] b [h], [w] -> [t] b [h], [l] b [h]")),
    ((recurrent_packed,), Rule(whole_choices, "[n] [i], [l] [b] [h], [w] -> [n] [h], [l] [b] [h]")),
    ((recurrent_packed_grads,), Rule(whole_choices, "[n] [h], [l] [b] [h], ... -> [n] [i], [w]")),
    (
        (recurrent_grads,),
        Rule(recurrent_grad_choices, "[t] b [h], [l] b [h], ... -> [t] b [i], [l] b [h], [w]"),
    ),
)

KERNELS: tuple[tuple[str, Any], ...] = (
    *((f"{kind}.input", _kernel(kind)) for kind in NUM_STATES),
    *((f"{kind}.data", _packed_kernel(kind)) for kind in NUM_STATES),
    ("_pack_padded_sequence", pack_padded),
    ("_pad_packed_sequence", pad_packed),
    ("lstm_cell", lstm_cell),
    ("gru_cell", gru_cell),
    ("rnn_tanh_cell", rnn_tanh_cell),
    ("rnn_relu_cell", rnn_relu_cell),
)
