"""One program on one device and sharded, how the two differ, and a smaller one that does."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from shardwise.core.placements import REPLICATE, Partial, Placement, Replicate, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import (
    ArgumentError,
    LayoutError,
    LeafError,
    MixedTensorsError,
    UnsupportedError,
)
from shardwise.simulation.world import simulate
from shardwise.testing.compare import Different, brief, difference, gathered, tolerance
from shardwise.testing.fuzz.program import (
    Item,
    Leaf,
    OneDevice,
    Program,
    Sharded,
    Statement,
    WorldState,
    placed,
    run,
)
from shardwise.testing.fuzz.undefined import (
    ROUNDING,
    SHARED_GRADIENT,
    SharedGradients,
    UndefinedMode,
    grad_of,
    hangs_on_rounding,
    steady,
    undefined_error,
)

#: How a program can end, the worst first. `stale` is a value that one device held earlier, `crash`
#: an error that is not a refusal, `refused` what shardwise does not support, `torch-refused` what
#: raises on one device as well, `undefined` what one device does not define (`undefined.REASONS`).
OUTCOMES = ("wrong", "stale", "crash", "refused", "torch-refused", "undefined", "ok")
FAILURES = OUTCOMES[:3]
#: The errors with which shardwise refuses what it does not support.
REFUSALS = (UnsupportedError, LayoutError, MixedTensorsError, LeafError, ArgumentError)


@dataclass(frozen=True)
class ProgramOutcome:
    """How a program ended: `aspect` is what differs, in `slot`; `note` is for people."""

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
        # Watched in a run of its own: in a mode, torch takes other ways through some formulas.
        watched = WorldState(OneDevice(), self.program.seed)
        for item in self.program.items:
            if not item.makes:  # it may write to what slots hold
                self._note()
            done = self.run.done
            shared = SharedGradients(self.run.slots().values())
            try:
                self.run.execute(item)
            except Exception as error:
                self.run.error = error
            with contextlib.suppress(Exception), UndefinedMode() as watch:
                watched.execute(item)
            if self.run.error is None:
                self.undefined = watch.found or (SHARED_GRADIENT if shared.changed else None)
            else:
                self.undefined = undefined_error(self.run.error, item.code)
            if self.undefined is not None or self.run.error is not None:
                self.run.done = done
                break

    def _note(self) -> None:
        for name, value in self.run.slots().items():
            if isinstance(value, torch.Tensor):
                self.history.setdefault(name, []).append(value.detach().clone())


def play(program: Program, world: Sharded) -> ProgramOutcome:
    """Play in the current simulated world."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _play(program, world)


def _play(program: Program, world: Sharded) -> ProgramOutcome:
    expected = Reference(program)
    if expected.undefined is not None:
        # What came before must still be right.
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
    if outcome is not None and _transposed_since(program, outcome):
        return ProgramOutcome("ok")  # torch too leaves the gradient of a transposed leaf as it is
    if outcome is not None and outcome.kind == "wrong" and _is_rounding(program, outcome, world):
        return ProgramOutcome("undefined", ROUNDING, outcome.note)
    if outcome is None and expected.run.error is not None:
        return ProgramOutcome("torch-refused", note=brief(expected.run.error))
    return outcome or ProgramOutcome("ok")


def _is_rounding(program: Program, outcome: ProgramOutcome, world: Sharded) -> bool:
    """Whether a number depends on rounding on one device, and agrees in float64."""
    if outcome.aspect not in ("value", "gradient value"):
        return False
    if not hangs_on_rounding(program, outcome.slot):
        return False
    wide = program.in_double()
    return wide == program or not _play(wide, world).failed


def _transposed_since(program: Program, outcome: ProgramOutcome) -> bool:
    """Whether a gradient is placed differently because its leaf was transposed after backward."""
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
    """Ours raises where one device does not; what came before must still be right."""
    error = found.error
    assert error is not None, "called after an error"
    before = play(program.upto(found.done), world)
    if before.failed:
        return before
    note = f"{program.items[found.done].code!r}: {type(error).__name__}: {brief(error)}"
    if isinstance(error, REFUSALS):
        return ProgramOutcome("refused", _plain(error), note)
    return ProgramOutcome("crash", f"{type(error).__name__} {_plain(error)}", note)


def _plain(error: BaseException) -> str:
    """The text of an error without shapes and layouts."""
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
            # A kernel that raises may have written some entries; a check before it writes none.
            if _held_before(whole(ours[name]), expected.history.get(name, []), allowed):
                return ProgramOutcome(
                    "stale", "value", f"{name} {why}, as it was before a write", name
                )
            return ProgramOutcome("wrong", _aspect(why), f"{name} {why}", name)
    # Where both raised, backward may have stopped anywhere.
    if expected.run.error is None:
        # An op may return its operand: compare each tensor once.
        distinct = {id(value): name for name, value in reversed(theirs.items())}
        for name in reversed(distinct.values()):
            if _tracked(ours[name]) != _tracked(theirs[name]):
                note = (
                    f"{name}.requires_grad is {_tracked(ours[name])}, not {_tracked(theirs[name])}"
                )
                try:
                    ours[name].clone()
                except REFUSALS as error:  # every use of it is refused
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
    if expected is not None and expected._is_zerotensor():
        return ""  # nothing can be read of it, and not even zero by zero is NaN
    if found is None and expected is not None and not expected.any():
        return ""  # None stands for zeros
    if found is None or expected is None:
        return "" if found is expected else f"{_word(found)} instead of {_word(expected)}"
    try:
        # Read by an op, as an optimizer does.
        return difference(whole(found.detach() * 1), expected, allowed) or misplaced(ours, found)
    except Different as error:
        return str(error)


