"""Growing a program: each step runs on one device before it is kept.

A second run of the same program, with rounding errors added to every result, shows which steps
depend on the last bit: ties, comparisons of equal values, cancellation, the sign of a zero (which a
sum of terms loses), the truth of a float next to zero. Such steps are not kept, so that no
tolerance has to allow for them.
"""

from __future__ import annotations

import warnings
from random import Random
from typing import Any

import torch

from shardwise.testing.fuzz.hand import Draft, Hand, NoFit
from shardwise.testing.fuzz.program import Item, OneDevice, Program, Statement, WorldState, execute
from shardwise.testing.fuzz.tables import FAMILIES
from shardwise.testing.fuzz.tables.nn import scalar
from shardwise.testing.fuzz.undefined import Kinks, alike, bounded, disturb

MESHES: tuple[tuple[int, ...], ...] = (
    (2,),
    (2,),
    (2,),
    (3,),
    (4,),
    (2, 2),
    (2, 2),
    (2, 3),
    (1, 2),
    (8,),
    (4, 2),
    (2, 2, 2),
    (2, 1, 2),
)


def mesh_of(seed: int, meshes: tuple[tuple[int, ...], ...] = MESHES) -> tuple[int, ...]:
    """The mesh of the program with this seed."""
    return Random(seed).choice(meshes)


def generate(seed: int, meshes: tuple[tuple[int, ...], ...] = MESHES) -> Program:
    """The program with this seed: the same every time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Growth(seed, mesh_of(seed, meshes)).grown()


class Growth:
    """A program that grows, with its two runs on one device."""

    def __init__(self, seed: int, mesh: tuple[int, ...]) -> None:
        self.random = Random(seed)
        self.seed, self.mesh = seed, mesh
        main = self.random.choices(
            (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128),
            (50, 28, 7, 7, 8),
        )[0]
        self.hand = Hand(self.random, mesh, main)
        self.items: list[Item] = []
        self.refused = False
        self._restart()

    def grown(self) -> Program:
        """A program of some steps, with backward at the end where something requires grad."""
        for _ in range(self.random.choice((1, 1, 2))):
            self.hand.new(self.hand.shape())
            self._add_leaves()
        wanted, tries = self.random.randint(3, 12), 0
        while wanted > 0 and tries < 60 and not self.refused:
            tries += 1
            wanted -= self._try_row()
        if not self.refused:
            self._end()
        return Program(self.seed, self.mesh, tuple(self.items))

    # -- one step ----------------------------------------------------------------------------

    def _try_row(self) -> bool:
        weights, tables = zip(*FAMILIES.values(), strict=True)
        row = self.random.choice(self.random.choices(tables, weights)[0])
        hand = self.hand
        hand.made.clear()
        number = hand.next_number
        try:
            draft = row(hand)
        except NoFit:
            hand.next_number = number
            return False
        return self._try(Draft(draft) if isinstance(draft, str) else draft)

    def _end(self) -> None:
        """Backward from some of the results that require grad."""
        hand = self.hand
        tracked = [
            name
            for name, v in self.exact.slots().items()
            if isinstance(v, torch.Tensor) and v.requires_grad and not v.is_leaf
        ]
        for name in self.random.sample(tracked, min(2, len(tracked))):
            if not self.refused:
                code = f"{scalar(hand, name)}.backward(retain_graph=True)"
                self._try(Draft(code, statement=True))

    def _try(self, draft: Draft) -> bool:
        """Keep the draft as a step, or leave everything as it was."""
        size = len(self.items)
        self._add_leaves()
        step: Statement | None = None
        try:
            step = self._step(draft)
            self.exact.execute(step)
        except Exception as error:
            if step is not None and self._worth_refusing(error):
                self.items.append(step)
                self.refused = True
                return True
            self._take_back(size)
            return False
        if not self._sound(step):
            self._take_back(size)
            return False
        self.items.append(step)
        self.hand.frozen.update(draft.frozen, step.makes if draft.frozen else ())
        if draft.local:
            self.hand.local.update(step.makes)
        self.hand.values = self.exact.slots()
        return True

    def _step(self, draft: Draft) -> Statement:
        """The draft with names for what it makes: as many as there are results."""
        if draft.statement:
            return Statement(draft.before + draft.code)
        made = self._result(draft)
        if isinstance(made, tuple | list):
            if not 1 <= len(made) <= 6 or not all(isinstance(m, torch.Tensor) for m in made):
                raise NoFit
            names = tuple(self._new_name() for _ in made)
            # A trailing comma unpacks a tuple of one.
            targets = ", ".join(names) + ("," if len(names) == 1 else "")
        else:
            if not isinstance(made, torch.Tensor | bool | int | float):
                raise NoFit
            names = (self._new_name(),)
            targets = names[0]
        return Statement(f"{draft.before}{targets} = {draft.code}", names)

    def _result(self, draft: Draft) -> Any:
        """The value of an expression; an error is raised again when the step runs."""
        scope = self.exact.scope
        torch.set_rng_state(self.exact.rng)
        try:
            execute(f"{draft.before}_result = {draft.code}", scope)
        except Exception:
            return torch.empty(0)
        return scope.pop("_result")

    def _new_name(self) -> str:
        self.hand.next_number += 1
        return f"v{self.hand.next_number - 1}"

    # -- what is worth keeping ---------------------------------------------------------------

    def _worth_refusing(self, error: Exception) -> bool:
        """Whether the program may end with this error: some do, since shardwise must raise too."""
        text = str(error)
        # Mistakes of the program's text, and kernels that torch lacks for a dtype.
        mine = isinstance(error, (NoFit, NameError, AttributeError, SyntaxError))
        if mine or "not implemented for" in text or "requires_grad" in text:
            return False
        return self.random.random() < 0.08 and len(self.items) > 2

    def _sound(self, step: Statement) -> bool:
        """Whether all values are bounded and do not depend on rounding errors."""
        slots = self.exact.slots()
        if not all(map(bounded, slots.values())):
            return False
        # An op may return its operand or an equal tensor: programs must not depend on which.
        if len({id(v) for v in slots.values() if isinstance(v, torch.Tensor)}) < sum(
            isinstance(v, torch.Tensor) for v in slots.values()
        ):
            return False
        try:
            with Kinks() as kinks:
                self.noisy.execute(step)
        except Exception:
            return False
        if kinks.found:
            return False
        disturb(self.noisy, step, self.exact)
        return alike(self.exact, self.noisy)

    # -- the two runs ------------------------------------------------------------------------

    def _restart(self) -> None:
        self.exact = WorldState(OneDevice(), self.seed)
        self.noisy = WorldState(OneDevice(), self.seed)
        for item in self.items:
            self._execute(item)
        self.hand.values = self.exact.slots()

    def _execute(self, item: Item) -> None:
        for each in (self.exact, self.noisy):
            each.execute(item)
        disturb(self.noisy, item, self.exact)

    def _take_back(self, size: int) -> None:
        del self.items[size:]
        self._restart()

    def _add_leaves(self) -> None:
        """Add the leaves that a row has asked for."""
        for leaf in self.hand.made:
            self.items.append(leaf)
            self._execute(leaf)
        self.hand.made.clear()
        self.hand.values = self.exact.slots()
