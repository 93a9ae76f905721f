"""Which rank attends to what: every pair once, balanced, and little is sent."""

import pytest

from shardwise.core.sizes import lengths
from shardwise.ops.nn.context_tiles import schedule, spans, tiles


def split(size, num, sizes=None):
    return spans(lengths(size, num, sizes))


def pairs_of(found):
    """Each pair of a query and a key that is computed, as often as it is."""
    for worker, work in enumerate(found.work):
        for held in work:
            for owner in range(found.num_ranks):
                for tile in tiles(held, found.needed(worker, owner), found.causal):
                    for query in range(*tile.queries):
                        for key in range(*tile.keys):
                            inside = query - tile.queries[0] >= key - tile.keys[0]
                            if inside or not tile.causal:
                                yield query, key


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(24, 24), (25, 25), (3, 3), (9, 24), (24, 9), (24, 1)]
)
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_every_pair_once(num, num_queries, num_keys, causal):
    found = schedule(split(num_queries, num), split(num_keys, num), causal)
    expected = [
        (query, key)
        for query in range(num_queries)
        for key in range(num_keys)
        if key <= query or not causal
    ]
    assert sorted(pairs_of(found)) == expected
    assert sum(found.num_pairs(rank) for rank in range(num)) == len(expected)


def test_uneven_ranges():
    held = spans((1, 0, 13, 6))
    found = schedule(held, held, True)
    assert len(list(pairs_of(found))) == len(set(pairs_of(found))) == 20 * 21 // 2


@pytest.mark.parametrize("num", [2, 3, 4, 5, 8])
def test_work_is_balanced(num):
    held = split(16384, num)
    found = schedule(held, held, True)
    work = [found.num_pairs(rank) for rank in range(num)]
    assert max(work) * num / sum(work) < 1.01


@pytest.mark.parametrize("group", [1, 2, 4])
def test_sends_less_than_a_ring_without_mask(group):
    """`group` query heads for each key head; a ring passes all keys to all ranks."""
    held = split(16384, 4)
    found = schedule(held, held, True)
    sent = [found.sent_rows(rank) for rank in range(4)]
    textbook = 4 * 3 * 4096
    assert sum(2 * keys + 2 * group * queries for queries, keys in sent) < 2 * textbook
    assert sum(4 * keys + 2 * group * queries for queries, keys in sent) < 4 * textbook
