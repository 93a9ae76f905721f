"""ParameterGroup: parameters that one module gathers together; Hub: what groups share.

Note [One step of a group]
Before the module's forward the group's buffers are gathered, and its modules see the whole tensors
as attributes that hide the sharded parameters; after forward the buffers are freed. The autograd
function `Unshard` returns the whole tensors: its backward gets the gradients of all of them, copies
them into one row and starts a reduce-scatter. When the gradient of a module's output arrives, the
group is gathered again, into the same storage, so that the tensors that autograd saved are valid.
`Deliver` comes before `Unshard` in the graph, and its backward returns the sharded gradients. All
`Deliver` nodes are made when the outermost module starts. The engine runs the newest node first, so
it runs them after everything else, and reductions overlap with the rest of backward.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise._torch.autograd import after_backward, in_backward
from shardwise._torch.dispatch import outside_checkpoints
from shardwise.core.untraced import UntracedFunction, untraced
from shardwise.errors import LeafError
from shardwise.training.fully_sharded.gradients import (
    SHARDED,
    STARTED,
    WHOLE,
    GroupGradients,
    GroupParameters,
    RowsInFlight,
)
from shardwise.training.fully_sharded.members import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardAxes,
    cast,
    check_ties,
    mapped,
    tensors_in,
)
from shardwise.training.reducer import declared_module, without_history

#: The groups whose modules' forward runs now, outermost first.
_forwards: list[ParameterGroup] = []


class ParameterGroup:
    """See Note [One step of a group]."""

    def __init__(
        self,
        module: nn.Module,
        modules: list[nn.Module],
        place: ShardAxes,
        *,
        reshard_after_forward: bool | int | None,
        precision: MixedPrecisionPolicy,
        offload: CPUOffloadPolicy | None,
        prefetch: int,
        ignored: set[str],
    ) -> None:
        #: The module, or a list of those that are called one after another.
        self.module, self.modules = module, modules
        self.place, self.ignored = place, ignored
        self.reshard_after_forward = reshard_after_forward
        self.precision, self.prefetch = precision, prefetch
        self.parameters = GroupParameters(place.grid.device_type, precision.param_dtype, offload)
        self.gradients = GroupGradients(
            modules[0], place, self.parameters, precision.reduce_dtype, prefetch
        )
        self.hub = Hub()
        self.depth = 0
        #: Calls whose backward has begun and whose parameters may still be read.
        self.running: list[ModuleCall] = []
        #: Calls that were differentiated with a graph, as long as it lives: the derivative of that
        #: reads parameters before any gradient of an output arrives.
        self.twice: weakref.WeakSet[ModuleCall] = weakref.WeakSet()
        self.token: torch.Tensor | None = None
        self.call: ModuleCall | None = None
        #: The call that goes on in the next of several modules.
        self.unended: ModuleCall | None = None
        #: Whether `unshard()` asked to keep it gathered.
        self.pinned = False

    def __getstate__(self) -> dict[str, Any]:
        nothing = dict.fromkeys(("twice", "token", "call", "unended"))
        return {**self.__dict__, **nothing, "depth": 0, "running": [], "pinned": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, twice=weakref.WeakSet())

    # -- what users call -----------------------------------------------------------------------

    def unshard(self) -> None:
        """Gather the group now, and keep it gathered until `reshard`."""
        self.parameters.check()
        self.free_old()
        self.parameters.gather()
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
                group.gradients.sync = requires_gradient_sync
                if declared is not None:
                    declared.enabled = requires_gradient_sync

    def run(
        self, module: nn.Module, method: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method of a module with gathered parameters, like forward."""
        declared, output = declared_module(module), None
        if declared is not None:
            declared.before_forward()
        args, kwargs = self.before_forward(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        finally:
            output = self.after_forward(module, args, output)
        return output

    # -- freeing -----------------------------------------------------------------------------

    def reshard(self, num_ranks: int | None = None) -> None:
        """Free the gathered buffers, unless something still reads them.

        With `num_ranks`, that many ranks together keep a copy, from which backward gathers.
        """
        if self.parameters.state == SHARDED or self.depth or self.running or self.pinned:
            return
        self.parameters.hide()
        if not self.twice:
            self.parameters.release(num_ranks)

    def free_old(self) -> None:
        """Free buffers gathered in an earlier step: parameters may have changed since."""
        pinned = self.pinned
        if self.parameters.seen != self.parameters.version():
            self.pinned = False
            self.twice.clear()
        self.unended = None
        self.reshard()
        self.pinned = pinned
        self.parameters.drop_kept()

    # -- forward -----------------------------------------------------------------------------

    @untraced
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.depth == 0:
            with outside_checkpoints():
                self._enter()
        self.depth += 1
        _forwards.append(self)
        policy = self.precision
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = mapped((args, kwargs), functools.partial(cast, policy.param_dtype))
        if self.call is not None and not self.call.takes_gradients:
            self._watch_inputs(self.call, (args, kwargs))
        return args, kwargs

    def _enter(self) -> None:
        self.unended, unended = None, self.unended
        if in_backward():  # activation checkpointing computes forward again
            self.hub.finish_after_backward()
            self.parameters.gather()
            self.token = None
        elif unended is not None and self._goes_on(unended):
            return
        else:
            if not _forwards:
                self.hub.begin(self)
            elif self.hub is not _forwards[0].hub:
                self.parameters.check()
                self.hub = _forwards[0].hub
                self.hub.groups.append(self)
            self.parameters.gather()
            calls, order = self.hub.calls, self.hub.last_order
            self.call = ModuleCall(self, len(calls), self.parameters.seen)
            calls.append(self.call)
            place = len(calls)
            if order[place - 1 : place] == [self]:
                self.hub.prefetch(iter(order[place:]), self.prefetch)
        self._show()

    def _goes_on(self, call: ModuleCall) -> bool:
        """Show the next of several modules the tensors that the one before saw."""
        same = call.grad_enabled == torch.is_grad_enabled() and self.parameters.state == WHOLE
        if same:
            self.call = call
            self.parameters.show(call.tensors)
        return same

    def _show(self) -> None:
        """Show the modules whole tensors; trained ones have a history."""
        tensors = self.parameters.tensors()
        trained = [
            number
            for number, member in enumerate(self.parameters.members)
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
        self.parameters.show(tensors)

    def make_token(self) -> None:
        trained = [m.parameter for m in self.parameters.members if m.parameter.requires_grad]
        self.token = Deliver.apply(self, *trained) if trained else None

    def _watch_inputs(self, call: ModuleCall, inputs: Any) -> None:
        """Without trained parameters, free the group when its inputs have their gradients."""
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
        self.parameters.hide()
        call, self.call = self.call, None
        if in_backward():
            return output
        if self.precision.output_dtype is not None:
            output = mapped(output, functools.partial(cast, self.precision.output_dtype))
        num_hooked = 0
        if torch.is_grad_enabled() and call is not None:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(self._before_backward, call))
                    num_hooked += 1
        if call is not None and module is not self.modules[-1] and _forwards:
            self.unended = call
            return output
        # Without a hooked output nothing says when backward begins: then it stays gathered.
        is_read = call is not None and call.takes_gradients and not num_hooked
        with outside_checkpoints():
            if self._reshards() and not is_read and not self.parameters.are_in(output):
                asked = self.reshard_after_forward
                splits = type(asked) is int and torch.is_grad_enabled()
                self.reshard(asked if splits else None)
            if not _forwards:
                self.hub.end()
        return output

    def _reshards(self) -> bool:
        asked = self.reshard_after_forward
        if asked is None:  # backward needs the outermost module first, then the one that ran last
            return bool(_forwards) and not (torch.is_grad_enabled() and self.hub.is_last(self))
        return bool(asked) or not torch.is_grad_enabled()

    # -- backward ----------------------------------------------------------------------------

    @untraced
    def _before_backward(self, call: ModuleCall, grad: torch.Tensor) -> None:
        self.hub.finish_after_backward()
        if torch.is_grad_enabled():
            self.twice.add(call)
        if call in self.running:
            return
        self.running.append(call)
        self.parameters.gather()
        if call.version != self.parameters.version():
            raise LeafError(
                f"Parameters of {type(self.module).__name__} were written to between forward and "
                "backward, for example by an optimizer's step. Backward needs the values of "
                "forward: call backward() first."
            )
        if self.depth == 0:
            self._show_again(call)
        calls = self.hub.calls
        if calls[call.index : call.index + 1] == [call]:
            earlier = (c.group for c in reversed(calls[: call.index]))
            self.hub.prefetch(earlier, self.prefetch)

    def _show_again(self, call: ModuleCall) -> None:
        """For checkpoints inside the module, which compute its forward again."""
        if call.tensors:
            self.parameters.show(call.tensors)
            return
        # Another backward pass of a graph that was retained: the tensors of forward are gone.
        token, self.token = self.token, None
        with torch.enable_grad():
            self._show()
        self.token = token

    def done(self, call: ModuleCall | None) -> None:
        """Note that backward has used the parameters of a call."""
        if call in self.running:
            self.running.remove(call)
        if call is not None:
            call.tensors.clear()
        if not torch.is_grad_enabled():
            self.reshard()


class Deliver(UntracedFunction):
    """From sharded parameters to a token; backward returns the gradients that were reduced."""

    @staticmethod
    def forward(ctx: Any, group: ParameterGroup, *parameters: Any) -> torch.Tensor:
        ctx.group, ctx.ids = group, [id(p) for p in parameters]
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=group.parameters.device or parameters[0].device)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        group: ParameterGroup = ctx.group
        found = group.gradients.delivered(group.hub.rows)
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
            raise without_history("a fully sharded module")
        group.hub.finish_after_backward()
        group.gradients.reduce(dict(zip(ctx.numbers, grads, strict=True)), group.hub.rows)
        group.done(ctx.call)
        return torch.empty(0, device=ctx.device), None, None, None, None


