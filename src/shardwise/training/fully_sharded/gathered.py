"""GroupParameters: the members of a group, sharded or gathered, and what their modules see."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError
from shardwise.training.fully_sharded.buffer import FlatBuffer
from shardwise.training.fully_sharded.members import CPUOffloadPolicy, Member, tensors_in

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
        return sum(buffer.version() for buffer in self.buffers)

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
        """Free what is gathered; with `num_ranks`, that many ranks together keep a copy."""
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
        """Raise where a module holds another parameter than the sharded one."""
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
        """Whether an output has a gathered parameter in it, or a view of one."""
        return any(
            buffer.shares_memory(x._local if isinstance(x, DTensor) else x)
            for x in tensors_in(output)
            for buffer in self.buffers
        )


class HeldParameters(dict[str, Any]):
    """The parameters of a module of which some are sharded: those cannot be replaced.

    A rank that replaced one would raise in forward, while the others wait for it in a collective.
    So it is an error where it is done: nothing has changed, and who catches it goes on in step.
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

    Each user of a shared parameter then has a tensor of its own; equal ones are one again.
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
