"""One rank's bags: the sums of their rows, gradients, and the largest entries.

A rank may have some rows of a table. Ids count in the whole table, of which `first_row` is the
first row here; it is None where all rows are. The engine's kernels do the work: on a CPU they get
the ids that count here, on a GPU all ids, of which they skip the others.

Note [One op of a graph]
How many ids count here is data-dependent. In a traced graph such a function is one op, and runs as
in eager code; only the length of a sparse gradient is unknown there. Two of them are also written
in ops that the compiler knows, for where that takes less time: sums in which all ids count, and
dense gradients on one thread of a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardwise._torch.functions import check_size
from shardwise.lookup.backends.backend import PartQuery
from shardwise.lookup.backends.registry import ByDevice
from shardwise.lookup.ids import (
    divided,
    has_values,
    num_up_to,
    repeated,
    rows_here,
    segment_sums,
)

MODE_SUM, MODE_MEAN, MODE_MAX = 0, 1, 2
#: Up to this many numbers, a gradient has a row for each id where that waits for nothing.
_FEW_NUMBERS = 1 << 20

Optional = torch.Tensor | None

_BY_DEVICE = ByDevice()


def fused_backend(values: torch.Tensor) -> Any:
    """The fused kernels of a GPU, if they take this table or this gradient of one."""
    if not values.is_cuda or type(values) not in (torch.Tensor, torch.nn.Parameter):
        return None
    found = _BY_DEVICE.serving(values)
    return found if getattr(found, "is_fused", False) and values.is_contiguous() else None


class Bags(NamedTuple):
    """Ids of shape (bags, ids in each), or flat with offsets.

    Offsets include the end of the last bag; later ids are in no bag. Ids equal to `padding_idx` do
    not count; it is -1 for none.
    """

    ids: torch.Tensor
    offsets: Optional
    weights: Optional
    padding_idx: int

    @property
    def num_bags(self) -> Any:
        return self.ids.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    @property
    def bounds(self) -> torch.Tensor:
        """Where each bag starts among the flat ids, and where the last one ends."""
        if self.offsets is not None:
            return self.offsets.long()
        num_bags, length = self.ids.shape
        if length:
            return torch.arange(0, (num_bags + 1) * length, length, device=self.ids.device)
        return torch.zeros(num_bags + 1, dtype=torch.int64, device=self.ids.device)

    def averaged(self, rows: torch.Tensor) -> torch.Tensor:
        """A row of each bag, divided by the number of its ids that count, on all ranks."""
        is_real = self.ids != self.padding_idx if self.padding_idx >= 0 else None
        if self.offsets is None:
            if is_real is None:
                return rows / max(self.ids.shape[1], 1)
            return rows / is_real.sum(1, keepdim=True).clamp_(min=1)
        edges = self.bounds
        if is_real is not None:
            edges = torch.nn.functional.pad(is_real.cumsum(0), (1, 0))[edges]
        return rows / edges.diff().clamp(min=1).unsqueeze(-1)

    def found(self, num_rows: int, first_row: int | None) -> tuple[torch.Tensor, Optional]:
        """The rows here of the ids that count, and their positions; None for those of all ids."""
        flat = self.ids.reshape(-1)
        if self.offsets is not None:  # later ids are in no bag
            flat = flat[: int(self.offsets[-1]) if self.num_bags else 0]
        if first_row is not None or self.padding_idx >= 0:
            return rows_here(flat, first_row or 0, num_rows, self.padding_idx)
        all_in_bags = flat.shape[0] == self.ids.numel()
        return flat, None if all_in_bags else torch.arange(flat.shape[0], device=flat.device)

    def weights_at(self, places: Optional) -> Optional:
        """The weights of the ids at these positions."""
        flat = None if self.weights is None else self.weights.reshape(-1).contiguous()
        return flat if flat is None or places is None else flat.index_select(0, places)

    def edges(self, places: Optional) -> torch.Tensor:
        """As `bounds`, among the ids at these positions."""
        return self.bounds if places is None else num_up_to(self.bounds, places, right=False)

    def per_id(self, grad: torch.Tensor, places: Optional) -> torch.Tensor:
        """For each id at these positions, the row of its bag."""
        if self.offsets is None:
            length = self.ids.shape[1]
            if places is None:
                return grad if length == 1 else grad.repeat_interleave(length, 0)
            return grad.index_select(0, places if length == 1 else divided(places, length))
        if places is None:
            bags = repeated(self.bounds.diff(), self.ids.numel())
        else:
            bags = num_up_to(places, self.bounds, right=True) - 1
        return grad.index_select(0, bags)

    def fused_query(self, first_row: int | None) -> PartQuery:
        """All ids, for kernels that skip those that do not count here."""
        ids = self.ids.reshape(-1)
        if self.padding_idx >= 0:
            ids = ids.masked_fill(ids == self.padding_idx, -1)  # no rank's row
        alone = self.offsets is None and self.ids.shape[1] == 1
        offsets, weights = None if alone else self.bounds, self.weights_at(None)
        return PartQuery(ids, None, weights, offsets=offsets, first_row=first_row or 0)


def times(rows: torch.Tensor) -> torch.Tensor:
    """For each entry of `rows`, how often its row occurs."""
    _, inverse, counts = torch.unique(rows, return_inverse=True, return_counts=True)
    return counts[inverse]


# -- one op of a graph ---------------------------------------------------------------------------

_library = torch.library.Library("shardwise", "FRAGMENT")
_Fn = Callable[..., Any]


def _one_op(
    name: str, rest: str, shapes: _Fn, traceable: _Fn = lambda *_: None
) -> Callable[[_Fn], _Fn]:
    """Decorates `fn(values, bags, *rest)`, which is called with the items of `bags`.

    `rest` is the end of the op's schema; see Note [One op of a graph]. `traceable` is the same
    function in ops that the compiler knows, or returns None.
    """
    bags = "Tensor ids, Tensor? offsets, Tensor? weights, int padding_idx"
    written = "(a!)" if name.endswith("_") else ""
    _library.define(f"{name}(Tensor{written} values, {bags}, {rest}")

    def unpacked(fn: _Fn) -> _Fn:
        return lambda values, *args: fn(values, Bags(*args[:4]), *args[4:])

    torch.library.register_fake(f"shardwise::{name}", unpacked(shapes), lib=_library)

    def decorate(fn: _Fn) -> _Fn:
        def kernel(*args: Any) -> Any:
            found = unpacked(fn)(*args)
            # Rows and values may be inputs, which an op must not return.
            return tuple(x.clone() for x in found) if isinstance(found, tuple) else found

        _library.impl(name, kernel, "CompositeExplicitAutograd")
        op, eager, known = getattr(torch.ops.shardwise, name), unpacked(fn), unpacked(traceable)

        def run(values: torch.Tensor, ids: torch.Tensor, *rest: Any) -> Any:
            if has_values(ids) and not ids.is_meta:
                return eager(values, ids, *rest)
            found = known(values, ids, *rest)
            return op(values, ids, *rest) if found is None else found

        run.__name__ = fn.__name__
        run.__doc__ = fn.__doc__
        return run

    return decorate


def unknown_length(traced: Any) -> Any:
    """An unbacked length, which is known when the graph runs.

    Torch offers these to fake implementations only with a compiler setting for data-dependent
    sizes. That is for sizes that a program computes with; nothing is computed with these.
    """
    shape_env = traced.fake_mode.shape_env
    length = shape_env.create_unbacked_symint()
    check_size(length >= 0)
    return length


# -- sums, and their gradients -------------------------------------------------------------------


def _traceable_bags(
    weight: torch.Tensor, bags: Bags, mode: int, first_row: int | None = None
) -> Optional:
    """As `pooled`, where all ids count: by torch's op, which is called without Python."""
    ids, offsets, weights, padding_idx = bags
    all_count = first_row is None and offsets is None and padding_idx < 0
    if not (all_count and weight.is_cpu and weight.is_floating_point()):
        return None
    flat = None if weights is None else weights.reshape(-1)
    edges = torch.arange(bags.num_bags + 1, dtype=ids.dtype, device=ids.device) * ids.shape[1]
    return torch.embedding_bag(weight, ids.reshape(-1), edges, False, mode, False, flat, True)[0]


