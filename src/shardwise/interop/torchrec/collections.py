"""torchrec's batches, configs and collections by its names, on those of `shardwise.embedding`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from shardwise.core.placements import Replicate
from shardwise.dtensor.tensor import DTensor
from shardwise.embedding import collection as ours
from shardwise.embedding.jagged import Jagged
from shardwise.errors import ArgumentError, ShardwiseError, UnsupportedError
from shardwise.interop.torchrec.conversion import tables_from_torchrec
from shardwise.lookup.optimizers import FusedOptimizer
from shardwise.lookup.prefetch import PrefetchedBatch
from shardwise.shard.spec import EnumerableShardingSpec, ShardMetadata
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import make_tiling


class PoolingType(Enum):
    """How the rows of a bag become one."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class DataType(Enum):
    """The dtype of a table."""

    FP64 = torch.float64
    FP32 = torch.float32
    FP16 = torch.float16
    BF16 = torch.bfloat16


@dataclass
class BaseEmbeddingConfig:
    """One table: its size, its features, and how its values begin.

    `init_fn` writes to the tensor that it is given, as those of `torch.nn.init` do. Without it
    values are drawn between `weight_init_min` and `weight_init_max`, or ±1/√num_embeddings.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[[torch.Tensor], Any] | None = None

    def has_own_values(self) -> bool:
        return (self.init_fn, self.weight_init_max, self.weight_init_min) != (None, None, None)

    def draw(self, weight: torch.Tensor) -> None:
        """Give a table its first values."""
        bound = self.num_embeddings**-0.5
        low = -bound if self.weight_init_min is None else self.weight_init_min
        high = bound if self.weight_init_max is None else self.weight_init_max
        with torch.no_grad():
            if self.init_fn is None:
                weight.uniform_(low, high)
            else:
                self.init_fn(weight)


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """A table of an `EmbeddingCollection`."""


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A table of an `EmbeddingBagCollection`."""

    pooling: PoolingType = PoolingType.SUM


#: The attribute of a parameter with the optimizer that `apply_optimizer_in_backward` chose.
CHOSEN = "_chosen_optimizer"


class _Named(ours._Collection):
    """Base of both collections: configs, fused optimizers chosen later, sharded state dicts."""

    def __init__(self, tables: Sequence[Any], device: torch.device | str | None) -> None:
        dtypes = {config.data_type for config in tables}
        if len(dtypes) > 1:
            raise UnsupportedError(
                f"The tables of a collection have one data_type, found "
                f"{sorted(t.name for t in dtypes)}. Make a collection for each."
            )
        self._configs = list(tables)
        dtype = dtypes.pop().value if dtypes else None
        super().__init__(tables_from_torchrec(tables), device=device, dtype=dtype)
        own = [config for config in self._configs if config.has_own_values()]
        if own and self._engine.stacks.device.type == "meta":
            raise UnsupportedError(
                f"Table {own[0].name!r} has its own initial values, and the collection is on "
                "the meta device, where it has none. Make it on the cpu; shard() keeps its values."
            )
        for config in own:
            config.draw(self.parameter(config.name))
        self.register_state_dict_post_hook(_as_sharded_tensors)

    @property
    def device(self) -> torch.device:
        return self._engine.stacks.device

    def fuse(self, optimizer: FusedOptimizer | None) -> None:
        """Update the tables in backward once sharded; None leaves their gradients."""
        if self._engine.grid is not None:
            raise ShardwiseError("The collection is sharded already: choose its optimizer before.")
        self._settings = optimizer

    def chosen_optimizer(self) -> FusedOptimizer | None:
        """The optimizer that `apply_optimizer_in_backward` chose for the tables."""
        chosen = [p.__dict__.get(CHOSEN) for p in self.parameters()]
        if any(each != chosen[0] for each in chosen):
            raise UnsupportedError(
                f"The tables {', '.join(table.name for table in self.tables)} of a collection were "
                "given different optimizers: make a collection for each."
            )
        return dataclasses.replace(chosen[0]) if chosen[0] is not None else None

    def _use_chosen_optimizer(self) -> None:
        """Update in backward on one device too."""
        if self._settings is None and self._engine.grid is None:
            optimizer = self.chosen_optimizer()
            if optimizer is not None:
                self.fuse(optimizer)
                self._settle(self._engine.stacks, scale=1.0)


