"""The parameters of a group, sharded or gathered, and the reduction of their gradients."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.core.placements import SUM, Placement
from shardwise.dtensor import autograd
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError
from shardwise.simulation.ranks import one_part, plain_if_equal
from shardwise.training.buckets import agree_on_trained, changed_on, unlike_ranks
from shardwise.training.contract import MeshAxes
from shardwise.training.fully_sharded.buffer import FlatBuffer, Lengths
from shardwise.training.fully_sharded.members import CPUOffloadPolicy, Member, ShardAxes, tensors_in
from shardwise.training.reducer import data_axes_along

#: By the number of a member in its buffer.
Gradients = dict[int, torch.Tensor | None]


@dataclass(slots=True, eq=False)
class Reducing:
    """A row of gradients being reduced: its members, and the axes that are left."""

    buffer: FlatBuffer
    #: For each member, by number, the axes of its mesh along which its gradient stays Partial.
    partial: dict[int, tuple[int, ...]]
    row: Any
    #: Whether each member has a gradient on this rank: then no flag has to be read.
    all_here: bool
    #: Axes of replicas, to be reduced after the reduce-scatter.
    left: list[int] = field(default_factory=list)
    #: The lengths of the row's chunks, where they differ.
    lengths: Lengths | None = None
    #: Gradients of members that not all ranks were known to train, and whether there are others.
    late: Gradients = field(default_factory=dict)
    changed: bool = False
    #: The gradients themselves, where nothing is sent.
    grads: Gradients | None = None
    finished: bool = False
    #: The collective that runs: waits for it, and returns the next row.
    wait: Callable[[], torch.Tensor] | None = None

    def advance(self) -> None:
        """Wait for the collective that runs, and start the next one."""
        row = self.row if self.wait is None else self.wait()
        if self.left:
            started = collectives.start_all_reduce(row, "sum", self.buffer.grid, self.left.pop(0))
            self.row, self.wait = None, functools.partial(collectives.awaited, started)
        else:
            self.row, self.wait, self.finished = row, None, True


class RowsInFlight:
    """The rows of all groups of one outermost module; see Note [In flight]."""

    def __init__(self) -> None:
        self.reducing: deque[Reducing] = deque()
        #: Rows that were sent in this pass. New memory costs a page fault for every 4 KiB of it.
        self.unused: list[torch.Tensor] = []

    def new_row(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for gradients: that of a row that was sent, if one fits."""
        for number, row in enumerate(self.unused):
            if (row.shape, row.dtype, row.device) == (shape, dtype, device):
                return self.unused.pop(number)
        return torch.empty(shape, dtype=dtype, device=device)

    def start(self, made: Reducing, most: int) -> None:
        """Start to reduce a row; wait for older ones so that at most `most` are in flight."""
        buffer = made.buffer
        with because("fully_shard", implicit=False):
            if buffer.parts > 1:
                grid, axis, unused = buffer.grid, buffer.axis, self.unused.append
                start = collectives.start_scattered_sum
                if made.lengths is not None:
                    start = functools.partial(collectives.start_uneven_scattered_sum, made.lengths)
                made.wait, made.row = start(made.row, grid, axis, unused), None
            self.reducing.append(made)
            while sum(not each.finished for each in self.reducing) > max(1, most):
                next(each for each in self.reducing if not each.finished).advance()

    def taken(self, buffers: list[FlatBuffer]) -> list[Reducing]:
        """The rows of these buffers, which are no longer in flight."""
        found = [each for each in self.reducing if each.buffer in buffers]
        for each in found:
            self.reducing.remove(each)
        return found

    def forget(self) -> None:
        """Drop the rows of a step that raised."""
        for reducing in self.reducing:
            if reducing.wait is not None:
                reducing.wait()
        self.reducing.clear()
        self.unused.clear()


