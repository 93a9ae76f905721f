"""What a training loop may do besides forward, backward and step."""

from __future__ import annotations

#: By word: what it means.
OPTIONS: dict[str, str] = {
    "accumulate": "two batches a step, each reduced",
    "no_sync": "two batches a step, the first inside no_sync()",
    "clip": "gradients are clipped by their common norm",
    "recompute": "activations are computed again in backward",
    "autocast": "forward in bfloat16",
    "copy": "after a step, training goes on with a deep copy",
    "pickle": "after a step, training goes on with what was pickled and read",
    "unused": "a layer that no step reaches",
    "sometimes": "a layer that one step reaches",
    "late": "parameters that are frozen at first",
    "freeze": "parameters that are frozen after a step",
    "two": "two optimizers share the parameters",
    "save": "saved by all ranks, loaded by one device",
    "penalty": "a gradient penalty, by double backward",
    "zeros": "gradients are set to zero, not to None",
}

#: Options that say two things about one matter.
EXCLUSIVE = (
    {"accumulate", "no_sync"},
    {"copy", "pickle"},
    {"unused", "sometimes"},
    {"late", "freeze"},
    {"autocast", "penalty"},
    # The second optimizer would divide by what rounding left.
    {"autocast", "two"},
    # A gradient of zeros is not none: frozen and unreached parameters would still be decayed.
    {"zeros", "freeze"},
)


def agree(options: frozenset[str]) -> bool:
    return not any(pair <= options for pair in EXCLUSIVE)
