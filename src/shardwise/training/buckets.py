"""Reduction of dense gradients in buckets and of row-sparse ones; checks between ranks."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise._torch.functions import flat
from shardwise.comm import collectives
from shardwise.comm.agreement import Fault, Faults
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.core.placements import REPLICATE
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError, RankMismatchError
from shardwise.ops.lookup import row_sparse
from shardwise.ops.lookup.row_sparse import RowSparse, gather_rows
from shardwise.simulation.ranks import (
    by_rank,
    each_rank,
    localize,
    one_part,
    parts_of,
    plain_if_equal,
    split_row,
)
from shardwise.training.contract import Axis, Reduction, is_used_alike, ranks_along, tensor_axes

#: A collective: its mesh, its axis, and its reduction.
Collective = tuple[Grid, int, str]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one dtype and device whose gradients have the same reduction."""

    parameters: tuple[nn.Parameter, ...]
    reduction: Reduction


@dataclass(slots=True)
class SentBucket:
    """A flat tensor being reduced: its parameters, and its collectives in order."""

    parameters: list[nn.Parameter]
    collectives: tuple[Collective, ...]
    row: torch.Tensor


def make_buckets(
    parameters: Iterable[tuple[nn.Parameter, Reduction]], bucket_bytes: int
) -> list[Bucket]:
    """Buckets of parameters, in the given order, in which gradients are expected."""
    buckets: list[Bucket] = []
    room: dict[Any, tuple[int, list[nn.Parameter]]] = {}
    for parameter, reduction in parameters:
        key = (reduction, parameter.dtype, parameter.device)
        left, members = room.get(key, (0, []))
        size = parameter.numel() * parameter.element_size()
        if size > left and members:
            buckets.append(Bucket(tuple(members), reduction))
            left, members = 0, []
        members.append(parameter)
        room[key] = ((left or bucket_bytes) - size, members)
    return [*buckets, *(Bucket(tuple(m), key[0]) for key, (_, m) in room.items())]


def collectives_for(parameter: nn.Parameter, reduction: Reduction) -> tuple[Collective, ...]:
    """The collectives that the present gradient needs; equal on all ranks."""
    if reduction.means:
        return tuple((grid, axis, "sum") for grid, axis in reduction.means)
    grad: Any = parameter.grad
    if not isinstance(grad, DTensor):
        return ()  # the ranks of a DTensor run one program: none of them has a gradient
    return tuple(
        (grid, axis, grad.placements[axis].reduce_op)  # type: ignore[attr-defined]
        for grid, axis in reduction.sums
        if grad.placements[axis].is_partial()
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, RowSparse):
        tensor = tensor.terms()
    return tensor._local if isinstance(tensor, DTensor) else tensor


def flattened(
    members: Sequence[nn.Parameter], grid: Grid, share: float, changed: bool
) -> torch.Tensor:
    """All gradients and a flag for each in one row, times `share`; called without autograd.

    At its end are two more flags; see Note [Frozen on one rank] in `reducer`.
    """
    grads = [p.grad if p.requires_grad else None for p in members]
    flags = [*(float(grad is not None) for grad in grads), float(changed), float(not changed)]
    parts = [
        torch.zeros_like(_local(p)) if grad is None else _local(grad)
        for p, grad in zip(members, grads, strict=True)
    ]

    def flatten(_: Any, *here: torch.Tensor) -> torch.Tensor:
        dense = [part.to_dense() if part.is_sparse else part for part in here]
        row = flat([*dense, dense[0].new_tensor(flags)])
        return row if share == 1 else row.mul_(share)

    return each_rank(grid, flatten, *(localize(grid, part) for part in parts), axes=())


def put_back(sent: SentBucket, row: torch.Tensor) -> None:
    """The reverse of `flattened`: set the gradients from the reduced row."""
    grid = sent.collectives[0][0]
    views, flags = split_row(grid, row, [_local(p) for p in sent.parameters])
    for number, (parameter, view) in enumerate(zip(sent.parameters, views, strict=True)):
        if not parameter.requires_grad:
            continue  # frozen since
        if parameter.grad is None and not plain_if_equal(flags)[number]:
            continue  # no rank used it
        _set_gradient(parameter, view, sent.collectives)


