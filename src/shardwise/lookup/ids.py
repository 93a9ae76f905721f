"""Ids of a table's rows: range checks, owners, and sorting by owner and by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shardwise._torch.functions import assert_async
from shardwise.comm import collectives
from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.errors import BatchError
from shardwise.kernels import has_triton
from shardwise.simulation.ranks import each_rank, one_part, parts_of


def has_values(x: torch.Tensor) -> bool:
    """Whether the values can be read: not in a traced graph."""
    return type(one_part(x)) is torch.Tensor


def sharded_axes(layout: Layout) -> tuple[int, ...]:
    return tuple(a for a, p in enumerate(layout.placements) if p.is_shard())


def checked_ids(layout: Layout, num_rows: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that returns its ids, which are in this layout, after checking them.

    An id out of range raises as on one device, on every rank, before anything is looked up. Costs
    one small all-reduce for each axis that shards the ids. On CUDA, and in a traced graph, it is an
    assertion on the device, as in torch's own lookup.
    """
    axes = sharded_axes(layout)

    def on_device(_: Coordinate, ids: torch.Tensor) -> torch.Tensor:
        if type(ids) is torch.Tensor and ids.is_cuda and has_triton():
            # One launch in place of five. Imported here: nothing else needs Triton.
            from shardwise.kernels.tables import assert_inside

            assert_inside(ids.reshape(-1), num_rows)
            return ids
        inside = ((ids >= 0) & (ids < num_rows)).all()
        assert_async(inside, f"index out of range in a table of {num_rows} rows")
        return ids

    def check(ids: torch.Tensor) -> torch.Tensor:
        if type(ids) is torch.Tensor and ids.is_cpu and not axes:  # the same ids on every rank
            if ids.numel():
                low, high = torch.aminmax(ids)
                _raise_outside(int(low), int(high), num_rows)
        elif has_values(ids) and not ids.is_cuda and not ids.is_meta:
            raise_out_of_range(id_range(ids, layout, axes), num_rows)
        else:
            each_rank(layout.grid, on_device, ids, axes=())
        return ids

    return check


def id_range(ids: torch.Tensor, layout: Layout, axes: Sequence[int]) -> torch.Tensor:
    """`[-lowest, highest]` of the ids of all ranks along `axes`: a maximum combines ranks."""

    def here(_: Coordinate, ids: torch.Tensor) -> torch.Tensor:
        if not ids.numel():
            return torch.tensor([0, -1], device=ids.device)
        low, high = torch.aminmax(ids)
        return torch.stack([-low, high]).long()

    found: torch.Tensor = each_rank(layout.grid, here, ids, axes=())
    for axis in axes:
        found = collectives.all_reduce(found, "max", layout.grid, axis)
    return found


def raise_out_of_range(ranges: torch.Tensor, num_rows: int) -> None:
    """Raise IndexError if one of the ranges, in the last dim, exceeds the table."""
    for part in parts_of(ranges):
        negative_low, high = part.view(-1, 2).amax(0).tolist()
        _raise_outside(-negative_low, high, num_rows)


def _raise_outside(low: int, high: int, num_rows: int) -> None:
    if low < 0 or high >= num_rows:
        raise IndexError(
            f"index out of range in a table of {num_rows} rows: ids run from {low} to {high}."
        )


_INTEGERS = (torch.int32, torch.int64)


def promoted(ids: Any, offsets: Any) -> tuple[Any, Any]:
    """Ids and offsets of bags; those of smaller integers or bools in the dtype of both, as torch's
    own op takes them.

    >>> [x.dtype for x in promoted(torch.tensor([True, False]), torch.tensor([0]))]
    [torch.int64, torch.int64]
    """
    if ids.dtype in _INTEGERS and offsets.dtype in _INTEGERS:
        return ids, offsets
    common = torch.promote_types(ids.dtype, offsets.dtype)
    return (ids.to(common), offsets.to(common)) if common in _INTEGERS else (ids, offsets)


def dtype_fault(integers: Any, name: str) -> str | None:
    """What is wrong with ids or offsets that are not integers."""
    dtype = integers.dtype if isinstance(integers, torch.Tensor) else type(integers).__name__
    return None if dtype in _INTEGERS else f"{name} are int32 or int64, found {dtype}."


def offsets_fault(offsets: torch.Tensor, num_ids: int) -> str | None:
    """What is wrong with where bags begin among `num_ids` ids; waits for the device once.

    >>> offsets_fault(torch.tensor([0, 3, 2]), 5)
    'offsets do not decrease, found 2 after 3 (bag 1).'
    """
    if not offsets.numel():
        return None
    falls = offsets[1:] < offsets[:-1]
    first, last, falling = torch.stack([offsets[0], offsets[-1], falls.any()]).tolist()
    if first != 0:
        return f"the first offset is 0, found {first}."
    if falling:
        at = int(falls.nonzero()[0])
        found, then = offsets[at : at + 2].tolist()
        return f"offsets do not decrease, found {then} after {found} (bag {at})."
    return f"the last offset is {last}, but there are {num_ids} ids." if last > num_ids else None


