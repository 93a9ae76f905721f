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
                if found is member.parameter or _takes(member, found):
                    continue
                raise LayoutError(
                    f"Parameter {member.name!r} is not the one that fully_shard made: its module "
                    f"now holds {_described(found)}, and {member.layout!r} was expected. Replace "
                    "parameters before fully_shard, or copy values into the sharded one: "
                    "param.copy_(distribute_tensor(x, param.device_mesh, param.placements))."
                )

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


def _takes(member: Member, found: Any) -> bool:
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


def _described(x: Any) -> str:
    if isinstance(x, DTensor):
        return f"a DTensor in {x._layout!r}"
    return f"a {type(x).__name__}" + (f" of shape {tuple(x.shape)}" if x is not None else "")