def _word(grad: Any) -> str:
    return "nothing" if grad is None else "a gradient"


def _held_before(found: Any, history: list[Any], allowed: float) -> bool:
    return any(not difference(found, value, allowed) for value in history)


def _aspect(why: str) -> str:
    for word, aspect in (
        ("instead of torch", "dtype"),
        ("has shape", "shape"),
        ("placed", "place"),
    ):
        if word in why:
            return aspect
    return "value" if "differs" in why or why.startswith("is [") else why.split()[0]


def whole(value: Any) -> Any:
    """A value as one device would hold it; raises `Different` where the ranks disagree."""
    with torch.no_grad():
        return gathered([value])[0]


def misplaced(leaf: Any, grad: Any) -> str:
    """How the placements of a leaf's gradient break the contract; empty where they do not."""
    if not isinstance(leaf, DTensor) or not isinstance(grad, DTensor) or not leaf.is_leaf:
        return ""
    if leaf.dim() != grad.dim():
        return ""  # the leaf got another dim in place afterwards
    for axis, (here, there) in enumerate(zip(leaf.placements, grad.placements, strict=True)):
        if here.is_shard() != there.is_shard() or (here.is_shard() and here != there):
            return f"is placed as {there!r} along axis {axis} of a leaf that is {here!r}"
    return ""


#: Seconds after which shrinking ends.
LIMIT_S = 20.0
_LIST = re.compile(r"\[((?:Shard|Replicate|Partial)\([^\[\]]*)\](?:, \(([\d, ]+)\))?")


def play_alone(program: Program) -> ProgramOutcome:
    """Play in a new world, without caches of other programs."""
    with simulate(math.prod(program.mesh)):
        return play(program, Sharded(program.mesh))


