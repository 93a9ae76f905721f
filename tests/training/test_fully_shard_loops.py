"""fully_shard in loops as people write them: checkpoints that choose, other methods, zero_grad."""

import copy
import functools

import pytest
import torch
from fully_sharded import IDS, Layer, Model, loss_of, mesh_of, own, sharded
from parity import assert_gradients, gradients, through_file
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import shardwise
from shardwise.errors import ArgumentError, MixedTensorsError
from shardwise.parallel import fully_shard, register_fsdp_forward_method

# -- activation checkpoints that choose what they keep ---------------------------------------------


class Chosen(nn.Module):
    """A module of which backward repeats all but the products of matrices."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        make = functools.partial(create_selective_checkpoint_contexts, _keeps_products)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=make)


def _keeps_products(_, op, *args, **kwargs):
    keeps = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("reshards", [None, True, 2])
@pytest.mark.parametrize("place", ["around", "inside", "around all"])
def test_selective_activation_checkpointing(place, reshards):
    alone = Model()
    loss_of(alone, IDS[0]).backward()
    with shardwise.simulate(4):
        model, mesh = Model(), mesh_of(dp=4)
        shard = functools.partial(fully_shard, mesh=mesh, reshard_after_forward=reshards)
        for number, layer in enumerate(model.layers):
            made = {
                "around": lambda x: Chosen(shard(x)),
                "inside": lambda x: shard(Chosen(x)),
                "around all": shard,
            }[place](layer)
            model.layers[number] = made
        model = shard(model)
        model = Chosen(model) if place == "around all" else model
        loss_of(model, own(IDS[0], 4)).backward()
        found = {n.replace("inner.", ""): g for n, g in gradients(model).items()}
        assert_close(found, gradients(alone))


# -- methods, and gradients that are dropped -------------------------------------------------------


class Decoder(Model):
    """Its methods call `forward` as a function, which no hook of the module sees."""

    def decode(self, ids):
        for _ in range(2):
            ids = torch.cat((ids, self.forward(ids)[:, -1:].argmax(-1)), 1)
        return ids

    def loss(self, ids):
        return F.cross_entropy(self.forward(ids).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("way", [lambda x: x, copy.deepcopy, through_file])
def test_methods_that_gather_as_forward_does(way):
    alone = Decoder()
    alone.loss(IDS[0]).backward()
    with shardwise.simulate(2):
        first = sharded(Decoder(), mesh_of(dp=2), reshard_after_forward=True)
        for name in ("decode", "loss", "loss"):
            register_fsdp_forward_method(first, name)
        model = way(first)
        if model is not first:
            torch._foreach_zero_([parameter.detach() for parameter in first.parameters()])
        decoded = model.decode(own(IDS[0], 2))
        for rank, expected in enumerate(alone.decode(IDS[0]).chunk(2)):
            assert torch.equal(decoded.on_rank(rank), expected)
        model.loss(own(IDS[0], 2)).backward()
        assert_gradients(model, alone)


def test_a_method_that_gathers_nothing():
    with shardwise.simulate(2):
        layer = fully_shard(Layer(), mesh_of(dp=2))
        with pytest.raises(MixedTensorsError, match="register_fsdp_forward_method"):
            layer.forward(torch.ones(2, 8))
        with pytest.raises(ArgumentError, match="Layer has no method 'decode'"):
            register_fsdp_forward_method(layer, "decode")
        register_fsdp_forward_method(layer.up, "decode")  # it is in the group of its layer


def test_zero_grad_drops_what_waits_for_a_reduction():
    alone = Model()
    loss_of(alone, IDS[1]).backward()
    with shardwise.simulate(2):
        model = sharded(Model(), mesh_of(dp=2))
        model.set_requires_gradient_sync(False)
        loss_of(model, own(IDS[0], 2)).backward()
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        loss_of(model, own(IDS[1], 2)).backward()
        assert_gradients(model, alone)
        copy.deepcopy(model).zero_grad()
        assert_gradients(model, alone)
