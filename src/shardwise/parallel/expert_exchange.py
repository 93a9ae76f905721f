"""expert_parallel: experts on ranks that each have tokens of their own.

Note [Tokens travel]
Along the axis each rank has its own tokens and some of the experts. Each pair of a token and an
expert that it chose is sent to the rank of the expert, which runs the module's own forward on what
arrives, as if the module had only its experts. The results are sent back and added by token. The
ranks first exchange how many pairs they send. So the axis is a data axis for everything else, and
the gradient of an expert, which sees the tokens of all ranks, is divided by the number of losses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.mesh import Coordinate, Grid, grid_of
from shardwise.core.placements import Partial, Placement, Shard
from shardwise.core.sizes import lengths
from shardwise.core.untraced import UntracedFunction, breaks_graph
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError, UnsupportedError
from shardwise.lookup.exchange import on_host
from shardwise.parallel.boundary import TENSOR_AXIS, ModuleBoundary, Scale
from shardwise.parallel.context import declare_data_axis
from shardwise.parallel.experts import ExpertParallel, Reached, check_inputs, holding
from shardwise.parallel.style import owner_of
from shardwise.plans import matching_modules, no_match
from shardwise.simulation.parts import one_part, sized
from shardwise.simulation.ranks import each_rank, on_plain_ranks


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

    `experts` are the paths, or patterns, of modules as `ExpertParallel` takes them: stacks of
    parameters, `num_experts`, and a forward of `(tokens, experts_of_tokens, weights_of_experts)`.
    All-to-alls bring each token to the ranks of its experts and the results back; every rank may
    have another number of tokens. All other parameters of `module` are averaged along the axis, as
    by `data_parallel`, which explains `src_data_rank` too.

    Without `capacity_factor` no token is dropped. With it, each expert takes at most
    `ceil(capacity_factor * num_tokens * num_chosen / num_experts)` tokens of each rank, the first
    ones, and the others get nothing from that expert.

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
    names = device_mesh.mesh_dim_names or ()
    if axis not in names:
        raise ArgumentError(
            f"expert_parallel: the mesh has no axis {axis!r}, only {', '.join(names) or 'unnamed'}"
            "; name one: init_device_mesh(device, (2, 4), mesh_dim_names=('dp', 'ep'))."
        )
    if axis == TENSOR_AXIS:
        raise ArgumentError(
            f"expert_parallel: ranks along {axis!r} have the same tokens, and nothing has to be "
            'sent. Use parallelize_module with the style "experts" there.'
        )
    if capacity_factor is not None and not capacity_factor > 0:
        raise ArgumentError(f"capacity_factor is positive or None, found {capacity_factor!r}.")
    found = _expert_modules(module, experts)
    grid = grid_of(device_mesh)
    for path, match in found:
        _distribute(path, match, grid, names.index(axis), capacity_factor, src_data_rank)
    declare_data_axis(module, device_mesh[axis], src_data_rank)
    return module


def _expert_modules(module: nn.Module, experts: str | Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The modules to change; raises before anything is changed."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for pattern in [experts] if isinstance(experts, str) else experts:
        matches = matching_modules(module, pattern)
        if not matches:
            raise LayoutError(f"expert_parallel: {no_match(module, pattern)}")
        for path, match in matches:
            style = ExpertParallel()
            style.path = path
            style.check(match)
            if "forward" in match.__dict__ or any(
                isinstance(p, DTensor) for p in match.parameters()
            ):
                raise LayoutError(
                    f"expert_parallel: {style.where} is parallel already. Name its experts once, "
                    "and not in a plan as well."
                )
            found[id(match)] = (path, match)
    return list(found.values())


def _distribute(
    path: str,
    module: nn.Module,
    grid: Grid,
    axis: int,
    capacity_factor: float | None,
    src_data_rank: int | None,
) -> None:
    style = ExpertParallel()
    style.path, style.src_data_rank = path, src_data_rank
    boundary = ModuleBoundary(grid.mesh, axis, path)
    placed = style.parameter_placements(module)
    style.place_parameters(module, boundary)
    exchange = _Exchange(grid, axis, path, tuple(placed.items()), capacity_factor)
    # With the module as an argument, so that a copy of the module calls the copy.
    module.forward = functools.partial(_run, module, exchange)


def _run(module: nn.Module, exchange: _Exchange, tokens: Any, experts: Any, weights: Any) -> Any:
    return exchange.run(module, tokens, experts, weights)


breaks_graph(_run, "the number of tokens that ranks exchange is known only when it runs")


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Runs a stack of experts along one axis; see Note [Tokens travel]."""

    grid: Grid
    axis: int
    path: str
    parameters: tuple[tuple[str, Placement], ...]
    capacity_factor: float | None

    @property
    def _num_losses(self) -> int:
        names = self.grid.axis_names or ()
        shared = self.grid.shape[names.index(TENSOR_AXIS)] if TENSOR_AXIS in names else 1
        return math.prod(self.grid.shape) // shared

    def run(self, module: nn.Module, tokens: Any, experts: Any, weights: Any) -> Any:
        where = f"Module {self.path!r}" if self.path else "The root module"
        for x in (tokens, experts, weights):
            if isinstance(x, DTensor):
                raise UnsupportedError(
                    f"{where}: expert_parallel takes each rank's own tokens as plain tensors, "
                    'found a DTensor. Use to_local(), or the style "experts" for tokens that '
                    "ranks share."
                )
        check_inputs(where, *map(one_part, (tokens, experts, weights)))
        grid = self.grid
        pair, sent = self._routed(module, experts)
        num_sent = on_host(grid, sent)
        with because("expert_parallel", implicit=False):
            arriving = collectives.all_to_all(sent.unsqueeze(1), grid, self.axis).squeeze(1)
            ways = (num_sent, on_host(grid, arriving), grid, self.axis)
            rows = Exchanged.apply(on_plain_ranks(grid, _tokens_of, tokens, pair, experts), *ways)
            scales = Exchanged.apply(on_plain_ranks(grid, _entries, weights, pair), *ways)
            chosen = Exchanged.apply(on_plain_ranks(grid, _entries, experts, pair), *ways)
        held = [self._local_parameter(module, name) for name, _ in self.parameters]
        terms = on_plain_ranks(
            grid, functools.partial(self._here, module), rows, scales, chosen, *held
        )
        back = (ways[1], ways[0], grid, self.axis)
        with because("expert_parallel", implicit=False):
            returned = Exchanged.apply(terms, *back)
        return on_plain_ranks(grid, _added, tokens, returned, pair, experts)

    def _bounds(self, module: nn.Module) -> list[int]:
        """The first expert of each rank along the axis, and one past the last."""
        count: Any = module.num_experts
        bounds = [0]
        for size in lengths(count, self.grid.shape[self.axis], None):
            bounds.append(bounds[-1] + size)
        return bounds

    def _routed(self, module: nn.Module, experts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The pairs of a token and an expert by the expert's rank, and their number for each.

        A pair is a number: that of the token times the experts of a token, plus the place among
        them.
        """
        bounds, count = self._bounds(module), int(module.num_experts)  # type: ignore[arg-type]

        def route(_: Coordinate, experts: torch.Tensor) -> Any:
            flat = experts.reshape(-1)
            chosen, pair = flat.sort(stable=True)
            if self.capacity_factor is not None:
                starts = torch.searchsorted(chosen, torch.arange(count, device=flat.device))
                place = torch.arange(flat.numel(), device=flat.device) - starts[chosen]
                kept = place < math.ceil(self.capacity_factor * flat.numel() / count)
                chosen, pair = chosen[kept], pair[kept]
            # One past the last is an expert that does not exist: some models mean "none" by it.
            edges = torch.searchsorted(chosen, torch.tensor(bounds, device=flat.device))
            return pair[: edges[-1]], edges.diff()

        return each_rank(self.grid, route, experts.detach(), axes=())

    def _local_parameter(self, module: nn.Module, name: str) -> torch.Tensor:
        """A parameter's local shard; its gradient is of all losses, and counts as their mean."""
        owner, key = owner_of(module, name)
        parameter: Any = getattr(owner, key)
        names = self.grid.axis_names or ()
        grads: list[Placement] = [
            p if isinstance(p, Shard) or names[a : a + 1] == (TENSOR_AXIS,) else Partial()
            for a, p in enumerate(parameter.placements)
        ]
        if parameter.requires_grad:
            parameter = Scale.apply(parameter, 1.0, 1 / self._num_losses)
        return parameter.to_local(grad_placements=grads)

    def _here(
        self,
        module: nn.Module,
        coordinate: Coordinate,
        rows: torch.Tensor,
        scales: torch.Tensor,
        chosen: torch.Tensor,
        *held: torch.Tensor,
    ) -> torch.Tensor:
        """The experts of one rank on what arrived."""
        first, end = self._bounds(module)[coordinate[self.axis] :][:2]
        out = torch.zeros_like(rows)
        if rows.shape[0]:
            names = [name for name, _ in self.parameters]
            with holding(module, names, end - first, held):
                own = (chosen - first).unsqueeze(-1)
                out = type(module).forward(module, rows, own, scales.unsqueeze(-1)).to(rows.dtype)
        return Reached.apply(out, rows, scales, *held)


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
    """Sends so many entries of dim 0 to each rank along an axis; its gradient the other way."""

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