def _set_gradient(
    parameter: nn.Parameter, view: torch.Tensor, collectives: Sequence[Collective]
) -> None:
    if not isinstance(parameter, DTensor):
        if type(view) is not torch.Tensor and type(parameter.data) is torch.Tensor:
            view = plain_if_equal(view)
        parameter.grad = view
        return
    grad: Any = parameter.grad
    layout = parameter._layout if grad is None else grad._layout
    placements = list(layout.placements)
    for grid, axis, _ in collectives:
        if grid is layout.grid and placements[axis].is_partial():
            placements[axis] = REPLICATE
    parameter.grad = DTensor._wrap(view, layout.with_placements(tuple(placements)))


# -- row gradients -------------------------------------------------------------------------------
# Row-sparse gradients: reduced by gathering rows, so that no dense one is materialised.


#: The kinds of a rank's gradient, in the order of precedence.
NOTHING, ROWS, DENSE = range(3)


def kinds_on_all_ranks(
    parameters: Sequence[nn.Parameter], axes: Sequence[Axis], changed: bool
) -> list[int]:
    """For each parameter, the highest kind of its gradient on any rank along the axes.

    Then the two flags of `flattened`.
    """
    mine = [_kind(p.grad if p.requires_grad else None) for p in parameters]
    mine += [int(changed), int(not changed)]
    grid = axes[0][0]
    device = parameters[0].device
    found: Any = each_rank(grid, lambda _: torch.tensor(mine, device=device), axes=())
    for axis in axes:
        found = collectives.all_reduce(found, "max", *axis)
    return plain_if_equal(found).tolist()


def _kind(grad: torch.Tensor | None) -> int:
    if grad is None:
        return NOTHING
    here = one_part(grad)
    return ROWS if here.is_sparse and here.sparse_dim() == 1 else DENSE


