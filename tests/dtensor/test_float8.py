"""Products of scaled float8 matrices."""

import pytest
import torch

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.debug import CommDebugMode

WHOLE = [Replicate()]


def small(*shape, dtype=torch.float8_e4m3fn):
    """Integers, so that results are exact in any order."""
    return torch.randint(-3, 4, shape).to(dtype)


@pytest.fixture
def mesh():
    with shardwise.simulate(2):
        yield shardwise.init_device_mesh("cpu", (2,))


def scales(kind):
    if kind == "one":
        return torch.tensor(2.0), torch.tensor(0.5)
    return small(16, 1, dtype=torch.float32), small(1, 64, dtype=torch.float32)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["one", "rows"])
@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (Shard(0), Replicate(), Shard(0)),
        (Replicate(), Shard(1), Shard(1)),
        (Shard(1), Shard(0), Partial()),
        (Replicate(), Replicate(), Replicate()),
    ],
)
def test_as_on_one_device(mesh, a, b, expected, kind, biased):
    torch.manual_seed(0)
    first, second = small(16, 64), small(64, 64).t()
    bias = small(64, dtype=torch.bfloat16) if biased else None
    options = {"out_dtype": torch.bfloat16 if biased else torch.float32}
    given = (first, second, *scales(kind), bias)
    where = [[a], [b], [a if a.is_shard(0) else Replicate()]]
    where += [[b if b.is_shard(1) else Replicate()], [Shard(0) if b.is_shard(1) else Replicate()]]
    laid = [
        None
        if x is None
        else shardwise.distribute_tensor(x, mesh, WHOLE if not x.dim() else placements)
        for x, placements in zip(given, where, strict=True)
    ]
    try:
        wanted = torch.ops.aten._scaled_mm(*given, **options)
    except RuntimeError:  # torch before 2.12, on CPU, knows one scale for all rows
        with pytest.raises(RuntimeError, match="only supports per-tensor scaling"):
            torch.ops.aten._scaled_mm(*laid, **options)
        return
    with CommDebugMode() as comm:
        found = torch.ops.aten._scaled_mm(*laid, **options)
    if not (biased and expected.is_partial()):  # a bias is added once: its operands are moved
        assert found.placements == (expected,)
        assert not comm.events
    torch.testing.assert_close(found.full_tensor().agreed(), wanted, rtol=0, atol=0)


def test_shards_that_the_kernel_does_not_take(mesh):
    """8 columns on each rank are less than 16 bytes: the second operand is gathered."""
    torch.manual_seed(0)
    first, second, one = small(16, 32), small(16, 32).t(), torch.ones(())
    wanted = torch.ops.aten._scaled_mm(first, second, one, one, out_dtype=torch.float32)
    laid = [
        shardwise.distribute_tensor(x, mesh, placements)
        for x, placements in ((first, WHOLE), (second, [Shard(1)]), (one, WHOLE), (one, WHOLE))
    ]
    found = torch.ops.aten._scaled_mm(*laid, out_dtype=torch.float32)
    torch.testing.assert_close(found.full_tensor().agreed(), wanted, rtol=0, atol=0)


def test_colwise_and_rowwise_layers(mesh):
    """A pair of layers in float8, as tensor parallelism splits it: one reduction."""
    torch.manual_seed(0)
    x, up, down, one = small(16, 32), small(64, 32), small(32, 64), torch.ones(())

    def forward(x, up, down, one):
        hidden = torch.ops.aten._scaled_mm(x, up.t(), one, one, out_dtype=torch.bfloat16)
        hidden = hidden.clamp(-3, 3).to(torch.float8_e4m3fn)
        return torch.ops.aten._scaled_mm(hidden, down.t(), one, one, out_dtype=torch.bfloat16)

    wanted = forward(x, up, down, one)
    laid = [
        shardwise.distribute_tensor(t, mesh, placements)
        for t, placements in ((x, WHOLE), (up, [Shard(0)]), (down, [Shard(1)]), (one, WHOLE))
    ]
    with CommDebugMode() as comm:
        found = forward(*laid)
    assert found.placements == (Partial(),)
    assert not comm.events
    torch.testing.assert_close(found.full_tensor().agreed(), wanted, rtol=0, atol=0)