class GroupGradients:
    """The gradients of a group: reduced while at most `most` rows are in flight, or kept."""

    def __init__(
        self,
        module: nn.Module,
        place: ShardAxes,
        parameters: GroupParameters,
        dtype: torch.dtype | None,
        most: int,
    ) -> None:
        self.module, self.place, self.parameters = module, place, parameters
        self.dtype, self.most = dtype, most
        self.sync = True
        #: Rows that wait for a backward pass that reduces, by what they hold.
        self.unsynced: dict[Any, Reducing] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "unsynced": {}}

    def reduce(self, grads: dict[int, torch.Tensor | None], rows: RowsInFlight) -> None:
        """Start to reduce the gradients of some members, or keep them for a later pass."""
        first = 0
        for buffer in self.parameters.buffers:
            numbers = range(len(buffer.members))
            mine = {n: grads[first + n] for n in numbers if first + n in grads}
            first += len(buffer.members)
            members = dict(zip(numbers, buffer.members, strict=True))
            # Nobody else is asked where nothing is sent, or where nothing was trained so far.
            if not self._is_sent(buffer) or not any(m.trained for m in buffer.members):
                for n in mine:
                    members[n].trained = True
            known = {n: mine.get(n) for n, member in members.items() if member.trained}
            late = {n: grad for n, grad in mine.items() if not members[n].trained}
            if not self._is_sent(buffer):
                known = mine
            if known:
                self._reduce(buffer, known, late, rows)

    def _is_sent(self, buffer: FlatBuffer) -> bool:
        return buffer.parts > 1 or bool(self._left())

    def _left(self) -> list[int]:
        """The axes of replicas that gradients are reduced along."""
        return [axis for axis in self.place.replicas if self.place.grid.shape[axis] > 1]

    def _reduce(
        self, buffer: FlatBuffer, grads: Gradients, late: Gradients, rows: RowsInFlight
    ) -> None:
        """See Note [Frozen on one rank] in `reducer`; `late` waits for what the ranks compare."""
        kept: dict[int, tuple[int, ...]] = {}
        declared: dict[Grid, tuple[int, ...]] = {}
        for number, grad in grads.items():
            member = buffer.members[number]
            grid = member.layout.grid
            if grid not in declared:
                declared[grid] = data_axes_along(self.module, grid)
            grads[number], kept[number] = self._local_gradient(member, grad, declared[grid])
        given = [one_part(grad) for grad in grads.values() if grad is not None]
        if not self._is_sent(buffer):
            # Nothing is sent, so there is nothing to wait for: also not for a later pass.
            rows.reducing.append(Reducing(buffer, kept, None, True, grads=grads))
            return
        computed = given[0].dtype if given else one_part(buffer.whole).dtype
        dtype = self.dtype if self.dtype and computed.is_floating_point else computed
        scales = [self._share(buffer.members[n], axes) for n, axes in kept.items()]
        lengths = buffer.row_lengths(tuple(grads), dtype)
        changed = any(m.trained != m.parameter.requires_grad for m in buffer.members)
        row = buffer.gradient_row(grads, scales, dtype, lengths, rows.new_row, changed)
        all_here = len(given) == len(grads)
        made = Reducing(buffer, kept, row, all_here, self._left(), lengths, late, changed)
        key = (id(buffer), tuple(kept.items()))
        before = self.unsynced.pop(key, None)
        if before is not None:
            made.row = row + before.row
            made.all_here |= before.all_here
            made.changed |= before.changed
            for number, grad in before.late.items():
                made.late[number] = _sum(made.late.get(number), grad)
        if self.sync:
            rows.start(made, self.most)
        else:
            self.unsynced[key] = made

    def _local_gradient(
        self, member: Member, grad: torch.Tensor | None, declared: tuple[int, ...]
    ) -> tuple[torch.Tensor | None, tuple[int, ...]]:
        """This rank's term of the sum over the group's axes, and the axes that stay Partial.

        Other front doors `declared` the latter as data axes: the first use of the gradient reduces
        it.
        """
        place, shard_grid = self.place, member.layout.grid
        if member.own:
            local: Any = grad
            if isinstance(grad, DTensor):
                assert member.whole is not None, "a DTensor's gradient is of a DTensor"
                local = autograd.move(grad, grad._layout.with_placements(member.whole.placements))
                local = local._local
            taken = {place.axis, *place.replicas} if shard_grid is place.grid else set()
            placed = member.layout.placements
            kept = tuple(a for a in declared if a not in taken and placed[a].is_replicate())
            return local, kept
        whole: Any = member.whole
        if grad is None:
            return None, ()
        assert isinstance(grad, DTensor), "the gradient of a DTensor is one"
        ours = _axes_in(whole.grid, place.grid, (place.axis, *place.replicas))
        placements: list[Placement] = list(whole.placements)
        kept_axes = []
        for axis, placement in enumerate(grad.placements):
            if axis in ours:
                placements[axis] = SUM
            elif placement.is_partial() and placements[axis].is_replicate():
                placements[axis] = SUM
                kept_axes.append(axis)
        target = grad._layout.with_placements(tuple(placements), whole.order)
        if target is not grad._layout:
            grad = autograd.move(grad, target)
        local = grad._local  # type: ignore[union-attr]
        return local, tuple(kept_axes)

    def delivered(self, rows: RowsInFlight) -> dict[int, torch.Tensor]:
        """The sharded gradients of this backward pass, by id of their parameter."""
        found: dict[int, Any] = {}
        waiting = deque(rows.taken(self.parameters.buffers))
        while waiting:
            each = waiting.popleft()
            for parameter, grad in self._finished(each):
                found[id(parameter)] = _sum(found.get(id(parameter)), grad)
            if each.late:
                self._reduce(each.buffer, each.late, {}, rows)
                waiting += rows.taken(self.parameters.buffers)
        return found

    @torch.no_grad()
    def _finished(self, reducing: Reducing) -> list[tuple[nn.Parameter, DTensor]]:
        buffer, numbers = reducing.buffer, tuple(reducing.partial)
        device = torch.device("cpu") if self.parameters.offload is not None else None
        if reducing.grads is not None:
            shares = [self._share(buffer.members[n], reducing.partial[n]) for n in numbers]
            found, used = buffer.as_gradients(reducing.grads, shares, device)
        else:
            with because("fully_shard", implicit=False):
                while not reducing.finished:
                    reducing.advance()
            found, flags = buffer.gradients(reducing.row, numbers, device)
            self._compare(reducing, flags)
            # A gradient without values may be one: nobody knows what other ranks used.
            assumed = reducing.all_here or one_part(flags).is_meta
            used = [True] * len(numbers)
            if not assumed:
                used = plain_if_equal(flags).tolist()[: len(numbers)]
        made = []
        for number, local, flag in zip(numbers, found, used, strict=True):
            if flag:  # else no rank used it
                member = buffer.members[number]
                placements = list(member.layout.placements)
                for axis in reducing.partial[number]:
                    placements[axis] = SUM
                layout = member.layout.with_placements(tuple(placements))
                made.append((member.parameter, DTensor._wrap(local, layout)))
        return made

    def _compare(self, reducing: Reducing, flags: torch.Tensor) -> None:
        """If ranks freeze other members than before, compare them, and raise or go on."""
        local = one_part(flags)
        if local.is_meta or not (local.is_cpu or reducing.changed):
            return
        some, others = changed_on(local)
        if some and others and not local.is_cpu:
            raise unlike_ranks()  # the others do not know it
        if some:
            members, grid = reducing.buffer.members, self.place.grid
            frozen = [m.name for m in members if not m.parameter.requires_grad]
            axes = (self.place.axis, *self.place.replicas)
            agree_on_trained(frozen, [(grid, axis) for axis in axes])
            for member in members:
                member.trained = member.parameter.requires_grad

    def _share(self, member: Member, partial: tuple[int, ...]) -> float:
        """The factor that makes a sum of terms the mean over ranks' losses."""
        if not member.own:
            return 1.0
        place = self.place
        ours = [place.grid.shape[axis] for axis in (place.axis, *place.replicas)]
        others = [member.layout.grid.shape[axis] for axis in partial]
        return 1 / math.prod((*ours, *others))

    @torch.no_grad()
    def reduce_late(self, rows: RowsInFlight) -> None:
        """Reduce gradients that earlier passes kept and the last pass did not add to."""
        if not (self.sync and self.unsynced):
            return
        for made in list(self.unsynced.values()):
            rows.start(made, self.most)
        self.unsynced.clear()
        found = self.delivered(rows)
        for member in self.parameters.members:
            parameter: Any = member.parameter
            grad = found.get(id(parameter))
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


