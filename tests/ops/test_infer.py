"""The shapes of results, where torch's own shape function is not right in every version."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise
from shardwise.core.layout import make_layout
from shardwise.core.mesh import grid_of
from shardwise.core.placements import REPLICATE
from shardwise.dispatch.infer import infer_outputs

aten = torch.ops.aten


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [-2, [-2], [-3, -2], [1], None])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_norm_over_dims_of_size_one_has_the_shape_of_one_device(
    order: int, dim: int | list[int] | None, keepdim: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(1, 1, 3)
    want = torch.linalg.vector_norm(x, order, dim, keepdim).shape
    # As in torch 2.11, whose shape function takes dims as they are given.
    monkeypatch.setattr(torch._prims_common, "canonicalize_dims", lambda ndim, dims, *_: dims)
    dims = [dim] if isinstance(dim, int) else dim
    op = torch.ops.aten.linalg_vector_norm.default
    (meta,), _ = infer_outputs(op, (x, order, dims, keepdim), {}, symbolic=False)
    assert meta.shape == want


def test_a_norm_over_a_dim_that_is_not_there_raises() -> None:
    op = torch.ops.aten.linalg_vector_norm.default
    with pytest.raises(IndexError):
        infer_outputs(op, (torch.ones(1, 3), 2, [-3]), {}, symbolic=False)


SHAPES = [(4, 6), (6,), (4, 1), (), (0, 3)]
DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtypes", [*itertools.product(DTYPES, DTYPES)], ids=str)
@pytest.mark.parametrize(
    "op", [aten.add.Tensor, aten.add_.Tensor, aten.div.Tensor, aten.eq.Tensor], ids=str
)
def test_a_pointwise_result_is_that_of_one_device(
    op: torch._ops.OpOverload, dtypes: tuple[torch.dtype, ...]
) -> None:
    with shardwise.simulate(1):
        grid = grid_of(shardwise.init_device_mesh("cpu", (1,)))
        for shapes in itertools.product(SHAPES, SHAPES):
            pairs = zip(shapes, dtypes, strict=True)
            operands = [torch.ones(shape, dtype=dtype) for shape, dtype in pairs]
            layouts = [
                make_layout(grid, (REPLICATE,), tuple(x.shape), x.stride(), x.dtype)
                for x in operands
            ]
            try:
                want = op(*operands)
            except RuntimeError:
                continue
            (meta,), _ = infer_outputs(op, layouts, {}, symbolic=False)
            found = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
            assert (found.shape, found.dtype) == (want.shape, want.dtype)
            assert found.stride() == want.stride() or not want.numel()


#: Of `torch.logaddexp((4,), x)` and the like torch's shape function makes several ops.
STRIDED = [aten.logaddexp.default, aten.xlogy.Tensor, aten.copysign.Tensor, aten.mul.Tensor]
STRIDED += [aten.ldexp.Tensor]


@pytest.mark.parametrize("op", [*STRIDED, aten.pow.Scalar, aten.sin.default], ids=str)
def test_a_pointwise_result_has_the_memory_order_of_one_device(op: torch._ops.OpOverload) -> None:
    turned = [
        torch.ones(2, 3, 4).permute(order)[:, :, :wide]
        for order in itertools.permutations(range(3))
        for wide in (1, 4)
    ]
    rows = [torch.ones(size) for size in ((4,), (3, 1), (2, 1, 4))]
    with shardwise.simulate(1):
        grid = grid_of(shardwise.init_device_mesh("cpu", (1,)))

        def layout(x: object) -> object:
            if not isinstance(x, torch.Tensor):
                return x
            return make_layout(grid, (REPLICATE,), tuple(x.shape), x.stride(), x.dtype)

        for x, y in [*itertools.product(turned, rows), *itertools.product(rows, turned)]:
            args = {aten.pow.Scalar: (2.0, y), aten.sin.default: (y,)}.get(op, (x, y))
            try:
                one_device = op(*args)
            except RuntimeError:  # the shapes do not broadcast
                continue
            (meta,), _ = infer_outputs(op, [layout(a) for a in args], {}, symbolic=False)
            assert _order(meta) == _order(one_device), args


def _order(x: Any) -> Any:
    """The shape and the strides that tell the order of entries in memory."""
    stride = x.stride() if isinstance(x, torch.Tensor) else x.stride
    return tuple(x.shape), [step for size, step in zip(x.shape, stride, strict=True) if size > 1]


@pytest.mark.parametrize("batch", [(1,), (2,), (1, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
def test_indexed_entries_have_the_memory_order_of_one_device(
    dims: tuple[int, ...], batch: tuple[int, ...]
) -> None:
    ids = torch.zeros(batch, dtype=torch.int64)
    turned = torch.zeros(batch[::-1], dtype=torch.int64).permute(*reversed(range(len(batch))))
    for shape in itertools.product((1, 2), (1, 3), (1, 2)):
        for strides in itertools.product((1, 2, 6), repeat=3):  # of windows and expanded rows too
            x = torch.empty(64).as_strided(shape, strides)
            for index in (ids, turned):
                args = (x, [index if dim in dims else None for dim in range(dims[-1] + 1)])
                (meta,), _ = infer_outputs(aten.index.Tensor, args, {}, symbolic=False)
                assert _order(meta) == _order(aten.index.Tensor(*args)), (shape, strides)


def _turned(*sizes: int, order: tuple[int, ...] | None = None, **options: Any) -> torch.Tensor:
    """A tensor whose dims lie in memory in this order, by default the second one innermost."""
    order = order or (0, *range(2, len(sizes)), 1)
    made = torch.ones([sizes[d] for d in order], **options)
    return made.permute([order.index(d) for d in range(len(sizes))])


def _strided(*stride: int) -> torch.Tensor:
    """An image whose strides along dims of size 1 are not those of a dense tensor."""
    return torch.ones(36).as_strided((1, 1, 6, 6), stride)


COMPLEX = torch.complex64
#: Calls whose results torch's shape functions put into another memory order than its kernels.
OTHER_ORDERS: dict[str, Any] = {
    "svd": lambda n: (torch.linalg.svd, torch.ones(n, 3)),
    "svd, wide": lambda n: (torch.linalg.svd, torch.ones(3, n)),
    "eig": lambda n: (torch.linalg.eig, torch.eye(n).expand(2, n, n)),
    "rfftn": lambda n: (torch.fft.rfftn, _turned(n, 6, 7)),
    "irfft": lambda n: (torch.fft.irfft, _turned(5, n, 7, order=(1, 0, 2), dtype=COMPLEX)),
    "batch norm": lambda n: (
        lambda x: F.batch_norm(x, x[0, :, 0] * 0, x[0, :, 0]),
        _turned(n, 2, 4, order=(1, 0, 2)),
    ),
    "angle": lambda n: (torch.angle, _turned(2, n, 5, dtype=COMPLEX)),
    "floor_divide": lambda n: (
        torch.floor_divide,
        _turned(n, 1, 5, order=(2, 0, 1)),
        _turned(1, n, 5),
    ),
    "ldexp": lambda n: (
        torch.ldexp,
        _turned(n, 1, 5, order=(2, 0, 1), dtype=COMPLEX),
        _turned(1, n, 5, dtype=COMPLEX),
    ),
    "an expanded operand of another dtype": lambda n: (
        lambda x, y: torch.mul(x.expand(n, 5), y),
        torch.ones(1, 1),
        _turned(n, 5, order=(1, 0), dtype=COMPLEX),
    ),
    "conv1d of one channel": lambda n: (F.conv1d, torch.ones(2, 1, n), _turned(6, 1, 3)),
    "pixel_unshuffle": lambda n: (lambda x: F.pixel_unshuffle(x, 3), _strided(36, 1, 6, 1)),
    "channel_shuffle": lambda n: (lambda x: F.channel_shuffle(x, 2), _turned(2, 4, n, 3)),
    "reflection_pad": lambda n: (lambda x: F.pad(x, (1, 1, 1, 1), "reflect"), _turned(2, 3, n, 4)),
    "as_strided": lambda n: (lambda x: x.as_strided((3, n), (1, 3)), torch.ones(3, n)),
    "mse_loss": lambda n: (_slope(F.mse_loss), _turned(n, 5, 4), torch.zeros(n, 5, 4)),
}


def _slope(loss: Any) -> Any:
    def slope(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(loss(x, *others), x)[0]

    return slope


@pytest.mark.parametrize("size", [5, 300])
@pytest.mark.parametrize("name", OTHER_ORDERS)
def test_results_have_the_memory_order_of_the_kernel(name: str, size: int) -> None:
    fn, *operands = OTHER_ORDERS[name](size)
    want = torch.utils._pytree.tree_leaves(fn(*operands))
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        for placed in (shardwise.Replicate(), shardwise.Shard(0), shardwise.Shard(1)):
            shards = [shardwise.distribute_tensor(x, mesh, [placed]) for x in operands]
            found = torch.utils._pytree.tree_leaves(fn(*shards))
            assert [*map(_order, found)] == [*map(_order, want)]


@pytest.mark.parametrize(
    "scatter",
    [
        lambda x: torch.select_scatter(x, x[0] * 2, 0, 0),
        lambda x: torch.diagonal_scatter(x, x.diagonal() * 2),
        lambda x: torch.slice_scatter(x, x[:1] * 2, 0, 0, 1),
    ],
)
def test_a_new_tensor_has_memory_for_every_entry(scatter: Any) -> None:
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x = shardwise.distribute_tensor(torch.arange(1.0, 4.0), mesh, [shardwise.Replicate()])
        made = scatter(x.unfold(0, 2, 1))
        assert made.stride() == (2, 1)
        want = -made.full_tensor().agreed()
        assert torch.equal(made.neg_().full_tensor().agreed(), want)


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 2, 3), (2, 2, 0)], ids=str)
def test_kernels_are_not_asked_about_tensors_without_entries(shape: tuple[int, ...]) -> None:
    """The backward of a batch norm without channels would end the process."""
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x = shardwise.distribute_tensor(torch.ones(shape), mesh, [shardwise.Replicate()])
        x.requires_grad_()
        stats = [x.detach().new_ones(shape[1]) for _ in range(2)]
        F.batch_norm(x, *stats).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == shape
