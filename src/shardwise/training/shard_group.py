"""ParameterGroup: the parameters that one module gathers, uses and reduces together.

Note [One step of a group]
Before the module's forward the group's buffers are gathered, and its modules see the whole tensors
as attributes that hide the sharded parameters; after forward the buffers are freed. `Unshard` makes
the whole tensors for autograd: its backward has the gradients of all of them, puts them into one
row and starts a reduce-scatter. When the gradient of a module's output arrives, the group is
gathered again, into the same storage, so that what autograd saved is valid. `Deliver` comes before
`Unshard` in the graph, and its backward hands out the sharded gradients. All of its nodes are made
when the outermost module starts, so that the engine, which runs the newest node first, runs them
after everything else, and reductions overlap with the rest of backward.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise._torch.autograd import in_backward
from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.core.placements import SUM, Placement
from shardwise.core.untraced import UntracedFunction, untraced
from shardwise.dtensor import autograd
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError, LeafError, UnsupportedError
from shardwise.simulation.parts import one_part
from shardwise.training.flat_buffer import FlatBuffer, Member
from shardwise.training.in_flight import (
    SHARDED,
    STARTED,
    WHOLE,
    Hub,
    ModuleCall,
    Reducing,
    group_of,
)
from shardwise.training.mesh_axes import MeshAxes
from shardwise.training.nested import cast, mapped, tensors_in
from shardwise.training.reducer import data_axes_along, declared_module


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of a group: of gathered parameters, of their reduction, and of outputs.

    Parameters, gradients and optimizer state keep the dtype that they have. Gradients are reduced
    in `reduce_dtype`, or else in the dtype in which backward computes them. With
    `cast_forward_inputs`, floating inputs of the module get `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy:
    """Sharded parameters, their gradients and so optimizer state are in the host's memory."""

    pin_memory: bool = True


#: The groups whose modules' forward runs now, outermost first.
_forwards: list[ParameterGroup] = []


