"""Whole safetensors in and out, and what other tools make of the files."""

import pytest
import torch
from torch import nn

import shardwise
from shardwise import CheckpointError, Shard
from shardwise.checkpoint import convert, inspect, load, save, verify

WHOLES = {"model.a": torch.randn(9, 5), "model.b": torch.randn(3, 7, 2), "other": torch.ones(3)}


@pytest.fixture
def saved(tmp_path):
    """Columns over three ranks: no tensor is in one piece."""
    path = tmp_path / "saved"
    with shardwise.simulate(3):
        mesh = shardwise.init_device_mesh("cpu", (3,))
        state = {
            n: shardwise.distribute_tensor(t, mesh, [Shard(t.dim() - 1)]) for n, t in WHOLES.items()
        }
        save({**state, "step": 4}, path)
    return path


def test_one_file(saved, tmp_path):
    convert(saved, tmp_path / "whole.safetensors")
    state = {name: torch.zeros_like(t) for name, t in WHOLES.items()}
    load(state, tmp_path / "whole.safetensors")
    for name, whole in WHOLES.items():
        assert torch.equal(state[name], whole), name
    convert(tmp_path / "whole.safetensors", tmp_path / "folder")
    assert verify(tmp_path / "folder").ok
    assert inspect(tmp_path / "folder").has_checksums


def test_a_folder_of_small_files_keeps_values(saved, tmp_path):
    convert(saved, tmp_path / "folder", max_file_bytes=200)
    report = inspect(tmp_path / "folder")
    assert all(len(t.pieces) == 1 for t in report.tensors)
    assert len(report.files) == 2
    assert report.state["step"] == 4
    state = {name: torch.zeros_like(t) for name, t in WHOLES.items()}
    assert load({**state, "step": 0}, tmp_path / "folder")["step"] == 4
    for name, whole in WHOLES.items():
        assert torch.equal(state[name], whole), name


def test_a_prefix(saved, tmp_path):
    convert(saved, tmp_path / "model", prefix="model.")
    assert [t.name for t in inspect(tmp_path / "model").tensors] == ["a", "b"]
    with pytest.raises(CheckpointError, match="begins with 'nothing'"):
        convert(saved, tmp_path / "none", prefix="nothing")


def test_damage_leaves_no_target(saved, tmp_path):
    file = next(saved.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for target in ("whole.safetensors", "folder"):
        with pytest.raises(CheckpointError, match=file.name):
            convert(saved, tmp_path / target)
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_the_safetensors_package_reads_and_writes_the_same(saved, tmp_path):
    package = pytest.importorskip("safetensors.torch")
    convert(saved, tmp_path / "whole.safetensors")
    read = package.load_file(tmp_path / "whole.safetensors")
    assert read.keys() == WHOLES.keys()
    for name, whole in WHOLES.items():
        assert torch.equal(read[name], whole), name
    for file in saved.glob("*.safetensors"):
        package.load_file(file)
    mixed = {"x": torch.arange(3), "y": torch.ones(5, dtype=torch.bfloat16), "z": torch.zeros(0)}
    package.save_file(mixed, tmp_path / "theirs.safetensors", metadata={"made": "by them"})
    state = {name: torch.full_like(t, 7) for name, t in mixed.items()}
    load(state, tmp_path / "theirs.safetensors")
    for name, value in mixed.items():
        assert torch.equal(state[name], value), name


def test_a_sharded_model_loads_hugging_faces_folder(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    hub.save_torch_state_dict(plain.state_dict(), tmp_path, max_shard_size=200)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
        for layer in model:
            placed = shardwise.distribute_tensor(layer.weight.data, mesh, [Shard(1)])
            layer.weight = nn.Parameter(placed)
        load(model, tmp_path)
        for mine, other in zip(model, plain, strict=True):
            assert torch.equal(mine.weight.full_tensor().agreed(), other.weight)
            assert torch.equal(mine.bias, other.bias)
