"""Calls of the ops that pick and write entries by index."""

import torch

from shardwise.testing import Sample

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(2)


def t(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def ids(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_generator)


x, cube = t(5, 4), t(3, 5, 4)


def indexing_samples() -> list[Sample]:
    return [*_lookups(), *_puts(), *_along_a_dim(), *_flat(), *_views_written()]


def _lookups() -> list[Sample]:
    index = aten.index.Tensor
    return [
        Sample(index, (x, [ids(5, 3)])),
        Sample(index, (x, [None, ids(4, 2, 3, low=-4)])),
        Sample(index, (cube, [None, ids(5, 2, 3), ids(4, 3)])),
        Sample(index, (cube, [ids(3, 2), None, ids(4, 2)])),
        Sample(index, (cube, [ids(3, 6, 1), ids(5, 1, 2)])),
        Sample(index, (torch.arange(6), [ids(6, 3)])),
        Sample(aten._unsafe_index.Tensor, (x, [ids(5, 3)])),
    ]


def _puts() -> list[Sample]:
    put, once = aten.index_put.default, torch.tensor([3, 0])
    mask = t(5, 4) > 0
    return [
        Sample(put, (x, [once], t(2, 4))),
        Sample(put, (x, [ids(5, 3)], t(3, 4), True)),
        Sample(put, (x, [ids(5, 3)], t(4), True)),
        Sample(put, (x, [None, torch.tensor([-1, 2])], t(5, 2))),
        Sample(put, (cube, [None, ids(5, 2, 3), ids(4, 3)], t(3, 2, 3), True)),
        Sample(put, (cube, [ids(3, 2), None, ids(4, 2)], t(2, 5), True)),
        Sample(put, (cube, [torch.tensor([2]), None, torch.tensor([1])], t(1, 5))),
        Sample(put, (x, [mask], torch.tensor(2.0))),
        Sample(put, (x, [mask[:, 0]], torch.tensor(2.0))),
        Sample(put, (x, [mask], t(int(mask.sum())))),
        Sample(aten._unsafe_index_put.default, (x, [once], t(2, 4))),
    ]


def _along_a_dim() -> list[Sample]:
    rows, once = ids(5, 3), torch.tensor([4, 0, 2])
    unique = torch.stack([torch.randperm(5, generator=_generator)[:3] for _ in range(4)], 1)
    return [
        Sample(aten.gather.default, (x, 0, ids(5, 3, 4))),
        Sample(aten.gather.default, (x, 1, ids(4, 5, 6))),
        Sample(aten.gather.default, (x, -1, ids(4, 3, 6))),
        Sample(aten.scatter.src, (x, 0, unique, t(3, 4))),
        Sample(aten.scatter.src, (x, 0, unique, t(3, 6))),
        Sample(aten.scatter.value, (x, 0, unique, 1.5)),
        Sample(aten.scatter.reduce, (x, 0, ids(5, 3, 4), t(3, 4)), {"reduce": "multiply"}),
        Sample(aten.scatter.value_reduce, (x, 1, ids(4, 5, 2), 1.5), {"reduce": "add"}),
        Sample(aten.scatter_add.default, (x, 0, ids(5, 3, 4), t(3, 4))),
        Sample(aten.scatter_add.default, (x, 1, ids(4, 5, 7), t(5, 7))),
        Sample(aten.scatter_reduce.two, (x, 0, ids(5, 6, 4), t(6, 4), "sum")),
        Sample(aten.scatter_reduce.two, (x, 1, ids(4, 5, 2), t(5, 2), "amax")),
        Sample(
            aten.scatter_reduce.two, (x, 0, ids(5, 6, 4), t(6, 4), "mean"), {"include_self": False}
        ),
        Sample(aten.index_select.default, (cube, 1, rows)),
        Sample(aten.index_select.default, (x, 0, rows)),
        Sample(aten.index_add.default, (x, 0, rows, t(3, 4)), {"alpha": 2.0}),
        Sample(aten.index_add.default, (cube, -1, ids(4, 2), t(3, 5, 2))),
        Sample(aten.index_copy.default, (x, 0, once, t(3, 4))),
        Sample(aten.index_fill.int_Scalar, (x, 0, torch.tensor([1, -1]), 2.0)),
        Sample(aten.index_fill.int_Tensor, (x, 1, torch.tensor([1, 3]), torch.tensor(2.0))),
        Sample(aten.index_reduce.default, (x, 0, rows, t(3, 4), "amin")),
    ]


def _flat() -> list[Sample]:
    return [
        Sample(aten.take.default, (cube, ids(60, 2, 3, low=-60))),
        Sample(aten.put.default, (cube, torch.tensor([[7, 0], [-1, 30]]), t(2, 2))),
        Sample(aten.put.default, (cube, ids(60, 5), t(5), True)),
        Sample(aten.masked_scatter.default, (x, t(5, 4) > 0, t(20))),
        Sample(aten.masked_scatter.default, (x, t(4) > 0, t(20))),
        Sample(aten.masked_fill.Scalar, (x, t(5, 4) > 0, 1.5)),
        Sample(aten.masked_fill.Scalar, (x, t(4) > 0, 1.5)),
        Sample(aten.masked_fill.Tensor, (x, t(5, 4) > 0, torch.tensor(1.5))),
        Sample(aten.masked_scatter_backward.default, (t(5, 4), t(5, 4) > 0, [20])),
        Sample(aten.nonzero_static.default, ((x > 0).float(),), {"size": 7}),
    ]


def _views_written() -> list[Sample]:
    return [
        Sample(aten.select_scatter.default, (cube, t(3, 4), 1, -2)),
        Sample(aten.slice_scatter.default, (cube, t(3, 2, 4), 1, 1, 5, 2)),
        Sample(aten.slice_scatter.default, (x, t(3, 4), 0, -3)),
        Sample(aten.diagonal_scatter.default, (cube, t(3, 4), 0, 1, 2)),
        Sample(aten.as_strided_scatter.default, (x, t(2, 2), [2, 2], [4, 1], 3)),
    ]
