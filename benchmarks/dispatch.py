"""What one eager call costs: shardwise, torch's DTensor and the plain local op, in one process.

    python -m benchmarks.dispatch [--filter linear] [--repeats 15] [--json out.json]
    python -m benchmarks.dispatch --against ../other    # this tree's package and that of a checkout

The tensors are small, so the times are mostly overhead. Both systems share one mesh of 4 ranks with
a fake process group (no simulated world): collectives cost their launch only. Both get the same
local values in the same placements.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as ours
from benchmarks.timing import Case, add_options, measure, print_table, write_json
from benchmarks.two_trees import answer, compare, print_comparison

NUM_RANKS = 4
#: Rows and columns of a local tensor.
SIZE = 16

#: Placements by their short names, in each system.
Placed = Callable[[Any], list[Any]]


def shard(dim: int) -> Placed:
    return lambda system: [system.Shard(dim)]


def replicated(system: Any) -> list[Any]:
    return [system.Replicate()]


def partial(system: Any) -> list[Any]:
    return [system.Partial()]


class Cases:
    """Makes cases of a function and of how its arguments lie."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def distributed(
        self, system: Any, local: torch.Tensor, placed: Placed, grad: bool = False
    ) -> Any:
        made = system.DTensor.from_local(local, self.mesh, placed(system), run_check=False)
        return made.detach().requires_grad_(grad)

    def call(
        self,
        name: str,
        fn: Callable[..., Any],
        *operands: tuple[torch.Tensor, Placed],
        grad: bool = False,
    ) -> Case:
        """`fn` of operands that are made once."""

        def bind(tensors: Sequence[Any]) -> Callable[[], Any]:
            match tensors:
                case [x]:
                    return lambda: fn(x)
                case [x, y]:
                    return lambda: fn(x, y)
                case [x, y, z]:
                    return lambda: fn(x, y, z)
            raise ValueError(f"{name}: {len(tensors)} operands")

        def on(system: Any) -> Callable[[], Any]:
            return bind([self.distributed(system, t, placed, grad) for t, placed in operands])

        plain = [t.detach().clone().requires_grad_(grad) for t, _ in operands]
        return Case(name, on(ours), on(theirs), bind(plain))

    def move(self, name: str, before: Placed, after: Placed) -> Case:
        """A redistribution: there is no local twin."""

        def on(system: Any) -> Callable[[], Any]:
            x = self.distributed(system, _values(SIZE, SIZE), before)
            placements = after(system)
            mesh = self.mesh
            return lambda: x.redistribute(mesh, placements)

        return Case(name, on(ours), on(theirs))

    def each(self, name: str, make: Callable[[Any], Callable[[], Any]]) -> Case:
        """A case that `make` builds for a system, and for None: plain tensors."""
        return Case(name, make(ours), make(theirs), make(None))


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) / 10


def _ids() -> torch.Tensor:
    return torch.randint(0, SIZE, (SIZE,))


def pointwise(cases: Cases) -> Iterator[Case]:
    rows = (_values(SIZE, SIZE), shard(0))
    zeros = (torch.zeros(SIZE, SIZE), shard(0))
    yield cases.call("add", torch.add, rows, rows)
    yield cases.call("add_ (in place)", lambda x, y: x.add_(y), rows, zeros)
    yield cases.call("add scalar", lambda x: x + 1.0, rows)
    yield cases.call("mul scalar", lambda x: x * 2.0, rows)
    yield cases.call("add, grad", torch.add, rows, rows, grad=True)
    yield cases.call("gelu", F.gelu, rows)
    yield cases.call("softmax", lambda x: torch.softmax(x, -1), rows)
    yield cases.call("layer_norm", lambda x: F.layer_norm(x, (SIZE,)), rows)
    yield cases.call("sum", torch.sum, rows)
    yield cases.call("sum of a dim", lambda x: x.sum(-1), rows)


def products(cases: Cases) -> Iterator[Case]:
    rows = (_values(SIZE, SIZE), shard(0))
    whole = (_values(SIZE, SIZE), replicated)
    three = (_values(2, SIZE, SIZE), replicated)
    columns = (_values(SIZE, SIZE), shard(1))
    bias = (_values(SIZE), shard(0))
    yield cases.call("mm", torch.mm, whole, columns)
    yield cases.call("addmm", torch.addmm, bias, whole, columns)
    yield cases.call(
        "bmm", torch.bmm, (_values(2, SIZE, SIZE), shard(0)), (_values(2, SIZE, SIZE), shard(0))
    )
    yield cases.call("linear 2-D", F.linear, whole, rows)
    yield cases.call("linear 2-D, bias", F.linear, whole, rows, bias)
    yield cases.call("linear 3-D, bias", F.linear, three, rows, bias)
    yield cases.call("linear 3-D, bias, grad", F.linear, three, rows, bias, grad=True)
    yield cases.call(
        "linear 3-D, row-parallel", F.linear, (_values(2, SIZE, SIZE), shard(2)), columns
    )