def _as_sharded_tensors(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A sharded collection's state dict has sharded tensors, and replicas as plain tensors."""
    for table in module.tables:
        name = f"{prefix}{module._child}.{table.name}.weight"
        weight = state.get(name)
        if isinstance(weight, DTensor):
            state[name] = _as_sharded(weight.detach())


def _as_sharded(weight: Any) -> Any:
    layout = weight._layout
    if isinstance(layout.placements[0], Replicate):
        return weight.to_local()
    if len(layout.grid.submeshes) > 1:
        return weight  # a spec names the ranks of one mesh
    shards = []
    for owner, coordinate in layout.grid.coordinates.items():
        offsets, sizes = map(list, layout.box(coordinate))
        if 0 not in sizes:
            place = f"rank:{owner}/{layout.grid.device_type}"
            shards.append(ShardMetadata(offsets, sizes, place))
    tiling = make_tiling(EnumerableShardingSpec(shards), tuple(layout.shape), layout.grid)
    return ShardedTensor.over(weight._local, tiling, layout)


class EmbeddingBagCollection(_Named, ours.EmbeddingBagCollection):
    """torchrec's: made of configs, called with a `KeyedJaggedTensor`, returns a `KeyedTensor`.

    Weights of ids are used with `is_weighted=True` alone, as in torchrec.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        for config in tables:
            if config.pooling is PoolingType.NONE:
                raise ArgumentError(
                    f"Table {config.name!r} is not pooled: make an EmbeddingCollection of it."
                )
        self._is_weighted = is_weighted
        _Named.__init__(self, tables, device)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted

    def forward(self, features: Any) -> KeyedTensor:
        self._use_chosen_optimizer()
        batch: Any = features
        if not isinstance(features, PrefetchedBatch):
            batch = Jagged.of(features)
            if not self._is_weighted:
                batch = batch.with_weights(None) if batch._weights is not None else batch
            elif batch._weights is None:
                batch.problem = batch.problem or "the collection is weighted, the batch has none"
        pooled = super().forward(batch)
        return KeyedTensor.from_tensor_list(list(pooled), list(pooled.values()))


class EmbeddingCollection(_Named, ours.EmbeddingCollection):
    """torchrec's: a row for each id; returns a `JaggedTensor` per feature."""

    def __init__(
        self, tables: Sequence[EmbeddingConfig], device: torch.device | str | None = None
    ) -> None:
        _Named.__init__(self, tables, device)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self._configs

    def forward(self, features: Any) -> dict[str, JaggedTensor]:  # type: ignore[override]
        self._use_chosen_optimizer()
        rows = super().forward(features)
        return {
            key: JaggedTensor(found.values, lengths=found.lengths) for key, found in rows.items()
        }


class JaggedTensor:
    """Values in bags of different lengths: `lengths`, or `offsets` that begin with 0.

    >>> bags = JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1]))
    >>> bags.to_dense()
    [tensor([1, 2]), tensor([], dtype=torch.int64), tensor([3])]
    >>> bags.to_padded_dense(2, padding_value=0)
    tensor([[1, 2],
            [0, 0],
            [3, 0]])
    """

    def __init__(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> None:
        if lengths is None and offsets is None:
            raise ArgumentError("A JaggedTensor takes lengths or offsets.")
        self._values, self._weights = values, weights
        self._lengths, self._offsets = lengths, offsets

    @staticmethod
    def from_dense(
        values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None = None
    ) -> JaggedTensor:
        """One bag per tensor."""
        lengths = torch.tensor(
            [len(bag) for bag in values], dtype=torch.int32, device=values[0].device
        )
        joined = None if weights is None else torch.cat(list(weights))
        return JaggedTensor(torch.cat(list(values)), joined, lengths)

    @staticmethod
    def from_dense_lengths(
        values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None
    ) -> JaggedTensor:
        """The first `lengths` values of each row."""
        kept = torch.arange(values.shape[1], device=values.device) < lengths[:, None]
        return JaggedTensor(values[kept], None if weights is None else weights[kept], lengths)

    def values(self) -> torch.Tensor:
        return self._values

    def weights(self) -> torch.Tensor:
        if self._weights is None:
            raise ArgumentError("The batch has no weights: give weights=, one per id.")
        return self._weights

    def weights_or_none(self) -> torch.Tensor | None:
        return self._weights

    def lengths(self) -> torch.Tensor:
        if self._lengths is None:
            assert self._offsets is not None, "a batch has lengths or offsets"
            self._lengths = self._offsets.diff()
        return self._lengths

    def offsets(self) -> torch.Tensor:
        if self._offsets is None:
            lengths = self.lengths()
            self._offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=lengths.dtype), (1, 0))
        return self._offsets

    def device(self) -> torch.device:
        return self._values.device

    def to_dense(self) -> list[torch.Tensor]:
        """The values of each bag."""
        return list(self._values.split(self.lengths().tolist()))

    def to_dense_weights(self) -> list[torch.Tensor] | None:
        return None if self._weights is None else list(self._weights.split(self.lengths().tolist()))

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> torch.Tensor:
        """One row per bag: cut off, or padded, to `desired_length`, else the longest."""
        lengths, offsets = self.lengths(), self.offsets()
        width = int(lengths.max()) if desired_length is None else desired_length
        at = torch.arange(width, device=lengths.device)
        there = at < lengths[:, None]
        rows = self._values.new_full((len(lengths), width, *self._values.shape[1:]), padding_value)
        rows[there] = self._values[(offsets[:-1, None] + at)[there]]
        return rows

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedTensor:
        move = _mover(device, non_blocking)
        return JaggedTensor(
            self._values.to(device, non_blocking=non_blocking),
            move(self._weights),
            move(self._lengths),
            move(self._offsets),
        )

    def __repr__(self) -> str:
        return f"JaggedTensor({self.to_dense()})"


