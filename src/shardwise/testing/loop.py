"""The training loop that one device and many ranks both run: options, batches, losses."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise._torch.functions import tree_leaves, tree_map
from shardwise.core.world import current_world
from shardwise.embedding import EmbeddingBagCollection, EmbeddingCollection, Jagged
from shardwise.errors import ArgumentError, LayoutError
from shardwise.simulation.ranks import on_every_rank

#: What a training loop may do besides forward, backward and step.
OPTIONS: dict[str, str] = {
    "accumulate": "two batches a step, each reduced",
    "no_sync": "two batches a step, the first inside no_sync()",
    "clip": "gradients are clipped by their common norm",
    "recompute": "activations are computed again in backward",
    "autocast": "forward in bfloat16",
    "copy": "after a step, training goes on with a deep copy",
    "pickle": "after a step, training goes on with a pickled copy",
    "unused": "a layer that no step uses",
    "sometimes": "a layer that one step uses",
    "late": "parameters that are frozen at first",
    "freeze": "parameters that are frozen after a step",
    "two": "two optimizers share the parameters",
    "save": "saved by all ranks, loaded by one device",
    "penalty": "a gradient penalty, by double backward",
    "zeros": "gradients are set to zero, not to None",
    "clamp": "each entry of a gradient is clipped",
    "scale": "the loss is scaled, and gradients unscaled, by a GradScaler",
    "losses": "two losses of one forward, each with its backward",
    "pair": "two forwards, then a backward of each",
    "sum": "two forwards, then one backward",
    "inputs": "a backward for half of the parameters, then one for the others",
    "hooks": "hooks on parameters halve their gradients",
    "average": "a copy of the model follows as a moving average",
    "reload": "after the second step, the model is set back to the first",
    "evaluate": "a forward in evaluation mode before each step",
    "groups": "the optimizer has some parameters at first, and is given the rest",
    "added": "a layer that is added between steps",
}

#: Options that contradict each other.
EXCLUSIVE = (
    {"accumulate", "no_sync"},
    {"copy", "pickle"},
    {"unused", "sometimes"},
    {"unused", "added"},
    {"sometimes", "added"},
    # One device has no such layer to load it to, or to average it in.
    {"save", "added"},
    {"average", "added"},
    {"reload", "added"},
    {"average", "copy"},
    {"average", "pickle"},
    {"groups", "two"},
    {"groups", "copy"},
    {"groups", "pickle"},
    {"groups", "added"},
    {"losses", "pair"},
    {"losses", "sum"},
    {"losses", "inputs"},
    {"pair", "sum"},
    {"pair", "inputs"},
    {"sum", "inputs"},
    # A penalty of a scaled loss is not a scaled penalty.
    {"scale", "penalty"},
    {"late", "freeze"},
    {"autocast", "penalty"},
    # The second optimizer would divide by rounding errors.
    {"autocast", "two"},
    # Zeros are not None: frozen and unused parameters would still be decayed.
    {"zeros", "freeze"},
    # A GradScaler steps no optimizer whose parameters are all frozen; the second has few.
    {"scale", "two", "freeze"},
)


def agree(options: frozenset[str]) -> bool:
    return not any(several <= options for several in EXCLUSIVE)


CLIP_NORM = 0.1
CLIP_VALUE = 0.01
#: A power of two, which rounds nothing.
LOSS_SCALE = 8.0
#: The weight of the parameters in their moving average.
AVERAGED = 0.25
#: With "losses", "pair" and "sum", the loss is the sum of two with these weights.
WEIGHTS = (0.25, 0.75)
PENALTY = 0.05

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, eps=1e-6),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-6),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, eps=1e-6, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, eps=1e-6, fused=True),
}
#: With "two", every second parameter is left to this one.
SECOND = {
    "sgd": "adagrad",
    "adagrad": "sgd",
    "momentum": "adamw",
    "adamw": "momentum",
    "foreach": "fused",
    "fused": "foreach",
}

Loss = Callable[[nn.Module, Any], torch.Tensor]


def plain_loss(module: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(call(module, batch))


def collections_in(module: nn.Module) -> dict[str, Any]:
    """The collections of tables in a module, by their paths."""
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    return {path: each for path, each in module.named_modules() if isinstance(each, kinds)}


def sparse_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters with sparse gradients, which some optimizers and torch's clipping refuse."""
    found = [
        inner
        for inner in module.modules()
        if getattr(inner, "sparse", False) or getattr(inner, "_sparse", False)
    ]
    return list(dict.fromkeys(p for inner in found for p in inner.parameters()))


@contextlib.contextmanager
def updates_together(module: nn.Module) -> Iterator[None]:
    """Collections that update in backward make one update for all parts, as when sharded."""
    found: list[Any] = [getattr(inner, "optimizer", None) for inner in module.modules()]
    optimizers = [each for each in found if hasattr(each, "hold")]
    with contextlib.ExitStack() as stack:
        for each in optimizers:
            stack.enter_context(each.hold())
        yield
    for each in optimizers:
        each.step()


