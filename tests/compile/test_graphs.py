"""Graphs of compiled code: how many there are, what is in them, and what is kept of them."""

import io

import pytest
import torch
from by_hand import value
from compiling import compiled
from found_again import assert_found_again
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.debug import CommDebugMode
from shardwise.errors import WorldError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.slow

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def layers():
    return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 14))


def parallel_layers(mesh):
    return parallelize_module(layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def outcome(run, model, x):
    model.zero_grad()
    out = run(x)
    out.square().sum().backward()
    return [out.agreed().detach(), *(value(p.grad) for p in model.parameters())]


def assert_as_eager(fast, model, x):
    torch.testing.assert_close(outcome(fast, model, x), outcome(model, model, x))


def test_batch_sizes_and_sequence_lengths_share_a_graph(pair):
    model = parallel_layers(pair)
    fast, counter = compiled(model, dynamic=True)
    for batch, length in ((3, 7), (5, 7), (5, 11), (6, 9)):
        assert_as_eager(fast, model, torch.randn(batch, length, 10))
    assert counter.frame_count == 1


def test_without_a_compiler_behind_it(pair):
    model = parallel_layers(pair)
    fast = torch.compile(model, backend="eager", fullgraph=True)
    assert_as_eager(fast, model, torch.randn(7, 10))


def test_the_graphs_hold_the_collectives_that_eager_code_issues(pair):
    model, x = parallel_layers(pair), torch.randn(7, 10, requires_grad=True)
    with CommDebugMode() as comm:
        outcome(model, model, x)
    marks = []

    def read(graph, inputs):
        marks.extend(n.args[1] for n in graph.graph.nodes if "collective" in str(n.target))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=read, bw_compiler=read)
    outcome(torch.compile(model, backend=backend, fullgraph=True), model, x)
    assert sorted(marks) == sorted(event.kind for event in comm.events)
    assert marks


@pytest.mark.parametrize("strict", [False, True])
def test_export(pair, strict):
    model = shardwise.distribute_module(layers(), pair)
    x = distribute_tensor(torch.randn(6, 10), pair, [S0])
    program = torch.export.export(model, (x,), strict=strict)
    found = program.module()(x)
    assert found.placements == (S0,)
    torch.testing.assert_close(value(found.detach()), value(model(x).detach()))


@pytest.mark.parametrize("strict", [False, True])
def test_a_parallelized_module_is_exported(pair, strict):
    """With any batch size, saved and loaded, and differentiable."""
    model = parallel_layers(pair)
    sizes = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(model, (torch.randn(8, 10),), strict=strict, dynamic_shapes=sizes)
    kept = io.BytesIO()
    torch.export.save(program, kept)
    kept.seek(0)
    loaded = torch.export.load(kept)
    for rows in (8, 5):
        x = torch.randn(rows, 10, requires_grad=True)
        expected = model(x).agreed()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x)
        for one in (program, loaded):
            found = one.module()(x)
            torch.testing.assert_close(found.agreed(), expected)
            torch.testing.assert_close(torch.autograd.grad(found.square().sum(), x)[0], grad)


@pytest.mark.parametrize("strict", [False, True])
def test_doors_are_exported(pair, strict):
    class Doors(nn.Module):
        def forward(self, x):
            rows = DTensor.from_local(x, pair, [R]).redistribute(placements=[S0])
            ones = shardwise.ones(6, 4, device_mesh=pair)
            halves = distribute_tensor(torch.full((6, 4), 0.5), pair, [Shard(1)])
            return (rows * 3 + ones).full_tensor(), (rows - halves).to_local()

    x = torch.randn(6, 4)
    whole, parts = torch.export.export(Doors(), (x,), strict=strict).module()(x)
    torch.testing.assert_close(whole.agreed(), x * 3 + 1)
    torch.testing.assert_close(parts.on_rank(1), x[3:] - 0.5)


class Rows(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, x):
        return DTensor.from_local(x, self.mesh, [R]).redistribute(placements=[S0]).full_tensor() * 2


def test_an_exported_program_finds_its_mesh_in_any_world():
    x, file = torch.randn(5, 3), io.BytesIO()
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("rows",))
        torch.export.save(torch.export.export(Rows(mesh), (x,)), file)
    for size in (2, 3, 1):
        file.seek(0)
        with shardwise.simulate(size):
            program = torch.export.load(file).module()
            if size > 1:
                assert torch.equal(program(x).agreed(), x * 2)
                continue
            with pytest.raises(WorldError, match=r"\(2,\) of ranks \[0, 1\].* has 1 ranks"):
                program(x)


def test_compiled_code_is_found_again(pair):
    x = distribute_tensor(torch.randn(6, 10), pair, [S0])
    weight = distribute_tensor(torch.randn(14, 10), pair, [R]).requires_grad_()

    def layer(x, weight):
        return nn.functional.linear(x, weight).relu()

    def run():
        out = torch.compile(layer, fullgraph=True)(x, weight)
        torch.autograd.grad(out.sum(), weight)
        torch.testing.assert_close(value(out.detach()), value(layer(x, weight).detach()))

    assert_found_again(run)


@pytest.mark.parametrize("rows", [8, 11])
def test_sizes_of_pieces_stay_simple(mesh, rows):
    """The compiler reasons about each size of each rank, and longest about minima."""
    sizes = set()

    def read(graph, inputs):
        for node in graph.graph.nodes:
            made = node.meta.get("val")
            if isinstance(made, torch.Tensor):
                sizes.update(str(s) for s in made.shape if isinstance(s, torch.SymInt))
        return make_boxed_func(graph.forward)

    def fn(x):
        columns = x.redistribute(placements=[S1]) * 2
        return columns.redistribute(placements=[R]) + x.redistribute(placements=[R])

    fast = torch.compile(fn, backend=aot_autograd(fw_compiler=read), fullgraph=True, dynamic=True)
    x = distribute_tensor(torch.randn(rows, 12), mesh, [S0])
    torch.testing.assert_close(value(fast(x)), value(fn(x)))
    assert not [size for size in sizes if "Min" in size or "Max" in size]
    assert 0 < len(sizes) < 9
