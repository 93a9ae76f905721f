"""Operators whose compiled code once differed from eager code, found by the compiled sweep.

The whole table is a command: `python -m tests.op_sweep --compiled`.
"""

import pytest
import torch
import torch.nn.functional as F

from shardwise import Replicate, Shard, distribute_tensor
from tests.op_sweep.play import Compiler, play_compiled
from tests.op_sweep.table import operators

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        # Torch takes them apart into tensors of its own making.
        "nn.functional.interpolate.nearest",
        "nn.functional.multi_margin_loss",
        # They read values.
        "masked_scatter",
        "index_put",
        "narrow",
        "nn.functional.nll_loss",
        # The shape depends on values, and a dim is negative.
        "unique_consecutive",
    ],
)
def test_an_operator_gives_eager_numbers(name):
    (entry,) = operators([name])
    result = play_compiled(entry, 1, 2, ("forward", "backward"), Compiler("aot_eager", False))
    assert result.worst("forward") == "ok", result.notes
    assert result.worst("backward") in ("ok", ""), result.notes


def test_a_plain_tensor_that_torch_did_not_make_is_refused(pair):
    x = distribute_tensor(torch.randn(8, 5), pair, [Shard(0)])
    compiled = torch.compile(F.multi_margin_loss, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="got mixed"):
        compiled(x, torch.zeros(8, dtype=torch.int64))


def test_rows_that_a_mask_names_are_written(pair):
    x, mask, rows = torch.randn(6, 3), torch.tensor([0, 1, 1, 0, 0, 1]).bool(), torch.randn(3, 3)
    laid = [distribute_tensor(t, pair, [Shard(0)]) for t in (x, mask, rows)]
    write = torch.compile(torch.index_put, backend="aot_eager", fullgraph=True)
    written = write(laid[0], (laid[1],), laid[2])
    assert torch.equal(written.full_tensor().agreed(), torch.index_put(x, (mask,), rows))


def test_a_part_that_starts_at_a_tensor_is_not_written_to(pair):
    x = distribute_tensor(torch.randn(6, 3), pair, [Shard(0)])
    start = distribute_tensor(torch.tensor(1), pair, [Replicate()])
    write = torch.compile(
        lambda x, start: x.narrow(0, start, 2).zero_(), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="the write would be lost"):
        write(x, start)
