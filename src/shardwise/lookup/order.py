"""Sorting ids by owner and by row.

On the CPU numpy sorts integers several times faster than torch; other devices use torch. Both give
the same order.
"""

from __future__ import annotations

import numpy as np
import torch


def stable_order(keys: torch.Tensor) -> torch.Tensor:
    """The stable argsort of small keys (uint8 or int16).

    >>> stable_order(torch.tensor([1, 0, 1, 0], dtype=torch.uint8)).tolist()
    [1, 3, 0, 2]
    """
    if keys.device.type == "cpu":
        # Up to 16 bits numpy's stable sort is a radix sort.
        return torch.from_numpy(np.argsort(keys.numpy(), kind="stable"))
    return torch.sort(keys, stable=True).indices


def sorted_in_place(keys: torch.Tensor) -> torch.Tensor:
    """`keys` (int64) sorted; its memory may be used for the result."""
    if keys.device.type == "cpu":
        keys.numpy().sort()
        return keys
    return torch.sort(keys).values


def repeated(lengths: torch.Tensor, total: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Each index of `lengths`, repeated that often.

    >>> repeated(torch.tensor([2, 0, 1]), 3).tolist()
    [0, 0, 2]
    """
    count = torch.arange(lengths.shape[0], dtype=dtype, device=lengths.device)
    if lengths.device.type == "cpu":
        return torch.from_numpy(np.repeat(count.numpy(), lengths.numpy()))
    return torch.repeat_interleave(count, lengths.long(), output_size=total)


def places(mask: torch.Tensor) -> torch.Tensor:
    """The positions where a mask is true.

    >>> places(torch.tensor([True, False, True])).tolist()
    [0, 2]
    """
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)


def divided(ids: torch.Tensor, block: int) -> torch.Tensor:
    """`ids // block`; numpy is faster than torch's division."""
    if ids.device.type == "cpu":
        return torch.from_numpy(np.floor_divide(ids.numpy(), block))
    return torch.div(ids, block, rounding_mode="floor")


def counted(keys: torch.Tensor, num: int) -> torch.Tensor:
    """How often each number below `num` occurs."""
    return torch.bincount(keys, minlength=num)


def starts_of_runs(keys: torch.Tensor) -> torch.Tensor:
    """Where each value begins in sorted keys, and finally the number of keys.

    >>> starts_of_runs(torch.tensor([3, 3, 5, 9, 9])).tolist()
    [0, 2, 3, 5]
    """
    num = keys.shape[0]
    changes = keys.new_ones(num + 1, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=changes[1:num])
    return places(changes)
