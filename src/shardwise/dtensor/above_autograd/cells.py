"""One step of a recurrent net, above autograd: see Note [Above autograd].

Torch adds the gates into views of one another, which needs all of them on one rank. Here they are
made anew: a batch that is sharded stays where it lies, and so may the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.dtensor.above_autograd.recurrent import distributed
from shardwise.dtensor.tensor import DTensor

#: How many gates, one after the other, the rows of each kind's weights hold.
_NUM_GATES = {"lstm_cell": 4, "gru_cell": 3, "rnn_tanh_cell": 1, "rnn_relu_cell": 1}


def _state(kind: str, x: Any, state: Any, w_ih: Any, w_hh: Any) -> Any:
    """The state of the last step, in place of plain zeros; sizes that fit, or torch's own error."""
    if x.dim() == 2 and state.dim() == 2:
        hidden = w_hh.shape[1]
        fits = (
            tuple(w_hh.shape) == (_NUM_GATES[kind] * hidden, hidden)
            and tuple(w_ih.shape) == (_NUM_GATES[kind] * hidden, x.shape[1])
            and tuple(state.shape) == (x.shape[0], hidden)
        )
        if fits:
            return distributed(state, next(t for t in (x, w_ih, w_hh) if isinstance(t, DTensor)))
    hollow = [torch.empty(t.shape, device="meta") for t in (x, state, w_ih, w_hh)]
    hollow_state = [hollow[1]] * 2 if kind == "lstm_cell" else hollow[1]
    getattr(torch, kind)(hollow[0], hollow_state, *hollow[2:])
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


KERNELS = (
    ("lstm_cell", lstm_cell),
    ("gru_cell", gru_cell),
    ("rnn_tanh_cell", rnn_tanh_cell),
    ("rnn_relu_cell", rnn_relu_cell),
)
