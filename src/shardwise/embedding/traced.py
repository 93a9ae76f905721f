"""Collections in compiled code.

Note [Collections in compiled code]
What a rank gets does not depend on its ids: a row for each of its bags. So a graph holds the lookup
of all tables as one op, as in Note [Effect ops].

The tables are no inputs of the graph. The op finds the collection by a number, the value of a small
tensor that is one; and since that requires grad, torch calls backward, which does what eager code
does: it updates rows, or adds to the `.grad` of the parameters, sparse or not. So no compiled code
depends on where the tables lie, on what is trained, or on gradients that wait.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.local_tensor import collective_handlers
from shardwise.core.grid import Grid, read_grid, spelled_grid
from shardwise.core.untraced import untraced
from shardwise.embedding.jagged import Jagged
from shardwise.errors import UnsupportedError
from shardwise.exchange.between import part_per_rank
from shardwise.exchange.effect_op import EffectOp

if TYPE_CHECKING:
    from shardwise.embedding.collection import _Collection

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    "collection(Tensor handle, str form, str code, str[] features, str? problem, SymInt[] sizes, "
    "Tensor values, Tensor lengths, Tensor? first, Tensor? weights, Tensor? batch_sizes) "
    "-> Tensor[]"
)

#: The size of a result that is known only when ids are.
NOT_KNOWN = -1
#: Collections by number.
_collections: weakref.WeakValueDictionary[int, _Collection] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def enroll(collection: _Collection) -> torch.Tensor:
    """A handle: what stands for the collection in a graph."""
    number = next(_numbers)
    _collections[number] = collection
    # Of one dim: what has none, torch.compile takes for a number.
    return torch.tensor([number], dtype=torch.float64, device="cpu", requires_grad=True)


def form_of(
    dims: Sequence[int], dtype: torch.dtype, device: torch.device, grid: Grid | None
) -> str:
    """What is known of results: their widths, and the ranks that get one."""
    name = str(dtype).removeprefix("torch.")
    spelled = None if grid is None else spelled_grid(grid)
    return json.dumps({"dims": dims, "dtype": name, "device": device.type, "grid": spelled})


@untraced
def _traced(
    handle: torch.Tensor,
    form: str,
    code: str,
    features: Sequence[str],
    problem: str | None,
    sizes: Sequence[int],
    values: torch.Tensor,
    lengths: torch.Tensor,
    first: torch.Tensor | None,
    weights: torch.Tensor | None,
    batch_sizes: torch.Tensor | None,
) -> list[torch.Tensor]:
    if type(handle) is torch.Tensor and not torch.compiler.is_exporting():  # nothing is traced
        own = Jagged(features, values, lengths=lengths, weights=weights, batch_sizes=batch_sizes)
        own.first, own.problem = first, problem
        return list(_collections[int(handle)]._run(own)[1])
    known = json.loads(form)
    grid = None if known["grid"] is None else read_grid(known["grid"])
    options = {"form": known, "features": features, "problem": problem}
    inputs = {"handle": handle, "values": values, "lengths": lengths, "first": first}
    inputs |= {"batch_sizes": batch_sizes, "weights": weights}
    return list(_LOOK_UP(grid, options, inputs, sizes=sizes))


_library.impl("collection", _traced, "CompositeImplicitAutograd")
# Without autograd a LocalTensor is asked first.
collective_handlers[torch.ops.shardwise.collection.default] = lambda func, args, kwargs: _traced(
    *args, **kwargs
)


# -- the op --------------------------------------------------------------------------------------


def _decode(options: Any, grid: Grid | None) -> Any:
    return options | {"grid": grid}


def _run(
    known: Any, handle: torch.Tensor, first: torch.Tensor | None = None, **tensors: Any
) -> tuple[torch.Tensor, ...]:
    batch = Jagged(known["features"], **tensors)
    batch.first, batch.problem = first, known["problem"]
    _, outputs = _collections[int(handle)]._run(batch)
    if known["grid"] is not None:
        _check_one_size(known["grid"], outputs)
    return outputs


def _check_one_size(grid: Grid, outputs: Sequence[torch.Tensor]) -> None:
    for out in outputs:
        shapes = [tuple(part.shape) for part in part_per_rank(grid, out)]
        if any(shape != shapes[0] for shape in shapes):
            raise UnsupportedError(
                "In a simulated world one graph cannot have a size per rank, and ranks get results "
                f"of shapes {shapes}. Give batches of one size, or leave the collection uncompiled."
            )


def _shapes(
    known: Any, sizes: Sequence[Any], ranks: Sequence[dict[str, torch.Tensor]]
) -> list[list[torch.Tensor]]:
    form = known["form"]
    options: Any = {"dtype": getattr(torch, form["dtype"]), "device": form["device"]}
    nums = [torch.library.get_ctx().new_dynamic_size() if _is_unknown(n) else n for n in sizes]
    shapes = list(zip(nums, form["dims"], strict=True))
    return [[torch.empty(shape, **options) for shape in shapes] for _ in ranks]


def _is_unknown(size: Any) -> bool:
    return type(size) is int and size == NOT_KNOWN  # a symbol is not asked


_LOOK_UP = EffectOp("collection", "a collection", _run, _shapes, decode=_decode, handle="handle")
