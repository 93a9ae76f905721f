"""ExpertParallel: a mixture of experts, sharded by experts.

Note [Experts]
Every rank has all tokens and some of the experts. It selects the (token, expert) pairs of its
experts, runs the module's own forward on them, as if the module had only these experts, and adds
the results by token. The ranks' outputs are terms of a sum, as after a rowwise layer. The number of
pairs is data-dependent, so the forward runs on plain tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.mesh import Coordinate
from shardwise.core.placements import REPLICATE, Partial, Placement, Shard
from shardwise.core.untraced import UntracedFunction, breaks_graph
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError, UnsupportedError
from shardwise.parallel.boundary import ModuleBoundary
from shardwise.parallel.style import ParallelStyle, owner_of
from shardwise.simulation.ranks import on_plain_ranks


class ExpertParallel(ParallelStyle):
    """Shard a stack of experts: each rank holds some of them, and gets every token.

    For a module whose parameters stack the weights of all experts along dim 0, with their number in
    `num_experts`, and whose forward takes `(tokens, experts_of_tokens, weights_of_experts)` of
    shapes `(num_tokens, width)` and twice `(num_tokens,
    num_chosen)`: the experts of Hugging Face's mixtures. The outputs of the ranks are added: by an
    all-reduce to the default `output_layouts` of `Replicate()`. Backward does the same for the
    gradients of the tokens and of their weights.

    >>> import shardwise, torch
    >>> from shardwise.parallel import ExpertParallel, parallelize_module
    >>> class Experts(torch.nn.Module):
    ...     def __init__(self, num_experts, width):
    ...         super().__init__()
    ...         self.num_experts = num_experts
    ...         self.matrices = torch.nn.Parameter(torch.randn(num_experts, width, width))
    ...     def forward(self, tokens, experts, weights):
    ...         each = torch.einsum("tkoi,ti->tko", self.matrices[experts], tokens)
    ...         return (each * weights.unsqueeze(-1)).sum(1)
    >>> experts, tokens = Experts(6, 4), torch.randn(5, 4)
    >>> chosen, weights = torch.randint(6, (5, 2)), torch.rand(5, 2)
    >>> expected = experts(tokens, chosen, weights)
    >>> with shardwise.simulate(4):
    ...     mesh = shardwise.init_device_mesh("cpu", (4,))
    ...     experts = parallelize_module(experts, mesh, ExpertParallel())
    ...     torch.testing.assert_close(experts(tokens, chosen, weights).agreed(), expected)
    >>> experts.matrices.placements
    (Shard(0),)
    """

    decides = ("parameters", "input", "output")

    def __init__(
        self, *, output_layouts: Placement | None = None, use_local_output: bool = True
    ) -> None:
        if output_layouts is not None and not isinstance(output_layouts, Placement):
            raise ArgumentError(
                f"ExpertParallel(output_layouts=...) takes one placement, found {output_layouts!r}."
            )
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    def check(self, module: nn.Module) -> None:
        if not any(p.is_shard() for p in self.parameter_placements(module).values()):
            raise UnsupportedError(
                f"{self.where} is a {type(module).__name__} without stacked experts: "
                "ExpertParallel is for a module with `num_experts` and parameters of two or more "
                "dims whose dim 0 counts them. Where each expert is a module of its own, name the "
                "layers inside it in the plan."
            )
        super().check(module)

    def parameter_placements(self, module: nn.Module) -> Mapping[str, Placement]:
        count = getattr(module, "num_experts", None)
        return {
            name: Shard(0) if p.dim() > 1 and p.shape[0] == count else REPLICATE
            for name, p in module.named_parameters()
        }

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        boundary = self.boundary(device_mesh)
        stacked = tuple(self.parameter_placements(module).items())
        self.place_parameters(module, boundary)
        local = _LocalExperts(
            boundary, stacked, self.output_layouts or REPLICATE, self.use_local_output
        )
        # With the module as an argument, so that a copy of the module calls the copy.
        module.forward = functools.partial(local.run, module)
        return module


@dataclass(frozen=True, slots=True)
class _LocalExperts:
    """Runs a module with the experts of one rank; see Note [Experts]."""

    boundary: ModuleBoundary
    parameters: tuple[tuple[str, Placement], ...]
    output: Placement
    local: bool

    def run(self, module: nn.Module, tokens: Any, experts: Any, weights: Any) -> Any:
        boundary = self.boundary
        check_inputs(boundary.where, tokens, experts, weights)
        x = boundary.enter(tokens, REPLICATE, REPLICATE, "tokens")
        chosen = boundary.enter(experts, REPLICATE, REPLICATE, "the experts of the tokens")
        scales = boundary.enter(weights, REPLICATE, REPLICATE, "the weights of the experts")
        held = [self._local_parameter(module, name) for name, _ in self.parameters]
        layout = x._layout
        term = [*x.placements]
        term[boundary.axis] = Partial()
        inputs = [
            x.to_local(grad_placements=term),
            chosen.to_local(),
            scales.to_local(grad_placements=term),
        ]

        def here(coordinate: Coordinate, *plain: torch.Tensor) -> torch.Tensor:
            return self._here(module, coordinate, *plain)

        out = on_plain_ranks(layout.grid, here, *inputs, *held)
        made = DTensor.from_local(
            out, layout.grid.mesh, term, shape=layout.shape, stride=layout.stride
        )
        return boundary.leave(made, self.output, self.local)

    breaks_graph(run, "the number of tokens of each rank's experts is known only when it runs")

    def _local_parameter(self, module: nn.Module, name: str) -> torch.Tensor:
        """A parameter's local shard; its gradient is a term of a sum where it is replicated."""
        owner, key = owner_of(module, name)
        parameter: Any = getattr(owner, key)
        grads = [p if p.is_shard() else Partial() for p in parameter.placements]
        return parameter.to_local(grad_placements=grads)

    def _here(
        self,
        module: nn.Module,
        coordinate: Coordinate,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        *held: torch.Tensor,
    ) -> torch.Tensor:
        first, count = self._range(module, coordinate)
        token, slot = ((experts >= first) & (experts < first + count)).nonzero(as_tuple=True)
        out = torch.zeros_like(tokens)
        if token.numel():
            mine = experts[token, slot].sub(first).unsqueeze(-1)
            with holding(module, [name for name, _ in self.parameters], count, held):
                terms = type(module).forward(
                    module, tokens[token], mine, weights[token, slot].unsqueeze(-1)
                )
            out = out.index_add(0, token, terms.to(out.dtype))
        return Reached.apply(out, tokens, weights, *held)

    def _range(self, module: nn.Module, coordinate: Coordinate) -> tuple[int, int]:
        """The first expert of a rank, and their number."""
        stacked = next(name for name, placement in self.parameters if placement.is_shard())
        owner, key = owner_of(module, stacked)
        parameter: Any = getattr(owner, key)
        offset, shape = parameter._layout.box(coordinate)
        return int(offset[0]), int(shape[0])


