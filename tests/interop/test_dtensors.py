"""Conversions to torch's DTensor: what has no counterpart there, and nested state dicts."""

from typing import NamedTuple

import pytest
import torch

import shardwise
from shardwise import Shard, interop
from shardwise.errors import UnsupportedError


def test_norms_of_shards_are_refused():
    with shardwise.simulate(1):
        mesh = shardwise.init_device_mesh("cpu", (1,))
        x = shardwise.ones(4, device_mesh=mesh, placements=[Shard(0)])
        with pytest.raises(UnsupportedError, match=r"norms of shards.*Replicate"):
            interop.to_torch(torch.linalg.vector_norm(x))


class Pair(NamedTuple):
    a: object
    b: object


def test_named_tuples_in_a_state_dict_stay_what_they_are():
    state = {"pair": Pair(1, [torch.ones(2)]), "list": [1, (2, 3)]}
    assert interop.state_dict_to_torch(state) == state
    assert type(interop.state_dict_from_torch(state)["pair"]) is Pair
