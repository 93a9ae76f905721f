"""What init_device_mesh says where there is no such mesh."""

import pytest

import shardwise
from shardwise import ArgumentError, LayoutError, WorldError


def test_outside_a_world(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(WorldError, match=r"in no world. Start one: `with shardwise.simulate\(4\)"):
        shardwise.init_device_mesh("cpu", (2, 2))


def test_too_large_for_the_world():
    with shardwise.simulate(2):
        with pytest.raises(WorldError, match=r"mesh of 4 ranks, and the world has 2. .* `torchrun"):
            shardwise.init_device_mesh("cpu", (4,))
        assert shardwise.init_device_mesh("cpu", [2], mesh_dim_names=("tp",)).shape == (2,)


def test_not_a_shape():
    with shardwise.simulate(2):
        with pytest.raises(ArgumentError, match="tuple of whole numbers"):
            shardwise.init_device_mesh("cpu", 2)
        with pytest.raises(LayoutError, match="at least one rank"):
            shardwise.init_device_mesh("cpu", (-2,))
