"""Compiling without a measurement that only torch's log shows.

After each compilation torch empties the processor's caches and times the guards once: 17 ms, half
of what a small function takes to compile, in each of the thousands that the tests compile.
"""

import torch._dynamo.guards as guards


def _no_time(*_):
    return 0.0


if hasattr(guards, "profile_guard_manager"):
    guards.profile_guard_manager = _no_time
