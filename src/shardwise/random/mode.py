"""`rng`: whether random numbers equal one device's, or are only reproducible."""

from __future__ import annotations

from typing import Any

from shardwise.errors import ArgumentError

_MODES = ("exact", "fast")


class _Setting:
    """Process-wide, since backward may run on other threads."""

    __slots__ = ("mode",)

    def __init__(self) -> None:
        self.mode = "exact"


setting = _Setting()


class rng:
    """Set how DTensors draw random numbers, from now on or for a `with` block.

    `"exact"`, the default: the values that one device would draw, whatever the mesh and placements;
    each rank draws the whole tensor and keeps its shard. `"fast"`: each rank draws only its shard,
    from a seed that depends on the generator and the shard's box. Runs with the same seed, mesh and
    placements repeat, but the values are not one device's and depend on the placements. Compiled
    code draws exactly in both modes.

    >>> import shardwise, torch
    >>> with shardwise.simulate(2), shardwise.rng("fast"):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     _ = torch.manual_seed(0)
    ...     x = shardwise.rand(4, device_mesh=mesh, placements=[shardwise.Shard(0)])
    ...     _ = torch.manual_seed(0)
    ...     again = shardwise.rand(4, device_mesh=mesh, placements=[shardwise.Shard(0)])
    >>> torch.equal(x.to_local().on_rank(1), again.to_local().on_rank(1))
    True
    """

    def __init__(self, mode: str) -> None:
        if mode not in _MODES:
            raise ArgumentError(f"rng() takes 'exact' or 'fast', found {mode!r}.")
        self._before = setting.mode
        setting.mode = mode

    def __enter__(self) -> rng:
        return self

    def __exit__(self, *exc: Any) -> None:
        setting.mode = self._before
