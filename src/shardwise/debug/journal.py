"""agree: compares what the ranks run, and raises on all of them; check_rng: their generators.

Note [Journals]
Inside the mode each rank keeps a journal: one record per op on DTensors, redistribution,
collective and optimizer step. A record names the op, its arguments (layouts, numbers, and which
tensors they are) and has a code, a hash of that text, which is the same in every process.
Collectives that follow from a recorded call's layouts have no record, unless each is compared; nor
has `detach`, whose result is the same tensor. Equal records are one object, made at the first such
call, with the line of the program that led to it. Since steps are alike, a call is first compared
with the call at the same position of the last step: that costs less than a lookup, which mostly
waits for memory.

Ranks compare a digest of all codes so far (Note [Rounds]). If digests differ, they exchange the
codes since the last verdict, and the first difference is the mistake. They also do so when a
collective fails or an error ends the mode, since ranks out of step reach no other comparison.

Note [Which tensor]
On one rank, two calls of an op on tensors of the same layout may be swapped, which gives wrong
numbers and no error. So tensors are numbered when a call makes them or first uses them. A record
counts back to them, so that the next step finds the same records. A tensor older than a step, such
as a parameter, gets a fixed number below 0.

The mode replaces functions while it is on; when it is off, no code checks for it.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.c10d import group_timeout
from shardwise._torch.frames import line_outside
from shardwise.comm import collectives
from shardwise.comm.collectives import GRACE_S, describers, explainers, lost
from shardwise.comm.watch import watch
from shardwise.core.mesh import Grid, grid_like, grid_of
from shardwise.core.untraced import untraced
from shardwise.core.world import World, current_world
from shardwise.debug.first_difference import (
    NOTHING,
    PLAIN,
    Account,
    DigestComparison,
    Noted,
    call_text,
    code_of,
    exchange_accounts,
    first_difference,
    listed,
)
from shardwise.dispatch.wrapped import Wrapped
from shardwise.dtensor import autograd
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, RankMismatchError, ShardwiseError
from shardwise.random import compare_generators, generator_digest
from shardwise.simulation.ranks import one_part

#: The functions of comm.collectives that start a collective.
_STARTS = (
    "_all_reduce",
    "_all_gather_into_tensor",
    "_all_gather_into_tensor_out",
    "_reduce_scatter_tensor",
    "_all_to_all_single",
    "_broadcast",
)
#: Records that are known by their key; dropped when full.
_MAX_RECORDS = 8192
#: How far back a record counts at most.
_MAX_BACK = 4096
_WORDS = {"step": 1, "collective": 0}
_active: list[agree] = []
#: Equal on all ranks, which enter the mode together.
_sessions = itertools.count(1)


class agree:
    """Inside, all ranks raise if one of them runs something other than the rest.

    Each rank keeps a running hash of what it runs: ops on DTensors with their layouts, numbers and
    operands, collectives, optimizer steps, and the state of the random generator. The hashes are
    compared every N optimizer steps, or with `every="collective"` before each collective;
    then a mistake is found before it can mix up messages. The error is a `RankMismatchError`. It
    names the ranks, the first call that differs, its layouts and its line in the program.

    A comparison after a step does not wait: its messages are read at the next steps, and when the
    mode ends. So two ranks learn of a difference one step later, more ranks within 2 log2(ranks)
    steps. Ops on plain tensors are not recorded. With `rng=False` generators are not compared, for
    programs that draw different numbers on each rank on purpose.

    >>> import shardwise
    >>> with shardwise.simulate(2), shardwise.debug.agree(every="collective") as mode:
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     x = shardwise.ones(4, device_mesh=mesh, placements=[shardwise.Shard(0)])
    ...     _ = (x + 1).full_tensor()
    >>> mode.num_calls, mode.num_comparisons
    (3, 2)
    """

    #: The next numbers, of tensors and of older ones; none is used again.
    _next_number = 1
    _next_older = -1

    def __init__(self, every: int | str = "step", *, rng: bool = True) -> None:
        #: The number of steps between comparisons; 0: before every collective.
        self._every = every if type(every) is int else _WORDS.get(str(every), -1)
        if self._every < (every != "collective"):
            raise ArgumentError(
                f"agree(every=...) is 'step', 'collective' or a number of steps, found {every!r}."
            )
        self._rng = rng

    # -- entering and leaving ----------------------------------------------------------------

    def __enter__(self) -> agree:
        if _active:
            raise ShardwiseError("agree() is active already, and compares everything as it is.")
        self._world: World = current_world()
        self._known: dict[Any, Noted] = {}
        #: The records since the last comparison; what is left of those before; and those that are
        #: being compared.
        self._journal: list[Noted] = []
        self._expected: Iterator[Noted] = iter(())
        self._sent: _Sent | None = None
        #: The last steps, by optimizer.
        self._stepping: dict[int, _Stepping] = {}
        self._digest = 0
        #: Whether collectives of a recorded call need no record, as the call's layouts imply them;
        #: and whether such a call runs now.
        self._implied, self._within = self._every > 0, False
        #: Why this rank will run nothing more, and whether it has told the others what it ran.
        self._end: str | None = None
        self._asked = False
        self._last: Noted | None = None
        self._num_compared = 0
        self.num_steps = self.num_comparisons = 0
        #: The first numbers of this session.
        self._base, self._first_older = agree._next_number, agree._next_older
        self._topic = f"journal/{next(_sessions)}"
        self._verdict = self._make_verdict()
        #: The number of the next tensor, and of the first of this step and of the one before.
        self._number = self._begin = self._before = self._base
        self._swap_in()
        _active.append(self)
        return self

    def _make_verdict(self) -> DigestComparison | None:
        """None where this process holds all ranks, which cannot differ."""
        world = self._world
        if len(world.present) == world.size:
            return None
        timeout = group_timeout(dist.GroupMember.WORLD)
        self._wait_s = timeout.total_seconds() if timeout is not None else 0.0
        return DigestComparison(f"{self._topic}/verdict", world.rank, world.size, self._wait_s)

    @property
    def num_calls(self) -> int:
        """How many calls this rank has recorded."""
        return self._num_compared + len(self._journal)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        _active.remove(self)
        try:
            if kind is None:
                self._end = f"the end of agree() after {self.num_steps} steps"
                self._compare(self._end, wait=True)
            elif isinstance(error, Exception):
                self._end = f"{kind.__name__}: {error}"[:600]
                found = self._difference(self._sent, GRACE_S)
                if found is not None:
                    raise found from error
        finally:
            agree._next_number = self._number
            self._swap_out()

    def _swap_in(self) -> None:
        self._dispatch = DTensor.__dict__["__torch_dispatch__"]
        self._move, self._starts = autograd.move, {n: getattr(collectives, n) for n in _STARTS}
        DTensor.__torch_dispatch__ = classmethod(  # type: ignore[method-assign, assignment]
            self._recording(self._dispatch.__func__)
        )
        autograd.move = self._recording_move(self._move)
        for name, start in self._starts.items():
            setattr(collectives, name, self._recording_start(name.strip("_"), start))
        watch.steps.append(self._stepped)
        watch.record = self._note
        describers.append(self._place)
        explainers.append(self._explain)

    def _swap_out(self) -> None:
        DTensor.__torch_dispatch__ = self._dispatch  # type: ignore[method-assign]
        autograd.move = self._move
        for name, start in self._starts.items():
            setattr(collectives, name, start)
        watch.steps.remove(self._stepped)
        watch.record = None
        describers.remove(self._place)
        explainers.remove(self._explain)

    def _place(self) -> str:
        """Where this rank is, for the error of a collective that failed."""
        last = self._journal[-1] if self._journal else self._last
        return f"after {self.num_steps} steps and {self.num_calls:,} calls, the last {last}"

    # -- recording ---------------------------------------------------------------------------

    def _recording(self, dispatch: Callable[..., Any]) -> Callable[..., Any]:
        """`dispatch`, recorded."""
        detach = torch.ops.aten.detach.default
        described, plain = self._described, PLAIN

        @untraced
        def record_and_run(
            cls: type,
            func: Any,
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
            preferred: Any = None,
        ) -> Any:
            if func is detach:  # autograd calls it for every gradient
                out = dispatch(cls, func, types, args, kwargs, preferred)
                if self._first_older < getattr(args[0], "_born", 0) < self._before:
                    self._number_new(args[:1])
                    self._number_older(args[:1])
                out._born = args[0]._born
                return out
            # As in `_key`, which takes twice as long.
            number = self._number
            key: list[Any] = [func]
            try:
                for arg in args:
                    kind = type(arg)
                    if kind is DTensor:
                        key.append(arg._layout)
                        born = arg._born
                        key.append(number - born if born > 0 else born)
                    elif kind in plain:
                        key.append(arg)
                    elif kind is list:
                        for each in arg:
                            if type(each) not in plain:
                                key.append(described(arg))
                                break
                        else:
                            key.append(tuple(arg))
                    else:
                        key.append(described(arg))
                if kwargs:
                    for name, value in kwargs.items():
                        key.append((name, described(value)))
            except AttributeError:  # a tensor without a number
                key.clear()
            record = next(self._expected, NOTHING)
            if record.key != key:
                record = self._record(func, args, kwargs)
            self._journal.append(record)
            number = self._number
            self._number = number + 1
            self._within = self._implied
            try:
                out = dispatch(cls, func, types, args, kwargs, preferred)
            finally:
                self._within = False
            if type(out) is DTensor:
                if not args or out is not args[0]:
                    out._born = number
            elif type(out) is tuple or type(out) is list:
                for each in out:
                    if type(each) is DTensor:
                        each._born = self._number
                        self._number += 1
            return out

        return record_and_run

    def _record(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Noted:
        """The record of a call that is not the expected one."""
        given = [*args, *(kwargs or {}).values()]
        self._number_new(given)
        key = self._key(func, args, kwargs)
        if tuple(key) not in self._known and self._number_older(given):
            key = self._key(func, args, kwargs)
        return self._known.get(tuple(key)) or self._new(key, lambda: call_text(func, key))

    def _key(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> list[Any]:
        key: list[Any] = [func]
        for arg in args:
            key += self._described(arg) if isinstance(arg, Wrapped) else (self._described(arg),)
        return key + [(name, self._described(value)) for name, value in (kwargs or {}).items()]

    def _described(self, value: Any) -> Any:
        """An argument as a part of a key: hashable, and without values of tensors."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, (list, tuple)):
            return tuple([self._described(each) for each in value])
        if isinstance(value, Wrapped):
            born = value._born
            return value._layout, self._number - born if born > 0 else born
        if isinstance(value, torch.Tensor):
            shape = tuple(one_part(value).shape)
            return f"{value.dtype} of shape {list(shape)}"
        return kind.__name__

    def _number_new(self, values: Sequence[Any]) -> None:
        """Number the tensors that have no number yet."""
        for tensor in _tensors(values):
            if not hasattr(tensor, "_born"):
                tensor._born = self._number
                self._number += 1

    def _number_older(self, values: Sequence[Any], first: int | None = None) -> bool:
        """Renumber tensors before `first`, below 0; returns whether there are any."""
        if first is None:  # of older steps, and of other sessions
            first = max(self._before, self._number - _MAX_BACK)
        older = [x for x in _tensors(values) if self._first_older < x._born < first]
        for tensor in older:
            tensor._born = agree._next_older
            agree._next_older -= 1
        return bool(older)

    def _new(self, key: list[Any], describe: Callable[[], str]) -> Noted:
        if len(self._known) >= _MAX_RECORDS:
            self._known.clear()
        text = describe()
        record = self._known[tuple(key)] = Noted(key, code_of(text), text, line_outside())
        return record

    def _add(self, key: list[Any], describe: Callable[[], str]) -> None:
        """Record something that is not a call of an op."""
        record = next(self._expected, NOTHING)
        if record.key != key:
            record = self._known.get(tuple(key)) or self._new(key, describe)
        self._journal.append(record)

    def _note(self, text: str) -> None:
        """Record something that is not an op: `text` is the same on ranks that do the same."""
        self._add([text], lambda: text)

    def _recording_move(self, move: Callable[..., Any]) -> Callable[..., Any]:
        @untraced
        def record_and_move(x: Any, target: Any, **options: Any) -> Any:
            self._number_new((x,))
            self._number_older((x,))
            key = ["redistribute", *self._described(x), target]
            self._add(key, lambda: f"redistribute({listed(key[1:3])}) to {target}")
            number, self._number = self._number, self._number + 1
            self._within = self._implied
            try:
                out = move(x, target, **options)
            finally:
                self._within = False
            out._born = number
            return out

        return record_and_move

    def _recording_start(self, kind: str, start: Callable[..., Any]) -> Callable[..., Any]:
        # What ranks send each other in an exchange may differ in length. Along one of several mesh
        # axes all sizes may: those of uneven shards, and of rows that each line looked up.
        lengths_differ = kind == "all_to_all_single"
        lines, num_ranks = self._world.lines, self._world.size

        def record_and_start(x: torch.Tensor, *rest: Any, **out: Any) -> torch.Tensor:
            if self._within:
                return start(x, *rest, **out)
            part, cause = (x if type(x) is torch.Tensor else one_part(x)), watch.cause
            why = None if cause is None else cause.op
            group_name = rest[-1]
            if group_name in lines and len(lines[group_name][0]) < num_ranks:
                shape: Any = (...,) * part.dim()
            else:
                shape = part.shape[1:] if lengths_differ else part.shape
            key = [kind, part.dtype, shape, rest[-1:] if lengths_differ else rest, why]
            self._add(key, lambda: self._collective_text(*key))
            if not self._every:
                self._compare("a collective", wait=True)
            return start(x, *rest, **out)

        return record_and_start

    def _collective_text(self, kind: str, dtype: Any, shape: Any, rest: Any, cause: Any) -> str:
        *options, group_name = rest
        axis = self._world.axis_names.get(group_name)
        of = f"{dtype} of shape [{', '.join('?' if n is ... else str(n) for n in shape)}]"
        words = [kind, f"of {of}", *(f"with {option}" for option in options)]
        words += [f"along {axis!r}"] if axis is not None else []
        words += [f"for {cause}"] if cause is not None else []
        return " ".join(words)

    def _stepped(self, optimizer: Any) -> None:
        """Called before each step of an optimizer."""
        groups = optimizer.param_groups
        parameters = [group["params"] for group in groups]
        options = [tuple(group.values()) for group in groups]
        # Both are as before in most steps, and all parameters take a while to describe.
        given: list[list[Any]]
        before: list[Any]
        given, before, records = self._stepping.get(id(optimizer), _NO_STEP)
        if len(given) != len(groups) or not all(map(_are_same, given, parameters)):
            given, before = [[*each] for each in parameters], []
            records = (self._parameters_record(optimizer, given), NOTHING)
        if before != options:
            records = (records[0], self._options_record(groups))
            self._stepping[id(optimizer)] = _Stepping(given, options, records)
        for record in records:
            next(self._expected, None)
            self._journal.append(record)
        self._count_step()

    def _parameters_record(self, optimizer: Any, parameters: Sequence[Any]) -> Noted:
        self._number_new(parameters)
        self._number_older(parameters, first=self._number)
        key = ["step", type(optimizer).__name__, self._described(parameters)]
        text = f"step of {key[1]}: {listed(key[2])}"
        return self._known.get(tuple(key)) or self._new(key, lambda: text)

    def _options_record(self, groups: Sequence[dict[str, Any]]) -> Noted:
        key = [
            tuple(
                (name, self._described(value)) for name, value in group.items() if name != "params"
            )
            for group in groups
        ]
        return self._known.get(tuple(key)) or self._new(key, lambda: f"options {listed(key)}")

    def step(self) -> None:
        """Count a step. Optimizers of torch do so; call it in a program without one."""
        self._note("the end of a step")
        self._count_step()

    def _count_step(self) -> None:
        self.num_steps += 1
        self._before, self._begin = self._begin, self._number
        if self._every and self.num_steps % self._every == 0:
            self._compare(f"step {self.num_steps}", wait=False)

    # -- comparing ---------------------------------------------------------------------------

    def _compare(self, at: str, *, wait: bool) -> None:
        """Compare what this rank has run, once the comparison under way has its verdict."""
        while not self._read() and wait:
            pass
        if self._sent is not None:
            return
        journal, self._journal = self._journal, []
        self._expected = iter(journal)
        self._num_compared += len(journal)
        self.num_comparisons += 1
        # Python hashes numbers alike in all processes, and in less time than hashlib needs.
        self._digest = hash((self._digest, *[record.code for record in journal]))
        if self._verdict is None:
            self._last = journal[-1] if journal else self._last
            return
        state = self._generators()
        self._sent = _Sent(journal, at, self.num_comparisons, state)
        place = (self._num_compared, self.num_steps, wait, self._end is None)
        self._verdict.begin(hash((self._digest, state, *place)))
        while wait and not self._read():
            pass

    def _generators(self) -> int:
        if not self._rng:
            return 0
        held: Any = torch.default_generator.get_state().numpy()
        state = zlib.crc32(held)  # in a microsecond
        if torch.cuda.is_initialized():
            state += generator_digest(torch.device("cuda"), None) >> 2
        return state

    def _read(self) -> bool:
        """Whether no comparison is under way any longer; raises if some rank differs."""
        sent = self._sent
        if sent is None or self._verdict is None:
            return True
        try:
            same = self._verdict.advance()
        except RuntimeError as error:
            raise lost(error, f"the comparison of agree() before {sent.at}") from error
        if same is None:
            return False
        self._sent = None
        if not same:
            found = self._difference(sent, GRACE_S + self._wait_s)
            raise found or RankMismatchError(f"The ranks do not run the same program at {sent.at}.")
        if sent.journal:
            self._last = sent.journal[-1]
        return True

    def _explain(self) -> None:
        """After a failed collective, raise if the reason is that ranks run different calls."""
        found = self._difference(self._sent, GRACE_S)
        if found is not None:
            raise found

    def _difference(self, sent: _Sent | None, wait_s: float) -> RankMismatchError | None:
        """The first call in which ranks differ, among the ranks that answer in time."""
        if self._verdict is None or self._asked:
            return None
        self._asked = True
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self._verdict.alarm()
        journal = [*(sent.journal if sent is not None else ()), *self._journal]
        kinds = {record: place for place, record in enumerate(dict.fromkeys(journal))}
        mine = Account(
            start=self.num_calls - len(journal),
            before=str(self._last) if self._last is not None else None,
            kinds=[(record.code, str(record)) for record in kinds],
            calls=[kinds[record] for record in journal],
            end=self._end,
            sent=(sent.number, sent.at, sent.generators) if sent is not None else None,
        )
        return first_difference(exchange_accounts(mine, self._topic, self._world.size, wait_s))


