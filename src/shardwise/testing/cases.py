"""One sample in one layout, run and compared with one device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.layout import Layout
from shardwise.core.placements import REPLICATE, Placement
from shardwise.dtensor.autograd import gradient_layout
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.testing.alone import (
    Alone,
    OpCall,
    copied,
    doubled,
    fixed_gradients,
    full_name,
    gradients,
    placed,
    tensors_of,
)
from shardwise.testing.compare import Different, compare, gathered
from shardwise.testing.doors import (
    Reading,
    Written,
    drawn_write,
    is_overwritten,
    reading,
    repeats_memory,
    written,
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
        """The kinds of cases that one device runs, with their functions, `forward` first."""
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
        """What `forward` or `backward` finds in double precision."""
        result, leaves = self._run(doubled(self._alone.sample))
        return gathered(result) if kind == "forward" else self._grads(result, leaves)

    def doors(self, key: str) -> None:
        """Read the results through conversions that `key` draws, with their gradients."""
        alone, flat = self._alone, random_of(key).random() < 0.3
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
        """Write to the operand or the result that `key` draws, and read everything."""
        alone = self._alone
        plain = tensors_of(alone.whole)
        write = drawn_write(alone.sample, len(plain), alone.read_as_it_is(), key)
        if write.to == "result" and _repeats(plain[write.number]):
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


def _repeats(tensor: torch.Tensor) -> bool:
    # Torch refuses a write to an expanded tensor.
    return 0 not in tensor.stride() and repeats_memory(tensor)


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