def check_inputs(where: str, *inputs: Any) -> None:
    shapes = [tuple(getattr(x, "shape", ())) for x in inputs]
    tokens, experts, weights = shapes
    if len(tokens) != 2 or len(experts) != 2 or experts != weights or experts[0] != tokens[0]:
        raise LayoutError(
            f"{where}: ExpertParallel takes tokens of shape (num_tokens, width), and the experts "
            "of each token and their weights, both (num_tokens, num_chosen); "
            f"found {', '.join(map(str, shapes))}."
        )


@contextlib.contextmanager
def holding(
    module: nn.Module, names: Sequence[str], count: int, held: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Inside, the module has `count` experts, and plain tensors for the parameters `names`."""
    owners = [owner_of(module, name) for name in names]
    changed: list[tuple[nn.Module, str, Any]] = [(module, "num_experts", count)]
    changed += [(o, key, part) for (o, key), part in zip(owners, held, strict=True)]
    before = [owner.__dict__.get(key, _ABSENT) for owner, key, _ in changed]
    # An attribute of the instance hides the parameter of that name.
    for owner, key, value in changed:
        owner.__dict__[key] = value
    try:
        yield
    finally:
        for (owner, key, _), value in zip(changed, before, strict=True):
            if value is _ABSENT:
                del owner.__dict__[key]
            else:
                owner.__dict__[key] = value


_ABSENT = object()


class Reached(UntracedFunction):
    """The first tensor; the others get a gradient even where they were not used.

    A rank whose experts no token chose still runs the collectives of backward, also of a second
    backward.
    """

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.num_others = len(others)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*others)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return grad, *([None] * ctx.num_others)
        others = ctx.saved_tensors
        return grad, *_Zeros.apply(len(others), *others, grad)


class _Zeros(UntracedFunction):
    """Zeros like the first `num` tensors, with all tensors in their autograd history."""

    @staticmethod
    def forward(ctx: Any, num: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*tensors)
        return tuple(torch.zeros_like(tensor) for tensor in tensors[:num])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        return None, *_Zeros.apply(len(tensors), *tensors, *grads)
