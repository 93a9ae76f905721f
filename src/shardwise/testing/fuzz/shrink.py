"""Making a failing program smaller: fewer steps, simpler layouts, smaller meshes and shapes."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import torch

from shardwise.core.placements import REPLICATE, Partial, Placement, Replicate, Shard
from shardwise.simulation.world import simulate
from shardwise.testing.fuzz.play import ProgramOutcome, play
from shardwise.testing.fuzz.program import Item, Leaf, Program, Statement, placed, run
from shardwise.testing.fuzz.undefined import steady
from shardwise.testing.fuzz.worlds import OneDevice, Sharded

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