class ParameterGroup:
    """See Note [One step of a group]."""

    def __init__(
        self,
        module: nn.Module,
        grid: Grid,
        axis: int,
        replicas: tuple[int, ...],
        *,
        reshard_after_forward: bool | int | None,
        precision: Any,
        offload: Any,
        prefetch: int,
        ignored: set[str],
    ) -> None:
        self.module, self.ignored = module, ignored
        self.grid, self.axis, self.replicas = grid, axis, replicas
        self.reshard_after_forward = reshard_after_forward
        self.precision, self.offload, self.prefetch = precision, offload, prefetch
        self.buffers: list[FlatBuffer] = []
        self.sync = True
        self.hub = Hub()
        self._reset()

    def _reset(self) -> None:
        self.state = SHARDED
        self.depth = 0
        #: Calls of which backward has begun and whose parameters may still be read.
        self.running: list[ModuleCall] = []
        #: Calls that were differentiated with a graph, as long as it lives: the derivative of that
        #: reads parameters before any gradient of an output arrives.
        self.twice: weakref.WeakSet[ModuleCall] = weakref.WeakSet()
        #: Rows that wait for a backward pass that reduces, by what they hold.
        self.unsynced: dict[Any, Reducing] = {}
        self.token: torch.Tensor | None = None
        self.call: ModuleCall | None = None
        #: The version of the shards that were gathered.
        self.seen = -1
        #: Whether `unshard()` asked to keep it gathered.
        self.pinned = False

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"state", "depth", "running", "twice", "unsynced", "token", "call"}
        left_out |= {"pinned", "seen"}
        return {k: v for k, v in self.__dict__.items() if k not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def members(self) -> list[Member]:
        return [member for buffer in self.buffers for member in buffer.members]

    def version(self) -> int:
        return sum(buffer.version() for buffer in self.buffers)

    # -- gathering ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start to gather."""
        if self.state != SHARDED:
            return
        self._check_parameters()
        for buffer in self.buffers:
            buffer.collect()
        self.seen = self.version()
        dtype = None if self.precision is None else self.precision.param_dtype
        device = torch.device(self.grid.device_type) if self.offload is not None else None
        for buffer in self.buffers:
            buffer.start_gather(dtype, device)
        self.state = STARTED

    def gather(self) -> None:
        """Gather, and wait for it."""
        self.start()
        if self.state == STARTED:
            for buffer in self.buffers:
                buffer.finish_gather()
            self.state = WHOLE

    def reshard(self, num_ranks: int | None = None) -> None:
        """Free the gathered buffers, unless something still reads them.

        With `num_ranks`, that many ranks together keep a copy, from which backward gathers.
        """
        if self.state == SHARDED or self.depth or self.running or self.pinned:
            return
        self._hide()
        if self.twice:
            return
        self.gather()  # a collective that runs still writes
        for buffer in self.buffers:
            buffer.release(num_ranks)
        self.state = SHARDED

    def drop_old(self) -> None:
        """Free what an earlier step gathered: parameters may have changed since."""
        pinned = self.pinned
        if self.seen != self.version():
            self.pinned = False
            self.twice.clear()
        self.reshard()
        self.pinned = pinned
        for buffer in self.buffers:
            buffer.kept = None

    def _check_parameters(self) -> None:
        for member in self.members:
            for owner, name in member.owners:
                found: Any = owner._parameters.get(name)
                if found is member.parameter:
                    continue
                if self._takes(member, found):
                    continue
                raise LayoutError(
                    f"Parameter {member.name!r} is not the one that fully_shard made: its module "
                    f"now holds {_described(found)}, and {member.layout!r} was expected. Replace "
                    "parameters before fully_shard, or copy values into the sharded one: "
                    "param.copy_(distribute_tensor(x, param.device_mesh, param.placements))."
                )

    def _takes(self, member: Member, found: Any) -> bool:
        """Take a new parameter in the layout of the old one, from `load_state_dict(assign=True)`.

        Each user of a shared parameter then has a tensor of its own; equal ones are one again.
        """
        held: list[Any] = [owner._parameters.get(name) for owner, name in member.owners]
        if not all(isinstance(x, DTensor) and x._layout is member.layout for x in held):
            return False
        if not all(x.is_leaf for x in held):  # torch.func.functional_call: not to stay
            return False
        if not all(x is found or torch.equal(x, found) for x in held):
            return False
        member.parameter = found
        for owner, name in member.owners:
            owner._parameters[name] = found
        return True

    # -- what users call -----------------------------------------------------------------------

    def unshard(self) -> None:
        """Gather the group now, and keep it gathered until `reshard`."""
        self.drop_old()
        self.gather()
        self.pinned = True

    def reshard_now(self) -> None:
        """Free the gathered parameters."""
        self.pinned = False
        self.reshard()

    def set_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, or keeps each rank's own for a later pass."""
        for module in self.module.modules() if recurse else (self.module,):
            group, declared = group_of(module), declared_module(module)
            if group is not None:
                group.sync = requires_gradient_sync
                if declared is not None:
                    declared.enabled = requires_gradient_sync

    def gather_plainly(self) -> None:
        """Gather in the dtype and on the device of the shards."""
        for buffer in self.buffers:
            buffer.collect()
            buffer.kept = None
            buffer.start_gather(None, None)
            buffer.finish_gather()
        self.state = WHOLE

    def offload_shards(self) -> None:
        """Move the shards to the host's memory."""
        for member in self.members:
            parameter: Any = member.parameter
            parameter.data = parameter.data.to("cpu")
        for buffer in self.buffers:
            buffer.collect(pin=getattr(self.offload, "pin_memory", False))

    # -- forward -----------------------------------------------------------------------------

    @untraced
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.depth == 0:
            self._enter()
        self.depth += 1
        _forwards.append(self)
        policy = self.precision
        if policy is not None and policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = mapped((args, kwargs), functools.partial(cast, policy.param_dtype))
        if self.call is not None and not self.call.takes_gradients:
            self._watch_inputs(self.call, (args, kwargs))
        return args, kwargs

    def _enter(self) -> None:
        if in_backward():  # activation checkpointing computes forward again
            self.hub.attend_end()
            self.gather()
            self.token = None
        else:
            if not _forwards:
                self.hub.begin(self)
            elif self.hub is not _forwards[0].hub:
                self.hub = _forwards[0].hub
                self.hub.groups.append(self)
            self.gather()
            calls, order = self.hub.calls, self.hub.last_order
            self.call = ModuleCall(self, len(calls), self.seen)
            calls.append(self.call)
            place = len(calls)
            if order[place - 1 : place] == [self]:
                self.hub.prefetch(iter(order[place:]), self.prefetch)
        self._show()

    def _show(self) -> None:
        """Put whole tensors where the modules look for their parameters."""
        tensors = [tensor for buffer in self.buffers for tensor in buffer.tensors()]
        trained = [
            number
            for number, member in enumerate(self.members)
            if member.parameter.requires_grad and torch.is_grad_enabled()
        ]
        if trained:
            if self.token is None:
                self.make_token()
            if self.call is not None:
                self.call.takes_gradients = True
            made = Unshard.apply(self.token, self, self.call, trained, tensors)
            for number, tensor in zip(trained, made, strict=True):
                tensors[number] = tensor
        if self.call is not None:
            self.call.tensors = tensors
        self._put(tensors)

    def _put(self, tensors: list[torch.Tensor]) -> None:
        for member, tensor in zip(self.members, tensors, strict=True):
            for owner, name in member.owners:
                owner.__dict__[name] = tensor
        self._follow_flat_weights()

    def _hide(self) -> None:
        for member in self.members:
            for owner, name in member.owners:
                owner.__dict__.pop(name, None)
        self._follow_flat_weights()

    def _follow_flat_weights(self) -> None:
        """Recurrent layers keep a list of their parameters."""
        for owner in {id(o): o for m in self.members for o, _ in m.owners}.values():
            if isinstance(owner, nn.RNNBase):
                names: Any = owner._flat_weights_names
                owner.__dict__["_flat_weights"] = [getattr(owner, name) for name in names]

    def _watch_inputs(self, call: ModuleCall, inputs: Any) -> None:
        """Without trained parameters, the group is free when its inputs have their gradients."""
        found = [x for x in tensors_in(inputs) if x.requires_grad]
        if found and torch.is_grad_enabled():
            waiting = set(range(len(found)))

            def arrived(number: int, _: torch.Tensor) -> None:
                waiting.discard(number)
                if not waiting:
                    waiting.update(range(len(found)))
                    self.done(call)

            for number, x in enumerate(found):
                x.register_hook(functools.partial(arrived, number))

    @untraced
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.depth == 0:
            return output  # before_forward raised
        _forwards.pop()
        self.depth -= 1
        if self.depth:
            return output
        self._hide()
        call, self.call = self.call, None
        if in_backward():
            return output
        if self.precision is not None and self.precision.output_dtype is not None:
            output = mapped(output, functools.partial(cast, self.precision.output_dtype))
        num_hooked = 0
        if torch.is_grad_enabled() and call is not None:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(self._before_backward, call))
                    num_hooked += 1
        # Without a hooked output nothing says when backward begins: then it stays gathered.
        is_read = call is not None and call.takes_gradients and not num_hooked
        if self._reshards() and not is_read and not self._lends(output):
            asked = self.reshard_after_forward
            splits = type(asked) is int and torch.is_grad_enabled()
            self.reshard(asked if splits else None)
        if not _forwards:
            self.hub.end(self)
        return output

    def _reshards(self) -> bool:
        asked = self.reshard_after_forward
        if asked is None:  # backward needs the outermost module first, then the one that ran last
            return bool(_forwards) and not (torch.is_grad_enabled() and self.hub.is_last(self))
        return bool(asked) or not torch.is_grad_enabled()

    def _lends(self, output: Any) -> bool:
        """Whether the output has a gathered parameter in it, or a view of one."""
        return any(
            buffer.shares_memory(x._local if isinstance(x, DTensor) else x)
            for x in tensors_in(output)
            for buffer in self.buffers
        )

    # -- backward ----------------------------------------------------------------------------

    @untraced
    def _before_backward(self, call: ModuleCall, grad: torch.Tensor) -> None:
        self.hub.attend_end()
        if torch.is_grad_enabled():
            self.twice.add(call)
        if call in self.running:
            return
        self.running.append(call)
        self.gather()
        aliased = any(buffer.whole is buffer.shard for buffer in self.buffers)
        if call.version != (self.version() if aliased else self.seen):
            raise LeafError(
                f"Parameters of {type(self.module).__name__} were written to between forward and "
                "backward, for example by an optimizer's step. Backward needs the values of "
                "forward: call backward() first."
            )
        if self.depth == 0:
            self._put_again(call)
        calls = self.hub.calls
        if calls[call.index : call.index + 1] == [call]:
            earlier = (c.group for c in reversed(calls[: call.index]))
            self.hub.prefetch(earlier, self.prefetch)

    def _put_again(self, call: ModuleCall) -> None:
        """For checkpoints inside the module, which compute its forward again."""
        if call.tensors:
            self._put(call.tensors)
            return
        # Another backward pass of a graph that was retained: the tensors of forward are gone.
        token, self.token = self.token, None
        with torch.enable_grad():
            self._show()
        self.token = token

    def done(self, call: ModuleCall | None) -> None:
        """Backward has used the parameters of a call."""
        if call in self.running:
            self.running.remove(call)
        if call is not None:
            call.tensors.clear()
        if not torch.is_grad_enabled():
            self.reshard()

    def make_token(self) -> None:
        trained = [m.parameter for m in self.members if m.parameter.requires_grad]
        self.token = Deliver.apply(self, *trained) if trained else None

    def reduce(self, grads: dict[int, torch.Tensor | None]) -> None:
        """Start to reduce the gradients of some members, or keep them for a later pass."""
        first = 0
        for buffer in self.buffers:
            numbers = range(len(buffer.members))
            mine = {n: grads[first + n] for n in numbers if first + n in grads}
            first += len(buffer.members)
            if mine:
                self._reduce(buffer, mine)

    def _reduce(self, buffer: FlatBuffer, grads: dict[int, torch.Tensor | None]) -> None:
        kept: dict[int, tuple[int, ...]] = {}
        for number, grad in grads.items():
            grads[number], kept[number] = self._local_gradient(buffer.members[number], grad)
        given = [one_part(grad) for grad in grads.values() if grad is not None]
        computed = given[0].dtype if given else one_part(buffer.whole).dtype
        wanted = None if self.precision is None else self.precision.reduce_dtype
        dtype = wanted if wanted is not None and computed.is_floating_point else computed
        left = [axis for axis in self.replicas if self.grid.shape[axis] > 1]
        if buffer.parts == 1 and not left:
            # Nothing is sent, so there is nothing to wait for: also not for a later pass.
            self.hub.reducing.append(Reducing(buffer, kept, None, True, grads=grads))
            return
        scales = [self._share(buffer.members[n], axes) for n, axes in kept.items()]
        row = buffer.gradient_row(grads, scales, dtype, self.hub.new_row)
        made = Reducing(buffer, kept, row, len(given) == len(grads), left)
        key = (id(buffer), tuple(kept.items()))
        before = self.unsynced.pop(key, None)
        if before is not None:
            made.row = row + before.row
            made.all_here |= before.all_here
        if self.sync:
            self._start_reduction(made)
        else:
            self.unsynced[key] = made

    def _start_reduction(self, made: Reducing) -> None:
        buffer = made.buffer
        with because("fully_shard", implicit=False):
            if buffer.parts > 1:
                made.wait = collectives.start_scattered_sum(
                    made.row, buffer.grid, buffer.axis, self.hub.unused_rows.append
                )
                made.row = None
            self.hub.started(made, self.prefetch)

    def _local_gradient(
        self, member: Member, grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, tuple[int, ...]]:
        """This rank's term of the sum over the group's axes, and axes that stay Partial.

        Those are data axes that somebody else declared: whoever uses the gradient reduces it.
        """
        shard_grid = member.layout.grid
        if member.own:
            local: Any = grad
            if isinstance(grad, DTensor):
                assert member.whole is not None, "a DTensor's gradient is of a DTensor"
                local = autograd.move(grad, grad._layout.with_placements(member.whole.placements))
                local = local._local
            taken = {self.axis, *self.replicas} if shard_grid is self.grid else set()
            others = data_axes_along(self.module, shard_grid)
            kept = tuple(
                a for a in others if a not in taken and member.layout.placements[a].is_replicate()
            )
            return local, kept
        whole: Any = member.whole
        if grad is None:
            return None, ()
        assert isinstance(grad, DTensor), "the gradient of a DTensor is one"
        ours = _axes_in(whole.grid, self.grid, (self.axis, *self.replicas))
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

    def delivered(self) -> dict[int, torch.Tensor]:
        """The sharded gradients that backward has found, by id of their parameter."""
        mine = [each for each in self.hub.reducing if each.buffer in self.buffers]
        found: dict[int, Any] = {}
        for each in mine:
            self.hub.reducing.remove(each)
            for parameter, grad in self._gradients(each):
                before = found.get(id(parameter))
                found[id(parameter)] = grad if before is None else before + grad
        return found

    @torch.no_grad()
    def _gradients(self, reducing: Reducing) -> list[tuple[nn.Parameter, DTensor]]:
        buffer, numbers = reducing.buffer, tuple(reducing.partial)
        device = torch.device("cpu") if self.offload is not None else None
        if reducing.grads is not None:
            shares = [self._share(buffer.members[n], reducing.partial[n]) for n in numbers]
            found, used = buffer.as_gradients(reducing.grads, shares, device)
        else:
            with because("fully_shard", implicit=False):
                while not reducing.finished:
                    reducing.advance()
            found, flags = buffer.gradients(reducing.row, numbers, device)
            used = [True] * len(numbers) if reducing.all_here else flags.tolist()
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

    def _share(self, member: Member, partial: tuple[int, ...]) -> float:
        """The factor that makes a sum of terms the mean over ranks' losses."""
        if not member.own:
            return 1.0
        ours = [self.grid.shape[axis] for axis in (self.axis, *self.replicas)]
        others = [member.layout.grid.shape[axis] for axis in partial]
        share = 1.0
        for size in (*ours, *others):
            share /= size
        return share

    @torch.no_grad()
    def reduce_late(self) -> None:
        """Reduce what earlier passes kept, where the last one found no gradient."""
        for made in list(self.unsynced.values()):
            self._start_reduction(made)
        self.unsynced.clear()
        found = self.delivered()
        for member in self.members:
            parameter: Any = member.parameter
            grad = found.get(id(parameter))
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad


