"""Specs are values: checked when they are made, compared and hashed by what they say."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shard_cases import chunks, stretches, tiles
from torch.distributed.remote_device import _remote_device

from shardwise.errors import ArgumentError, LayoutError
from shardwise.shard import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardMetadata,
)
from shardwise.shard.spec import check_ranks, device_type_of


@given(
    size=st.integers(0, 40), other=st.integers(1, 3), ranks=st.lists(st.integers(0, 5), min_size=1)
)
def test_chunks_are_those_of_torch(size, other, ranks):
    whole = torch.arange(size * other).view(size, other)
    boxes = chunks(0, *ranks).boxes(whole.shape)
    found = [whole[b.shard_offsets[0] :][: b.shard_sizes[0]] for b in boxes]
    expected = list(whole.chunk(len(ranks)))
    assert [box.rank for box in boxes] == ranks
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=False))
    assert all(not part.numel() for part in found[len(expected) :])


def test_they_compare_by_value():
    assert chunks(0, 1, 0) == chunks(0, 1, 0)
    assert chunks(0, 1, 0) != chunks(0, 0, 1)
    assert chunks(0, 1) != chunks(1, 1)
    assert len({chunks(0, 1), chunks(0, 1), tiles((5, 4)), tiles((5, 4))}) == 2
    assert ChunkShardingSpec(0, ["rank:0/cuda:1"]) != ChunkShardingSpec(0, ["rank:0/cpu"])


def test_a_box_without_a_place_says_where_but_makes_no_tensor():
    box = ShardMetadata([0], [3])
    assert box.numel == 3
    with pytest.raises(LayoutError, match="names no rank"):
        device_type_of(EnumerableShardingSpec([box]))
    there = ShardMetadata([0], [3], _remote_device("rank:1/cpu"))
    assert there == ShardMetadata([0], [3], "rank:1/cpu")


@pytest.mark.parametrize("text", ["rank:x/cpu", "worker0/cpu", "rank:0/toaster", "toaster"])
def test_places_that_mean_nothing(text):
    with pytest.raises(LayoutError):
        ChunkShardingSpec(0, [text])


def test_rank_and_device_of_a_placement_are_attributes_and_methods():
    place = ShardMetadata([0], [3], "rank:1/cuda:2").placement
    assert place.rank == place.rank() == 1
    assert place.device == place.device() == torch.device("cuda:2") == place.device
    assert (place.device.type, place.device.index, repr(place)) == ("cuda", 2, "rank:1/cuda:2")
    assert torch.empty(1, device=ShardMetadata([0], [3], "rank:1").placement.device).is_cpu
    assert hash(place) == hash(ShardMetadata([0], [3], "rank:1/cuda:2").placement)


def test_a_placement_without_a_rank_names_a_device_and_makes_no_tensor():
    place = DevicePlacementSpec("cuda:1").device
    assert (place.rank(), place.device(), repr(place)) == (None, torch.device("cuda:1"), "cuda:1")
    assert isinstance(DevicePlacementSpec("rank:0/cpu"), PlacementSpec)
    with pytest.raises(LayoutError, match="names no rank"):
        check_ranks(ChunkShardingSpec(0, ["cpu", "cpu"]).boxes([4]), [0, 1])


def test_arguments_of_another_kind():
    with pytest.raises(NotImplementedError, match="by number"):
        ChunkShardingSpec("H", ["rank:0/cpu"])
    with pytest.raises(ArgumentError, match="one dim"):
        ChunkShardingSpec(0.5, ["rank:0/cpu"])
    with pytest.raises(ArgumentError, match="list of texts"):
        ChunkShardingSpec(0, "rank:0/cpu")
    with pytest.raises(LayoutError, match="at least one"):
        ChunkShardingSpec(0, [])
    with pytest.raises(ArgumentError, match="lists of ints"):
        ShardMetadata([0.5], [1], "rank:0/cpu")
    with pytest.raises(LayoutError, match="not negative"):
        ShardMetadata([-1], [1], "rank:0/cpu")
    with pytest.raises(LayoutError, match="as many offsets"):
        ShardMetadata([0], [1, 2], "rank:0/cpu")


def test_a_dim_that_is_not_there():
    with pytest.raises(LayoutError, match="has 1 dims"):
        chunks(1, 0).boxes([4])


def test_overlaps():
    first = ShardMetadata([0, 0], [3, 4], "rank:0/cpu")
    with pytest.raises(LayoutError, match="overlap"):
        EnumerableShardingSpec([first, ShardMetadata([2, 3], [3, 4], "rank:1/cpu")])


def test_holes_and_pieces_outside():
    spec = stretches(0, (6, 4), (2, 4))
    assert sum(box.numel for box in spec.boxes((6, 4))) == 24
    with pytest.raises(LayoutError, match="holes"):
        spec.boxes((7, 4))
    with pytest.raises(LayoutError, match="outside"):
        spec.boxes((5, 4))
    with pytest.raises(LayoutError, match="outside"):
        spec.boxes((6, 4, 1))


@given(data=st.data(), rows=st.integers(3, 9), columns=st.integers(2, 6))
def test_any_tiling_is_accepted_and_any_shift_refused(data, rows, columns):
    """Cut into stripes of columns within stripes of rows; then move one box."""
    boxes, at = [], 0
    for height in data.draw(_summing_to(rows)):
        left = 0
        for width in data.draw(_summing_to(columns)):
            rank = data.draw(st.integers(0, 3))
            boxes.append(ShardMetadata([at, left], [height, width], f"rank:{rank}/cpu"))
            left += width
        at += height
    order = data.draw(st.permutations(boxes))
    assert EnumerableShardingSpec(order).boxes((rows, columns)) == tuple(order)
    if len(boxes) > 1:
        moved = [*order[1:], ShardMetadata(order[1].shard_offsets, [1, 1], "rank:0/cpu")]
        with pytest.raises(LayoutError):
            EnumerableShardingSpec(moved).boxes((rows, columns))


def _summing_to(total):
    cuts = st.lists(st.integers(1, total - 1), unique=True).map(sorted)
    return cuts.map(lambda c: [b - a for a, b in zip([0, *c], [*c, total], strict=True)])
