"""Jagged: the ids of many features, bags of different lengths, in one flat tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwise.errors import ArgumentError
from shardwise.simulation.ranks import is_per_rank, parts_of, sized_copy


class Jagged:
    """The ids of each feature's bags: all bags of the first feature, then of the second, …

    `values` holds the ids of all bags one after another, `lengths` the length of each bag (or
    `offsets`, which begin with 0 and end with the number of ids). All features have the same number
    of bags unless `batch_sizes` gives one per feature. `weights` has one number per id. With
    `padded`, ids after the last bag are not looked up: `values` is a buffer for batches of several
    sizes, as a CUDA graph needs.

    Tensors that do not fit together do not raise here, since other ranks may be waiting for this
    one: the collection that gets the batch raises, on every rank.

    >>> ids, lengths = torch.tensor([7, 8, 9, 1]), torch.tensor([1, 0, 1, 2])
    >>> batch = Jagged(["user", "item"], ids, lengths=lengths)
    >>> batch
    Jagged(user: 2 bags, item: 2 bags; 4 ids)
    >>> batch.bags("item")
    [[8], [9, 1]]
    """

    __slots__ = (
        "_lengths",
        "_offsets",
        "_unsized",
        "_unsized_weights",
        "_values",
        "_weights",
        "batch_sizes",
        "features",
        "first",
        "padded",
        "problem",
        "sizes",
    )

    def __init__(
        self,
        features: Iterable[str],
        values: torch.Tensor,
        *,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        batch_sizes: Sequence[int] | torch.Tensor | None = None,
        padded: bool = False,
    ) -> None:
        if (lengths is None) == (offsets is None):
            raise ArgumentError("Jagged takes lengths or offsets, one of the two.")
        if isinstance(features, str):
            raise ArgumentError("Jagged takes a list of features, not one text.")
        self.features = tuple(features)
        # Not through the properties, which older versions of dynamo do not call here.
        self._set_values(values)
        self._set_weights(weights if isinstance(weights, torch.Tensor) else None)
        #: How many bags each feature has, as ints: None if all have the same number, empty if that
        #: is known only at run time.
        self.sizes = _known_sizes(batch_sizes)
        if batch_sizes is not None and not isinstance(batch_sizes, torch.Tensor):
            batch_sizes = torch.tensor(batch_sizes, dtype=torch.int64)
        self.batch_sizes: torch.Tensor | None = batch_sizes
        #: What is wrong with the batch; the collection raises it.
        self.problem = _problem(
            weights, values=values, lengths=lengths, offsets=offsets, batch_sizes=batch_sizes
        )
        #: The first offset: 0, unless the offsets are wrong.
        self.first: torch.Tensor | None = None
        self._offsets: torch.Tensor | None = None
        if offsets is not None and self.problem is None:
            self._offsets, self.first = offsets, offsets[:1]
            # A graph has the lengths; elsewhere they wait until someone asks.
            lengths = offsets.diff() if torch.compiler.is_compiling() else None
        elif lengths is None:
            lengths = torch.empty(0)
        self._lengths = lengths
        self.padded = padded

    @property
    def lengths(self) -> torch.Tensor:
        """The length of each bag."""
        if self._lengths is None:
            assert self._offsets is not None, "a batch has lengths or offsets"
            self._lengths = self._offsets.diff()
        return self._lengths

    @property
    def offsets(self) -> torch.Tensor:
        """The position of each bag's first id, and the end of the last bag."""
        if self._offsets is None:
            lengths = self.lengths
            self._offsets = lengths.new_zeros(lengths.shape[0] + 1)
            torch.cumsum(lengths, 0, dtype=lengths.dtype, out=self._offsets[1:])
            if self.first is not None:
                self._offsets += self.first
        return self._offsets

    @property
    def num_bags(self) -> int:
        """The number of bags of all features together."""
        if self._lengths is None:
            return max(0, self.offsets.shape[0] - 1)
        return self._lengths.shape[0]

    @property
    def values(self) -> torch.Tensor:
        return self._values

    @values.setter
    def values(self, values: torch.Tensor) -> None:
        self._set_values(values)

    def _set_values(self, values: torch.Tensor) -> None:
        self._values = values
        #: The same without a common size, for graphs, where ranks have different numbers of ids.
        self._unsized = _without_size(values)

    def values_in_graph(self) -> torch.Tensor:
        """The ids as a graph takes them."""
        return self._values if self._unsized is None else self._unsized

    @property
    def weights(self) -> torch.Tensor | None:
        # The caller may ask for their gradient, which the unsized copy would not have.
        self._unsized_weights = None
        return self._weights

    @weights.setter
    def weights(self, weights: torch.Tensor | None) -> None:
        self._set_weights(weights)

    def _set_weights(self, weights: torch.Tensor | None) -> None:
        self._weights = weights
        self._unsized_weights = _without_size(weights)

    def weights_in_graph(self) -> torch.Tensor | None:
        """The weights as a graph takes them."""
        return self._weights if self._unsized_weights is None else self._unsized_weights

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Jagged:
        """The same batch on another device; `batch_sizes` stays where it is."""

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        values = self.values.to(device, non_blocking=non_blocking)
        weights, first = moved(self._weights), moved(self.first)
        return self.replaced(values, moved(self.lengths), weights, self.batch_sizes, first)

    def with_weights(self, weights: torch.Tensor | None) -> Jagged:
        """The same ids with other weights."""
        values = self.values_in_graph() if torch.compiler.is_compiling() else self._values
        return self.replaced(values, self.lengths, weights, self.batch_sizes, self.first)

    def replaced(
        self,
        values: torch.Tensor,
        lengths: torch.Tensor | None,
        weights: torch.Tensor | None,
        batch_sizes: torch.Tensor | None,
        first: torch.Tensor | None,
    ) -> Jagged:
        """Other tensors of the same form, such as those of one rank."""
        other = Jagged(
            self.features,
            values,
            lengths=lengths,
            weights=weights,
            batch_sizes=batch_sizes,
            padded=self.padded,
        )
        other.first, other.sizes = first, self.sizes
        other.problem = self.problem or other.problem
        return other

    # -- from other formats ------------------------------------------------------------------

    @staticmethod
    def from_lists(
        bags: Mapping[str, Sequence[Sequence[int]]],
        weights: Mapping[str, Sequence[Sequence[float]]] | None = None,
    ) -> Jagged:
        """From lists of ids.

        >>> Jagged.from_lists({"user": [[7], []], "item": [[8], [9, 1]]}).lengths
        tensor([1, 0, 1, 2])
        """
        flat = [id_ for feature in bags.values() for bag in feature for id_ in bag]
        flat_weights = None
        if weights is not None:
            listed = [w for feature in bags for bag in weights.get(feature, ()) for w in bag]
            flat_weights = torch.tensor(listed, dtype=torch.float32)
        return Jagged(
            bags,
            torch.tensor(flat, dtype=torch.int64),
            lengths=torch.tensor(
                [len(bag) for feature in bags.values() for bag in feature], dtype=torch.int64
            ),
            weights=flat_weights,
            batch_sizes=[len(feature) for feature in bags.values()],
        )

    @staticmethod
    def from_nested(
        nested: torch.Tensor | Mapping[str, torch.Tensor],
        features: Iterable[str] | None = None,
        weights: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
    ) -> Jagged:
        """From torch's jagged nested tensors, or from matrices with a bag per row.

        One tensor holds the bags of all `features`, feature by feature, and is not copied.
        A tensor per feature is joined into one, which copies the ids once.

        >>> Jagged.from_nested({"user": torch.tensor([[7], [2]]), "item": torch.tensor([[8, 9]])})
        Jagged(user: 2 bags, item: 1 bags; 4 ids)
        """
        if isinstance(nested, torch.Tensor):
            if features is None:
                raise ArgumentError("One nested tensor needs features=: whose bags it holds.")
            values, offsets = _values_and_offsets(nested)
            flat_weights = None
            if weights is not None:
                if not isinstance(weights, torch.Tensor):
                    raise ArgumentError("One nested tensor of ids takes one of weights.")
                flat_weights, _ = _values_and_offsets(weights)
            return Jagged(features, values, offsets=offsets, weights=flat_weights)
        inner = {name: _values_and_offsets(one) for name, one in nested.items()}
        if not inner:
            nothing = torch.empty(0, dtype=torch.int64)
            return Jagged((), nothing, lengths=nothing)
        flat_weights = None
        if weights is not None:
            if isinstance(weights, torch.Tensor):
                raise ArgumentError("A nested tensor of ids per feature takes one of weights each.")
            flat_weights = torch.cat(
                [_values_and_offsets(weights[name])[0] for name in inner if name in weights]
            )
        return Jagged(
            inner,
            torch.cat([values for values, _ in inner.values()]),
            lengths=torch.cat([offsets.diff() for _, offsets in inner.values()]),
            weights=flat_weights,
            batch_sizes=[len(offsets) - 1 for _, offsets in inner.values()],
        )

    @staticmethod
    def from_torchrec(batch: Any) -> Jagged:
        """From torchrec's `KeyedJaggedTensor`; nothing is copied."""
        sizes = None
        if batch.variable_stride_per_key():
            sizes = batch.stride_per_key()
        return Jagged(
            batch.keys(),
            batch.values(),
            lengths=batch.lengths(),
            weights=batch.weights_or_none(),
            batch_sizes=sizes,
        )

    @staticmethod
    def of(batch: Any) -> Jagged:
        """A batch in any of these formats."""
        if isinstance(batch, Jagged):
            return batch
        if isinstance(batch, Mapping):
            return Jagged.from_nested(batch)
        if any(kind.__name__ == "KeyedJaggedTensor" for kind in type(batch).__mro__):
            return Jagged.from_torchrec(batch)
        raise ArgumentError(
            "A batch is a Jagged, a dict of matrices or jagged nested tensors, or a "
            f"KeyedJaggedTensor; found {type(batch).__name__}."
        )

    # -- reading -----------------------------------------------------------------------------

    def bags(self, feature: str) -> list[list[int]]:
        """The ids of one feature as lists."""
        values, lengths = self.of_feature(feature)
        return [bag.tolist() for bag in values.split(lengths.tolist())]

    def of_feature(self, feature: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of one feature, and the lengths of its bags.

        >>> Jagged.from_lists({"user": [[7], []], "item": [[8], [9, 1]]}).of_feature("item")
        (tensor([8, 9, 1]), tensor([1, 2]))
        """
        sizes, place = num_bags(self), self.features.index(feature)
        first = sum(sizes[:place])
        lengths = self.lengths[first : first + sizes[place]]
        start = int(self.lengths[:first].sum())
        return self.values[start : start + int(lengths.sum())], lengths

    def __repr__(self) -> str:
        try:
            counts = zip(self.features, num_bags(self), strict=True)
            each = ", ".join(f"{name}: {num} bags" for name, num in counts)
            return f"Jagged({each}; {self.values.numel()} ids)"
        except (RuntimeError, ArgumentError):  # ranks that differ, or sizes that do not fit
            return f"Jagged({', '.join(self.features)})"


def num_bags(batch: Jagged) -> list[int]:
    """How many bags each feature has."""
    if batch.batch_sizes is not None:
        return batch.batch_sizes.tolist()
    num = len(batch.features)
    if not num or len(batch.lengths) % num:
        raise ArgumentError(
            f"{len(batch.lengths)} bags do not divide among {num} features; batch_sizes= says how "
            "many each has."
        )
    return [len(batch.lengths) // num] * num


def _without_size(x: Any) -> torch.Tensor | None:
    if torch.compiler.is_compiling() or not is_per_rank(x) or x.requires_grad:
        return None
    shapes = {part.shape for part in parts_of(x)}
    return sized_copy(x, sized=False) if len(shapes) > 1 else None


def _known_sizes(sizes: Sequence[int] | torch.Tensor | None) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    if torch.compiler.is_compiling():
        return () if isinstance(sizes, torch.Tensor) else tuple(sizes)
    if isinstance(sizes, torch.Tensor):
        first, *others = parts_of(sizes)
        if any(not torch.equal(part, first) for part in others):
            return ()
        sizes = first
        if sizes.device.type != "cpu" or sizes.ndim != 1:
            return ()
        sizes = sizes.tolist()
    return None if len(set(sizes)) < 2 else tuple(sizes)


def _problem(weights: Any, **tensors: torch.Tensor | None) -> str | None:
    """The fault in the type, dtype or shape of these tensors, if any."""
    if weights is not None and not isinstance(weights, torch.Tensor):
        return f"weights are a tensor of floating-point numbers, found {type(weights).__name__}"
    if weights is not None and not weights.is_floating_point():
        return f"weights are floating-point numbers, found {weights.dtype}; convert them first"
    for what, tensor in tensors.items():
        if tensor is None and what != "values":
            continue
        if not isinstance(tensor, torch.Tensor):
            return f"{what} are a tensor of whole numbers, found {type(tensor).__name__}"
        if tensor.dtype not in (torch.int64, torch.int32):
            return f"{what} are int32 or int64, found {tensor.dtype}; convert them first"
        if tensor.ndim != 1:
            return f"{what} are flat, found shape {tuple(tensor.shape)}"
    return None


def _values_and_offsets(bags: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if getattr(bags, "is_nested", False) and bags.layout is torch.jagged:
        return bags.values(), bags.offsets()
    if isinstance(bags, torch.Tensor) and not bags.is_nested and bags.ndim == 2:
        num_bags, each = bags.shape
        return bags.reshape(-1), torch.arange(num_bags + 1, device=bags.device) * each
    found = type(bags).__name__
    if isinstance(bags, torch.Tensor):
        found = "a strided nested one" if bags.is_nested else f"one of shape {tuple(bags.shape)}"
    raise ArgumentError(
        "Bags are a matrix, (bags, ids in each), or a nested tensor of layout torch.jagged, "
        f"torch.nested.nested_tensor([...], layout=torch.jagged); found {found}."
    )