class Deliver(UntracedFunction):
    """From sharded parameters to a token; backward returns the gradients that were reduced."""

    @staticmethod
    def forward(ctx: Any, group: ParameterGroup, *parameters: Any) -> torch.Tensor:
        ctx.group, ctx.ids = group, [id(p) for p in parameters]
        ctx.set_materialize_grads(False)
        offloaded = group.offload is not None
        device = group.grid.device_type if offloaded else parameters[0].device
        return torch.empty(0, device=device)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        found = ctx.group.delivered()
        return None, *(found.get(number) for number in ctx.ids)


class Unshard(UntracedFunction):
    """From a token to the gathered tensors; backward reduces their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        group: ParameterGroup,
        call: ModuleCall | None,
        numbers: list[int],
        tensors: list[torch.Tensor],
    ) -> Any:
        ctx.group, ctx.call, ctx.numbers, ctx.device = group, call, numbers, token.device
        ctx.set_materialize_grads(False)
        return tuple(tensors[number] for number in numbers)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        group: ParameterGroup = ctx.group
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "backward(create_graph=True) of a fully sharded module: gradients that are reduced "
                "have no history, so that they cannot be differentiated again. Use "
                "torch.autograd.grad(loss, tensors, create_graph=True) for what a penalty needs, "
                "and call backward() on the sum of loss and penalty."
            )
        group.hub.attend_end()
        group.reduce(dict(zip(ctx.numbers, grads, strict=True)))
        group.done(ctx.call)
        return torch.empty(0, device=ctx.device), None, None, None, None


def _axes_in(other: Grid, grid: Grid, axes: tuple[int, ...]) -> set[int]:
    """The axes of `other` that run through the ranks of these axes of `grid`."""
    if other is grid:
        return set(axes)
    return set(MeshAxes(grid, axes, grid).meet(other)[0])


def _described(x: Any) -> str:
    if isinstance(x, DTensor):
        return f"a DTensor in {x._layout!r}"
    return f"a {type(x).__name__}" + (f" of shape {tuple(x.shape)}" if x is not None else "")