def _axes_in(other: Grid, grid: Grid, axes: tuple[int, ...]) -> set[int]:
    """The axes of `other` that run through the ranks of these axes of `grid`."""
    if other is grid:
        return set(axes)
    return set(MeshAxes(grid, axes, grid).meet(other)[0])


SHARDED, STARTED, WHOLE = "sharded", "started", "whole"


class GroupParameters:
    """Members in their buffers. While gathered, whole tensors hide the sharded parameters."""

    def __init__(
        self, device_type: str, dtype: torch.dtype | None, offload: CPUOffloadPolicy | None
    ) -> None:
        self.dtype, self.offload = dtype, offload
        self.device = torch.device(device_type) if offload is not None else None
        self.buffers: list[FlatBuffer] = []
        self.state = SHARDED
        #: The version of the shards that were gathered.
        self.seen = -1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "state": SHARDED, "seen": -1}

    @property
    def members(self) -> list[Member]:
        return [member for buffer in self.buffers for member in buffer.members]

    def version(self) -> int:
        """Changes with writes to a parameter, as far as torch counts them."""
        return sum(member.parameter._version for member in self.members)

    # -- gathering ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start to gather."""
        if self.state != SHARDED:
            return
        for buffer in self.buffers:
            buffer.collect()
        self.seen = self.version()
        for buffer in self.buffers:
            buffer.start_gather(self.dtype, self.device)
        self.state = STARTED

    def gather(self) -> None:
        """Gather, and wait for it."""
        self.start()
        if self.state == STARTED:
            for buffer in self.buffers:
                buffer.finish_gather()
            self.state = WHOLE

    def release(self, num_ranks: int | None = None) -> None:
        """Free the gathered buffers; with `num_ranks`, that many ranks together keep a copy."""
        self.gather()  # a collective that runs still writes
        for buffer in self.buffers:
            buffer.release(num_ranks)
        self.state = SHARDED

    def drop_kept(self) -> None:
        for buffer in self.buffers:
            buffer.kept = None

    def gather_plainly(self) -> None:
        """Gather in the dtype and on the device of the shards."""
        self.drop_kept()
        for buffer in self.buffers:
            buffer.collect()
            buffer.start_gather(None, None)
            buffer.finish_gather()
        self.state = WHOLE

    def offload_shards(self) -> None:
        """Move the shards to the host's memory, if that is where they belong."""
        if self.offload is None:
            return
        for member in self.members:
            parameter: Any = member.parameter
            parameter.data = parameter.data.to("cpu")
        for buffer in self.buffers:
            buffer.collect(pin=getattr(self.offload, "pin_memory", False))

    def check(self) -> None:
        """Raise if a module holds a parameter other than the sharded one."""
        for member in self.members:
            for owner, name in member.owners:
                found: Any = owner._parameters.get(name)
                if found is not member.parameter and not _takes(member, found):
                    raise _replaced(member, found)
        self.hold()  # a copy of a module has no such dict

    def hold(self) -> None:
        """Have the modules keep their sharded parameters."""
        for member in self.members:
            for owner, name in member.owners:
                if type(owner._parameters) is not HeldParameters:
                    owner.__dict__["_parameters"] = HeldParameters(owner._parameters)
                owner.__dict__["_parameters"].held[name] = member

    def let_go(self) -> None:
        """Let the modules take other parameters."""
        for member in self.members:
            for owner, _ in member.owners:
                owner.__dict__["_parameters"] = dict(owner._parameters)

    # -- what modules see --------------------------------------------------------------------

    def tensors(self) -> list[torch.Tensor]:
        """The gathered tensors of all members."""
        return [tensor for buffer in self.buffers for tensor in buffer.tensors()]

    def show(self, tensors: list[torch.Tensor]) -> None:
        """Put whole tensors where the modules look for their parameters."""
        for member, tensor in zip(self.members, tensors, strict=True):
            for owner, name in member.owners:
                owner.__dict__[name] = tensor
        self.follow_flat_weights()

    def hide(self) -> None:
        for member in self.members:
            for owner, name in member.owners:
                owner.__dict__.pop(name, None)
        self.follow_flat_weights()

    def follow_flat_weights(self) -> None:
        """Recurrent layers keep a list of their parameters."""
        for owner in {id(o): o for m in self.members for o, _ in m.owners}.values():
            if isinstance(owner, nn.RNNBase):
                names: Any = owner._flat_weights_names
                owner.__dict__["_flat_weights"] = [getattr(owner, name) for name in names]

    def are_in(self, output: Any) -> bool:
        """Whether an output contains a gathered parameter, or a view of one."""
        return any(
            buffer.shares_memory(x._local if isinstance(x, DTensor) else x)
            for x in tensors_in(output)
            for buffer in self.buffers
        )


