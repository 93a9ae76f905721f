"""Sorting ids by owner and by row.

On the CPU numpy is faster for keys of 8 bits, and torch's radix sort for larger ones.
"""

from __future__ import annotations

import numpy as np
import torch

#: From how many integers on torch sorts them by radix on the CPU, where it is built with fbgemm.
_RADIX_FROM = 32768
#: The mode of `torch.embedding_bag`.
_SUM = 0
_HAS_RADIX = "fbgemm" in torch.backends.quantized.supported_engines


def stable_order(keys: torch.Tensor) -> torch.Tensor:
    """The stable argsort of small keys (uint8 or int16).

    >>> stable_order(torch.tensor([1, 0, 1, 0], dtype=torch.uint8)).tolist()
    [1, 3, 0, 2]
    """
    if keys.device.type == "cpu":
        # Up to 16 bits numpy's stable sort is a radix sort.
        return torch.from_numpy(np.argsort(keys.numpy(), kind="stable"))
    return torch.sort(keys, stable=True).indices


def sorted_with_order(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers in ascending order, and the stable argsort.

    >>> found, order = sorted_with_order(torch.tensor([7, 3, 7, 1], dtype=torch.int32))
    >>> found.tolist(), order.tolist()
    ([1, 3, 7, 7], [3, 1, 0, 2])
    """
    num = keys.shape[0]
    if keys.device.type == "cpu" and _RADIX_FROM // 16 <= num < _RADIX_FROM and _HAS_RADIX:
        # A radix sort of more numbers is faster than what torch does with fewer.
        padded = keys.new_full((_RADIX_FROM,), torch.iinfo(keys.dtype).max)
        padded[:num] = keys
        found, order = torch.sort(padded, stable=True)
        return found[:num], order[:num]
    return torch.sort(keys, stable=True)


def repeated(
    lengths: torch.Tensor, total: int, dtype: torch.dtype = torch.int64, first: int = 0
) -> torch.Tensor:
    """Each index of `lengths`, counted from `first`, repeated that often.

    >>> repeated(torch.tensor([2, 0, 1]), 3).tolist()
    [0, 0, 2]
    """
    count = torch.arange(first, first + lengths.shape[0], dtype=dtype, device=lengths.device)
    if lengths.device.type == "cpu":
        return torch.from_numpy(np.repeat(count.numpy(), lengths.numpy()))
    return torch.repeat_interleave(count, lengths.long(), output_size=total)


def spread(
    numbers: torch.Tensor, counts: np.ndarray, total: int, device: torch.device | None = None
) -> torch.Tensor:
    """Each of some numbers on the CPU, repeated as often as `counts` say.

    >>> spread(torch.tensor([5, 7]), np.array([1, 2]), 3).tolist()
    [5, 7, 7]
    """
    if device is None or device.type == "cpu":
        return torch.from_numpy(np.repeat(numbers.numpy(), counts))
    times = torch.from_numpy(counts).to(device)
    return torch.repeat_interleave(numbers.to(device), times, output_size=total)


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


def places_of_runs(order: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """For each key, its place among the different ones, from what `distinct` returned.

    >>> places_of_runs(torch.tensor([1, 0, 2]), torch.tensor([0, 1, 3])).tolist()
    [1, 0, 1]
    """
    number = repeated(starts.diff(), order.shape[0])
    return torch.empty_like(number).index_copy_(0, order, number)


def segment_sums(
    values: torch.Tensor,
    places: torch.Tensor,
    starts: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of `values[places]`, times their weights, from each start to the next.

    >>> values, places = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([2, 0, 1])
    >>> segment_sums(values, places, torch.tensor([0, 2, 3])).tolist()
    [[5.0], [2.0]]
    """
    if not places.numel() or not values.shape[1]:
        return values.new_zeros(starts.shape[0] - 1, values.shape[1])
    if weights is not None:
        weights = weights.to(values.dtype)
    if not values.is_floating_point():  # complex: `embedding_bag` has no kernel
        sums = values.new_zeros(starts.shape[0] - 1, values.shape[1])
        rows = values.index_select(0, places)
        rows = rows if weights is None else rows * weights.unsqueeze(1)
        return sums.index_add_(0, repeated(starts.diff(), places.shape[0]), rows)
    # Without the checks of `F.embedding_bag`, which take longer than a small sum.
    return torch.embedding_bag(values, places, starts, False, _SUM, False, weights, True)[0]


def distinct(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The different keys in order, the stable argsort, and where each key begins in it.

    >>> found, order, starts = distinct(torch.tensor([7, 3, 7]))
    >>> found.tolist(), order.tolist(), starts.tolist()
    ([3, 7], [1, 0, 2], [0, 1, 3])
    """
    found, order = sorted_with_order(keys)
    starts = starts_of_runs(found)
    return found.index_select(0, starts[:-1]), order, starts


def starts_of_runs(keys: torch.Tensor) -> torch.Tensor:
    """Where each value begins in sorted keys, and finally the number of keys.

    >>> starts_of_runs(torch.tensor([3, 3, 5, 9, 9])).tolist()
    [0, 2, 3, 5]
    """
    num = keys.shape[0]
    changes = keys.new_ones(num + 1, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=changes[1:num])
    return places(changes)
