"""Compiled code that a later process would find on disk."""

import logging
from contextlib import contextmanager
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
    """The first run leaves all its code on disk, the second compiles nothing, neither warns."""
    with no_warning_logged():
        first, second = counts_of_two_runs(run)
    for counts in (first, second):
        assert not [name for name in counts if name.endswith("_bypass")], counts
    assert first["autograd_cache_saved"] >= 1
    assert second["autograd_cache_hit"] == first["autograd_cache_saved"]
    assert "fxgraph_cache_miss" not in second


@contextmanager
def no_warning_logged():
    """Like pytest's `caplog`, whose plugin would take two milliseconds of every test."""
    handler, told = logging.Handler(logging.WARNING), []
    handler.emit = told.append
    loggers = [
        each for each in logging.root.manager.loggerDict.values() if hasattr(each, "propagate")
    ]
    loggers = [logging.root, *(each for each in loggers if not each.propagate)]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert not told, told
