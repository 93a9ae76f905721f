"""ShardedTensor: a DTensor with a sharding spec on top.

See Note [Natural, permuted and loose tilings] for how it is stored.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch.autograd import own_hook
from shardwise._torch.dispatch import (
    ABOVE_AUTOGRAD,
    NO_KEYS,
    make_wrapper,
    without_subclass_functions,
)
from shardwise.core.layout import Layout, contiguous_stride
from shardwise.core.mesh import grid_like
from shardwise.core.placements import Placement, short
from shardwise.core.untraced import breaks_graph, untraced
from shardwise.dtensor.autograd import to_leaf_layout
from shardwise.dtensor.compile import FlatContext, flattened
from shardwise.dtensor.conversion import checked_local
from shardwise.dtensor.tensor import DTensor, _lasting
from shardwise.errors import (
    ArgumentError,
    LayoutError,
    LeafError,
    UnsupportedError,
    WorldError,
)
from shardwise.shard.dispatch import dispatch, with_tiling
from shardwise.shard.moves import (
    Reshard,
    ToLocalShard,
    WithSpec,
    converted,
    move_boxes,
    sharded_like,
    with_spec,
)
from shardwise.shard.spec import (
    EnumerableShardingSpec,
    RankDevice,
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    decode_spec,
    device_type_of,
    encode_spec,
)
from shardwise.shard.tiling import (
    Tiling,
    group_grid,
    group_ranks,
    listed_spec,
    make_tiling,
    natural_spec,
    shard_whole,
)
from shardwise.shard.unbacked import (
    UnbackedSpec,
    UnbackedToLocal,
    as_tangent,
    check_backed,
    is_unbacked,
    unflattened,
)
from shardwise.simulation.ranks import check_saved_world, held_like, pack_parts, rank_values

GRAD_REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, slots=True)
class ShardedContext:
    """What a compiled graph knows about a sharded tensor besides its inner tensors."""

    flat: FlatContext
    #: Or what is known of it; see Note [Unbacked tilings].
    tiling: Tiling | UnbackedSpec
    grad_reduction: str

    def as_tangent(self, x: DTensor) -> ShardedTensor:
        """A gradient as the graph expects it."""
        if isinstance(self.tiling, UnbackedSpec):
            return as_tangent(x, ShardedTensor, self)
        sharded = sharded_like(x, self.tiling, ShardedTensor)
        local: Any = sharded._local
        held = held_like(local, self.flat.roster)
        return sharded if held is local else ShardedTensor.over(held, sharded._tiling, like=sharded)


class ShardedTensor(DTensor):
    """A tensor whose shards are placed by a spec.

    Made by `shard_tensor`, `shard_parameter`, `shard_module`, `init_from_local_shards` and the
    factories of this package. Lookups and linear layers take each rank's own plain batch; the
    gradient is then that of the mean of the ranks' losses, or of the sum with
    `grad_reduction="sum"`.
    """

    __slots__ = ("_tiling", "grad_reduction")
    _tiling: Tiling
    grad_reduction: str

    @staticmethod
    def over(
        local: torch.Tensor, tiling: Tiling, layout: Layout | None = None, like: Any = None
    ) -> ShardedTensor:
        """A sharded tensor out of the ranks' local tensors, unchecked."""
        layout = layout or tiling.layout(local.dtype)
        stride = layout.stride if tiling.natural else contiguous_stride(tiling.shape)
        out = make_wrapper(
            ShardedTensor,
            tiling.shape,
            strides=stride,
            dtype=layout.dtype,
            device=local.device,
            _extra_dispatch_keys=ABOVE_AUTOGRAD if tiling.natural else NO_KEYS,
        )
        out._local, out._layout, out._tiling = local, layout, tiling
        out.grad_reduction = "mean" if like is None else like.grad_reduction
        return out

    # -- ops ---------------------------------------------------------------------------------

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = functions.get(func)
        if func in spec_functions:
            special = spec_functions[func].get(
                type(first_sharded(args, kwargs).sharding_spec()), special
            )
        with without_subclass_functions():
            return func(*args, **kwargs) if special is None else special(func, types, args, kwargs)

    @classmethod
    @untraced
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        preferred: Layout | None = None,
    ) -> Any:
        return dispatch(ShardedTensor, func, args, kwargs or {})

    @breaks_graph
    def requires_grad_(self, mode: bool = True) -> ShardedTensor:
        """As for any tensor; the gradient of a leaf has the leaf's spec."""
        torch.Tensor.requires_grad_(self, mode)
        if mode and "_hooked" not in self.__dict__:
            hook = functools.partial(_lies_in, self._tiling, self._layout)
            self.__dict__["_hooked"] = torch.Tensor.register_hook(self, hook)
        return self

    @breaks_graph
    def _set_data(self, value: Any) -> None:
        """`x.data = value`: this tensor gets the memory and the spec of `value`."""
        if isinstance(value, DTensor):
            value = with_spec(value, ShardedTensor)
            self._tiling = value._tiling
        super()._set_data(value)

    data = property(DTensor._get_data, _set_data)

    # -- torch.compile -----------------------------------------------------------------------

    @untraced
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names, flat = flattened(self)
        tiling: Any = self._tiling
        if not is_unbacked(self):
            return names, ShardedContext(flat, tiling, self.grad_reduction)
        return [*names, "_extent"], ShardedContext(flat, tiling.known, self.grad_reduction)

    @property
    def _extent(self) -> torch.Tensor:
        """See Note [Unbacked tilings]."""
        tiling: Any = self._tiling
        return tiling.extent

    @staticmethod
    @untraced
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> ShardedTensor:
        tiling, flat = context.tiling, context.flat
        if type(tiling) is UnbackedSpec:
            return unflattened(ShardedTensor, inner, context, outer_size)
        if tiling.natural:
            local, layout = flat.restored(inner, tiling.shape, tuple(outer_stride))
        else:
            layout = tiling.layout(flat.dtype)
            local, _ = flat.restored(inner, layout.shape, layout.stride)
        made = ShardedTensor.over(local, tiling, layout)
        made.grad_reduction = context.grad_reduction
        return made

    @untraced
    def __coerce_tangent_metadata__(self) -> ShardedTensor:
        return self

    @untraced
    def __coerce_same_metadata_as_tangent__(
        self, context: Any, expected_type: type | None = None
    ) -> ShardedTensor:
        return context.as_tangent(self)

    def _stable_hash_for_caching(self) -> str:
        return f"{super()._stable_hash_for_caching()} {self._tiling.spec} {self.grad_reduction}"

    # -- what it is --------------------------------------------------------------------------

    def sharding_spec(self) -> ShardingSpec:
        return self._tiling.spec

    def metadata(self) -> ShardedTensorMetadata:
        """All shards, on all ranks."""
        properties = TensorProperties(dtype=self.dtype, requires_grad=self.requires_grad)
        return ShardedTensorMetadata(self._tiling.boxes, torch.Size(self._tiling.shape), properties)

    def local_shards(self) -> list[Shard]:
        """The shards of the ranks present: this one's, or all of a simulated world's.

        They share memory with the tensor.
        """
        tiling, found = self._tiling, []
        if tiling.grid.world.absent and len(tiling.grid.ranks) > 1:
            raise WorldError(
                "The tensor was loaded without a process group, and its file does not say which "
                "rank's shards it holds. Load it where torch.distributed is initialised."
            )
        for (place,), held in rank_values(tiling.grid, self._local):
            rank = tiling.grid.ranks[place]
            views = tiling.box_views(rank, held)
            found += [Shard(v, b) for v, b in zip(views, tiling.on_rank(rank), strict=True)]
        return found

    def local_tensor(self) -> torch.Tensor:
        """This rank's shard, differentiable; empty on a rank that has none."""
        if is_unbacked(self):
            return UnbackedToLocal.apply(self)
        if self._tiling.split is None:
            raise UnsupportedError(
                f"A rank has several shards of this tensor, which are not adjacent: "
                f"{self.sharding_spec()}. Use local_shards(), or reshard() it first."
            )
        return ToLocalShard.apply(self)

    @property
    def process_group(self) -> Any:
        if self._tiling.grid.outside:
            return dist.GroupMember.NON_GROUP_MEMBER
        return self._tiling.grid.mesh.get_group(0)

    @property
    def placements(self) -> tuple[Placement, ...]:
        self._check_natural("placements")
        return self._layout.placements

    def _check_natural(self, asked: str) -> None:
        if not self._tiling.natural:
            raise UnsupportedError(
                f"{asked} is not available for {self.sharding_spec()}: no layout of a mesh has "
                "shards in that order. Use reshard(spec) with one shard per rank, in rank order."
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        held = short(self._layout.placements) if self._tiling.natural else "in boxes"
        return (
            f"ShardedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {held} on "
            f"{self._tiling.grid!r}{grad}, spec={self.sharding_spec()},\nlocal={self._local!r})"
        )

    def __checkpoint_pieces__(self) -> list[tuple[int, tuple[int, ...], torch.Tensor]]:
        """The shards, for shardwise.checkpoint."""
        found = [(shard.metadata, shard.tensor) for shard in self.local_shards()]
        return [(at.rank, tuple(at.shard_offsets), values) for at, values in found]

    def _chunks(self) -> list[Any]:
        pieces = [(offsets, values) for _, offsets, values in self.__checkpoint_pieces__()]
        return [(at, values) for at, values in pieces if values.numel() or not self.numel()]

    # -- moving ------------------------------------------------------------------------------

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Bring this tensor to another spec in place, as torch's does, and return it.

        Its gradient moves along. In code that autograd records, use `resharded`.
        """
        if not self.is_leaf:
            raise LeafError(
                "reshard() changes a tensor in place, and this one has a history in autograd: use "
                "x.resharded(spec), which returns a new tensor and is differentiable."
            )
        with torch.no_grad():
            detached: Any = self.detach()
            moved = detached.resharded(resharding_spec)
            grad = self.grad
            if moved._tiling is not self._tiling:
                self.grad, self.data = None, moved
                if grad is not None:
                    self.grad = sharded_like(grad, moved._tiling, ShardedTensor)
        return self

    def resharded(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """The same tensor in another spec, differentiable: one all-to-all, owner to owner."""
        if not isinstance(resharding_spec, ShardingSpec):
            raise ArgumentError(f"reshard() takes a sharding spec, found {resharding_spec!r}.")
        check_backed(self, "reshard()")
        source = self._tiling
        kind = device_type_of(resharding_spec, source.shape)
        if kind != source.grid.device_type:
            raise LayoutError(
                f"reshard() stays on {source.grid.device_type}; {resharding_spec} is on {kind}. "
                "Move the tensor first: .to(device)."
            )
        target = make_tiling(resharding_spec, source.shape, source.grid)
        return self if target is source else Reshard.apply(self, target)

    def gather(  # type: ignore[override]
        self, dst: int = 0, out: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        """The whole tensor on rank `dst` of the group, None elsewhere; also written to `out`.

        In a simulated world, where rank `dst` is always present, it is returned.
        """
        check_backed(self, "gather()")
        tiling = self._tiling
        if not 0 <= dst < len(tiling.grid.ranks):
            raise LayoutError(f"dst={dst} is not a rank of a group of {len(tiling.grid.ranks)}.")
        rank = tiling.grid.ranks[dst]
        place = RankDevice(rank, torch.device(tiling.grid.device_type))
        one = EnumerableShardingSpec([ShardMetadata([0] * self.dim(), tiling.shape, place)])
        target = make_tiling(one, tiling.shape, tiling.grid)
        held = move_boxes(self._local.detach(), tiling, target, "gather")
        for (at,), mine in rank_values(tiling.grid, held):
            if at == dst:
                whole = target.box_views(rank, mine)[0].to(dtype or self.dtype)
                return whole if out is None else out.copy_(whole)
        return None

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank."""
        return DTensor.full_tensor(self._in_order(), grad_placements=grad_placements)

    def tolist(self) -> Any:
        return DTensor.tolist(self._in_order())

    def numpy(self, *, force: bool = False) -> Any:
        return DTensor.numpy(self._in_order(), force=force)

    def _in_order(self) -> ShardedTensor:
        """The same tensor in a natural tiling."""
        if self._tiling.natural:
            return self
        if not self._tiling.shape:
            raise UnsupportedError(
                "A tensor without dims is on one rank, and no mesh has that layout: read the "
                "owner's shard, local_shards(), or gather() it."
            )
        return self.resharded(natural_spec(self._tiling))

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """As for any DTensor; the result has no spec."""
        self._check_natural("redistribute()")
        return super().redistribute(*args, **kwargs)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        self._check_natural("to_local()")
        return super().to_local(grad_placements=grad_placements)

    def to(
        self, *args: Any, copy: bool = False, process_group: Any = None, **kwargs: Any
    ) -> ShardedTensor:
        """Another dtype or another kind of device, as for any tensor.

        `process_group` is that of the result: of the same ranks, with a backend for the other
        device.
        """
        return converted(self, args, kwargs, copy, process_group)

    def cpu(
        self,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Any = None,
    ) -> ShardedTensor:
        return self.to("cpu", memory_format=memory_format, process_group=process_group)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Any = None,
    ) -> ShardedTensor:
        """The current device of CUDA, or the one that is named."""
        if device is None:
            device = torch.device("cuda")
        elif isinstance(device, int):
            device = torch.device("cuda", device)
        return self.to(
            device,
            non_blocking=non_blocking,
            memory_format=memory_format,
            process_group=process_group,
        )

    # -- copies ------------------------------------------------------------------------------

    def _deep_copied(self, memo: dict[int, Any]) -> ShardedTensor:
        return with_tiling(super()._deep_copied(memo), self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        tiling, grid = self._tiling, self._tiling.grid
        spec, facts = encode_spec(listed_spec(tiling)), (tiling.shape, grid.device_type, grid.ranks)
        state = pack_parts(self._local.detach()), spec, facts
        marks = (self.grad_reduction, self.requires_grad)
        return _unpickle, (state, marks, _lasting(self.__dict__))


@own_hook
def _lies_in(tiling: Tiling, layout: Layout, grad: Any) -> Any:
    """A gradient in this tiling; None where it is already, as torch's hooks want it."""
    if grad is None or (isinstance(grad, ShardedTensor) and grad._tiling is tiling):
        return None
    if tiling.natural and (not isinstance(grad, ShardedTensor) or grad._layout is layout):
        moved = to_leaf_layout(DTensor, layout, grad)
        found = grad if moved is None else moved
        is_dense = type(found) in (DTensor, ShardedTensor)
        return WithSpec.apply(found, tiling, ShardedTensor) if is_dense else moved
    if isinstance(grad, DTensor):
        return sharded_like(grad, tiling, ShardedTensor)
    return ShardedTensor.over(shard_whole(tiling, grad), tiling)


#: Functions of torch with special code for sharded tensors, and that code; filled by `functions`.
functions: dict[Any, Any] = {}
#: The same for tensors of one kind of spec, by its class; they come first.
spec_functions: dict[Any, dict[type, Any]] = {}


def first_sharded(args: Any, kwargs: Any) -> ShardedTensor:
    """The first sharded tensor in a call, also in a list."""
    for value in (*args, *kwargs.values()):
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(x, ShardedTensor):
                return x
    raise AssertionError("called for a sharded tensor")


# -- pickling ------------------------------------------------------------------------------------
# Pickled sharded tensors: a process group is kept as its ranks, and looked up when loading.


_group: contextvars.ContextVar[Any] = contextvars.ContextVar("process group", default=None)


@contextlib.contextmanager
def load_with_process_group(process_group: Any) -> Iterator[Any]:
    """Inside, loaded sharded tensors belong to this group, not to the whole world."""
    token = _group.set(process_group)
    try:
        yield process_group
    finally:
        _group.reset(token)


def _unpickle(state: Any, marks: Any, attributes: dict[str, Any]) -> ShardedTensor:
    held, spec, (shape, device_type, ranks) = state
    check_saved_world(held, both=False)
    if dist.is_initialized():
        grid = group_grid(group_of_load(ranks, "The tensor"), device_type)
    else:
        grid = grid_like(device_type, (len(ranks),), tuple(ranks), None)
    tiling = make_tiling(decode_spec(spec), tuple(shape), grid)
    first = held[1] if held[0] == "real" else held[1][0]
    restored = ShardedTensor.over(checked_local(held, tiling.layout(first.dtype)), tiling)
    restored.grad_reduction, requires_grad = marks
    restored.__dict__.update(attributes)
    return restored.requires_grad_(requires_grad)


def group_of_load(ranks: Sequence[int], what: str) -> Any:
    """The group of the load; raises where `what` was saved on other ranks."""
    group = _group.get()
    found = group_ranks(group)
    if found != tuple(ranks):
        raise WorldError(
            f"{what} was saved on the group of ranks {list(ranks)}, but is loaded on "
            f"{list(found)}. Put the load under load_with_process_group(group) with such a group, "
            "or reshard(spec) before saving."
        )
    return group
