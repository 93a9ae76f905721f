"""Sharding specs (which rank holds which box), shards, and their metadata.

Specs are values that compare and hash.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise._torch.c10d import RemoteDevice
from shardwise.core.box import Box, overlapping
from shardwise.core.sizes import chunk_length, lengths
from shardwise.errors import ArgumentError, LayoutError, UnsupportedError

Shape = tuple[int, ...]

_TEXT = re.compile(r"rank:(\d+)(?:/(.+))?")


class RankNumber(int):
    """A rank. Torch's placements have a method `rank()`, so this one can be called."""

    def __call__(self) -> int:
        return int(self)


class DeviceName(str):
    """A device: an attribute like a `torch.device`, and torch's method `device()`.

    It is a str, because torch accepts devices as strings and its own class cannot be subclassed.
    """

    __slots__ = ()

    def __call__(self) -> torch.device:
        return torch.device(self)

    @property
    def type(self) -> str:
        return self().type

    @property
    def index(self) -> int | None:  # type: ignore[override]
        return self().index

    def __eq__(self, other: object) -> bool:
        return self() == (other() if isinstance(other, DeviceName) else other)

    def __hash__(self) -> int:
        return hash(self())

    def __repr__(self) -> str:
        return repr(self())


@dataclass(frozen=True, slots=True, repr=False)
class RankDevice:
    """The rank and device of a shard. The rank is a global rank, even in a smaller group.

    Both are attributes, and also methods as in torch. A device of this process has no rank.

    >>> place = parse_device("rank:1/cuda:3")
    >>> place.rank, place.device, place
    (1, device(type='cuda', index=3), rank:1/cuda:3)
    >>> place.rank(), place.device()
    (1, device(type='cuda', index=3))
    """

    rank: Any
    device: Any

    def __post_init__(self) -> None:
        if self.rank is None:
            object.__setattr__(self, "rank", _no_rank)
        else:
            object.__setattr__(self, "rank", RankNumber(self.rank))
        object.__setattr__(self, "device", DeviceName(self.device))

    def __repr__(self) -> str:
        return str(self.device) if self.rank() is None else f"rank:{self.rank}/{self.device}"


def _no_rank() -> None:
    """Stands for the rank of a placement that names only a device."""


def parse_device(given: Any) -> RankDevice:
    """The rank and device that a text names: "rank:0/cpu", "rank:0" or "cpu"."""
    if isinstance(given, RankDevice):
        return given
    if isinstance(given, (RemoteDevice, torch.device)):
        given = str(given)
    if not isinstance(given, str):
        raise ArgumentError(f"A placement is a text such as 'rank:0/cpu', found {given!r}.")
    found = _TEXT.fullmatch(given)
    try:
        if found is None:
            return RankDevice(None, torch.device(given))
        return RankDevice(int(found[1]), torch.device(found[2] or "cpu"))
    except RuntimeError as error:
        raise LayoutError(
            f"{given!r} names no rank and device: write 'rank:0/cpu' or 'rank:1/cuda:1', with a "
            "device of torch. (Names of RPC workers mean nothing here.)"
        ) from error


class PlacementSpec(ABC):  # noqa: B024
    """Where something is placed; a base class, as in torch."""


@dataclass(frozen=True, slots=True)
class DevicePlacementSpec(PlacementSpec):
    """Placed on one device.

    >>> DevicePlacementSpec("rank:1/cpu").device.rank()
    1
    """

    device: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", parse_device(self.device))


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """One box of a tensor: its offsets, its sizes, and the rank that holds it.

    In a spec, a box needs a placement.

    >>> ShardMetadata([0, 4], [2, 4], "rank:1/cpu")
    ShardMetadata(shard_offsets=(0, 4), shard_sizes=(2, 4), placement=rank:1/cpu)
    """

    shard_offsets: Sequence[int]
    shard_sizes: Sequence[int]
    placement: Any = None

    def __post_init__(self) -> None:
        offsets, sizes = _numbers(self.shard_offsets), _numbers(self.shard_sizes)
        if len(offsets) != len(sizes):
            raise LayoutError(f"A shard has as many offsets as sizes, found {offsets} and {sizes}.")
        object.__setattr__(self, "shard_offsets", offsets)
        object.__setattr__(self, "shard_sizes", sizes)
        if self.placement is not None:
            object.__setattr__(self, "placement", parse_device(self.placement))

    @property
    def place(self) -> RankDevice:
        """The placement; raises if it names no rank."""
        if self.placement is None or self.placement.rank() is None:
            raise LayoutError(f"{self} names no rank: give it a placement such as 'rank:0/cpu'.")
        found: RankDevice = self.placement
        return found

    @property
    def rank(self) -> int:
        return self.place.rank()

    @property
    def box(self) -> Box:
        return Box(tuple(self.shard_offsets), tuple(self.shard_sizes))

    @property
    def numel(self) -> int:
        return self.box.volume