def play_forked(program: Program) -> ProgramOutcome:
    """As `play_alone`, in a forked process: a crash of it is an outcome."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "w") as answer:
            json.dump(asdict(play_alone(program)), answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if text:
        return ProgramOutcome(**json.loads(text))
    return ProgramOutcome("crash", "process", f"the process ended with status {status}")


def shrink(
    program: Program,
    outcome: ProgramOutcome,
    play_one: Callable[[Program], ProgramOutcome] = play_alone,
    limit_s: float = LIMIT_S,
) -> tuple[Program, ProgramOutcome]:
    """The smallest program found that fails in the same way, and how it does."""
    until = time.monotonic() + limit_s
    improved = True
    while improved and time.monotonic() < until:
        improved = False
        for candidates in _REDUCTIONS:
            # Repeat each reduction until it gives nothing more.
            while time.monotonic() < until:
                better = _first_failing(program, outcome, candidates(program), play_one, until)
                if better is None:
                    break
                program, outcome = better
                improved = True
    return program, outcome


def _first_failing(
    program: Program,
    outcome: ProgramOutcome,
    candidates: Iterator[Program],
    play_one: Callable[[Program], ProgramOutcome],
    until: float,
) -> tuple[Program, ProgramOutcome] | None:
    for candidate in candidates:
        if time.monotonic() > until:
            return None
        try:
            found = play_one(candidate)
        except Exception:  # not a valid program, such as a Shard of a removed dim
            continue
        if found.kind == outcome.kind and found.aspect == outcome.aspect and steady(candidate):
            return candidate, found
    return None


def _fewer_items(program: Program) -> Iterator[Program]:
    num = len(program.items)
    for size in (num // 2, 3 * num // 4):
        yield program.upto(size)
    for index in reversed(range(num)):
        yield program.without(index)


def _leaf_for_step(program: Program) -> Iterator[Program]:
    """A leaf in place of a step, without what led to it."""
    values = run(program, OneDevice()).slots()
    whole = (REPLICATE,) * len(program.mesh)
    for index in reversed(range(len(program.items))):
        item = program.items[index]
        if not isinstance(item, Statement) or len(item.makes) != 1:
            continue
        value = values.get(item.makes[0])
        if not isinstance(value, torch.Tensor):
            continue
        shape = tuple(value.shape)
        grad = value.requires_grad
        leaf = Leaf(item.makes[0], shape, value.dtype, whole, None, grad)
        choices = [
            whole,
            *(
                _along(whole, axis, Shard(d))
                for axis in range(len(whole))
                for d in range(len(shape))
            ),
        ]
        choices += [_along(whole, axis, Partial()) for axis in range(len(whole))]
        for placements in choices:
            shorter = program.with_item(index, replace(leaf, placements=placements))
            yield _only_needed(shorter)


def _skip(program: Program) -> Iterator[Program]:
    """Without a step: its operand in place of its result, where both have the same shape."""
    values = run(program, OneDevice()).slots()
    for index in reversed(range(len(program.items))):
        item = program.items[index]
        if not isinstance(item, Statement) or len(item.makes) != 1 or item.makes[0] not in values:
            continue
        for name in sorted(item.reads):
            if _alike(values[name], values[item.makes[0]]):
                later = [_renamed(i, item.makes[0], name) for i in program.items[index + 1 :]]
                yield replace(program, items=(*program.items[:index], *later))


def _alike(one: object, other: object) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.shape == other.shape and one.dtype == other.dtype


def _renamed(item: Item, old: str, new: str) -> Item:
    if isinstance(item, Leaf):
        return item
    return replace(item, code=re.sub(rf"\b{old}\b", new, item.code))


def _only_needed(program: Program) -> Program:
    """Without leaves that nothing reads."""
    read = {name for item in program.items for name in item.reads}
    kept = [i for i in program.items if not isinstance(i, Leaf) or i.name in read]
    return replace(program, items=tuple(kept))


def _along(placements: tuple[Placement, ...], axis: int, one: Placement) -> tuple[Placement, ...]:
    return (*placements[:axis], one, *placements[axis + 1 :])


def _simpler_leaves(program: Program) -> Iterator[Program]:
    for index, item in enumerate(program.items):
        if isinstance(item, Leaf):
            for leaf in _simpler(item):
                yield program.with_item(index, leaf)


def _simpler(leaf: Leaf) -> Iterator[Leaf]:
    if leaf.order is not None:
        yield replace(leaf, order=None)
    if leaf.grad:
        yield replace(leaf, grad=False)
    if leaf.dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield replace(leaf, dtype=torch.float32)
    for axis, placement in enumerate(leaf.placements):
        if placement != REPLICATE:
            yield replace(leaf, placements=_along(leaf.placements, axis, REPLICATE))
        if isinstance(placement, Shard) and placement.sizes is not None:
            yield replace(leaf, placements=_along(leaf.placements, axis, Shard(placement.dim)))
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            yield replace(leaf, placements=_along(leaf.placements, axis, Partial()))


def _simpler_conversions(program: Program) -> Iterator[Program]:
    """Conversions to Replicate along an axis."""
    for index, item in enumerate(program.items):
        if isinstance(item, Statement) and (found := _LIST.search(item.code)):
            placements = _placements(found)
            for axis, placement in enumerate(placements):
                if placement != REPLICATE:
                    code = _LIST.sub(placed(_along(placements, axis, REPLICATE)), item.code)
                    yield program.with_item(index, replace(item, code=code))


def _smaller_mesh(program: Program) -> Iterator[Program]:
    for axis, parts in enumerate(program.mesh):
        if len(program.mesh) > 1:
            yield _without_axis(program, axis)
        if parts > 2:
            mesh = (*program.mesh[:axis], 2, *program.mesh[axis + 1 :])
            yield replace(program, mesh=mesh)


def _without_axis(program: Program, axis: int) -> Program:
    def left(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
        return placements[:axis] + placements[axis + 1 :]

    items: list[Item] = []
    for item in program.items:
        if isinstance(item, Leaf):
            order = item.order and tuple(a - (a > axis) for a in item.order if a != axis)
            items.append(replace(item, placements=left(item.placements), order=order))
        elif found := _LIST.search(item.code):
            items.append(replace(item, code=_LIST.sub(placed(left(_placements(found))), item.code)))
        else:
            items.append(item)
    return replace(program, mesh=program.mesh[:axis] + program.mesh[axis + 1 :], items=tuple(items))


def _smaller_shapes(program: Program) -> Iterator[Program]:
    """A smaller size wherever it occurs, so that related sizes stay equal."""
    for size in sorted({s for leaf in program.leaves for s in leaf.shape if s > 1}, reverse=True):
        for smaller in (2, size - 1):
            if smaller < size:
                yield replace(
                    program, items=tuple(_resized(i, size, smaller) for i in program.items)
                )
    for index, item in enumerate(program.items):
        if isinstance(item, Leaf):
            for dim, size in enumerate(item.shape):
                if size > 1:
                    shape = (*item.shape[:dim], size - 1, *item.shape[dim + 1 :])
                    yield program.with_item(index, replace(item, shape=shape))


def _resized(item: Item, size: int, smaller: int) -> Item:
    if not isinstance(item, Leaf):
        return item
    return replace(item, shape=tuple(smaller if s == size else s for s in item.shape))


def _placements(found: re.Match[str]) -> tuple[Placement, ...]:
    names = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial}
    return tuple(eval(f"[{found[1]}]", names))


_REDUCTIONS = (
    _fewer_items,
    _skip,
    _leaf_for_step,
    _smaller_mesh,
    _simpler_leaves,
    _simpler_conversions,
    _smaller_shapes,
)
