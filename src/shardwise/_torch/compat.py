"""Taking private names from torch, each with what stops working where this torch lacks it.

A missing name is replaced by a stand-in that raises when it is used: `import shardwise` works, and
so does all that does not need the name. Names are given as text, so that nothing of torch is
touched but through here, and a test can take each name away.
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
    """What a dotted name stands for; AttributeError or ImportError where there is no such thing."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(".".join(parts[:number]))
    return found


class Missing:
    """Stands where a private name should; whoever uses it learns which, and what needs it."""

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
            raise AttributeError(name)  # Python asks for these by itself
        self._refuse()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """A class that derives from the stand-in can be defined, but has no objects."""

        def __new__(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
            self._refuse()

        return (type("MissingBase", (), {"__new__": __new__}),)


@dataclass(frozen=True)
class Probe:
    """`ok` is None where only something with a substitute is missing; `text` says what is lost."""

    ok: bool | None
    text: str


class Names:
    """The private names that one file of this room uses."""

    def __init__(self) -> None:
        #: What is lost without each name, and whether something else does its work.
        self.known: dict[str, tuple[str, bool]] = {}

    def find(self, name: str, without: str, **instead: Any) -> Any:
        """What `name` stands for; `instead=` is taken in its place, else a stand-in that raises."""
        self._know(name, without, bool(instead))
        try:
            return resolve(name)
        except (AttributeError, ImportError):
            return instead.get("instead", Missing(name, without))

    def later(self, name: str, without: str, **instead: Any) -> Callable[[], Any]:
        """As `find`, of a name that takes long to import: a function that does so when called."""
        self._know(name, without, bool(instead))
        return functools.partial(self.find, name, without, **instead)

    def make(
        self, names: str, of: str, without: str, build: Callable[..., Any], **instead: Any
    ) -> Any:
        """As `find`: `build(*found)` of several names of `of`, separated by blanks."""
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
        found = {}
        for name, (without, _) in self.known.items():
            try:
                resolve(name)
            except (AttributeError, ImportError):
                found[name] = without
        return found

    def require(self) -> None:
        """Raise if a name without a substitute is missing."""
        for name, without in self.lacking().items():
            if not self.known[name][1]:
                Missing(name, without)()

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
