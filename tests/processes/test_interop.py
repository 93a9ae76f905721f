"""torch's DTensor and its checkpoints, in real processes."""

import checkpoint_programs as programs
import pytest
import torch

import shardwise
from shardwise import interop

pytestmark = pytest.mark.processes


def test_checkpoints_of_torch(processes, tmp_path):
    assert processes(programs.through_torch, tmp_path / "saved") == [True] * 4
    # What processes saved, a simulated world and one device load.
    plain = {n: torch.zeros(s) for n, s in programs.SHAPES.items()}
    interop.load_torch_checkpoint(plain, tmp_path / "saved", trusted=True)
    for name, whole in programs.wholes().items():
        assert torch.equal(plain[name], whole), name
    with shardwise.simulate(4):
        new = programs.laid_out({n: torch.zeros(s) for n, s in programs.SHAPES.items()}, (4,))
        interop.load_torch_checkpoint(new, tmp_path / "saved", trusted=True)
        interop.save_torch_checkpoint(new, tmp_path / "again")
        for name, whole in programs.wholes().items():
            assert torch.equal(new[name].full_tensor().agreed(), whole), name


def test_a_checkpoint_with_a_pickle_is_not_read_by_accident(tmp_path):
    with pytest.raises(shardwise.ArgumentError, match="trusted=True"):
        interop.load_torch_checkpoint({}, tmp_path)


def test_to_torch_and_back(processes):
    for error in processes(programs.to_torch_and_back):
        assert error.startswith("UnsupportedError: [S(0, (15, 1)), R] has explicit sizes")


def test_a_model_of_fsdp2(processes):
    assert processes(programs.from_fsdp2) == [[True] * 4] * 4


def test_a_simulated_tensor_is_refused(mesh):
    with pytest.raises(shardwise.UnsupportedError, match="simulated"):
        interop.to_torch(shardwise.ones(4, device_mesh=mesh))
