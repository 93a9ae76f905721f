"""ExpertParallel and expert_parallel: a mixture of experts, sharded by experts.

Note [Experts]
Every rank has all tokens and some of the experts. It selects the (token, expert) pairs of its
experts, runs the module's own forward on them, as if the module had only these experts, and adds
the results by token. The ranks' outputs are terms of a sum, as after a rowwise layer. The number of
pairs is data-dependent, so the forward runs on plain tensors.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import collectives
from shardwise.comm.agreement import agreeing
from shardwise.comm.watch import because
from shardwise.core.mesh import Coordinate, Grid, grid_of
from shardwise.core.placements import REPLICATE, Partial, Placement, Shard
from shardwise.core.sizes import lengths
from shardwise.core.untraced import UntracedFunction, breaks_graph
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError, UnsupportedError
from shardwise.lookup.exchange import on_host
from shardwise.parallel.context import declare_data_axis
from shardwise.parallel.style import (
    TENSOR_AXIS,
    ModuleBoundary,
    ParallelStyle,
    Scale,
    named_axis,
    owner_of,
)
from shardwise.plans import modules_at
from shardwise.simulation.ranks import each_rank, on_plain_ranks, one_part, sized


class ExpertParallel(ParallelStyle):
    """Shard a stack of experts: each rank holds some of them, and gets every token.

    The module's parameters stack the weights of all experts along dim 0, their number is in
    `num_experts`, and its forward takes `(tokens, experts_of_tokens, weights_of_experts)` of shapes
    `(num_tokens, width)` and twice `(num_tokens, num_chosen)`. The experts of Hugging Face's
    mixtures are such modules. The ranks' outputs are added, with the default `output_layouts` of
    `Replicate()` by an all-reduce. Backward does the same for the gradients of the tokens and of
    their weights.

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
                "dims whose dim 0 counts them. If each expert is a separate module, name the "
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
        self.place_parameters(module, boundary)
        output = self.output_layouts or REPLICATE
        local = _LocalExperts(boundary, _names(module), output, self.use_local_output)
        # With the module as an argument, so that a copy of the module calls the copy.
        module.forward = functools.partial(local.run, module)
        return module


@dataclass(frozen=True, slots=True)
class _LocalExperts:
    """Runs a module with the experts of one rank; see Note [Experts]."""

    boundary: ModuleBoundary
    names: tuple[str, ...]
    output: Placement
    local: bool

    def run(self, module: nn.Module, tokens: Any, experts: Any, weights: Any) -> Any:
        boundary = self.boundary
        check_inputs(boundary.where, tokens, experts, weights)
        x = boundary.enter(tokens, REPLICATE, REPLICATE, "tokens")
        chosen = boundary.enter(experts, REPLICATE, REPLICATE, "the experts of the tokens")
        scales = boundary.enter(weights, REPLICATE, REPLICATE, "the weights of the experts")
        held = _local_parameters(module, self.names)
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

    def _here(
        self,
        module: nn.Module,
        coordinate: Coordinate,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        *held: torch.Tensor,
    ) -> torch.Tensor:
        first, end = _bounds(module, self.boundary)[coordinate[self.boundary.axis] :][:2]
        token, slot = ((experts >= first) & (experts < end)).nonzero(as_tuple=True)
        pairs = (tokens[token], experts[token, slot], weights[token, slot])
        terms = _results(module, self.names, (first, end), *pairs, held)
        out = torch.zeros_like(tokens).index_add(0, token, terms)
        return KeptInGraph.apply(out, tokens, weights, *held)


def check_inputs(where: str, *inputs: Any) -> None:
    shapes = [tuple(getattr(x, "shape", ())) for x in inputs]
    tokens, experts, weights = shapes
    if len(tokens) != 2 or len(experts) != 2 or experts != weights or experts[0] != tokens[0]:
        raise LayoutError(
            f"{where}: ExpertParallel takes tokens of shape (num_tokens, width), and the experts "
            "of each token and their weights, both (num_tokens, num_chosen); "
            f"found {', '.join(map(str, shapes))}."
        )


def _names(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, _ in module.named_parameters())


def _local_parameters(
    module: nn.Module, names: Sequence[str], same: int | None = None, share: float = 1.0
) -> list[torch.Tensor]:
    """The local shards of parameters; their gradients count `share` times.

    Along axes that do not shard it, the gradient of a parameter is a term of a sum; but along the
    axis `same`, ranks have the same one.
    """
    found = []
    for name in names:
        owner, key = owner_of(module, name)
        parameter: Any = getattr(owner, key)
        grads = [
            p if p.is_shard() or axis == same else Partial()
            for axis, p in enumerate(parameter.placements)
        ]
        if share != 1 and parameter.requires_grad:
            parameter = Scale.apply(parameter, 1.0, share)
        found.append(parameter.to_local(grad_placements=grads))
    return found


def _bounds(module: nn.Module, boundary: ModuleBoundary) -> list[int]:
    """The first expert of each rank along the axis, and one past the last."""
    count: Any = module.num_experts
    sizes = lengths(count, boundary.mesh.size(boundary.axis), None)
    return list(itertools.accumulate(sizes, initial=0))


