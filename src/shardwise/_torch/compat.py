"""Looking up private names of torch, each with what stops working without it.

A missing name is replaced by a stand-in that raises when used: `import shardwise` still works, and
so does everything that does not need the name. Names are strings, so that all lookups happen here
and a test can remove each name.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from shardwise.errors import TorchVersionError

VERSION = torch.__version__
OLDEST, NEWEST = "2.11", "2.13"


def resolve(name: str) -> Any:
    """The object of a dotted name; AttributeError or ImportError if there is none."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(".".join(parts[:number]))
    return found


class Missing:
    """Stands for a missing name; raises when used, with the name and what needs it."""

    def __init__(self, name: str, without: str) -> None:
        self.__dict__.update(_name=name, _without=without)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TorchVersionError(
            f"torch {VERSION} has no {self._name}. Without it: {self._without}. shardwise is "
            f"tested on torch {OLDEST} to {NEWEST}; `shardwise doctor` lists what else is missing."
        )

    __call__ = __instancecheck__ = __getitem__ = __iter__ = __contains__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python looks these up by itself
        self._refuse()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """A class that derives from the stand-in can be defined, but not instantiated."""

        def __new__(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
            self._refuse()

        return (type("MissingBase", (), {"__new__": __new__}),)


@dataclass(frozen=True)
class Probe:
    """`ok` is None if only names with a substitute are missing; `text` says what is lost."""

    ok: bool | None
    text: str


class Names:
    """The private names that one file of this folder uses."""

    def __init__(self) -> None:
        #: What is lost without each name, and whether it has a substitute.
        self.known: dict[str, tuple[str, bool]] = {}

    def find(self, name: str, without: str, **instead: Any) -> Any:
        """The object of `name`; if missing, `instead=`, or a stand-in that raises."""
        self._know(name, without, bool(instead))
        try:
            return resolve(name)
        except (AttributeError, ImportError):
            return instead.get("instead", Missing(name, without))

    def later(self, name: str, without: str, **instead: Any) -> Callable[[], Any]:
        """As `find`, for a name that is slow to import: a function that looks it up when called."""
        self._know(name, without, bool(instead))
        return functools.partial(self.find, name, without, **instead)

    def make(
        self, names: str, of: str, without: str, build: Callable[..., Any], **instead: Any
    ) -> Any:
        """As `find`: `build(*found)` of several names in `of`, separated by blanks."""
        found = []
        for name in names.split():
            self._know(f"{of}.{name}", without, bool(instead))
            found.append(self.find(f"{of}.{name}", without))
        missing = [each for each in found if isinstance(each, Missing)]
        return instead.get("instead", missing[0]) if missing else build(*found)

    def _know(self, name: str, without: str, substitute: bool) -> None:
        self.known.setdefault(name, (without, substitute))

    def lacking(self) -> dict[str, str]:
        """The names that this torch lacks, with what is lost without them."""
        return {
            name: without
            for name, (without, _) in self.known.items()
            if isinstance(self.find(name, without), Missing)
        }

    def require(self, without: str | None = None) -> None:
        """Raise if a name without a substitute is missing; given `without`, one that costs this."""
        for name, (lost, substitute) in self.known.items():
            if not substitute and without in (None, lost):
                found = self.find(name, lost)
                if isinstance(found, Missing):
                    found()

    def probe(self, check: Callable[[], bool], otherwise: str) -> Probe:
        """Whether all names are there and `check` holds; `otherwise` says what is lost if not."""
        lacking = self.lacking()
        if lacking:
            ok = None if all(self.known[name][1] for name in lacking) else False
            return Probe(ok, "; ".join(f"no {name}: {lost}" for name, lost in lacking.items()))
        try:
            right, found = check(), ""
        except Exception as error:
            right, found = False, f" ({type(error).__name__}: {error})"
        return Probe(right, "" if right else f"{otherwise}{found}")


def probe() -> Probe:
    """Whether shardwise is tested on this version of torch."""
    version, oldest, newest = (
        tuple(map(int, str(text).split("+")[0].split(".")[:2]))
        for text in (VERSION, OLDEST, NEWEST)
    )
    tested = oldest <= version <= newest
    return Probe(tested, "" if tested else f"shardwise is tested on {OLDEST} to {NEWEST}")
