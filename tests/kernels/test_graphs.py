"""Graphs of a collection's steps on one GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
    pytest.skip("needs Triton and a GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "embedding"))
import embedding_cases as cases

from shardwise.embedding import SGD, EmbeddingBagCollection, Jagged, RowWiseAdagrad

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def pair(**options):
    """Two collections of the same values: by torch's kernels, and by the fused ones."""
    plain = EmbeddingBagCollection(cases.TABLES, backend="torch", device=DEVICE, **options)
    fused = EmbeddingBagCollection(cases.TABLES, backend="triton", device=DEVICE, **options)
    fused.load_state_dict(plain.state_dict())
    return plain, fused


@pytest.mark.parametrize("optimizer", [SGD, RowWiseAdagrad])
def test_a_graph_of_steps_whose_batches_vary(optimizer):
    """Replays with other ids and lengths within the bound; a bad batch changes nothing."""
    plain, fused = pair(output="tensor", optimizer=optimizer(lr=0.1))
    capacity, num_bags = 200, 3 * 6
    batches = [cases.batch(seed).to(DEVICE) for seed in range(6)]
    ids = torch.zeros(capacity, dtype=torch.int64, device=DEVICE)
    offsets = torch.zeros(num_bags + 1, dtype=torch.int64, device=DEVICE)
    static = Jagged(batches[0].features, ids, offsets=offsets, padded=True)

    def fill(batch):
        ids[: len(batch.values)] = batch.values
        offsets[1:] = batch.lengths.cumsum(0)

    def run():
        out = fused(static)
        out.backward(torch.ones_like(out))
        return out

    start = {name: p.detach().clone() for name, p in fused.named_parameters()}
    offsets.zero_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for name, p in fused.named_parameters():
        assert torch.equal(p, start[name])
    for batch in batches:
        fill(batch)
        graph.replay()
        expected = plain(batch)
        assert_close(out, expected)
        expected.backward(torch.ones_like(expected))
    fused.synchronize()
    for mine, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        assert_close(mine, theirs)
    before = [p.detach().clone() for p in fused.parameters()]
    ids[0] = -5
    offsets[1:] = 1
    graph.replay()
    fill(batches[0])
    offsets.zero_()
    graph.replay()
    with pytest.raises(Exception, match="out of the range of its table"):
        fused.synchronize()
    assert all(map(torch.equal, fused.parameters(), before))
    fused.synchronize()
