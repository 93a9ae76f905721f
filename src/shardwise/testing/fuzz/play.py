"""One program on one device and sharded, and how the two differ."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from shardwise.errors import (
    ArgumentError,
    LayoutError,
    LeafError,
    MixedTensorsError,
    UnsupportedError,
)
from shardwise.testing.fuzz import undefined
from shardwise.testing.fuzz.compare import (
    Different,
    difference,
    grad_of,
    misplaced,
    tolerance,
    whole,
)
from shardwise.testing.fuzz.program import Program
from shardwise.testing.fuzz.run import WorldState, hangs_on_rounding, run
from shardwise.testing.fuzz.worlds import OneDevice, Sharded
from shardwise.testing.op_sweep.compare import brief

#: How a program can end, the worst first. `stale` is a value that one device held earlier, `crash`
#: an error that is no refusal, `refused` what shardwise says it does not do, `torch-refused` what
#: raises on one device as well, `undefined` what one device does not define (`REASONS`).
OUTCOMES = ("wrong", "stale", "crash", "refused", "torch-refused", "undefined", "ok")
FAILURES = OUTCOMES[:3]
#: The errors by which shardwise says that it does not do something.
REFUSALS = (UnsupportedError, LayoutError, MixedTensorsError, LeafError, ArgumentError)


@dataclass(frozen=True)
class ProgramOutcome:
    """How a program ended: `aspect` is what differs, in `slot`, and `note` says it in words."""

    kind: str
    aspect: str = ""
    note: str = ""
    slot: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES


@dataclass
class Reference:
    """The program on one device, with what each slot held after each step."""

    program: Program
    run: WorldState = field(init=False)
    history: dict[str, list[Any]] = field(default_factory=dict)
    #: Why there is nothing to compare with after `run.done` items, if so.
    undefined: str | None = None

    def __post_init__(self) -> None:
        self.run = WorldState(OneDevice(), self.program.seed)
        for item in self.program.items:
            if not item.makes:  # it may write to what slots hold
                self._note()
            done = self.run.done
            try:
                with undefined.Watch() as watch:
                    self.run.execute(item)
            except Exception as error:
                self.run.error = error
            if self.run.error is None:
                self.undefined = watch.found
            else:
                self.undefined = undefined.raised(self.run.error, item.code)
            if self.undefined is not None or self.run.error is not None:
                self.run.done = done
                break

    def _note(self) -> None:
        for name, value in self.run.slots().items():
            if isinstance(value, torch.Tensor):
                self.history.setdefault(name, []).append(value.detach().clone())


def play(program: Program, world: Sharded) -> ProgramOutcome:
    """Play in the simulated world that is entered."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _play(program, world)


def _play(program: Program, world: Sharded) -> ProgramOutcome:
    expected = Reference(program)
    if expected.undefined is not None:
        # What came before must be right all the same.
        before = _play(program.upto(expected.run.done), world)
        note = repr(program.items[expected.run.done].code)
        return before if before.failed else ProgramOutcome("undefined", expected.undefined, note)
    found = run(program, world)
    if found.error is None or expected.run.error is None or found.done != expected.run.done:
        if found.error is not None:
            return _raised(program, world, found)
        if expected.run.error is not None:
            error = expected.run.error
            code = program.items[expected.run.done].code
            note = f"accepted {code!r}, where one device raises {type(error).__name__}: "
            return ProgramOutcome("wrong", "accepted", note + brief(error))
    outcome = _compare(expected, found)
    if outcome is not None and _turned_since(program, outcome):
        return ProgramOutcome("ok")  # torch too leaves a gradient as it is when its leaf is turned
    if outcome is not None and outcome.kind == "wrong" and _is_rounding(program, outcome, world):
        return ProgramOutcome("undefined", undefined.ROUNDING, outcome.note)
    if outcome is None and expected.run.error is not None:
        return ProgramOutcome("torch-refused", note=brief(expected.run.error))
    return outcome or ProgramOutcome("ok")


def _is_rounding(program: Program, outcome: ProgramOutcome, world: Sharded) -> bool:
    """Whether a number differs that hangs on rounding on one device, and not in float64."""
    if outcome.aspect not in ("value", "gradient value"):
        return False
    if not hangs_on_rounding(program, outcome.slot):
        return False
    wide = program.in_double()
    return wide == program or not _play(wide, world).failed


def _turned_since(program: Program, outcome: ProgramOutcome) -> bool:
    """Whether a gradient lies otherwise since its leaf was turned after the last backward."""
    if outcome.aspect != "gradient place":
        return False
    name = outcome.slot.removesuffix(".grad")
    turn = re.compile(rf"\b{name}\.(t|transpose|swapaxes|swapdims|squeeze|unsqueeze)_\(")
    for item in reversed(program.items):
        if "backward(" in item.code:
            return False
        if turn.search(item.code):
            return True
    return False


def _raised(program: Program, world: Sharded, found: WorldState) -> ProgramOutcome:
    """Ours raises where one device does not; what came before must be right all the same."""
    error = found.error
    assert error is not None, "an error is told about"
    before = play(program.upto(found.done), world)
    if before.failed:
        return before
    note = f"{program.items[found.done].code!r}: {type(error).__name__}: {brief(error)}"
    if isinstance(error, REFUSALS):
        return ProgramOutcome("refused", _plain(error), note)
    return ProgramOutcome("crash", f"{type(error).__name__} {_plain(error)}", note)


def _plain(error: BaseException) -> str:
    """The text of an error without what changes with shapes and layouts."""
    return " ".join(word for word in str(error).split()[:14] if word.isalpha())


