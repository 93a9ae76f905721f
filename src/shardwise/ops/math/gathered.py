"""Ops that run whole on every rank: their operands are gathered first.

Each is here on purpose; an op without a rule raises. Comments say why no work can be done on
shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.dispatch.notation import Group, linear_choices
from shardwise.dispatch.rule import Call, Choice, Rule, Table, table

aten = torch.ops.aten


def gathered(
    *ops: Any, linear: Sequence[Group] = (), found_shapes: bool = False
) -> tuple[tuple[Any, ...], Rule]:
    """An entry of a table. With `found_shapes`, output shapes are only known from the results."""

    def choices(call: Call) -> Iterator[Choice]:
        yield call.replicated()
        yield from linear_choices(call, linear)

    return ops, Rule(choices, "replicated -> replicated", found_shapes=found_shapes)


RULES: Table = table(
    # Every pair of rows is compared.
    gathered(aten._pdist_forward.default, aten._pdist_backward.default),
    # The range of the bins, or the number of counts, depends on all values.
    gathered(aten.histc.default),
    gathered(
        aten.histogram.bin_ct,
        aten.histogram.bins_tensor,
        aten._histogramdd_bin_edges.default,
        aten._histogramdd_from_bin_cts.default,
        aten._histogramdd_from_bin_tensors.default,
        found_shapes=True,
    ),
    # Torch cannot infer their output shapes without running them.
    gathered(aten.linalg_lstsq.default, aten.geqrf.default, found_shapes=True),
    # A segment may span several ranks.
    gathered(aten.segment_reduce.default, aten._segment_reduce_backward.default),
    # The alignment of a sequence needs all its steps, classes and targets.
    gathered(
        aten._ctc_loss.default,
        aten._ctc_loss.Tensor,
        aten._ctc_loss_backward.default,
        aten._ctc_loss_backward.Tensor,
        found_shapes=True,
    ),
    # The result is mostly zeros, and each operand has rows and columns of its own.
    gathered(aten.block_diag.default),
)
