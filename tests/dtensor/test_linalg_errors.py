"""A matrix that has no factors is on one rank; the ranks agree before any raises."""

import pytest
import torch
from devices import needs_cuda

import shardwise
from shardwise import Shard
from shardwise.debug import CommDebugMode

#: Functions of a batch of matrices, and a matrix that each of them refuses.
REFUSING = {
    "cholesky_ex": (lambda x: torch.linalg.cholesky_ex(x, check_errors=True), -torch.eye(3)),
    "inv_ex": (lambda x: torch.linalg.inv_ex(x, check_errors=True), torch.zeros(3, 3)),
    "eigh": (torch.linalg.eigh, torch.full((3, 3), torch.nan)),
    "svd": (torch.linalg.svd, torch.full((3, 3), torch.nan)),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name", REFUSING)
def test_ranks_agree_on_every_device(name, device):
    if (name, device) == ("svd", "cuda"):
        pytest.skip("torch's solver on a GPU takes NaN")
    torch.ones(1, device=device)  # a mesh warns when no device was used before
    fn, refused = REFUSING[name]
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh(device, (4,))
        for last, error in ((torch.eye(3), None), (refused, torch.linalg.LinAlgError)):
            matrices = torch.stack([*[torch.eye(3)] * 3, last]).to(device)
            x = shardwise.distribute_tensor(matrices, mesh, [Shard(0)])
            with CommDebugMode() as comm:
                if error is None:
                    fn(x)
                else:
                    with pytest.raises(error):
                        fn(x)
            first, *_ = comm.events
            assert (first.kind, first.num_bytes) == ("all_reduce", 8)