class HeldParameters(dict[str, Any]):
    """The parameters dict of a module with sharded parameters, which cannot be replaced.

    A rank that replaced one would raise in forward, while the others wait for it in a collective.
    So the replacement itself raises: nothing has changed, and a program that catches the error
    stays in step.
    """

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.held: dict[str, Member] = {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())

    def __setitem__(self, name: str, value: Any) -> None:
        member = self.held.get(name)
        if member is not None and value is not member.parameter and not _is_like(member, value):
            raise _replaced(member, value)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if name in self.held:
            raise _replaced(self.held[name], None)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        if name in self.held:
            raise _replaced(self.held[name], None)
        return super().pop(name, *default)


def _replaced(member: Member, found: Any) -> LayoutError:
    return LayoutError(
        f"Parameter {member.name!r} is fully sharded, and its module is given {_described(found)} "
        f"in its place, where {member.layout!r} is expected. Replace parameters before "
        "fully_shard, or copy values into the sharded one: "
        "param.copy_(distribute_tensor(x, param.device_mesh, param.placements))."
    )


def _is_like(member: Member, x: Any) -> bool:
    """Whether `x` may take the place of a parameter, as in `load_state_dict(assign=True)`."""
    return isinstance(x, DTensor) and x._layout is member.layout and x.is_leaf


def _takes(member: Member, found: Any) -> bool:
    """Take a new parameter in the layout of the old one, from `load_state_dict(assign=True)`.

    Each user of a shared parameter then has a separate tensor; equal ones are tied again.
    """
    held: list[Any] = [owner._parameters.get(name) for owner, name in member.owners]
    if not all(_is_like(member, x) for x in held):
        return False
    if not all(x is found or torch.equal(x, found) for x in held):
        return False
    member.parameter = found
    for owner, name in member.owners:
        owner._parameters[name] = found
    return True


def _described(x: Any) -> str:
    if x is None:
        return "nothing"
    if isinstance(x, DTensor):
        return f"a DTensor in {x._layout!r}" + ("" if x.is_leaf else " with a history")
    return f"a {type(x).__name__} of shape {tuple(x.shape)}"