class KeyedJaggedTensor(JaggedTensor):
    """The bags of many features: all of the first key, then all of the second, …

    Collections accept it, also those of `shardwise.embedding`. It copies nothing.

    >>> batch = KeyedJaggedTensor.from_lengths_sync(
    ...     ["user", "item"], torch.tensor([7, 8, 9, 1]), lengths=torch.tensor([1, 0, 1, 2])
    ... )
    >>> batch["item"].to_dense()
    [tensor([8]), tensor([9, 1])]
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
        stride_per_key: Sequence[int] | None = None,
        **others: Any,
    ) -> None:
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise UnsupportedError(
                f"KeyedJaggedTensor({', '.join(given)}=...) is not supported: leave it out. "
                "shardwise derives what it can from values and lengths; for inverse_indices, index "
                "the output yourself, with index_select."
            )
        super().__init__(values, weights, lengths, offsets)
        self._keys = list(keys)
        if stride_per_key is None and stride_per_key_per_rank is not None:
            stride_per_key = [sum(sizes) for sizes in stride_per_key_per_rank]
        self._sizes = None if stride_per_key is None else list(stride_per_key)
        self._stride = stride

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
        stride_per_key: Sequence[int] | None = None,
    ) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys, values, weights, lengths, None, stride, stride_per_key_per_rank, stride_per_key
        )

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
        stride_per_key: Sequence[int] | None = None,
    ) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys, values, weights, None, offsets, stride, stride_per_key_per_rank, stride_per_key
        )

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """From a jagged tensor per key."""
        return _joined(list(jt_dict.items()))

    @staticmethod
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The keys of all of them, one after the other."""
        parts = [item for batch in kjt_list for item in batch._items()]
        keys = [key for key, _ in parts]
        if len(set(keys)) < len(keys):
            raise ArgumentError(f"Batches that are joined have different keys, found {keys}.")
        return _joined(parts)

    # -- reading -----------------------------------------------------------------------------

    def keys(self) -> list[str]:
        return self._keys

    def stride_per_key(self) -> list[int]:
        """How many bags each key has."""
        if self._sizes is not None:
            return self._sizes
        return [self.stride()] * len(self._keys)

    def stride(self) -> int:
        """How many bags a key has, where all have equally many."""
        if self._sizes is not None:
            return max(self._sizes, default=0)
        if self._stride is not None:
            return self._stride
        known = self._offsets.shape[0] - 1 if self._offsets is not None else self.lengths().shape[0]
        return known // len(self._keys) if self._keys else 0

    def variable_stride_per_key(self) -> bool:
        return self._sizes is not None and len(set(self._sizes)) > 1

    def length_per_key(self) -> list[int]:
        """How many ids each key has."""
        lengths = self.lengths().split(self.stride_per_key())
        return [int(each.sum()) for each in lengths]

    def offset_per_key(self) -> list[int]:
        return list(itertools.accumulate(self.length_per_key(), initial=0))

    def to_dict(self) -> dict[str, JaggedTensor]:
        return dict(self._items())

    def _items(self) -> list[tuple[str, JaggedTensor]]:
        lengths = self.lengths().split(self.stride_per_key())
        num_ids = [int(each.sum()) for each in lengths]
        values = self._values.split(num_ids)
        weights: Sequence[torch.Tensor | None] = [None] * len(num_ids)
        if self._weights is not None:
            weights = self._weights.split(num_ids)
        found = zip(self._keys, values, weights, lengths, strict=True)
        return [(key, JaggedTensor(*parts)) for key, *parts in found]

    def __getitem__(self, key: str) -> JaggedTensor:
        return self.to_dict()[key]

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Batches with these numbers of keys."""
        if sum(segments) > len(self._keys):
            raise ArgumentError(
                f"split({list(segments)}) asks for {sum(segments)} keys of a batch that has "
                f"{len(self._keys)}."
            )
        starts = itertools.accumulate(segments, initial=0)
        pairs = zip(starts, segments, strict=False)
        return [self.permute(range(start, start + number)) for start, number in pairs]

    def permute(self, indices: Sequence[int]) -> KeyedJaggedTensor:
        """The keys in another order; a key may occur several times."""
        if not len(indices):
            weights = None if self._weights is None else self._weights[:0]
            nothing = self._values[:0], weights, self.lengths()[:0]
            return KeyedJaggedTensor([], *nothing, stride=self.stride())
        items = self._items()
        return _joined([items[index] for index in indices])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedTensor:
        return self._moved(_mover(device, non_blocking))

    def pin_memory(self) -> KeyedJaggedTensor:
        return self._moved(lambda x: None if x is None else x.pin_memory())

    def _moved(self, move: Any) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            self._keys,
            move(self._values),
            move(self._weights),
            move(self._lengths),
            move(self._offsets),
            self._stride,
            stride_per_key=self._sizes,
        )

    def __repr__(self) -> str:
        bags = ", ".join(f"{key!r}: {bag.to_dense()}" for key, bag in self.to_dict().items())
        return f"KeyedJaggedTensor({{{bags}}})"


def _joined(parts: Sequence[tuple[str, JaggedTensor]]) -> KeyedJaggedTensor:
    """The bags of each key, one after the other."""
    tensors = [part for _, part in parts]
    weights = [w for part in tensors if (w := part.weights_or_none()) is not None]
    if weights and len(weights) < len(tensors):
        raise ArgumentError("Either all jagged tensors have weights, or none has.")
    return KeyedJaggedTensor(
        [key for key, _ in parts],
        torch.cat([part.values() for part in tensors]),
        torch.cat(weights) if weights else None,
        torch.cat([part.lengths() for part in tensors]),
        stride_per_key=[len(part.lengths()) for part in tensors],
    )


class KeyedTensor:
    """Tensors by key, side by side in one: what an `EmbeddingBagCollection` returns.

    >>> pooled = KeyedTensor.from_tensor_list(["a", "b"], [torch.zeros(2, 1), torch.ones(2, 2)])
    >>> pooled.values()
    tensor([[0., 1., 1.],
            [0., 1., 1.]])
    >>> pooled["b"].shape
    torch.Size([2, 2])
    """

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: torch.Tensor,
        key_dim: int = 1,
    ) -> None:
        self._keys, self._lengths, self._key_dim = list(keys), list(length_per_key), key_dim
        self._values: torch.Tensor | None = values
        self._by_key: dict[str, torch.Tensor] | None = None

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[torch.Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> KeyedTensor:
        if key_dim != cat_dim:
            raise UnsupportedError(
                f"Tensors are joined along the dim of their keys, found {key_dim=} and {cat_dim=}."
            )
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        made = KeyedTensor(keys, lengths, torch.empty(0), key_dim)
        # Joined on first use: most programs read the parts.
        made._values, made._by_key = None, dict(zip(keys, tensors, strict=True))
        return made

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        if self._values is None:
            assert self._by_key is not None, "it was made of parts"
            self._values = torch.cat(list(self._by_key.values()), self._key_dim)
        return self._values

    def key_dim(self) -> int:
        return self._key_dim

    def device(self) -> torch.device:
        return self.values().device

    def length_per_key(self) -> list[int]:
        return self._lengths

    def offset_per_key(self) -> list[int]:
        return list(itertools.accumulate(self._lengths, initial=0))

    def to_dict(self) -> dict[str, torch.Tensor]:
        if self._by_key is None:
            parts = self.values().split(self._lengths, self._key_dim)
            self._by_key = dict(zip(self._keys, parts, strict=True))
        return self._by_key

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.to_dict()[key]

    @staticmethod
    def regroup(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]
    ) -> list[torch.Tensor]:
        """One tensor per group of keys, wherever the keys are."""
        found = {key: part for each in keyed_tensors for key, part in each.to_dict().items()}
        dim = keyed_tensors[0].key_dim()
        return [torch.cat([found[key] for key in group], dim) for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        values = self.values().to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._lengths, values, self._key_dim)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __repr__(self) -> str:
        return f"KeyedTensor({self.to_dict()})"


def _mover(device: torch.device | str, non_blocking: bool) -> Any:
    return lambda x: None if x is None else x.to(device, non_blocking=non_blocking)
