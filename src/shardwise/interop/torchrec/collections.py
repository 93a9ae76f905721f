"""torchrec's configs and collections by its names, on those of `shardwise.embedding`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from shardwise.core.placements import Replicate
from shardwise.dtensor.tensor import DTensor
from shardwise.embedding import collection as ours
from shardwise.embedding.jagged import Jagged
from shardwise.errors import ArgumentError, ShardwiseError, UnsupportedError
from shardwise.interop.torchrec.batches import JaggedTensor, KeyedTensor
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


class _Named(ours._Collection):
    """What both collections share: configs, updates that come later, and sharded state dicts."""

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
                f"Table {own[0].name!r} begins with values of its own, and the collection is on "
                "the meta device, where it has none. Make it on the cpu; shard() keeps its values."
            )
        for config in own:
            config.draw(self.parameter(config.name))
        self.register_state_dict_post_hook(_as_sharded_tensors)

    @property
    def device(self) -> torch.device:
        return self._engine.stacks.device

    def fuse(self, optimizer: FusedOptimizer) -> None:
        """Update the tables in backward, from `shard` on; torchrec chooses the optimizer then."""
        if self._engine.grid is not None:
            raise ShardwiseError("The collection is sharded already: choose its optimizer before.")
        self._settings = optimizer


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
        rows = super().forward(features)
        return {
            key: JaggedTensor(found.values, lengths=found.lengths) for key, found in rows.items()
        }