@_one_op(
    "bags",
    "int mode, SymInt? first_row=None) -> Tensor",
    lambda weight, bags, *_: weight.new_empty((bags.num_bags, weight.shape[1])),
    _traceable_bags,
)
def pooled(
    weight: torch.Tensor, bags: Bags, mode: int, first_row: int | None = None
) -> torch.Tensor:
    """The sum of each bag's rows that are here, or their term of its mean."""
    if not weight.numel():
        return weight.new_zeros((bags.num_bags, weight.shape[1]))
    fused = fused_backend(weight)
    if fused is not None:
        found = fused.look_up(weight, bags.fused_query(first_row))
    else:
        rows, places = bags.found(weight.shape[0], first_row)
        edges = bags.edges(places).to(rows.dtype)
        found = segment_sums(weight, rows, edges, bags.weights_at(places))
    return bags.averaged(found).to(weight.dtype) if mode == MODE_MEAN else found


_GRADIENT = "SymInt num_rows, int mode, bool by_freq, SymInt? first_row"


def _traceable_grad(
    grad: torch.Tensor,
    bags: Bags,
    num_rows: int,
    mode: int,
    by_freq: bool,
    first_row: int | None = None,
) -> Optional:
    """As `pooled_grad`, for one thread of a CPU: the compiler makes one loop of it.

    That of several threads adds each number atomically, which takes many times as long as the op.
    """
    known = grad.is_cpu and grad.is_floating_point() and type(num_rows) is int and not by_freq
    if not known or torch.get_num_threads() > 1:
        return None
    if not num_rows:
        return grad.new_zeros((0, grad.shape[1]))
    grad = bags.averaged(grad).to(grad.dtype) if mode == MODE_MEAN else grad
    ids, offsets, weights, padding_idx = bags
    rows, counts = ids, None
    if first_row is not None:
        rows = ids - first_row
        counts = (rows >= 0) & (rows < num_rows)
    if padding_idx >= 0:
        real = ids != padding_idx
        counts = real if counts is None else counts & real
    if offsets is None:
        values = grad.unsqueeze(1).expand(-1, ids.shape[1], -1)
    else:  # ids after the last bag are in one more
        places = torch.arange(ids.shape[0], device=ids.device)
        bag = torch.searchsorted(bags.bounds, places, right=True) - 1
        values = torch.nn.functional.pad(grad, (0, 0, 0, 1)).index_select(0, bag)
    if weights is not None:
        values = values * weights.unsqueeze(-1)
    if counts is not None:
        rows = torch.where(counts, rows, 0)
        values = torch.where(counts.unsqueeze(-1), values, 0)
    summed = torch.promote_types(grad.dtype, torch.float32)
    found = grad.new_zeros((num_rows, grad.shape[1]), dtype=summed)
    return found.index_put((rows,), values.to(summed), accumulate=True).to(grad.dtype)


