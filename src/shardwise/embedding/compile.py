"""Collections in compiled code.

Note [Collections in compiled code]
The output's size does not depend on the ids: a row for each bag. So a graph holds the lookup of all
tables as one op, as in Note [Effect ops].

The tables are not inputs of the graph. The op finds the collection by the number in a small tensor,
its handle. The handle requires grad, so torch calls backward, which does what eager code does: it
updates rows, or adds to the `.grad` of the parameters, sparse or not. So compiled code depends
neither on the tables' layout, nor on which are trained, nor on gradients that are held.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.core.encode import decode_grid, encode_grid, source_digest
from shardwise.core.mesh import Grid
from shardwise.core.untraced import untraced
from shardwise.effects import EffectOp
from shardwise.embedding.jagged import Jagged
from shardwise.errors import ArgumentError, UnsupportedError
from shardwise.simulation.local_tensor import collective_handlers
from shardwise.simulation.ranks import part_per_rank

if TYPE_CHECKING:
    from shardwise.embedding.collection import _Collection

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    "collection(Tensor handle, str form, str code, str[] features, str? problem, SymInt[] sizes, "
    "str[] names, Tensor[] tensors) -> Tensor[]"
)

#: The size of a data-dependent result.
NOT_KNOWN = -1
#: Collections by number.
_collections: weakref.WeakValueDictionary[int, _Collection] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def enroll(collection: _Collection) -> torch.Tensor:
    """A handle: the tensor that stands for the collection in a graph."""
    number = next(_numbers)
    _collections[number] = collection
    # With one dim: torch.compile specializes on a tensor without dims.
    return torch.tensor([number], dtype=torch.float64, device="cpu", requires_grad=True)


def form_of(
    dims: Sequence[int], dtype: torch.dtype, device: torch.device, grid: Grid | None
) -> str:
    """What a graph knows of the results, as JSON: widths, dtype, device and mesh."""
    name = str(dtype).removeprefix("torch.")
    encoded = None if grid is None else encode_grid(grid)
    return json.dumps({"dims": dims, "dtype": name, "device": device.type, "grid": encoded})


# -- traced by torch.compile: nothing here reads a value -----------------------------------------


def jagged_in_graph(batch: Any) -> Jagged:
    """`Jagged.of`; an invalid batch raises later, on all ranks together."""
    try:
        return Jagged.of(batch)
    except ArgumentError as error:
        nothing = torch.empty(0, dtype=torch.int64)
        jagged = Jagged((), nothing, lengths=nothing)
        jagged.problem = str(error)
        return jagged


def num_bags_in_graph(
    batch: Jagged, features: Sequence[str], *, equal: bool = False
) -> Sequence[int]:
    """How many bags each of `features` has; with `equal`, all have the same number."""
    if batch.problem is not None:
        return [0] * len(features)
    if equal or batch.sizes is None:
        return [batch.lengths.shape[0] // max(1, len(batch.features))] * len(features)
    if not batch.sizes:
        raise UnsupportedError(
            "batch_sizes in compiled code: a graph has to know how many bags each feature has, and "
            "these are a tensor that was made inside it, or differ between ranks. Give a list."
        )
    sizes = dict(zip(batch.features, batch.sizes, strict=False))
    return [sizes.get(feature, 0) for feature in features]


def lengths_in_graph(batch: Jagged, features: Sequence[str]) -> list[torch.Tensor]:
    """The lengths of each feature's bags."""
    found, start = {}, 0
    for feature, num in zip(batch.features, num_bags_in_graph(batch, batch.features), strict=True):
        found[feature] = batch.lengths[start : start + num]
        start += num
    return [found.get(feature, batch.lengths[:0]) for feature in features]


def look_up_in_graph(
    handle: torch.Tensor, form: str, batch: Jagged, sizes: Sequence[int]
) -> list[torch.Tensor]:
    """The outputs of a collection; output i has `sizes[i]` rows."""
    values, lengths = batch.values_in_graph(), batch.lengths
    if batch.problem is not None:  # the tensors may be of any dtype or shape
        values = lengths = torch.empty(0, dtype=torch.int64)
    given = {"values": values, "lengths": lengths, "first": batch.first}
    given |= {"batch_sizes": batch.batch_sizes, "weights": batch.weights_in_graph()}
    there = {name: x for name, x in given.items() if x is not None}
    return torch.ops.shardwise.collection(
        handle,
        form,
        _code(),
        batch.features,
        batch.problem,
        sizes,
        list(there),
        list(there.values()),
    )


def _code() -> str:
    """The version of this package that compiled code belongs to."""
    return source_digest()


_code._dynamo_marked_constant = True  # type: ignore[attr-defined]


@untraced
def _traced(
    handle: torch.Tensor,
    form: str,
    code: str,
    features: Sequence[str],
    problem: str | None,
    sizes: Sequence[int],
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    options = json.loads(form) | {"features": features, "problem": problem}
    inputs = {"handle": handle, **dict(zip(names, tensors, strict=True))}
    if type(handle) is torch.Tensor and not torch.compiler.is_exporting():  # eager
        return list(_look_up(options, **inputs))
    grid = None if options["grid"] is None else decode_grid(options["grid"])
    return list(_LOOK_UP(grid, options, inputs, sizes=sizes))


_library.impl("collection", _traced, "CompositeImplicitAutograd")
# Without autograd, a LocalTensor gets the call first.
collective_handlers[torch.ops.shardwise.collection.default] = lambda func, args, kwargs: _traced(
    *args, **kwargs
)


# -- the op --------------------------------------------------------------------------------------


def _look_up(
    known: Any, handle: torch.Tensor, first: torch.Tensor | None = None, **tensors: Any
) -> tuple[torch.Tensor, ...]:
    batch = Jagged(known["features"], **tensors)
    batch.first, batch.problem = first, known["problem"]
    return _collections[int(handle)]._run(batch)[1]


def _run(known: Any, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    outputs, grid = _look_up(known, **inputs), known["grid"]
    for out in outputs if grid is not None else ():
        shapes = [tuple(part.shape) for part in part_per_rank(grid, out)]
        if any(shape != shapes[0] for shape in shapes):
            raise UnsupportedError(
                "In a simulated world one graph cannot have a size per rank, and ranks get results "
                f"of shapes {shapes}. Give batches of one size, or leave the collection uncompiled."
            )
    return outputs


def _shapes(
    known: Any, sizes: Sequence[Any], ranks: Sequence[dict[str, torch.Tensor]]
) -> list[list[torch.Tensor]]:
    options: Any = {"dtype": getattr(torch, known["dtype"]), "device": known["device"]}
    nums = [torch.library.get_ctx().new_dynamic_size() if _is_unknown(n) else n for n in sizes]
    shapes = list(zip(nums, known["dims"], strict=True))
    return [[torch.empty(shape, **options) for shape in shapes] for _ in ranks]


def _is_unknown(size: Any) -> bool:
    return type(size) is int and size == NOT_KNOWN  # no guard on a symbol


_LOOK_UP = EffectOp(
    "collection",
    "a collection",
    _run,
    _shapes,
    decode=lambda options, grid: options | {"grid": grid},
    handle="handle",
)