class StepRun:
    """The training loop that one device and many ranks both run.

    `late` names the parameters that the options "late" and "freeze" freeze; `loss` computes the
    loss of the module for a batch.
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
        self.kind, self.num_steps = optimizer, 0
        if "hooks" in options:
            for parameter in list(module.parameters())[::2]:
                if parameter.requires_grad:
                    parameter.register_hook(_halved)
        self.optimizers = self._make_optimizers()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE, enabled="scale" in options)
        #: The module that was copied and trains no further, or the moving average.
        self.left: nn.Module | None = copy.deepcopy(module) if "average" in options else None
        #: With "reload": what the module held after the first step.
        self.kept: dict[str, Any] = {}
        #: A context manager around backward.
        self.around_backward: Callable[[nn.Module], Any] = contextlib.nullcontext
        #: Whether any parameter has changed.
        self.has_stepped = False

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        parameters = list(self.module.parameters())
        if "groups" in self.options and self.num_steps == 0:
            parameters = parameters[::2]
        if "two" not in self.options or len(parameters) < 2:
            return [OPTIMIZERS[self.kind](parameters)]
        second = OPTIMIZERS[SECOND[self.kind]]
        return [OPTIMIZERS[self.kind](parameters[::2]), second(parameters[1::2])]

    def step(self, batches: Sequence[Any]) -> None:
        """One step of the optimizers, on one batch or several."""
        self._prepare()
        if "evaluate" in self.options:
            self.module.eval()
            with torch.no_grad():
                self.loss(self.module, batches[0])
            self.module.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none="zeros" not in self.options)
        for number, batch in enumerate(batches):
            with self._synchronised(last=number == len(batches) - 1):
                self._pass(batch, 1 / len(batches))
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        self._clip()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            self.has_stepped = True
        self.scaler.update()
        self.num_steps += 1
        self._after_step()

    def _pass(self, batch: Any, weight: float) -> None:
        """Forward and backward of a batch."""
        scaled: Callable[[torch.Tensor], torch.Tensor] = self.scaler.scale
        if self.options & {"pair", "sum"}:
            losses = [scaled(self._loss(batch) * (weight * w)) for w in WEIGHTS]
        else:
            losses = [scaled(self._loss(batch) * weight)]
        with self.around_backward(self.module):
            self._backward(losses)

    def _backward(self, losses: list[torch.Tensor]) -> None:
        if "losses" in self.options:
            (loss,) = losses
            (WEIGHTS[0] * loss).backward(retain_graph=True)
            (WEIGHTS[1] * loss).backward()
        elif "inputs" in self.options:
            (loss,) = losses
            trained = [p for p in self.module.parameters() if p.requires_grad]
            loss.backward(inputs=trained[::2], retain_graph=True)
            loss.backward(inputs=trained[1::2])
        elif "sum" in self.options:
            torch.stack(losses).sum().backward()
        else:
            for loss in losses:
                loss.backward()

    def _clip(self) -> None:
        reached = [p for p in self.module.parameters() if p.grad is not None]
        if "clip" in self.options:
            nn.utils.clip_grad_norm_(reached, CLIP_NORM)
        if "clamp" in self.options:
            nn.utils.clip_grad_value_(reached, CLIP_VALUE)

    def _after_step(self) -> None:
        if self.num_steps == 1:
            self._copy()
        if "average" in self.options and self.left is not None:
            ours, theirs = self.left.parameters(), self.module.parameters()
            with torch.no_grad():
                for average, parameter in zip(ours, theirs, strict=True):
                    average.lerp_(parameter, AVERAGED)
        if "reload" in self.options and self.num_steps == 1:
            self.kept = copy.deepcopy(self.module.state_dict())
        if "reload" in self.options and self.num_steps == 2:
            self.module.load_state_dict(self.kept)

    def _prepare(self) -> None:
        """Between steps: change which parameters are trained, and which are used."""
        if hasattr(self.module, "reaches_spare") and "added" not in self.options:
            reached = "sometimes" in self.options and self.num_steps == 1
            setattr(self.module, "reaches_spare", reached)  # noqa: B010
        if self.num_steps == 1 and self.options & {"late", "freeze"}:
            freeze(self.module, self.late, frozen="freeze" in self.options)
        if self.num_steps == 1 and "groups" in self.options:
            known = {id(p) for group in self.optimizers[0].param_groups for p in group["params"]}
            others = [p for p in self.module.parameters() if id(p) not in known]
            self.optimizers[0].add_param_group({"params": others, "lr": 0.01})
            self.optimizers[0].param_groups[0]["lr"] *= 0.5
        if self.num_steps == 1 and "added" in self.options:
            self._add_layer()

    def _add_layer(self) -> None:
        """A layer that no front door has seen."""
        module: Any = self.module
        with torch.random.fork_rng():
            torch.manual_seed(1)
            dtype = next(self.module.parameters()).dtype
            module.spare = nn.Linear(module.spare_width, module.spare_width, dtype=dtype)
        module.reaches_spare = True
        self.optimizers[0].add_param_group({"params": list(module.spare.parameters())})

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
            # The mean over the examples of the squared gradient of each one's own loss.
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


def _halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def freeze(module: nn.Module, names: Sequence[str], frozen: bool) -> None:
    parameters = dict(module.named_parameters())
    for name in names:
        parameters[name].requires_grad_(not frozen)
        if frozen:
            parameters[name].grad = None


# -- batches -------------------------------------------------------------------------------------
# Batches: split over data axes and given to ranks; calls of a module and their loss.


def split_batch(batch: Any, num_parts: int) -> list[Any]:
    """The batch in equal parts along dim 0 of each tensor; bags of ids are split alike.

    >>> split_batch({"x": torch.arange(4), "scale": 2}, 2)
    [{'x': tensor([0, 1]), 'scale': 2}, {'x': tensor([2, 3]), 'scale': 2}]
    """

    return [
        _map(functools.partial(_part, index=index, num_parts=num_parts), batch)
        for index in range(num_parts)
    ]


def part_of_batch(batch: Any, index: int, num_parts: int) -> Any:
    """One of the equal parts of a batch, copied."""
    part = split_batch(batch, num_parts)[index]
    return _map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, part)


def per_rank(parts: list[Any], index_of: Callable[[int], int]) -> Any:
    """Each rank's part of a batch, with the number `index_of(rank)`.

    In a simulated world, tensors of all ranks; in a process, its own part.
    """
    first, *others = current_world().present
    if not others or len(parts) == 1:
        return parts[index_of(first)]
    return _map(lambda *leaves: _on_ranks(leaves, index_of), *parts)


def _on_ranks(leaves: Sequence[Any], index_of: Callable[[int], int]) -> Any:
    """One leaf of a batch, as each rank's own part."""
    first = leaves[0]
    if isinstance(first, torch.Tensor):
        return on_every_rank(lambda rank: leaves[index_of(rank)])
    if isinstance(first, Jagged):
        fields = {
            name: _on_ranks([getattr(leaf, name) for leaf in leaves], index_of)
            for name in ("values", "lengths", "weights")
        }
        return Jagged(first.features, **fields)
    return first


