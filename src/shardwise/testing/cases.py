"""One sample in one layout, run, read through conversions, and compared with one device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.functions import tree_map_only
from shardwise.core.layout import Layout, canonical_order
from shardwise.core.placements import REPLICATE, SUM, Partial, Placement, Shard, short
from shardwise.dtensor.autograd import gradient_layout
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.simulation.ranks import sized_copy
from shardwise.testing.compare import (
    Alone,
    Different,
    OpCall,
    compare,
    copied,
    doubled,
    fixed_gradients,
    full_name,
    gathered,
    gradients,
    placed,
    tensors_of,
)
from shardwise.testing.layouts import OperandLayouts, laid_out, random_of


class Cases:
    """A sample in one layout: the op, its gradients, reads and writes."""

    def __init__(
        self,
        alone: Alone,
        way: OperandLayouts,
        mesh: DeviceMesh,
        number: int,
        through: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda fn: fn,
        num_doors: int = 0,
    ) -> None:
        """`number` is that of the layout; `through` wraps the op before it is called.

        `num_doors` is how many reads and how many writes are tried.
        """
        self._alone, self._way, self._mesh, self._number = alone, way, mesh, number
        self._through, self._num_doors = through, num_doors
        #: The result of `forward`, and the leaves that want a gradient.
        self._result: Any = None
        self._leaves: list[torch.Tensor] = []
        #: kind -> the tensors that were compared, as one device would hold them
        self.found: dict[str, list[Any]] = {}

    def each(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """The kinds of cases that run on one device, with their functions, `forward` first."""
        alone, way, doors = self._alone, self._way, self._num_doors
        yield "forward", self.forward
        if alone.grads is not None:
            yield "backward", self.backward
        if not alone.without_values:
            keys = [f"{full_name(alone.entry)} {alone.sample} {way} {i}" for i in range(doors)]
            for key in keys:
                yield "doors", functools.partial(self.doors, key)
            for key in keys:
                yield "writes", functools.partial(self.writes, key)

    def forward(self) -> None:
        alone = self._alone
        self._result, self._leaves = self._run(alone.sample)
        compare_states(alone.state)
        if alone.without_values:
            self._result = torch.zeros_like(self._result)

        self.found["forward"] = gathered(self._result)
        compare(
            self.found["forward"],
            alone.result,
            lambda: (self.in_double("forward"), alone.double().result),
        )

    def backward(self) -> None:
        alone = self._alone
        self.found["backward"] = self._grads(self._result, self._leaves)
        compare(
            self.found["backward"],
            alone.grads or [],
            lambda: (self.in_double("backward"), alone.double().grads or []),
            "gradient",
        )

    def in_double(self, kind: str) -> list[Any]:
        """The result of `forward` or `backward` in double precision."""
        result, leaves = self._run(doubled(self._alone.sample))
        return gathered(result) if kind == "forward" else self._grads(result, leaves)

    def doors(self, key: str) -> None:
        """Read the results, with their gradients, through random conversions seeded by `key`."""
        alone, flat = self._alone, random_of(key).random() < 0.3
        if flat and alone.grads is not None:  # some ops of torch refuse an expanded gradient
            flat = alone.other(flat=True).grads is not None
        read: list[Reading | None] = []
        with _noted(read):
            values, grads = self._through_doors(alone.sample, key, flat, read)
            compare(
                values,
                alone.read,
                lambda: (
                    self._through_doors(doubled(alone.sample), key, flat, [])[0],
                    alone.double().read,
                ),
            )
            expected = alone.other(flat=True) if flat else alone
            compare(
                grads,
                expected.grads or [],
                lambda: (
                    self._through_doors(doubled(alone.sample), key, flat, [])[1],
                    alone.other(double=True, flat=flat).grads or [],
                ),
                "gradient",
            )

    def _through_doors(
        self, sample: OpCall, key: str, flat: bool, read: list[Reading | None]
    ) -> tuple[list[Any], list[Any]]:
        """The values and the gradients; the conversions are added to `read`."""
        result, leaves = self._run(sample)
        grads: Sequence[torch.Tensor | None]
        if self._alone.grads is None:
            results, leaves = tensors_of(result), []
            grads = [None] * len(results)
        else:
            results = [t for t in tensors_of(sample.differentiable(result)) if t.requires_grad]
            grads = fixed_gradients(results, flat)
        through: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
        for number, grad in enumerate(grads):
            tensor, door = results[number], None
            if isinstance(tensor, DTensor):
                door = reading(tensor._layout, f"{key} {number}")
                through.append(door.read(tensor, grad))
            else:
                through.append((tensor, grad, tensor))
            read.append(door)
        found: Sequence[Any] = ()
        if leaves:
            outs, given = [out for out, _, _ in through], [grad for _, grad, _ in through]
            found = torch.autograd.grad(outs, leaves, given, allow_unused=True)
        return gathered([value.detach() for _, _, value in through]), gathered(list(found))

    def writes(self, key: str) -> None:
        """Write to a random operand or result, seeded by `key`, and read everything."""
        alone = self._alone
        plain = tensors_of(alone.whole)
        write = drawn_write(alone.sample, len(plain), alone.read_as_it_is(), key)
        # Torch refuses a write to an expanded tensor; to other repeated memory it is undefined.
        written_to = plain[write.number] if write.to == "result" else None
        if written_to is not None and 0 not in written_to.stride() and repeats_memory(written_to):
            return

        def there(sample: OpCall) -> tuple[list[Any], list[Any], list[bool]]:
            placements, op = iter(self._way.placements), self._through(alone.entry.op)
            found = written(write, sample, op, lambda t: self._lay(t, next(placements)), self._like)
            return gathered(found.values), gathered(found.grads), found.requires_grad

        apart = False

        def on_one_device(sample: OpCall) -> Written:
            op, like = alone.entry.op, lambda grad, _: grad
            return written(write, sample, op, copied, like, apart=apart)

        with _noted([write]):
            try:
                expected = on_one_device(alone.sample)
            except Exception as refusal:
                if not is_overwritten(refusal):
                    _must_refuse(lambda: there(alone.sample), refusal)
                    return
                apart = True
                expected = on_one_device(alone.sample)
            try:
                values, grads, requires_grad = there(alone.sample)
            except RuntimeError as error:
                if is_overwritten(error):
                    return
                raise
            double = doubled(alone.sample)
            compare(
                values,
                expected.values,
                lambda: (there(double)[0], on_one_device(double).values),
                "operand or result",
            )
            if requires_grad != expected.requires_grad:
                raise Different(f"requires_grad is {requires_grad}, not {expected.requires_grad}")
            compare(
                grads,
                expected.grads,
                lambda: (there(double)[1], on_one_device(double).grads),
                "gradient",
            )

    def _spread(self, sample: OpCall) -> tuple[Any, Any, list[torch.Tensor]]:
        placements = iter(self._way.placements)
        return placed(sample, lambda t: self._lay(t, next(placements)))

    def _lay(self, tensor: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
        return laid_out(tensor, self._mesh, placements, self._way.order)

    def _run(self, sample: OpCall) -> tuple[Any, list[torch.Tensor]]:
        args, kwargs, leaves = self._spread(sample)
        torch.default_generator.manual_seed(0)
        return self._through(self._alone.entry.op)(*args, **kwargs), leaves

    def _grads(self, result: Any, leaves: list[torch.Tensor]) -> list[Any]:
        differentiable = self._alone.sample.differentiable(result)
        return gathered(gradients(differentiable, leaves, self._like))

    def _like(self, grad: torch.Tensor, result: Any) -> torch.Tensor:
        # Half of the cases have gradients laid out like the result, half replicated ones.
        layout: Layout = gradient_layout(result._layout)
        where = layout.placements if self._number % 2 else [REPLICATE] * len(layout.placements)
        return distribute_tensor(grad, layout.grid.mesh, where, src_data_rank=None)


def compare_states(expected: torch.Tensor | None) -> None:
    assert expected is not None, "the state is known once one device has run"
    if not torch.equal(torch.default_generator.get_state(), expected):
        raise Different("the generator is left in another state")


def _must_refuse(case: Callable[[], Any], refusal: Exception) -> None:
    try:
        case()
    except Exception:
        return
    raise Different(f"accepted, where one device raises {type(refusal).__name__}: {refusal}")


@contextlib.contextmanager
def _noted(notes: Sequence[Any]) -> Iterator[None]:
    """Add the notes, as they are by then, to errors raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note("; ".join(map(str, notes)))
        raise