def check_offsets(offsets: torch.Tensor, num_ids: int) -> None:
    """Offsets that do not fit raise, on every rank: they are replicated, and end with the last bag.

    On CUDA, and in a traced graph, they are not read, as in torch's own op.
    """
    fault = dtype_fault(offsets, "offsets")
    if fault is None and has_values(offsets) and not offsets.is_cuda and not offsets.is_meta:
        for part in parts_of(offsets):
            if part.shape[0] > 1:  # there are bags
                fault = fault or offsets_fault(part, num_ids)
                # Without the end of the last bag, an offset too large is easier to recognise.
                fault = fault and (offsets_fault(part[:-1], num_ids) or fault)
    if fault is not None:
        raise BatchError(f"embedding_bag: {fault}")


# -- order ---------------------------------------------------------------------------------------
# Sorting ids by owner and by row.
#
# On the CPU numpy is faster for keys of 8 bits, and torch's radix sort for larger ones.


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


def sorted_pairs(
    keys: torch.Tensor, values: torch.Tensor, num_keys: int, num_values: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys in ascending order, with the value of each; values of equal keys ascend already.

    Keys and values are below these numbers.

    >>> keys, values = sorted_pairs(torch.tensor([7, 3, 7]), torch.tensor([0, 0, 4]), 8, 5)
    >>> keys.tolist(), values.tolist()
    ([3, 7, 7], [0, 0, 4])
    """
    shift = max(0, num_values - 1).bit_length()
    bits = max(0, num_keys - 1).bit_length() + shift
    if keys.device.type != "cpu" or bits > 63:
        found, order = sorted_with_order(keys)
        return found, values.index_select(0, order)
    # One number for both: numpy sorts those by vectors, in a third of the time of torch's radix.
    pairs = keys.to(torch.int32 if bits <= 31 else torch.int64, copy=True)
    pairs.bitwise_left_shift_(shift).bitwise_or_(values)
    pairs.numpy().sort()
    return (pairs >> shift).to(keys.dtype), (pairs & ((1 << shift) - 1)).to(values.dtype)


def repeated(lengths: torch.Tensor, total: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Each index of `lengths`, repeated that often.

    >>> repeated(torch.tensor([2, 0, 1]), 3).tolist()
    [0, 0, 2]
    """
    count = torch.arange(lengths.shape[0], dtype=dtype, device=lengths.device)
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


def edges_of(lengths: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Where each of some neighbours begins, and where the last one ends.

    >>> edges_of(torch.tensor([2, 0, 1])).tolist()
    [0, 2, 2, 3]
    """
    edges = lengths.new_zeros(lengths.shape[0] + 1, dtype=dtype)
    torch.cumsum(lengths, 0, dtype=dtype, out=edges[1:])
    return edges


def places(mask: torch.Tensor) -> torch.Tensor:
    """The positions where a mask is true.

    >>> places(torch.tensor([True, False, True])).tolist()
    [0, 2]
    """
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)


def rows_here(
    ids: torch.Tensor, first_row: int, num_rows: int, skipped: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of so many from the first one on, without one id; and the positions of their ids.

    >>> rows, places = rows_here(torch.tensor([7, 3, 5, 4]), 4, 3, skipped=5)
    >>> rows.tolist(), places.tolist()
    ([0], [3])
    """
    if ids.device.type != "cpu":
        rows = ids - first_row
        keep = (rows >= 0).logical_and_(rows < num_rows)
        if skipped >= 0:
            keep.logical_and_(ids != skipped)
        found = keep.nonzero().view(-1)
        return rows.index_select(0, found), found
    # By numpy, in half of the time of torch's calls. Negative numbers are large without a sign.
    numbers = (ids - first_row).numpy()
    inside = numbers.view(f"u{numbers.itemsize}") < num_rows
    if skipped >= 0:
        inside &= numbers != skipped - first_row
    positions = np.flatnonzero(inside)
    return torch.from_numpy(numbers[positions]), torch.from_numpy(positions)


def num_up_to(bounds: torch.Tensor, sorted_numbers: torch.Tensor, right: bool) -> torch.Tensor:
    """How many of some sorted numbers are less than each bound; with `right`, or equal.

    >>> num_up_to(torch.tensor([0, 2, 5]), torch.tensor([1, 2, 4]), right=True).tolist()
    [0, 2, 3]
    """
    if bounds.device.type == "cpu":
        side: Any = "right" if right else "left"
        return torch.from_numpy(np.searchsorted(sorted_numbers.numpy(), bounds.numpy(), side))
    return torch.searchsorted(sorted_numbers, bounds, right=right)


def divided(ids: torch.Tensor, block: int) -> torch.Tensor:
    """`ids // block`; numpy is faster than torch's division."""
    if ids.device.type == "cpu":
        return torch.from_numpy(np.floor_divide(ids.numpy(), block))
    return torch.div(ids, block, rounding_mode="floor")


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
