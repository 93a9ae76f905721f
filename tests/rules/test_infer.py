"""The shapes of results, where torch's own shape function is not right in every version."""

from __future__ import annotations

import pytest
import torch

from shardwise.rules.infer import infer_outputs


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