def average_rows(parameter: nn.Parameter, reduction: Reduction) -> None:
    """Set the gradient of a parameter to the mean over ranks, as rows."""
    grid = reduction.means[0][0]
    rows, values = (localize(grid, each) for each in _parts(parameter, grid))
    for axis in reduction.means:
        rows, values = gather_rows(rows, values, *axis)
    values = values * reduction.share
    if isinstance(parameter, DTensor):
        grad: Any = parameter.grad
        layout = parameter._layout if grad is None else grad._layout
        parameter.grad = row_sparse.make(layout, rows, values)
        return
    size = tuple(parameter.shape)

    def make(_: Any, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.sparse_coo_tensor(rows.unsqueeze(0), values, size, check_invariants=False)

    held = [localize(grid, plain_if_equal(each)) for each in (rows, values)]
    made = each_rank(grid, make, *held, axes=())
    parts = parts_of(made)
    parameter.grad = parts[0] if len(parts) == 1 else made


def _parts(parameter: nn.Parameter, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers and rows of this rank's gradient; empty where it has none."""
    grad: Any = parameter.grad
    if isinstance(grad, RowSparse):
        return grad._rows, grad._local
    if grad is None:
        local = getattr(parameter, "_local", parameter).detach()
        return torch.empty(0, dtype=torch.int64, device=parameter.device), local[:0]

    def apart(_: Any, here: torch.Tensor) -> Any:
        return here._indices()[0], here._values()

    return each_rank(grid, apart, localize(grid, grad), axes=())


# -- what is trained -----------------------------------------------------------------------------

_UNLIKE = (
    "Ranks train different parameters, so their gradients have no mean. Call requires_grad_() "
    "alike on all ranks, between steps. "
)


def changed_on(row: torch.Tensor) -> tuple[bool, bool]:
    """Whether some ranks train other parameters than before, and whether some do not.

    Read from the last two flags of a reduced row.
    """
    changed, unchanged = one_part(row)[-2:].tolist()
    return changed != 0, unchanged != 0


def changed_on_later(row: torch.Tensor) -> Callable[[], tuple[bool, bool]]:
    """A function that returns `changed_on` of a row on a GPU.

    If it is called when the device is past the row, as in the next pass, nothing waits.
    """
    flags = one_part(row)[-2:]
    if not flags.is_cuda:
        return functools.partial(changed_on, flags.clone())
    seen = torch.empty(2, dtype=flags.dtype, pin_memory=True)
    seen.copy_(flags, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> tuple[bool, bool]:
        arrived.synchronize()
        return changed_on(seen)

    return read


def unlike_ranks() -> RankMismatchError:
    return RankMismatchError(
        f"{_UNLIKE}Some ranks train other parameters than in the step before, and others do not."
    )


def agree_on_trained(frozen: Sequence[str], axes: Sequence[Axis]) -> None:
    """Raise, on all ranks along the axes, unless the names of frozen parameters are the same."""
    said = f"frozen: {', '.join(frozen)}" if frozen else "none is frozen"
    digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=7).digest(), "little")
    grid = axes[0][0]
    faults = Faults(grid, "which parameters are trained", _UNLIKE)

    def compared(rank: int) -> torch.Tensor:
        status = faults.status(rank, Fault(said, RankMismatchError))
        return torch.tensor([digest, -digest, status], device=grid.device_type)

    found = by_rank(grid, compared)
    for axis in axes:
        found = collectives.all_reduce(found, "max", *axis)
    high, low, longest = one_part(found).tolist()
    if high != -low:
        error = faults.error([longest], [axis for mesh, axis in axes if mesh is grid])
        raise error or unlike_ranks()


# -- plain gradients -----------------------------------------------------------------------------
# The check that plain gradients are equal along tensor axes.
#
# Between sharded layers, each rank has only some columns, heads or positions. A plain parameter
# that is used there gets the gradient of only those, and its replicas would diverge.


#: The tolerance for sums of the same numbers, by the size of the dtype: GPU kernels may add in
#: different orders.
_TOLERANCE = {8: 1e-6, 4: 1e-3, 2: 3e-2, 1: 0.2}


def check_plain_gradients(module: nn.Module) -> None:
    """Raise, on all ranks, if a plain gradient differs along an axis that styles split along."""
    plain = {
        name: p
        for name, p in module.named_parameters()
        if p.requires_grad and is_used_alike(p) and not p.is_meta
    }
    for (grid, axis), reason in tensor_axes(module).items() if plain else ():
        if len(ranks_along(grid, axis)) < 2:
            continue
        with torch.no_grad(), because("a check of plain gradients", implicit=False):
            odd = _different(list(plain.values()), grid, axis)
        if any(odd):
            names = [name for name, differs in zip(plain, odd, strict=True) if differs]
            raise LayoutError(
                f"The gradients of {names} differ between the ranks along axis "
                f"{grid.axis_name(axis)!r} of {grid!r}. {reason[0].upper()}{reason[1:]}; between "
                "such layers each rank has some of the columns, heads or positions, and a plain "
                "parameter that is used there gets the gradient of those alone. Give its module an "
                'entry in the plan ("replicated_with_grad_allreduce" for a norm of each head, '
                "SequenceParallel() for a sequence in parts), or add the gradient up yourself in a "
                "hook of the parameter."
            )


def _different(parameters: Sequence[nn.Parameter], grid: Grid, axis: int) -> list[bool]:
    grads = [localize(grid, _local_gradient(p)) for p in parameters]

    def sums(_: Any, *here: torch.Tensor) -> torch.Tensor:
        found = [_sums(grad) for grad in here]
        row = torch.stack(found).to(torch.float64 if grid.device_type != "mps" else torch.float32)
        return torch.cat([row, -row])

    row = each_rank(grid, sums, *grads, axes=())
    largest = plain_if_equal(collectives.all_reduce(row, "max", grid, axis))
    found = [False] * len(parameters)
    for part in parts_of(largest):
        high, low = part.chunk(2)
        for number, parameter in enumerate(parameters):
            allowed = _TOLERANCE[min(parameter.element_size(), 8)] * high[number, 1]
            found[number] |= bool((high[number] + low[number] > allowed).any())
    return found


def _local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros(1, device=parameter.device)
    return parameter.grad._local if isinstance(parameter.grad, DTensor) else parameter.grad


def _sums(grad: torch.Tensor) -> torch.Tensor:
    values = grad._values() if grad.is_sparse else grad
    wide = torch.view_as_real(values) if values.is_complex() else values
    wide = wide.detach().double()
    return torch.stack([wide.sum(), wide.abs().sum()])
