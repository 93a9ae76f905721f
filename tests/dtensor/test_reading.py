"""Reading a DTensor into Python and numpy gives the whole of it, or says why not."""

import numpy as np
import pytest
import torch
from by_hand import lay

import shardwise
from shardwise import Partial, Replicate, Shard, UnsupportedError
from shardwise.debug import CommDebugMode
from shardwise.errors import RedistributionError


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_lists_and_arrays_hold_the_whole(mesh, placement, dtype):
    whole = torch.randint(-4, 5, (5, 3)).to(dtype)
    x = lay(whole, mesh, [placement])
    assert x.tolist() == whole.tolist()
    assert np.array_equal(np.asarray(x), whole.numpy())
    assert np.array_equal(np.array(x, dtype=np.complex128), whole.numpy())
    x.numpy()[0] = 9
    assert x.tolist() == whole.tolist()
    with pytest.raises(ValueError, match="would be a copy"):
        np.asarray(x, copy=False)


def test_what_requires_grad_is_detached_first(mesh):
    x = lay(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        x.numpy()
    assert x.numpy(force=True).tolist() == x.tolist() == [1, 1, 1, 1]


def test_what_is_sent_has_a_cause_and_strict_mode_refuses_it(mesh):
    x = lay(torch.ones(4), mesh, [Shard(0)])
    with CommDebugMode() as comm:
        x.tolist()
    assert [(e.op, e.implicit) for e in comm.events] == [("DTensor.tolist", True)]
    with shardwise.explicit_redistribution():
        assert lay(torch.ones(2), mesh, [Replicate()]).tolist() == [1, 1]
        with pytest.raises(RedistributionError, match="redistribute"):
            x.numpy()


def test_memory_that_is_not_there_is_not_touched(mesh):
    x = lay(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(UnsupportedError, match="to_local"):
        x.apply_(abs)
    with pytest.raises(UnsupportedError, match="to_local"):
        np.from_dlpack(x)


def test_shards_move_to_shared_memory(mesh):
    """As `module.share_memory()` asks of each parameter; torch would end the process."""
    layer = torch.nn.Linear(4, 4)
    shardwise.distribute_module(layer, mesh, lambda *_: None)
    assert layer.share_memory() is layer
    assert layer.weight.to_local().on_rank(1).is_shared()


def test_a_list_of_tensors_is_stacked_not_read_as_numbers(mesh):
    loss = shardwise.distribute_tensor(torch.tensor(2.0), mesh, [Replicate()])
    row = shardwise.distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    for x in (loss, row):
        for read in (torch.tensor, torch.as_tensor):
            with pytest.raises(TypeError, match=r"0-d.*Use torch\.stack\(\[\.\.\.\]\)"):
                read([x, x])
        assert torch.stack([x, x]).shape == (2, *x.shape)
    assert len(row) == 4
