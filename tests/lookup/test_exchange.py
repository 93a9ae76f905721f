"""Ids to their owners and rows back, against what one device would do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise
from shardwise import LocalTensor
from shardwise.comm import collectives
from shardwise.core.mesh import grid_of
from shardwise.lookup.exchange import on_host, route
from shardwise.lookup.ids import distinct, places_of_runs, segment_sums


@given(st.lists(st.integers(0, 30)))
def test_each_key_is_found_once_and_in_order(keys):
    given_keys = torch.tensor(keys, dtype=torch.long)
    found, order, starts = distinct(given_keys)
    assert found.tolist() == sorted(set(keys))
    assert found[places_of_runs(order, starts)].tolist() == keys
    sums = segment_sums(given_keys.double().unsqueeze(1), order, starts)
    assert sums.view(-1).tolist() == [key * keys.count(key) for key in sorted(set(keys))]


def test_counts_may_differ_between_ranks():
    """Rank r sends r + 1 entries to each; what arrives is in the order of ranks."""
    with shardwise.simulate(3):
        grid = grid_of(shardwise.init_device_mesh("cpu", (3,)))
        x = LocalTensor.per_rank(lambda r: torch.arange(3 * (r + 1)) + 100 * r)
        sent = LocalTensor.per_rank(lambda r: torch.tensor([r + 1] * 3))
        received = LocalTensor.per_rank(lambda r: torch.tensor([1, 2, 3]))
        moved = collectives.all_to_all_uneven(
            x, on_host(grid, sent), on_host(grid, received), grid, 0
        )
        assert moved.on_rank(0).tolist() == [0, 100, 101, 200, 201, 202]
        assert moved.on_rank(2).tolist() == [2, 104, 105, 206, 207, 208]


@pytest.mark.parametrize("bounds", [[0, 3, 6, 9, 11], [0, 0, 11, 11, 11]], ids=str)
def test_rows_come_back_in_the_order_of_the_ids(bounds):
    table = torch.randn(11, 2)
    with shardwise.simulate(4):
        grid = grid_of(shardwise.init_device_mesh("cpu", (4,)))
        ids = [torch.randint(0, 11, (n,)) for n in (5, 0, 1, 7)]
        local = LocalTensor.per_rank(lambda rank: ids[rank])
        notes = []
        note = LocalTensor.per_rank(lambda rank: torch.tensor([rank]))
        routing = route(grid, 0, local, bounds, note, notes.append)
        assert notes[0].tolist() == [[0], [1], [2], [3]]
        for rank in range(4):
            asked = routing.asked.on_rank(rank)
            assert all(bounds[rank] <= i < bounds[rank + 1] for i in asked.tolist())
        rows = LocalTensor.per_rank(lambda rank: table[routing.asked.on_rank(rank)])
        answered = routing.answer(rows)
        for rank in range(4):
            assert torch.equal(answered.on_rank(rank), table[ids[rank]])
        grads = LocalTensor.per_rank(lambda rank: torch.ones(len(ids[rank]), 2))
        given = routing.hand_in(grads)
        total = torch.zeros(11)
        for rank in range(4):
            total.index_add_(0, routing.asked.on_rank(rank), given.on_rank(rank)[:, 0])
        assert torch.equal(total, torch.bincount(torch.cat(ids), minlength=11).float())