def call(module: Callable[..., Any], batch: Any) -> Any:
    """The module called with a batch: a tuple is its arguments, a dict its keyword arguments."""
    if isinstance(batch, tuple):
        return module(*batch)
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(batch)


def loss_of(output: Any) -> torch.Tensor:
    """The output if it is a scalar, its `loss`, or else the mean square of its tensors."""
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if isinstance(output, Mapping):
        loss = output.get("loss")
    if isinstance(loss, torch.Tensor) and not loss.dim():
        return loss
    tensors = tensors_of(output)
    floating = [leaf for leaf in tensors if leaf.is_floating_point()]
    if not floating:
        found = ", ".join(sorted({str(leaf.dtype) for leaf in tensors})) or type(output).__name__
        raise ArgumentError(
            f"The module should return a loss, or tensors of floats to make one of; found {found}."
        )
    return sum((leaf.pow(2).mean() for leaf in floating), torch.zeros(()))


def tensors_of(output: Any) -> list[torch.Tensor]:
    if not isinstance(output, (torch.Tensor, Mapping, tuple, list)) and hasattr(output, "__dict__"):
        output = vars(output)
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _map(fn: Callable[..., Any], *batches: Any) -> Any:
    return tree_map(fn, *batches, is_leaf=lambda value: isinstance(value, Jagged))


def _part(value: Any, index: int, num_parts: int) -> Any:
    if isinstance(value, Jagged):
        return _bags(value, index, num_parts)
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or num_parts == 1:
        return value
    _even(value.shape[0], num_parts)
    size = value.shape[0] // num_parts
    return value[index * size : (index + 1) * size]


def _even(size: int, num_parts: int) -> None:
    if size % num_parts:
        raise LayoutError(
            f"A batch of {size} examples does not divide among {num_parts} data-parallel ranks. "
            f"Let the factory return a batch of a multiple of {num_parts}, or use fewer ranks."
        )


def _bags(batch: Jagged, index: int, num_parts: int) -> Jagged:
    """The bags of some examples, of all features."""
    num_features = len(batch.features)
    num_bags = len(batch.lengths) // num_features
    _even(num_bags, num_parts)
    size = num_bags // num_parts
    start = torch.zeros(len(batch.lengths) + 1, dtype=torch.int64)
    torch.cumsum(batch.lengths, 0, out=start[1:])
    values, lengths, weights = [], [], []
    for feature in range(num_features):
        first = feature * num_bags + index * size
        ids = slice(int(start[first]), int(start[first + size]))
        lengths.append(batch.lengths[first : first + size])
        values.append(batch.values[ids])
        if batch.weights is not None:
            weights.append(batch.weights[ids])
    return Jagged(
        batch.features,
        torch.cat(values),
        lengths=torch.cat(lengths),
        weights=torch.cat(weights) if weights else None,
    )