def _numbers(given: Any) -> Shape:
    if isinstance(given, (str, int)) or any(
        not isinstance(n, int) or isinstance(n, bool) for n in given
    ):
        raise ArgumentError(f"Offsets and sizes are lists of ints, found {given!r}.")
    if any(n < 0 for n in given):
        raise LayoutError(f"Offsets and sizes are not negative, found {tuple(given)}.")
    return tuple(given)


class ShardingSpec(ABC):
    """How a tensor of some size is split into boxes.

    A spec of your own has `build_metadata`, as in torch, and compares and hashes by value: the
    ranks compare specs, and equal ones share their plans. It may have `shard` as well, to make the
    sharded tensor itself.
    """

    @abstractmethod
    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """The shards of a tensor of this size."""

    def shard(
        self, tensor: torch.Tensor, src_rank: int | None = 0, process_group: Any = None
    ) -> Any:
        """The tensor of rank `src_rank`, sharded by this spec."""
        return by_boxes[0](tensor, self, src_rank, process_group)

    def boxes(self, size: Sequence[int]) -> tuple[ShardMetadata, ...]:
        """The boxes of a tensor of this size, checked: they fill it and do not overlap."""
        made = self.build_metadata(torch.Size(size), TensorProperties())
        if not isinstance(made, ShardedTensorMetadata):
            raise ArgumentError(
                f"build_metadata() of {type(self).__name__} returns a ShardedTensorMetadata, found "
                f"{type(made).__name__}."
            )
        return EnumerableShardingSpec(made.shards_metadata).boxes(size)


#: What `ShardingSpec.shard` calls: `shard_tensor`, which is above this module.
by_boxes: list[Any] = []


@dataclass(frozen=True, slots=True)
class ChunkShardingSpec(ShardingSpec):
    """One dim split as by `torch.chunk`; chunk i is on the rank that `placements[i]` names.

    Ranks may come in any order, more than once, or not at all.

    >>> spec = ChunkShardingSpec(dim=0, placements=["rank:1/cpu", "rank:0/cpu"])
    >>> [(shard.rank, shard.shard_offsets, shard.shard_sizes) for shard in spec.boxes([5, 2])]
    [(1, (0, 0), (3, 2)), (0, (3, 0), (2, 2))]
    """

    dim: int
    placements: Sequence[Any]

    def __post_init__(self) -> None:
        if isinstance(self.dim, str):
            raise UnsupportedError(f"ChunkShardingSpec splits a dim by number; found {self.dim!r}.")
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise ArgumentError(f"ChunkShardingSpec splits one dim, an int; found {self.dim!r}.")
        if isinstance(self.placements, str):
            raise ArgumentError(f"placements is a list of texts, found {self.placements!r}.")
        object.__setattr__(self, "placements", tuple(map(parse_device, self.placements)))
        if not self.placements:
            raise LayoutError("ChunkShardingSpec needs at least one placement.")

    def boxes(self, size: Sequence[int]) -> tuple[ShardMetadata, ...]:
        ndim = len(size)
        if not -ndim <= self.dim < ndim:
            raise LayoutError(
                f"{self} splits dim {self.dim}, but the tensor of shape {tuple(size)} has {ndim} "
                "dims."
            )
        dim, parts = self.dim % ndim, len(self.placements)
        step = chunk_length(size[dim], parts)
        found = []
        for number, length in enumerate(lengths(size[dim], parts, None)):
            offsets, sizes = [0] * ndim, list(size)
            offsets[dim], sizes[dim] = min(number * step, size[dim]), length
            found.append(ShardMetadata(offsets, sizes, self.placements[number]))
        return tuple(found)

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        return ShardedTensorMetadata(self.boxes(tensor_sizes), tensor_sizes, tensor_properties)


@dataclass(frozen=True, slots=True)
class EnumerableShardingSpec(ShardingSpec):
    """Any split, box by box.

    >>> top = ShardMetadata([0, 0], [1, 4], "rank:0/cpu")
    >>> spec = EnumerableShardingSpec([top, ShardMetadata([1, 0], [3, 4], "rank:1/cpu")])
    >>> spec.boxes([5, 4])
    Traceback (most recent call last):
    shardwise.errors.LayoutError: The total volume of shards does not match tensor volume: they \
hold 16 of the 20 values of shape (5, 4), and leave holes.
    """

    shards: Sequence[ShardMetadata]

    def __post_init__(self) -> None:
        boxes = tuple(self.shards)
        for box in boxes:
            if not isinstance(box, ShardMetadata):
                raise ArgumentError(f"The shards of a spec are ShardMetadata, found {box!r}.")
        if not boxes:
            raise LayoutError("EnumerableShardingSpec needs at least one shard.")
        if len({len(box.shard_sizes) for box in boxes}) > 1:
            raise LayoutError(f"The shards of a spec have one number of dims, found {boxes}.")
        pair = overlapping([box.box for box in boxes])
        if pair is not None:
            raise LayoutError(f"{boxes[pair[0]]} and {boxes[pair[1]]} overlap.")
        object.__setattr__(self, "shards", boxes)

    def boxes(self, size: Sequence[int]) -> tuple[ShardMetadata, ...]:
        whole = Box.whole(size)
        for box in self.shards:
            if len(box.shard_sizes) != len(size) or not whole.contains(box.box):
                raise LayoutError(f"{box} lies outside a tensor of shape {tuple(size)}.")
        held, wanted = sum(box.numel for box in self.shards), whole.volume
        if held != wanted:
            raise LayoutError(
                f"The total volume of shards does not match tensor volume: they hold {held} of the "
                f"{wanted} values of shape {tuple(size)}, and leave holes."
            )
        return tuple(self.shards)

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        return ShardedTensorMetadata(self.boxes(tensor_sizes), tensor_sizes, tensor_properties)