# -- doors ---------------------------------------------------------------------------------------
# Reads of a result through conversions, and writes to operands and results.
#
# A reading is one or two of the conversions `redistribute`, `full_tensor` and `to_local`, and the
# gradient that comes back through them.
#
# After a write to an operand or a result, all operands and results are read, with the gradients of
# the operands: tensors that share memory on one device must share values. A write that one device
# refuses must be refused. Whether backward needs an overwritten value may differ, since a rank may
# have kept a copy: either side may refuse, and results that are not refused must be right.


#: How a tensor is read at the end: as it is placed, whole, or each rank's shard. With `terms`, the
#: gradients that ranks give for a replica add up to the gradient.
_ENDS = ("placed", "whole", "whole, terms", "local", "local, terms")


@dataclass(frozen=True)
class Reading:
    """The placements to redistribute a tensor to, if any, and how it is read there."""

    target: tuple[Placement, ...] | None
    order: tuple[int, ...] | None
    end: str

    def __str__(self) -> str:
        order = "" if self.order is None else f" in order {self.order}"
        moved = "" if self.target is None else f"moved to {short(self.target)}{order}, "
        return moved + {"placed": "read as placed"}.get(self.end, f"read {self.end}")

    def read(
        self, x: DTensor, grad: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """The values read from `x`, its gradient, and a DTensor of the same values."""
        if self.target is not None:
            x = x.redistribute(placements=self.target, order=self.order)
            _check_order(x._layout, self.order)
        mesh, layout = x.device_mesh, x._layout
        whole: tuple[Placement, ...] = (REPLICATE,) * len(x.placements)
        if self.end == "placed":
            return x, None if grad is None else laid_out(grad, mesh, whole), x
        terms = self.end.endswith("terms")
        where = gradient_layout(layout).placements
        order: tuple[int, ...] | None = layout.order
        if self.end.startswith("whole"):
            layout, where, order = layout.with_placements(whole), whole, None
        if terms:
            where = tuple(SUM if p.is_replicate() else p for p in where)
        door = x.full_tensor if self.end.startswith("whole") else x.to_local
        read = door(grad_placements=where if terms else None)
        given = None
        if grad is not None:
            given = sized_copy(laid_out(grad, mesh, where, order)._local, True)
        return read, given, DTensor._wrap(_inside(read), layout)


def _check_order(found: Layout, asked: tuple[int, ...] | None) -> None:
    """Without an order, placements alone say which rank holds what."""
    if found.order != canonical_order(found.placements, asked):
        raise Different(f"moved to {found!r}, asked for order {asked}")


def _inside(read: torch.Tensor) -> torch.Tensor:
    return sized_copy(read.detach(), False)


def reading(layout: Layout, key: str) -> Reading:
    """A reading of a tensor in this layout, drawn at random by `key`."""
    random = random_of(key)
    # Most programs read results as they come.
    if random.random() < 0.5:
        return Reading(None, None, random.choice(_ENDS[1:]))
    num_axes = layout.grid.num_axes
    choices: list[Placement] = [REPLICATE, *map(Shard, range(len(layout.shape)))]
    if layout.dtype.is_floating_point or layout.dtype.is_complex:
        # Terms along several axes have to be of one kind.
        real = layout.dtype.is_floating_point
        choices.append(random.choice([SUM, SUM, Partial("avg"), Partial("max")]) if real else SUM)
    placements = [random.choice(choices) for _ in range(num_axes)]
    order = tuple(random.sample(range(num_axes), num_axes)) if random.random() < 0.5 else None
    last = placements[-1]
    if isinstance(last, Shard) and order is None and not _is_sharded_before(placements):
        parts = layout.grid.shape[-1]
        sizes = (*[0] * (parts - 1), layout.shape[last.dim])
        placements[-1] = random.choice([last, Shard(last.dim, sizes)])
    return Reading(tuple(placements), order, random.choice(_ENDS))


def _is_sharded_before(placements: list[Placement]) -> bool:
    """Whether an earlier axis shards the last one's dim, so that no sizes may be given."""
    *before, last = placements
    return isinstance(last, Shard) and any(p.is_shard(last.dim) for p in before)


# -- writes ----------------------------------------------------------------------------------

#: The autograd history of the operands: none, results of an earlier op, or leaves.
_HISTORIES = ("none", "op", "leaf")


@dataclass(frozen=True)
class Write:
    """Which tensor is written to, and the autograd history of the operands."""

    to: str
    number: int
    history: str

    def __str__(self) -> str:
        words = {"none": "", "op": ", with gradients", "leaf": ", operands are leaves"}
        return f"written to {self.to} {self.number}{words[self.history]}"


@dataclass
class Written:
    """The values read after a write."""

    values: list[torch.Tensor]
    requires_grad: list[bool]
    grads: list[Any]


def drawn_write(sample: OpCall, num_results: int, differentiable: bool, key: str) -> Write:
    """A write to an operand or a result, drawn at random by `key`."""
    random = random_of(key)
    names = [("operand", i) for i in range(len(sample.tensors))]
    names += [("result", i) for i in range(num_results)]
    to, number = random.choice(names)
    return Write(to, number, random.choice(_HISTORIES) if differentiable else "none")


def written(
    write: Write,
    sample: OpCall,
    op: Callable[..., Any],
    place: Callable[[torch.Tensor], torch.Tensor],
    like: Callable[[torch.Tensor, Any], torch.Tensor],
    *,
    apart: bool = False,
) -> Written:
    """Call the op, write, and read; raises what the write or the backward pass raises.

    With `apart`, the op keeps copies of its operands and results for its backward pass.
    """
    if write.history == "none":
        sample = replace(sample, wants_grad=(False,) * len(sample.wants_grad))
    args, kwargs, leaves = placed(sample, place)
    if write.history == "op":
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    torch.default_generator.manual_seed(0)
    operands = tensors_of((args, kwargs))
    if apart:
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    results = tensors_of(op(*args, **kwargs))
    if apart:
        results = [t.clone() for t in results]
        for operand, copy in zip(operands, tensors_of((args, kwargs)), strict=True):
            operand.detach().copy_(copy.detach())  # some ops write to operands themselves
    _write((operands if write.to == "operand" else results)[write.number])
    tensors = [*operands, *results]
    grads = _gradients(tensors, leaves, like) if leaves else []
    requires_grad = [t.requires_grad for t in tensors]
    return Written([t.detach() for t in tensors], requires_grad, grads)


def repeats_memory(tensor: torch.Tensor) -> bool:
    """Whether entries share memory, as in overlapping windows: a write is then undefined."""
    if not tensor.numel():
        return False
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    places = torch.arange(reach + 1).as_strided(tensor.shape, tensor.stride())
    return places.unique().numel() < tensor.numel()


def is_overwritten(error: BaseException) -> bool:
    """Whether autograd refuses because a write changed what backward needs."""
    return "modified by an inplace operation" in str(error)


def _write(tensor: torch.Tensor) -> None:
    if tensor.dtype is torch.bool:
        tensor.logical_not_()
    else:
        tensor.mul_(2).add_(1)


def _gradients(
    tensors: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    like: Callable[[torch.Tensor, Any], torch.Tensor],
) -> list[Any]:
    differentiable = [t for t in tensors if t.requires_grad]
    given = list(map(like, fixed_gradients(differentiable), differentiable))
    return list(torch.autograd.grad(differentiable, leaves, given, allow_unused=True))
