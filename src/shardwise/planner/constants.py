"""Constants: what work costs on a machine, measured and kept in a file.

Note [Seconds per byte]
The seconds per byte of a lookup depend on how many different bytes a step touches: what fits into a
cache is read faster. So a kernel has seconds per byte at some sizes, and those between are
interpolated over the logarithm of the size. There are also seconds per call, per shard of a
table, per id and per bag: a kernel's time is not the sum of the times of tables alone.

Note [Rows of an update]
An update reads and writes each different row once, however often it was looked up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import ArgumentError, LayoutError
from shardwise.plans import LARGEST, read_content, write_text

FORMAT = "shardwise constants 1"
#: Files that come with the package, by name.
SHIPPED = ("cpu", "h200")

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel over all shards of a rank: a lookup, or an update."""

    #: Seconds per call, per shard of a table, per id, and per bag.
    call_s: float
    tile_s: float
    id_s: float
    bag_s: float
    #: Bytes that a step touches, ascending, and seconds per byte of the rows of its ids there.
    touched: tuple[float, ...]
    byte_s: tuple[float, ...]
    #: Seconds per byte of a bag's row: what is written, or read as a gradient.
    bag_byte_s: float = 0.0
    #: Seconds per different row, and per byte of those. See Note [Rows of an update].
    row_s: float = 0.0
    row_byte_s: float = 0.0

    def seconds(self, ids: Any, bags: Any, row_bytes: Any, touched: Any) -> Array:
        """The seconds of shards that touch so many different bytes, without `call_s`."""
        sizes = np.log(np.maximum(np.asarray(touched, float), 1.0))
        per_byte = np.interp(sizes, np.log(np.asarray(self.touched)), np.asarray(self.byte_s))
        found = self.tile_s + ids * (self.id_s + row_bytes * per_byte)
        found = found + bags * (self.bag_s + row_bytes * self.bag_byte_s)
        rows = touched / np.maximum(row_bytes, 1.0)
        return np.asarray(found + rows * self.row_s + touched * self.row_byte_s, float)


@dataclass(frozen=True, slots=True)
class Constants:
    """What a machine takes for the work of a step."""

    name: str
    lookup: Kernel
    update: Kernel
    #: Seconds of one exchange, whatever it carries: within a host, and between hosts.
    latency_s: float
    latency_between_s: float
    #: Seconds per byte for the rank that holds a table, to ranks of its host and of others.
    owner_byte_s: float
    owner_byte_between_s: float
    #: Seconds per byte of rows assembled and gradients sent, for the requesting ranks.
    asker_byte_s: float
    #: Seconds of a feature per shard of its table, for the requesting ranks.
    leg_s: float
    #: Seconds per id that a rank sends, and per id of a table whose rows are split.
    send_id_s: float
    split_id_s: float
    #: Seconds per byte of gradients of replicated tables.
    copy_byte_s: float
    copy_byte_between_s: float
    #: Further seconds of a step.
    step_s: float = 0.0
    #: How many ranks of a host compute at the same time; None for all.
    at_once: float | None = None
    #: Seconds of each further width of a rank's tables; None: those of both kernel calls.
    width_s: float | None = None
    #: Seconds per id whose row comes back instead of a sum, and of each group of tables of one
    #: width whose rows are split over the same ranks; for the requesting ranks.
    sum_id_s: float = 0.0
    group_s: float = 0.0
    #: Where each figure comes from.
    sources: Mapping[str, str] = field(default_factory=dict)
    #: Seconds per byte of rows that are rounded to a narrower dtype, or widened.
    round_byte_s: float = 0.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the constants to a JSON file, whole or not at all."""
        check_constants_path(path)
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"
        write_text(Path(path), text)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Constants:
        file = Path(path)
        content = read_content(file)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise LayoutError(f'{file} holds no constants: it does not say format = "{FORMAT}".')
        return _constants(file, {k: v for k, v in content.items() if k != "format"})

    @staticmethod
    def of(given: Constants | str | os.PathLike[str]) -> Constants:
        """Constants, the name of a file that ships with the package, or a path."""
        if isinstance(given, Constants):
            return given
        if isinstance(given, str) and given in SHIPPED:
            return Constants.load(Path(__file__).parent / f"constants_{given}.json")
        if not Path(given).is_file():
            raise ArgumentError(
                f"There is no file of constants {os.fspath(given)!r}; those that ship are "
                f"{', '.join(SHIPPED)}, and `shardwise plan --calibrate FILE` measures others."
            )
        return Constants.load(given)


def check_constants_path(path: str | os.PathLike[str]) -> None:
    if Path(path).suffix != ".json":
        raise ArgumentError(f"Constants are written as .json, found {os.fspath(path)!r}.")


def _constants(file: Path, content: dict[str, Any]) -> Constants:
    others = sorted(set(content) - {each.name for each in fields(Constants)})
    missing = sorted(_required(Constants) - set(content))
    if others or missing:
        said = f"unknown: {', '.join(others)}" if others else f"missing: {', '.join(missing)}"
        raise LayoutError(f"{file}: {said}.")
    for name, value in content.items():
        if name in ("lookup", "update"):
            content[name] = _kernel(file, name, value)
        elif name not in ("name", "sources") and not (
            name in ("at_once", "width_s") and value is None
        ):
            _check(file, name, value)
    return Constants(**content)


def _kernel(file: Path, name: str, value: Any) -> Kernel:
    known = {each.name for each in fields(Kernel)}
    if not isinstance(value, dict) or set(value) - known or _required(Kernel) - set(value):
        raise LayoutError(f"{file}: {name} should have {', '.join(sorted(known))}.")
    for key, number in value.items():
        for each in number if isinstance(number, list) else [number]:
            _check(file, f"{name}.{key}", each)
    touched, byte_s = tuple(value["touched"]), tuple(value["byte_s"])
    if not touched or len(touched) != len(byte_s) or list(touched) != sorted(touched):
        raise LayoutError(
            f"{file}: {name} needs as many byte_s as touched, and touched ascending; found "
            f"{len(byte_s)} and {list(touched)}."
        )
    return Kernel(**{**value, "touched": touched, "byte_s": byte_s})


def _required(kind: type[Constants] | type[Kernel]) -> set[str]:
    return {e.name for e in fields(kind) if e.default is MISSING and e.default_factory is MISSING}


def _check(file: Path, name: str, value: Any) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 <= value <= LARGEST:
        raise LayoutError(f"{file}: {name} is a number from 0 on, found {value!r}.")
