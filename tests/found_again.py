"""Compiled code that a later process would find on disk."""

from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache


def counts_of_two_runs(run) -> list[dict[str, Any]]:
    """What torch counts of its caches in two runs, as if the second were in a later process.

    All that is kept in memory is gone then; the cache on disk is not.
    """
    found = []
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            run()
            found.append({**counters["aot_autograd"], **counters["inductor"]})
    return found


def assert_found_again(run) -> None:
    """The first run leaves all its code on disk, and the second compiles nothing."""
    first, second = counts_of_two_runs(run)
    for counts in (first, second):
        assert not [name for name in counts if name.endswith("_bypass")], counts
    assert first["autograd_cache_saved"] >= 1
    assert second["autograd_cache_hit"] == first["autograd_cache_saved"]
    assert "fxgraph_cache_miss" not in second