#: The options of an encoded spec, by its style, and those of a shard in it.
SPEC_OPTIONS = {"ChunkShardingSpec": ("dim", "placements"), "EnumerableShardingSpec": ("shards",)}
SHARD_OPTIONS = ("offsets", "sizes", "placement")


def encode_spec(spec: ShardingSpec) -> dict[str, Any]:
    """A spec as an entry of a plan file: values that files and JSON can hold."""
    if isinstance(spec, ChunkShardingSpec):
        places = [str(place) for place in spec.placements]
        return {"style": "ChunkShardingSpec", "dim": spec.dim, "placements": places}
    if isinstance(spec, EnumerableShardingSpec):
        shards = [(*map(list, shard.box), str(shard.placement)) for shard in spec.shards]
        named = [dict(zip(SHARD_OPTIONS, shard, strict=True)) for shard in shards]
        return {"style": "EnumerableShardingSpec", "shards": named}
    raise ArgumentError(f"{spec!r} is a spec of your own class: a file cannot hold it.")


def decode_spec(entry: Mapping[str, Any]) -> ShardingSpec:
    """The spec that `encode_spec` encoded.

    >>> spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    >>> decode_spec(encode_spec(spec)) == spec
    True
    """
    if entry["style"] == "ChunkShardingSpec":
        return ChunkShardingSpec(entry["dim"], entry["placements"])
    return EnumerableShardingSpec(
        [ShardMetadata(*(shard[name] for name in SHARD_OPTIONS)) for shard in entry["shards"]]
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """One box of a tensor: its values and its metadata."""

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        if not isinstance(self.metadata, ShardMetadata):
            raise ArgumentError(f"A shard's metadata is a ShardMetadata, found {self.metadata!r}.")
        if tuple(self.tensor.shape) != self.metadata.shard_sizes:
            raise LayoutError(
                f"Shard tensor size does not match: the tensor has shape "
                f"{tuple(self.tensor.shape)}, its metadata says {self.metadata.shard_sizes}."
            )

    @staticmethod
    def from_tensor_and_offsets(
        tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int
    ) -> Shard:
        """The shard of `rank` that starts at `shard_offsets`.

        >>> Shard.from_tensor_and_offsets(torch.ones(2), [4], rank=1).metadata
        ShardMetadata(shard_offsets=(4,), shard_sizes=(2,), placement=rank:1/cpu)
        """
        place = RankDevice(rank, tensor.device)
        return Shard(tensor, ShardMetadata(shard_offsets, tuple(tensor.shape), place))


@dataclass(frozen=True, slots=True)
class TensorProperties:
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """The properties of a whole tensor.

        >>> TensorProperties.create_from_tensor(torch.ones(2, dtype=torch.int32)).dtype
        torch.int32
        """
        return TensorProperties(tensor.dtype, tensor.layout, tensor.requires_grad)


@dataclass(frozen=True, slots=True)
class ShardedTensorMetadata:
    """All shards of a tensor, on all ranks, in the order of its spec."""

    shards_metadata: Sequence[ShardMetadata] = ()
    size: torch.Size = field(default_factory=torch.Size)
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)


def device_type_of(spec: ShardingSpec, shape: Sequence[int] = ()) -> str:
    """The one device type that a spec names; one of your own is asked for a tensor of `shape`."""
    if isinstance(spec, ChunkShardingSpec):
        places = spec.placements
    else:
        boxes = spec.shards if isinstance(spec, EnumerableShardingSpec) else spec.boxes(shape)
        places = [box.place for box in boxes]
    kinds = sorted({place.device.type for place in places})
    if len(kinds) > 1:
        raise LayoutError(f"A tensor is on one kind of device; the spec names {kinds}: {spec}.")
    return kinds[0]


def check_ranks(boxes: Sequence[ShardMetadata], ranks: Sequence[int]) -> None:
    outside = sorted({box.rank for box in boxes} - set(ranks))
    if outside:
        raise LayoutError(
            f"The spec places shards on ranks {outside}, which are not in the group of ranks "
            f"{list(ranks)}. A placement names a rank of the world: 'rank:{ranks[0]}/cpu'."
        )


def split_dims(boxes: Sequence[ShardMetadata], shape: Sequence[int]) -> set[int]:
    """The dims that some box holds only in part."""
    return {d for box in boxes for d, size in enumerate(box.shard_sizes) if size != shape[d]}