# -- hub -----------------------------------------------------------------------------------------
# Hub: what the groups of one outermost module share: their order, and what is in flight.
#
# Note [In flight]
# While a group computes, the next `prefetch` groups are being gathered: in forward in the order of
# the last step, in backward in the reverse order of this one. As many reductions may be running:
# the next one waits for the oldest, which frees its row.


#: The attribute of a module with its group.
GROUP = "_shard_group"


def group_of(module: nn.Module) -> ParameterGroup | None:
    return module.__dict__.get(GROUP)


def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
    """As a module's own, and drop gradients that wait for a pass that reduces."""
    type(module).zero_grad(module, set_to_none)
    for group in filter(None, map(group_of, module.modules())):
        group.gradients.unsynced.clear()


@dataclass(slots=True, eq=False, weakref_slot=True)
class ModuleCall:
    """One forward of a group: its place in the order of the step, and what it read."""

    group: ParameterGroup
    index: int
    version: int
    takes_gradients: bool = False
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)
    #: The tensors that its modules saw as their parameters: they see them again if checkpoints
    #: inside recompute forward. Dropped after backward, since its history refers to this.
    tensors: list[torch.Tensor] = field(default_factory=list)


class Hub:
    """State shared by the groups of one outermost module: their order, and rows in flight."""

    def __init__(self) -> None:
        self.groups: list[ParameterGroup] = []
        self.last_order: list[ParameterGroup] = []
        self.calls: list[ModuleCall] = []
        self.rows = RowsInFlight()
        self.ends_backward = False
        #: Whether the backward pass makes a graph, in which tensors are saved again.
        self.keeps_whole = False

    def __getstate__(self) -> dict[str, Any]:
        return {"groups": self.groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.groups = state["groups"]

    def begin(self, root: ParameterGroup) -> None:
        """Begin a new forward of the outermost module."""
        if self.ends_backward and not in_backward():
            self.forget()  # that backward raised
        inside = (group for group in map(group_of, root.module.modules()) if group is not None)
        found = list({id(group): group for group in inside}.values())
        for group in found:
            group.parameters.check()
        if found != self.groups:
            check_ties(root.module)
            self.groups = found
            for group in found:
                group.hub = self
        for call in self.calls:
            call.tensors.clear()
        self.last_order = [call.group for call in self.calls] or self.last_order
        self.calls = []
        for group in found:
            group.free_old()
        if torch.is_grad_enabled():
            for group in found:
                group.make_token()

    def end(self) -> None:
        """Free what was prefetched and not used; the outermost module has returned."""
        for group in self.groups:
            if group.parameters.state == STARTED and group.depth == 0:
                group.reshard()

    def is_last(self, group: ParameterGroup) -> bool:
        """Whether the call that runs was the last one of the step before, and of this group."""
        order = self.last_order
        return len(self.calls) == len(order) and order[-1] is self.calls[-1].group is group

    def prefetch(self, groups: Iterator[ParameterGroup], most: int) -> None:
        for group in itertools.islice(groups, most):
            group.parameters.start()

    def finish_after_backward(self) -> None:
        """Make `finish` run at the end of the current backward pass."""
        self.keeps_whole |= torch.is_grad_enabled()
        if not self.ends_backward:
            self.ends_backward = True
            after_backward(self.finish)

    @untraced
    def finish(self) -> None:
        self.ends_backward = False
        self.rows.unused.clear()
        keeps, self.keeps_whole = self.keeps_whole, False
        for group in self.groups:
            group.gradients.reduce_late(self.rows)
            group.running.clear()
            if not keeps:
                group.reshard()

    def forget(self) -> None:
        """Drop the state of a step that raised."""
        self.ends_backward = self.keeps_whole = False
        self.rows.forget()
        for group in self.groups:
            group.running.clear()
            group.reshard()