def views(cases: Cases) -> Iterator[Case]:
    rows = (_values(SIZE, SIZE), shard(0))
    yield cases.call("view", lambda x: x.view(-1, 4, SIZE // 4), rows)
    yield cases.call("transpose", lambda x: x.transpose(0, 1), rows)
    yield cases.call("t", lambda x: x.t(), rows)
    yield cases.call("detach", lambda x: x.detach(), rows)
    yield cases.call("chunk", lambda x: x.chunk(2, 1), rows)
    yield cases.call("split", lambda x: x.split(SIZE // 4, 1), rows)
    yield cases.call("slice", lambda x: x[:, : SIZE // 2], rows)
    yield cases.call("cat", lambda x, y: torch.cat([x, y], 1), rows, rows)


def embeddings(cases: Cases) -> Iterator[Case]:
    ids = (_ids(), replicated)

    def lookup(ids: Any, weight: Any) -> Any:
        return F.embedding(ids, weight)

    yield cases.call("embedding, row-wise", lookup, ids, (_values(SIZE, SIZE), shard(0)))
    yield cases.call("embedding, column-wise", lookup, ids, (_values(SIZE, SIZE), shard(1)))
    for name, placed, like_output in (
        ("row-wise", shard(0), replicated),
        ("column-wise", shard(1), shard(1)),
    ):
        # After sum() a replicated gradient arrives. torch then leaves the whole table's gradient
        # replicated and moves it when it is used; shardwise shards it like the table at once. So
        # that case is timed with the update.
        yield cases.each(f"embedding, {name}, fwd+bwd", _train_lookup(cases, placed, like_output))
        yield cases.each(f"embedding, {name}, sum, fwd+bwd+update", _train_lookup(cases, placed))


def _train_lookup(
    cases: Cases, placed: Placed, grad_placed: Placed | None = None
) -> Callable[[Any], Callable[[], Any]]:
    """Forward and backward from a given gradient of the rows, or a step that lessens their sum."""

    def make(system: Any) -> Callable[[], Any]:
        weight, ids, grad = _values(SIZE, SIZE), _ids(), _values(SIZE, SIZE)
        if system is None:
            weight.requires_grad_()
        else:
            weight = cases.distributed(system, weight, placed, grad=True)
            ids = cases.distributed(system, ids, replicated)
            grad = cases.distributed(system, grad, grad_placed or replicated)

        def step() -> None:
            weight.grad = None
            rows = F.embedding(ids, weight)
            if grad_placed is None:
                rows.sum().backward()
                with torch.no_grad():
                    weight.add_(weight.grad, alpha=-0.01)
            else:
                rows.backward(grad)

        return step

    return make


def doors(cases: Cases) -> Iterator[Case]:
    mesh, local = cases.mesh, _values(SIZE, SIZE)

    def enter(system: Any, x: torch.Tensor) -> Callable[[], Any]:
        placements = [system.Shard(0)]
        from_local = system.DTensor.from_local
        return lambda: from_local(x, mesh, placements, run_check=False)

    trained = _values(SIZE, SIZE).requires_grad_()
    yield Case("from_local", enter(ours, local), enter(theirs, local))
    yield Case("from_local, grad", enter(ours, trained), enter(theirs, trained))
    rows = (local, shard(0))
    for name, grad in (("to_local", False), ("to_local, grad", True)):
        case = cases.call(name, lambda x: x.to_local(), rows, grad=grad)
        yield Case(case.name, case.ours, case.theirs)
    yield cases.each("add_ (in place) after to_local", lambda system: _write_lent(cases, system))


def _write_lent(cases: Cases, system: Any) -> Callable[[], Any]:
    """A write to memory that somebody else holds."""
    x, zeros = _values(SIZE, SIZE), torch.zeros(SIZE, SIZE)
    if system is not None:
        x, zeros = (cases.distributed(system, t, shard(0)) for t in (x, zeros))
    held: list[torch.Tensor] = []

    def write() -> Any:
        if not held:  # not before: cases that come first should find a mesh that has lent nothing
            held.append(x.view_as(x) if system is None else x.to_local())
        return x.add_(zeros)

    return write


def moves(cases: Cases) -> Iterator[Case]:
    yield cases.move("redistribute S(0) -> R", shard(0), replicated)
    yield cases.move("redistribute R -> S(0)", replicated, shard(0))
    yield cases.move("redistribute P -> R", partial, replicated)
    yield cases.move("redistribute P -> S(0)", partial, shard(0))
    yield cases.move("redistribute S(0) -> S(1)", shard(0), shard(1))
    yield cases.move("redistribute S(0) -> S(0)", shard(0), shard(0))


def training(cases: Cases) -> Iterator[Case]:
    yield cases.each("MLP, fwd+bwd", lambda system: _mlp_step(cases, system))
    yield cases.each("block, fwd+bwd", lambda system: _block_step(cases, system, replicated))
    yield cases.each(
        "block, sequence-parallel, fwd+bwd", lambda system: _block_step(cases, system, shard(1))
    )
    yield cases.each("SGD step", _optimizer_step(cases, torch.optim.SGD, foreach=False))
    yield cases.each("AdamW step", _optimizer_step(cases, torch.optim.AdamW, foreach=False))
    yield cases.each("AdamW step, foreach", _optimizer_step(cases, torch.optim.AdamW, foreach=True))


def _parameters(cases: Cases, system: Any) -> list[Any]:
    """A column-parallel linear, then a row-parallel one whose bias every rank adds once."""
    parts = [
        (_values(SIZE, SIZE), shard(0)),
        (_values(SIZE), shard(0)),
        (_values(SIZE, SIZE), shard(1)),
        (_values(SIZE), replicated),
    ]
    if system is None:
        return [nn.Parameter(t) for t, _ in parts]
    return [nn.Parameter(cases.distributed(system, t, placed)) for t, placed in parts]


def _mlp_step(cases: Cases, system: Any) -> Callable[[], Any]:
    up, up_bias, down, down_bias = parameters = _parameters(cases, system)
    x = _values(8, SIZE)
    if system is not None:
        x = cases.distributed(system, x, replicated)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        hidden = F.relu(F.linear(x, up, up_bias))
        F.linear(hidden, down, down_bias).sum().backward()

    return step


def _block_step(cases: Cases, system: Any, between: Placed) -> Callable[[], Any]:
    """A pre-norm transformer block, sharded by head and by hidden column.

    `between` is how activations lie between the sharded layers: replicated, or sharded along the
    sequence. The plain side computes on the shapes that one rank has in the replicated form.
    """
    heads, width = 2, 8
    local, whole = heads * width, heads * width * NUM_RANKS
    norms = [(_values(whole), replicated) for _ in range(4)]
    columns = [(_values(local, whole), shard(0)) for _ in range(4)]
    rows = [(_values(whole, local), shard(1)) for _ in range(2)]
    parts, x = [*norms, *columns, *rows], _values(2, SIZE, whole)
    if system is None:
        parameters = [nn.Parameter(t) for t, _ in parts]
    else:
        parameters = [nn.Parameter(cases.distributed(system, t, placed)) for t, placed in parts]
        x = cases.distributed(system, x, replicated).redistribute(cases.mesh, between(system))
    norm_w, norm_b, second_w, second_b, query, key, value, up, out, down = parameters

    def move(x: Any, placed: Placed) -> Any:
        return x if system is None else x.redistribute(cases.mesh, placed(system))

    def split_heads(x: Any) -> Any:
        return x.view(2, -1, x.shape[-1] // width, width).transpose(1, 2)

    def attend(x: Any) -> Any:
        q, k, v = (split_heads(F.linear(x, weight)) for weight in (query, key, value))
        # Written out: torch's DTensor does not support the fused attention of CPUs.
        scores = torch.softmax(q @ k.transpose(-1, -2) * width**-0.5, -1)
        return F.linear((scores @ v).transpose(1, 2).flatten(2), out)

    def feed_forward(x: Any) -> Any:
        return F.linear(F.gelu(F.linear(x, up)), down)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        hidden = x
        for layer, weight, bias in ((attend, norm_w, norm_b), (feed_forward, second_w, second_b)):
            normed = move(F.layer_norm(hidden, (whole,), weight, bias), replicated)
            hidden = hidden + move(layer(normed), between)
        hidden.sum().backward()

    return step


def _optimizer_step(
    cases: Cases, optimizer: Callable[..., Any], **options: Any
) -> Callable[[Any], Callable[[], Any]]:
    def make(system: Any) -> Callable[[], Any]:
        parameters = _parameters(cases, system)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return optimizer(parameters, lr=1e-3, **options).step

    return make


FAMILIES = (pointwise, products, views, embeddings, doors, moves, training)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--filter", default="", help="only cases whose name contains this")
    parser.add_argument("--against", type=Path, metavar="PATH", help="compare with this checkout")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    add_options(parser, repeats=15)
    options = parser.parse_args(arguments)
    if options.against:
        command = ["benchmarks.dispatch", "--answer", f"--filter={options.filter}"]
        found = compare(options.against.resolve(), command, options.repeats)
        print_comparison(f"one eager call, against {options.against}", found)
        return
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        cases = Cases(init_device_mesh("cpu", (NUM_RANKS,)))
        chosen = [c for family in FAMILIES for c in family(cases) if options.filter in c.name]
        if options.answer:
            answer({case.name: case.ours for case in chosen})
            return
        results = [measure(case, options.repeats) for case in chosen]
    finally:
        dist.destroy_process_group()
    print_table(f"one eager call, {SIZE}x{SIZE} local, {NUM_RANKS} ranks", results)
    write_json(options.json, results, benchmark="dispatch", num_ranks=NUM_RANKS, size=SIZE)


if __name__ == "__main__":
    main()