def _compare(expected: Reference, found: WorldState) -> ProgramOutcome | None:
    ours, theirs = found.slots(), expected.run.slots()
    allowed = tolerance(theirs.values(), expected.run.casts)
    for name, value in theirs.items():
        try:
            why = difference(whole(ours[name]), value, allowed)
        except Different as error:
            return ProgramOutcome("wrong", "parts", f"{name}: {error}", name)
        except REFUSALS as error:
            return ProgramOutcome("refused", _plain(error), f"reading {name}: {brief(error)}", name)
        except Exception as error:
            aspect = f"{type(error).__name__} {_plain(error)}"
            return ProgramOutcome("crash", aspect, f"reading {name}: {brief(error)}", name)
        before = expected.history.get(name, [])[-1:] if expected.run.error is not None else []
        if why and not _held_before(whole(ours[name]), before, allowed):
            # A kernel that raises may have written to some entries; who checks first has to none.
            if _held_before(whole(ours[name]), expected.history.get(name, []), allowed):
                return ProgramOutcome(
                    "stale", "value", f"{name} {why}, as it was before a write", name
                )
            return ProgramOutcome("wrong", _aspect(why), f"{name} {why}", name)
    # Where both raised, backward may have come to any point.
    if expected.run.error is None:
        # An op that returns its operand has made no other tensor.
        distinct = {id(value): name for name, value in reversed(theirs.items())}
        for name in reversed(distinct.values()):
            if _tracked(ours[name]) != _tracked(theirs[name]):
                note = (
                    f"{name}.requires_grad is {_tracked(ours[name])}, not {_tracked(theirs[name])}"
                )
                try:
                    ours[name].clone()
                except REFUSALS as error:  # nobody can use it, nor differentiate it
                    return ProgramOutcome(
                        "refused", _plain(error), f"using {name}: {brief(error)}", name
                    )
                return ProgramOutcome("wrong", "requires_grad", note, f"{name}.requires_grad")
            try:
                why = _grad_difference(ours[name], theirs[name], allowed)
            except Exception as error:
                aspect = f"{type(error).__name__} {_plain(error)}"
                note = f"reading the gradient of {name}: {brief(error)}"
                return ProgramOutcome("crash", aspect, note, f"{name}.grad")
            if why:
                aspect = f"gradient {_aspect(why)}"
                return ProgramOutcome("wrong", aspect, f"gradient of {name} {why}", f"{name}.grad")
        if not torch.equal(found.rng, expected.run.rng):
            return ProgramOutcome("wrong", "generator", "the generator is left in another state")
    return None


def _tracked(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _grad_difference(ours: Any, theirs: Any, allowed: float) -> str:
    if not isinstance(theirs, torch.Tensor):
        return ""
    expected, found = grad_of(theirs), grad_of(ours)
    if found is None and expected is not None and not expected.any():
        return ""  # nothing stands for zeros
    if found is None or expected is None:
        return "" if found is expected else f"{_word(found)} instead of {_word(expected)}"
    try:
        # As an optimizer reads it, by an op.
        return difference(whole(found.detach() * 1), expected, allowed) or misplaced(ours, found)
    except Different as error:
        return str(error)


def _word(grad: Any) -> str:
    return "nothing" if grad is None else "a gradient"


def _held_before(found: Any, history: list[Any], allowed: float) -> bool:
    return any(not difference(found, value, allowed) for value in history)


def _aspect(why: str) -> str:
    for word, aspect in (("instead of torch", "dtype"), ("has shape", "shape"), ("lies", "place")):
        if word in why:
            return aspect
    return "value" if "differs" in why or why.startswith("is [") else why.split()[0]


# What is known about a program that was played.

# MERGED


@dataclass
class Result:
    """How the program with this seed ended, and its script where it was shrunk."""

    seed: int
    mesh: tuple[int, ...]
    num_items: int
    kind: str
    aspect: str = ""
    note: str = ""
    script: str = ""


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Programs by outcome, the worst first."""
    found = Counter(result.kind for result in results)
    return {kind: found[kind] for kind in OUTCOMES}


def summary(results: Sequence[Result]) -> str:
    """A line of counts, what was refused and what is undefined, the most frequent first."""
    steps = sum(result.num_items for result in results)
    told = ", ".join(f"{num} {kind}" for kind, num in counts(results).items())
    lines = [f"{len(results)} programs, {steps} leaves and steps: {told}"]
    for kind in ("refused", "undefined"):
        texts = Counter(result.aspect for result in results if result.kind == kind)
        lines += [f"  {kind} {num:5} times: {text}" for text, num in texts.most_common(20)]
    return "\n".join(lines)


def failures(results: Sequence[Result]) -> list[Result]:
    """What failed, scripts first, alike ones together."""
    found = [result for result in results if result.kind in FAILURES]
    order = {kind: place for place, kind in enumerate(OUTCOMES)}
    return sorted(found, key=lambda r: (not r.script, order[r.kind], r.aspect, r.seed))


def told(result: Result) -> str:
    """A failure in words, with its script or the way to get it."""
    head = f"=== seed {result.seed}, mesh {result.mesh}: {result.kind}: {result.note}"
    again = f"    python -m shardwise.testing.fuzz --replay {result.seed}"
    return f"{head}\n{result.script or again}"


def as_json(results: Sequence[Result], settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "settings": settings,
        "counts": counts(results),
        "failures": [asdict(result) for result in failures(results)],
        "refused": [asdict(result) for result in results if result.kind == "refused"],
        "undefined": [asdict(result) for result in results if result.kind == "undefined"],
    }