class _Sent(NamedTuple):
    """A comparison on its way."""

    journal: list[Noted]
    at: str
    number: int
    generators: int


class _Stepping(NamedTuple):
    """A step of an optimizer: by group its parameters and options, and the records of both."""

    parameters: list[list[Any]]
    options: list[Any]
    records: tuple[Noted, Noted]


_NO_STEP = _Stepping([], [], (NOTHING, NOTHING))


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _tensors(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Wrapped):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


# -- generators ----------------------------------------------------------------------------------


def check_rng(mesh: DeviceMesh | None = None, generator: torch.Generator | None = None) -> None:
    """Raise on every rank, naming the ranks, if their generators are in different states.

    Compares `generator`, or by default those of the CPU and of the mesh's device. All ranks of the
    mesh (without a mesh, of the world) must call it. Costs one all-gather of 8 bytes per generator
    and mesh axis.

    >>> import shardwise
    >>> from shardwise.debug import check_rng
    >>> with shardwise.simulate(4):
    ...     check_rng()
    """
    grid = grid_of(mesh) if mesh is not None else _everyone()
    if generator is not None:
        devices = [generator.device]
    else:
        devices = [torch.device(t) for t in dict.fromkeys(("cpu", grid.device_type))]
    for device in devices:
        compare_generators(grid, device, generator, "check_rng")


def _everyone() -> Grid:
    """All ranks along one axis, on a device that their process group supports."""
    world = current_world()
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return grid_like(device_type, (world.size,), tuple(range(world.size)), None)