def _results(
    module: nn.Module,
    names: Sequence[str],
    span: tuple[int, int],
    rows: torch.Tensor,
    chosen: torch.Tensor,
    scales: torch.Tensor,
    held: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The results of the experts of `span` for rows, each with its expert and weight."""
    if not rows.shape[0]:
        return torch.zeros_like(rows)
    first, end = span
    with _holding(module, names, end - first, held):
        own = (chosen - first).unsqueeze(-1)
        return type(module).forward(module, rows, own, scales.unsqueeze(-1)).to(rows.dtype)


@contextlib.contextmanager
def _holding(
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


class KeptInGraph(UntracedFunction):
    """Returns the first tensor, and keeps the others in its autograd graph, used or not.

    So a rank whose experts no token chose still runs the collectives of backward, and of a second
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


# Note [Tokens travel]
# Along the axis each rank has its own tokens and some of the experts. Each pair of a token and an
# expert that it chose is sent to the rank of the expert, which runs the module's own forward on
# what arrives, as if the module had only its experts. The results are sent back and added by token.
# The ranks first exchange how many pairs they send. So the axis is a data axis for everything else,
# and the gradient of an expert, which sees the tokens of all ranks, is divided by the number of
# losses.


def expert_parallel(
    module: nn.Module,
    device_mesh: DeviceMesh,
    experts: str | Sequence[str],
    *,
    axis: str = "ep",
    capacity_factor: float | None = None,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Give the ranks along `axis`, each with its own tokens, some of the experts; in place.

    `experts` has the paths, or patterns, of modules as `ExpertParallel` takes them: stacks of
    parameters, `num_experts`, and a forward of `(tokens, experts_of_tokens, weights_of_experts)`.
    All-to-alls bring each token to the ranks of its experts and the results back; ranks may have
    different numbers of tokens. The gradients of all other parameters of `module` are averaged
    along the axis, as by `data_parallel`, which explains `src_data_rank` too.

    Without `capacity_factor` no token is dropped. With it, each expert takes at most
    `ceil(capacity_factor * num_tokens * num_chosen / num_experts)` tokens of each rank, the first
    ones, and the others get nothing from that expert. Numbers below 0 or from `num_experts` on
    stand for no expert.

    >>> import shardwise, torch
    >>> from shardwise.parallel import expert_parallel
    >>> class Experts(torch.nn.Module):
    ...     def __init__(self, num_experts, width):
    ...         super().__init__()
    ...         self.num_experts = num_experts
    ...         self.matrices = torch.nn.Parameter(torch.randn(num_experts, width, width))
    ...     def forward(self, tokens, experts, weights):
    ...         each = torch.einsum("tkoi,ti->tko", self.matrices[experts], tokens)
    ...         return (each * weights.unsqueeze(-1)).sum(1)
    >>> experts, tokens = Experts(6, 4), torch.randn(10, 4)
    >>> chosen, weights = torch.randint(6, (10, 2)), torch.rand(10, 2)
    >>> expected = experts(tokens, chosen, weights)
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    ...     experts = expert_parallel(experts, mesh, "")
    ...     mine = [
    ...         shardwise.LocalTensor.per_rank(lambda rank, x=x: x.chunk(2)[rank])
    ...         for x in (tokens, chosen, weights)
    ...     ]
    ...     found = experts(*mine)
    >>> torch.testing.assert_close(found.on_rank(1), expected[5:])
    >>> experts.matrices.placements
    (Shard(0),)
    """
    number = named_axis(device_mesh, axis, "expert_parallel")
    if axis == TENSOR_AXIS:
        raise ArgumentError(
            f"expert_parallel: ranks along {axis!r} have the same tokens, and nothing has to be "
            'sent. Use parallelize_module with the style "experts" there.'
        )
    with agreeing(grid_of(device_mesh[axis]), "expert_parallel") as request:
        request.append(f"capacity_factor={capacity_factor}, src_data_rank={src_data_rank}")
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ArgumentError(
                f"capacity_factor is positive and finite, or None, found {capacity_factor!r}."
            )
        styles = _expert_styles(module, experts)
    for match, style in styles:
        style.src_data_rank = src_data_rank
        boundary = ModuleBoundary(device_mesh, number, style.path)
        style.place_parameters(match, boundary)
        exchange = _Exchange(boundary, _names(match), capacity_factor)
        # With the module as an argument, so that a copy of the module calls the copy.
        match.forward = functools.partial(exchange.run, match)
    declare_data_axis(module, device_mesh[axis], src_data_rank)
    return module


def _expert_styles(
    module: nn.Module, experts: str | Sequence[str]
) -> list[tuple[nn.Module, ExpertParallel]]:
    """The modules to change, and the styles that place their parameters; nothing is changed yet."""
    found = []
    for path, match in modules_at(module, experts, "expert_parallel"):
        style = ExpertParallel()
        style.path = path
        style.check(match)
        if "forward" in match.__dict__ or any(isinstance(p, DTensor) for p in match.parameters()):
            raise LayoutError(
                f"expert_parallel: {style.where} is parallel already. Name its experts once, and "
                "not in a plan as well."
            )
        found.append((match, style))
    return found


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Runs a stack of experts along one axis; see Note [Tokens travel]."""

    boundary: ModuleBoundary
    names: tuple[str, ...]
    capacity_factor: float | None

    def run(self, module: nn.Module, tokens: Any, experts: Any, weights: Any) -> Any:
        where, axis = self.boundary.where, self.boundary.axis
        for x in (tokens, experts, weights):
            if isinstance(x, DTensor):
                raise UnsupportedError(
                    f"{where}: expert_parallel takes each rank's own tokens as plain tensors, "
                    'found a DTensor. Use to_local(), or the style "experts" for tokens that '
                    "ranks share."
                )
        check_inputs(where, *map(one_part, (tokens, experts, weights)))
        grid = grid_of(self.boundary.mesh)
        pair, sent = self._routed(module, grid, experts)
        num_sent = on_host(grid, sent)
        with because("expert_parallel", implicit=False):
            arriving = collectives.all_to_all(sent.unsqueeze(1), grid, axis).squeeze(1)
            ways = (num_sent, on_host(grid, arriving), grid, axis)
            rows = Exchanged.apply(on_plain_ranks(grid, _tokens_of, tokens, pair, experts), *ways)
            scales = Exchanged.apply(on_plain_ranks(grid, _entries, weights, pair), *ways)
            chosen = Exchanged.apply(on_plain_ranks(grid, _entries, experts, pair), *ways)
        axes = grid.axis_names or ()
        same = axes.index(TENSOR_AXIS) if TENSOR_AXIS in axes else None
        num_losses = math.prod(grid.shape) // (1 if same is None else grid.shape[same])
        # A gradient is of all losses, and counts as that of their mean.
        held = _local_parameters(module, self.names, same, 1 / num_losses)
        here = functools.partial(self._here, module)
        terms = on_plain_ranks(grid, here, rows, scales, chosen, *held)
        back = (ways[1], ways[0], grid, axis)
        with because("expert_parallel", implicit=False):
            returned = Exchanged.apply(terms, *back)
        return on_plain_ranks(grid, _added, tokens, returned, pair, experts)

    breaks_graph(run, "the number of tokens that ranks exchange is known only when it runs")

    def _routed(self, module: nn.Module, grid: Grid, experts: Any) -> Any:
        """The pairs of a token and an expert by the expert's rank, and their number for each.

        A pair is encoded as a number: the token's number times the experts per token, plus the
        expert's position among them.
        """
        bounds = _bounds(module, self.boundary)
        count = bounds[-1]

        def route(_: Coordinate, experts: torch.Tensor) -> Any:
            chosen, pair = experts.reshape(-1).long().sort(stable=True)
            # An expert that does not exist, such as one past the last, means "none" in some models.
            exists = (chosen >= 0) & (chosen < count)
            chosen, pair = chosen[exists], pair[exists]
            if self.capacity_factor is not None:
                starts = torch.searchsorted(chosen, torch.arange(count, device=chosen.device))
                place = torch.arange(len(chosen), device=chosen.device) - starts[chosen]
                kept = place < math.ceil(self.capacity_factor * experts.numel() / count)
                chosen, pair = chosen[kept], pair[kept]
            edges = torch.searchsorted(chosen, torch.tensor(bounds, device=chosen.device))
            return pair, edges.diff()

        return each_rank(grid, route, experts.detach(), axes=())

    def _here(
        self,
        module: nn.Module,
        coordinate: Coordinate,
        rows: torch.Tensor,
        scales: torch.Tensor,
        chosen: torch.Tensor,
        *held: torch.Tensor,
    ) -> torch.Tensor:
        """Runs the experts of one rank on the rows that arrived."""
        first, end = _bounds(module, self.boundary)[coordinate[self.boundary.axis] :][:2]
        out = _results(module, self.names, (first, end), rows, chosen, scales, held)
        return KeptInGraph.apply(out, rows, scales, *held)


def _tokens_of(_: Coordinate, tokens: Any, pair: torch.Tensor, experts: torch.Tensor) -> Any:
    return tokens[pair // experts.shape[1]]


def _entries(_: Coordinate, x: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1)[pair]


def _added(
    _: Coordinate, tokens: torch.Tensor, terms: Any, pair: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """The results of a token's experts, added."""
    return torch.zeros_like(tokens).index_add(0, pair // experts.shape[1], terms)


class Exchanged(UntracedFunction):
    """Sends these numbers of rows to the ranks along an axis; gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, num_sent: list[Any], num_received: list[Any], grid: Grid, axis: int
    ) -> Any:
        ctx.ways = (num_received, num_sent, grid, axis)
        return sized(collectives.all_to_all_uneven(x, num_sent, num_received, grid, axis))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        with because("expert_parallel", implicit=False):
            return Exchanged.apply(grad, *ctx.ways), None, None, None, None