@_one_op(
    "bags_backward",
    f"{_GRADIENT}=None) -> Tensor",
    lambda grad, _, num_rows, *__: grad.new_empty((num_rows, grad.shape[1])),
    _traceable_grad,
)
def pooled_grad(
    grad: torch.Tensor,
    bags: Bags,
    num_rows: int,
    mode: int,
    by_freq: bool,
    first_row: int | None = None,
) -> torch.Tensor:
    """The gradient of the rows that are here; no other row is made."""
    found = grad.new_zeros((num_rows, grad.shape[1]))
    if not found.numel():
        return found
    fused = None if by_freq else fused_backend(found)
    if fused is None:
        rows, values = row_grads(grad, *bags, num_rows, mode, by_freq, first_row)
        return found.index_add_(0, rows, values)
    grad = bags.averaged(grad) if mode == MODE_MEAN else grad
    return fused.add_gradients(found, bags.fused_query(first_row), grad)


def _row_grad_shapes(grad: torch.Tensor, bags: Bags, *_: Any) -> Any:
    num = unknown_length(bags.ids)
    return bags.ids.new_empty(num), grad.new_empty((num, grad.shape[1]))


@_one_op("bags_backward_rows", f"{_GRADIENT}) -> (Tensor, Tensor)", _row_grad_shapes)
def row_grads(
    grad: torch.Tensor, bags: Bags, num_rows: int, mode: int, by_freq: bool, first_row: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows here that were looked up, maybe with repeats, and the gradient of each."""
    grad = bags.averaged(grad).to(grad.dtype) if mode == MODE_MEAN else grad
    width = grad.shape[1]
    all_count = first_row is None and bags.offsets is None and bags.padding_idx < 0
    if grad.is_cuda:
        grad = grad.contiguous()  # that of a sum is one number, expanded
    fused = None if by_freq or not width else fused_backend(grad)
    # To sum up rows waits for the device, as does the choice of those that count.
    if fused is not None and not (all_count and bags.ids.numel() * width <= _FEW_NUMBERS):
        return fused.part_gradient(num_rows, bags.fused_query(first_row), grad)
    rows, places = bags.found(num_rows, first_row)
    weights = bags.weights_at(places)
    values = bags.per_id(grad, places)
    if weights is not None:
        values = values * weights.unsqueeze(-1)
    if by_freq:
        values = values / times(rows).unsqueeze(-1)
    return rows, values


@_one_op(
    "bags_backward_weights",
    "Tensor table, SymInt? first_row=None) -> Tensor",
    lambda grad, bags, *_: grad.new_empty(bags.ids.shape),
)
def sample_grad(
    grad: torch.Tensor, bags: Bags, weight: torch.Tensor, first_row: int | None = None
) -> torch.Tensor:
    """For each id, its row times its bag's gradient; 0 for rows that are not here."""
    found = grad.new_zeros(bags.ids.numel())
    if not weight.numel() or not grad.numel():
        return found.view(bags.ids.shape)
    fused = fused_backend(weight)
    if fused is not None:
        found = fused.weight_gradient(weight, bags.fused_query(first_row), grad)
        return found.to(grad.dtype).view(bags.ids.shape)
    rows, places = bags.found(weight.shape[0], first_row)
    products = weight.index_select(0, rows).mul_(bags.per_id(grad, places)).sum(1)
    if places is not None:
        products = found.index_copy_(0, places, products)
    return products.view(bags.ids.shape)


@_one_op(
    "rows_renorm_",
    "float max_norm, float norm_type, SymInt? first_row) -> ()",
    lambda *_: None,
)
def scale_rows(
    weight: torch.Tensor, bags: Bags, max_norm: float, norm_type: float, first_row: int | None
) -> None:
    """Scale down the rows here that are looked up, in place."""
    if weight.shape[0]:
        rows, _ = bags.found(weight.shape[0], first_row)
        torch.embedding_renorm_(weight, rows, max_norm, norm_type)


# -- the largest ---------------------------------------------------------------------------------
# Note [NaN in a maximum]
# In torch a bag's first entry stays until a later one is larger. So NaN is the maximum where it is
# the first of its bag, and is passed over elsewhere. Ranks that have some rows agree on the largest
# entry and on the first position that has it. There such a NaN counts as infinity, and position p
# as -1 - p, which is less than all others.


@_one_op(
    "bags_max",
    "SymInt? first_row=None) -> (Tensor, Tensor)",
    lambda weight, bags, *_: tuple(
        weight.new_empty((bags.num_bags, weight.shape[1]), dtype=dtype)
        for dtype in (weight.dtype, torch.int64)
    ),
)
def largest(
    weight: torch.Tensor, bags: Bags, first_row: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest entry of each bag and column among the rows here, and its first position.

    A bag without rows is -inf, with the number of ids as position. See Note [NaN in a maximum].
    """
    fused, may_be_nan = fused_backend(weight), True
    if fused is not None and weight.shape[1]:
        best, place = fused.largest(weight, bags.fused_query(first_row))
        none = place < 0
    else:
        rows, places = bags.found(weight.shape[0], first_row)
        edges, found = bags.edges(places), weight.index_select(0, rows)
        none = (edges.diff() == 0).unsqueeze(1)
        if found.numel():
            numbers = torch.arange(rows.shape[0], device=rows.device)
            query = (found, numbers, edges, False, MODE_MAX)
            best, _, _, place = torch.embedding_bag(*query, include_last_offset=True)
            may_be_nan = bool(best.isnan().any())
            if may_be_nan:
                best, place = _largest_number(found, edges)
                none = place == rows.shape[0]
                place = place.masked_fill(none, 0)
            place = place if places is None else places[place]
        else:  # kernels may fail
            best = found.new_zeros((bags.num_bags, weight.shape[1]))
            place, may_be_nan = torch.zeros_like(best, dtype=torch.int64), False
    best, place = best.masked_fill(none, -math.inf), place.masked_fill(none, bags.ids.numel())
    return _with_first_nan(best, place, weight, bags, first_row) if may_be_nan else (best, place)


def _largest_number(rows: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest number of each bag and column, and its first position; past the end for none."""
    num, shape = rows.shape[0], (edges.shape[0] - 1, rows.shape[1])
    is_nan, bag = rows.isnan(), torch.repeat_interleave(edges.diff(), output_size=num)
    target, score = bag.unsqueeze(1).expand_as(rows), rows.masked_fill(is_nan, -math.inf)
    best = rows.new_full(shape, -math.inf).scatter_reduce_(0, target, score, "amax")
    positions = torch.arange(num, device=rows.device).unsqueeze(1).expand_as(rows)
    others = is_nan | (score != best.index_select(0, bag))
    place = positions.new_full(shape, num)
    return best, place.scatter_reduce_(0, target, positions.masked_fill(others, num), "amin")


def _with_first_nan(
    best: torch.Tensor,
    place: torch.Tensor,
    weight: torch.Tensor,
    bags: Bags,
    first_row: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest numbers, and NaN where that is the first entry of a bag."""
    ids, num = bags.ids.reshape(-1), bags.ids.numel()
    if not num or not weight.shape[0]:
        return best, place
    starts, ends = bags.bounds[:-1], bags.bounds[1:]
    if bags.padding_idx >= 0:  # from each position on, the first that counts
        at = torch.arange(num, device=ids.device).masked_fill(ids == bags.padding_idx, num)
        at = torch.nn.functional.pad(at.flip(0).cummin(0).values.flip(0), (0, 1), value=num)
        starts = at.index_select(0, starts)
    first = starts.clamp(max=num - 1).unsqueeze(1)
    rows = ids.index_select(0, first.squeeze(1)).long() - (first_row or 0)
    here = (starts < ends) & (rows >= 0) & (rows < weight.shape[0])
    entries = weight.index_select(0, rows.masked_fill(~here, 0))
    is_first = entries.isnan() & here.unsqueeze(1)
    if first_row is None:
        return best.masked_fill(is_first, math.nan), torch.where(is_first, first, place)
    return best.masked_fill(is_first, math.inf), torch.where(is_first, -1 - first, place)
