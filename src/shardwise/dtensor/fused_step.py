"""torch's fused optimizer steps: one kernel for whole lists of parameters, gradients and states.

The steps are elementwise, so the kernel is right on local tensors of one layout. A tensor in
another layout than its parameter is moved first, and written back after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.watch import because, watch
from shardwise.core.layout import Layout
from shardwise.dispatch.foreach import count_writes
from shardwise.dispatch.plan import check_writable, on_one_mesh
from shardwise.dispatch.strict import forbid_move
from shardwise.dispatch.wrapped import Wrapped, reduced_layout
from shardwise.dtensor import autograd
from shardwise.dtensor.conversion import stride_like
from shardwise.errors import LayoutError, MixedTensorsError
from shardwise.redistribute.search import find_steps
from shardwise.simulation.parts import from_parts, held_like, parts_of, roster_of
from shardwise.simulation.ranks import one_for_all
from shardwise.simulation.roster import Roster

#: The list of numbers, one per parameter; all other lists hold tensors shaped like the parameters.
_STEPS = "state_steps"
#: The list that the first step fills without reading it.
_MOMENTA = "momentum_buffer_list"


def fused_step(op: Any, *lists: Sequence[torch.Tensor], **options: Any) -> None:
    """Run a fused step on lists that hold DTensors, and perhaps plain tensors too."""
    names = [argument.name for argument in op._schema.arguments[: len(lists)]]
    given = {name: items for name, items in zip(names, lists, strict=True) if items}
    rows: list[list[Any]] = []
    loans: list[_LentTensors] = []
    for cells in zip(*given.values(), strict=True):
        row = dict(zip(given, cells, strict=True))
        found, lent = _local_rows(op, row, unset=bool(options.get("is_first_step")))
        rows += found
        loans += lent
    columns = dict(zip(given, zip(*rows, strict=True), strict=True))
    op(*(list(columns.get(name, ())) for name in names), **options)
    written = written_lists(op, options)
    for loan in loans:
        if loan.name in written:
            loan.give_back()
    count_writes([tensor for name in given if name in written for tensor in given[name]])


def written_lists(op: Any, options: Mapping[str, Any]) -> set[str]:
    """The lists that the kernel writes to: gradients only where it unscales them."""
    unscales = options.get("grad_scale") is not None
    listed = {a.name for a in op._schema.arguments if not a.kwarg_only}
    return listed - ({_STEPS} if unscales else {_STEPS, "grads"})


@dataclass(slots=True)
class _LentTensors:
    """The local tensors of a DTensor in the kernel's lists."""

    name: str
    tensor: Any
    layout: Layout
    roster: Roster | None
    parts: list[torch.Tensor]
    #: Whether these are copies, not the DTensor's own memory.
    apart: bool = False

    def give_back(self) -> None:
        if self.apart:
            local = from_parts(self.parts, self.roster)
            torch.ops.aten.copy_.default(self.tensor, self.tensor._wrap(local, self.layout))


def _local_rows(
    op: Any, cells: Mapping[str, Any], *, unset: bool
) -> tuple[list[list[Any]], list[_LentTensors]]:
    """One parameter with its gradient and state: one row, or one per part in a simulated world.

    `unset`: its momentum has no values yet.
    """
    tensors = {name: tensor for name, tensor in cells.items() if name != _STEPS}
    if not any(isinstance(tensor, Wrapped) for tensor in tensors.values()):
        return [list(cells.values())], []
    _check(op, tensors)
    loans: dict[str, _LentTensors] = {}
    for position, (name, tensor) in enumerate(tensors.items()):
        if unset and name == _MOMENTA:
            tensor.zero_()  # simulated ranks must hold equal values
        loans[name] = _lend(op, position, name, tensor, next(iter(loans.values()), None))
    step = cells.get(_STEPS)
    if isinstance(step, Wrapped):
        step = one_for_all(autograd.move(step, autograd.whole_layout(step._layout))._local)
    num = len(next(iter(loans.values())).parts)
    for number in range(num):
        _share_strides(list(loans.values()), number)
    rows = [[loans[n].parts[k] if n in loans else step for n in cells] for k in range(num)]
    return rows, list(loans.values())


def _check(op: Any, tensors: Mapping[str, Any]) -> None:
    """Raise where shapes differ: the kernels check none, and would access other memory."""
    plain = [name for name, tensor in tensors.items() if not isinstance(tensor, Wrapped)]
    if plain:
        raise MixedTensorsError(
            f"{op} got mixed torch.Tensor and DTensor: a parameter with its gradient and state, of "
            f"which {', '.join(plain)} {'is' if len(plain) == 1 else 'are'} plain. Wrap all of "
            "them alike: distribute_tensor(x, mesh, placements)."
        )
    layouts = on_one_mesh(op, [tensor._layout for tensor in tensors.values()])
    for name, layout in zip(tensors, layouts, strict=True):
        check_writable(op, layout)
        if layout.shape != layouts[0].shape:
            raise LayoutError(
                f"{op} got {layout!r} in {name} for the parameter {layouts[0]!r}: both must have "
                "the same shape."
            )


def _lend(
    op: Any, position: int, name: str, tensor: Any, first: _LentTensors | None
) -> _LentTensors:
    """`tensor` in the layout of the first loan, the parameter's; a Partial is reduced."""
    layout = tensor._layout
    if first is None:
        target = reduced_layout(layout)
    else:
        target = layout.with_placements(first.layout.placements, first.layout.order)
    moved = tensor
    if target is not layout:
        if watch.strict:
            forbid_move(op, position, find_steps(layout, target), target)
        with because(op, implicit=True):
            moved = autograd.move(tensor, target, own=True)
    local = moved._local
    roster = roster_of(local) if first is None else first.roster
    apart = moved is not tensor or roster_of(local) is not roster
    parts = list(parts_of(held_like(local, roster)))
    return _LentTensors(name, tensor, target, roster, parts, apart)


def _share_strides(loans: Sequence[_LentTensors], number: int) -> None:
    """Give the tensors of a row the same dense strides: the kernels ignore strides."""
    parts = [loan.parts[number] for loan in loans]
    if all(part.is_contiguous() for part in parts):
        return
    stride = parts[0].stride()
    if stride == stride_like(parts[0], parts[0].shape) and all(p.stride() == stride for p in parts):
        return  # dense, with the dims in another order
    for loan in loans:
        if not loan.parts[number].is_contiguous():
            loan.parts[number] = loan.parts[number].contiguous()
            loan.apart = True
