"""The training loop that one device and many ranks both run."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.testing.batches import call, loss_of

NUM_STEPS = 3
CLIP_NORM = 0.1
PENALTY = 0.05

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, eps=1e-6),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-6),
}
#: With "two", every second parameter is left to this one.
SECOND = {"sgd": "adagrad", "adagrad": "sgd", "momentum": "adamw", "adamw": "momentum"}

Loss = Callable[[nn.Module, Any], torch.Tensor]


def plain_loss(module: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(call(module, batch))


@contextlib.contextmanager
def updates_together(module: nn.Module) -> Iterator[None]:
    """Collections that update in backward: all parts make one update, as when sharded."""
    found: list[Any] = [getattr(inner, "optimizer", None) for inner in module.modules()]
    optimizers = [each for each in found if hasattr(each, "hold")]
    with contextlib.ExitStack() as stack:
        for each in optimizers:
            stack.enter_context(each.hold())
        yield
    for each in optimizers:
        each.step()


class StepRun:
    """A module in training, and the copy it left behind.

    `late` names the parameters that the options "late" and "freeze" are about, `loss` computes a
    loss of the module and a batch.
    """

    def __init__(
        self,
        module: nn.Module,
        options: frozenset[str],
        optimizer: str,
        late: Sequence[str],
        loss: Loss = plain_loss,
    ) -> None:
        self.module, self.options, self.late, self.loss = module, options, late, loss
        self.kind = optimizer
        self.optimizers = self._make_optimizers()
        #: What was copied, as it was when it was copied.
        self.left: nn.Module | None = None
        self.num_steps = 0
        #: What backward runs in.
        self.around_backward: Callable[[nn.Module], Any] = contextlib.nullcontext
        #: Whether any parameter was changed.
        self.has_stepped = False

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        parameters = list(self.module.parameters())
        if "two" not in self.options or len(parameters) < 2:
            return [OPTIMIZERS[self.kind](parameters)]
        second = OPTIMIZERS[SECOND[self.kind]]
        return [OPTIMIZERS[self.kind](parameters[::2]), second(parameters[1::2])]

    def step(self, batches: Sequence[Any]) -> None:
        """One step of the optimizers, on one batch or several."""
        self._prepare()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none="zeros" not in self.options)
        for number, batch in enumerate(batches):
            with self._synchronised(last=number == len(batches) - 1):
                loss = self._loss(batch) / len(batches)
                with self.around_backward(self.module):
                    loss.backward()
        if "clip" in self.options:
            reached = [p for p in self.module.parameters() if p.grad is not None]
            nn.utils.clip_grad_norm_(reached, CLIP_NORM)
        for optimizer in self.optimizers:
            optimizer.step()
            self.has_stepped = True
        self.num_steps += 1
        if self.num_steps == 1:
            self._copy()

    def _prepare(self) -> None:
        """What changes between steps: which parameters are trained, and which are reached."""
        if hasattr(self.module, "reaches_spare"):
            reached = "sometimes" in self.options and self.num_steps == 1
            setattr(self.module, "reaches_spare", reached)  # noqa: B010
        if self.num_steps == 1 and self.options & {"late", "freeze"}:
            freeze(self.module, self.late, frozen="freeze" in self.options)

    def _loss(self, batch: Any) -> torch.Tensor:
        inputs = []
        if "penalty" in self.options:
            inputs = [value.detach().requires_grad_() for value in batch[:1]]
            batch = (*inputs, *batch[1:])
        autocast = torch.autocast("cpu", torch.bfloat16, enabled="autocast" in self.options)
        with autocast:
            loss = self.loss(self.module, batch)
        for value in inputs:
            (grad,) = torch.autograd.grad(loss, value, create_graph=True)
            # The mean, over the examples, of the square of what each one's own loss depends on it.
            loss = loss + PENALTY * value.shape[0] * grad.pow(2).sum()
        return loss

    @contextlib.contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if "no_sync" in self.options and not last:
                for inner in self.module.modules():
                    no_sync: Any = getattr(inner, "no_sync", None)
                    if no_sync is not None:
                        stack.enter_context(no_sync())
            yield

    def _copy(self) -> None:
        before = self.module
        if "copy" in self.options:
            self.module = copy.deepcopy(before)
        elif "pickle" in self.options:
            file = io.BytesIO()
            torch.save(before, file)
            file.seek(0)
            self.module = torch.load(file, weights_only=False)
        else:
            return
        self.left = before
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        self.optimizers = self._make_optimizers()
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def freeze(module: nn.Module, names: Sequence[str], frozen: bool) -> None:
    parameters = dict(module.named_parameters())
    for name in names:
        parameters[name].requires_grad_(not frozen)
        if frozen:
            parameters[name].grad = None
