"""Softmax over a whole dim, and the losses built on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwise.core.placements import REPLICATE, SUM, Shard
from shardwise.rules.notation import rule
from shardwise.rules.rule import Call, Choice, Rule, Table, table

aten = torch.ops.aten


def nll(log_probs: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Minus the log-probability of each target, 0 where it is ignored. Classes stand last."""
    if not target.dim():
        return nll(log_probs.unsqueeze(0), target.unsqueeze(0), ignore_index).squeeze(0)
    # The kernel of one device: it looks at the targets, and raises what one device raises.
    rows, ids = log_probs.flatten(0, -2), target.flatten()
    # Called as the op that it is: the compiler's shape function of F.nll_loss loses the reduction.
    losses, _ = aten.nll_loss_forward.default(rows, ids, None, 0, ignore_index)
    return losses.view(target.shape)


def nll_grad(
    grad: torch.Tensor, target: torch.Tensor, ignore_index: int, num_classes: int
) -> torch.Tensor:
    """The gradient of `nll` for the log-probabilities."""
    kept = target != ignore_index
    grad = torch.where(kept, -grad, 0.0).unsqueeze(-1)
    index = torch.where(kept, target, 0).unsqueeze(-1)
    zeros = grad.new_zeros((*target.shape, num_classes))
    if num_classes == 0:
        return zeros  # every target was ignored
    return zeros.scatter(-1, index, grad)


def bce(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The binary cross entropy of each element; the kernel refuses what is no probability."""
    return aten.binary_cross_entropy.default(x, target, None, 0)


def nll_loss_choices(call: Call) -> Iterator[Choice]:
    """Torch's own kernel. Without a reduction the batch may be sharded; a mean needs all of it."""
    yield call.replicated()
    if call.argument("reduction") == 0 and call.inputs[0].ndim == 2:
        others = (REPLICATE,) * (len(call.inputs) - 2)
        for sizes in call.splits([(0, 0), (1, 0)]):
            shard = Shard(0, sizes)
            yield Choice((shard, shard, *others), (shard, REPLICATE))
    if call.argument("reduction") == 2 and call.inputs[0].ndim == 2:
        others = (REPLICATE,) * (len(call.inputs) - 2)
        for sizes in call.splits([(0, 0), (1, 0)]):
            shard = Shard(0, sizes)
            yield Choice((shard, shard, *others), (SUM, SUM))


RULES: Table = table(
    ((aten.nll_loss_forward.default,), Rule(nll_loss_choices, "n [c], n -> n, ")),
    rule(aten._softmax.default, aten._log_softmax.default, like="... [n] -> ... [n]", n="dim"),
    rule(
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
        like="... [n], ... [n] -> ... [n]",
        linear=((0,),),
        n="dim",
    ),
    rule(nll, like="... [c], ... -> ...", linear=((0,),)),
    rule(bce, like="..., ... -> ..."),
    rule(nll_grad, like="..., ... -> ... [c]", linear=((0,),)),
)

#: The inputs whose values the op may refuse; see `rules.refused`.
REFUSED: dict[Any, slice] = {
    aten.nll_loss_forward.default: slice(1, 2),
    nll: slice(1, 2),
    bce: slice(0, 2),
}
