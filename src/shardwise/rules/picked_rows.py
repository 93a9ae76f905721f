"""Rows of a gradient that are kept: how many there are depends on the values of the ids.

Eager code picks them and has a tensor of that length. In a traced graph the picking is one op,
whose result has a length that is known when the graph runs. The op takes the gradient along, so
that it stands in the graph of backward, and no length has to be saved for it.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise._torch.symint import check_size

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    "picked_rows(Tensor? keep, Tensor rows, Tensor values, bool by_freq) -> (Tensor, Tensor)"
)


def picked_rows(
    keep: torch.Tensor | None, rows: torch.Tensor, values: torch.Tensor, by_freq: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and values where `keep` is true, as one op of a traced graph.

    With `by_freq` a row's values are divided by how often it occurs.
    """
    if keep is None and not by_freq:
        return rows, values
    return torch.ops.shardwise.picked_rows(keep, rows, values, by_freq)


def times(rows: torch.Tensor) -> torch.Tensor:
    """How often each row occurs, at every place where it does; as large as the batch."""
    _, inverse, counts = torch.unique(rows, return_inverse=True, return_counts=True)
    return counts[inverse]


def _pick(
    keep: torch.Tensor | None, rows: torch.Tensor, values: torch.Tensor, by_freq: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if keep is None:
        rows = rows.clone()  # what an op puts out is not what it was given
    else:
        places = keep.nonzero().squeeze(1)
        rows, values = rows.index_select(0, places), values.index_select(0, places)
    return rows, values / times(rows).unsqueeze(-1) if by_freq else values


def _picked_shapes(
    keep: torch.Tensor | None, rows: torch.Tensor, values: torch.Tensor, by_freq: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    num = rows.shape[0] if keep is None else unknown_length(rows)
    return rows.new_empty(num), values.new_empty((num, values.shape[1]))


def unknown_length(traced: Any) -> Any:
    """A length that is known when the graph runs.

    Torch offers these to an op's shapes only where a setting of the compiler asks for graphs of
    unknown sizes. That is about what a program computes with; nothing is computed with these.
    """
    shape_env = traced.fake_mode.shape_env
    length = shape_env.create_unbacked_symint()
    check_size(length >= 0)
    return length


_library.impl("picked_rows", _pick, "CompositeExplicitAutograd")
torch.library.register_fake("shardwise::picked_rows", _picked_shapes, lib=_library)
