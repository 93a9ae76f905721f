"""Transformers on meshes that mix all axes: five steps of AdamW with clipping, for both worlds."""

import functools
import math
from dataclasses import dataclass, field

import hugging_face_models as models
import torch
from parity import whole
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise.parallel import (
    context_parallel,
    data_parallel,
    expert_parallel,
    fully_shard,
    parallelize_module,
)
from shardwise.simulation.ranks import on_every_rank

NUM_STEPS, BATCH, LENGTH = 5, 4, 16


@dataclass(frozen=True)
class Dense:
    """A model: how it is made, its layers and attention, and what context_parallel splits."""

    make: object
    layers: str
    attention: str
    split: str = ""
    options: dict = field(default_factory=dict)


MODELS = {
    "Llama": Dense(models.llama, "model.layers", "model.layers.*.self_attn"),
    "Mixtral": Dense(models.mixtral, "model.layers", "model.layers.*.self_attn"),
    "GPT-2": Dense(models.gpt2, "transformer.h", "transformer.h.*.attn"),
    "BERT": Dense(models.bert, "bert.encoder.layer", "bert.encoder.layer.*.attention.self"),
    "ViT": Dense(
        models.vit,
        "encoder.layers",
        "layers.*.attention",
        "encoder",
        {"sequence_dims": {"hidden_states": 1}},
    ),
}

#: By name, the sizes of the axes. "sp" is a tensor axis with positions split between layers.
MESHES = {
    "dp": {"dp": 4},
    "fsdp": {"fsdp": 4},
    "dp x fsdp": {"dp": 2, "fsdp": 2},
    "dp x tp": {"dp": 2, "tp": 2},
    "fsdp x tp": {"fsdp": 2, "tp": 2},
    "fsdp x sp": {"fsdp": 2, "sp": 2},
    "fsdp x cp": {"fsdp": 2, "cp": 2},
    "cp x tp": {"cp": 2, "tp": 2},
    "fsdp x ep": {"fsdp": 2, "ep": 2},
    "ep x tp": {"ep": 2, "tp": 2},
    "dp x fsdp x tp": {"dp": 2, "fsdp": 2, "tp": 2},
    "fsdp x cp x tp": {"fsdp": 2, "cp": 2, "tp": 2},
    "fsdp x ep x sp": {"fsdp": 2, "ep": 2, "sp": 2},
    "fsdp x ep x cp": {"fsdp": 2, "ep": 2, "cp": 2},
}


IN_PROCESSES = ("dp x fsdp", "fsdp x tp", "fsdp x sp", "fsdp x cp", "cp x tp", "fsdp x ep")


def made(name):
    """The model, its plan, and the batches of all steps, from one seed."""
    torch.manual_seed(0)
    model, plan = MODELS[name].make(num_layers=2 if name == "Llama" else 1)
    labels = torch.randint(1, 61, (NUM_STEPS, BATCH, LENGTH))
    given = torch.randn(NUM_STEPS, BATCH, 3, 16, 16) if name == "ViT" else labels.roll(1, -1)
    return model, plan, given, labels


def loss_of(model, given, labels):
    out = model(given) if isinstance(model, models.PatchLabels) else model(given).logits
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())


def backward(model, given, labels):
    loss_of(model, given, labels).backward()


def steps(model, batches, backward=backward):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    norms = []
    for batch in batches:
        backward(model, *batch)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    found = {n: whole(p).clone() for n, p in model.named_parameters()}
    return found | {f"norm {step}": whole(norm) for step, norm in enumerate(norms)}


@functools.cache
def one_device(name):
    model, _, given, labels = made(name)
    return steps(model, zip(given, labels, strict=True))


def on_mesh(name, axes):
    model, plan, given, labels = made(name)
    model = sharded(name, model, plan, axes)
    return steps(model, own_batches(axes, given, labels))


def all_in_processes():
    return {(name, mesh): on_mesh(name, MESHES[mesh]) for name in MODELS for mesh in IN_PROCESSES}


def own_batches(axes, given, labels):
    """Each rank's inputs, and the labels of what its module returns."""
    sizes = tuple(axes.values())
    places = torch.cartesian_prod(*map(torch.arange, sizes)).reshape(-1, len(sizes)).tolist()
    data = [axis for axis in axes if axis in ("dp", "fsdp", "ep")]

    def mine(x, by_position):
        def part(rank):
            place, number = dict(zip(axes, places[rank], strict=True)), 0
            for axis in data:
                number = number * axes[axis] + place[axis]
            here = x.chunk(math.prod(axes[axis] for axis in data))[number]
            return here.chunk(axes["cp"], 1)[place["cp"]] if by_position else here

        return on_every_rank(part)

    return [(mine(x, False), mine(y, "cp" in axes)) for x, y in zip(given, labels, strict=True)]


def sharded(name, model, plan, axes, **options):
    """What a user writes."""
    dense = MODELS[name]
    names = tuple("tp" if axis == "sp" else axis for axis in axes)
    mesh = shardwise.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=names)
    if "ep" in axes:
        plan = {path: style for path, style in plan.items() if "expert" not in path}
    if "sp" in axes:
        plan |= models.BY_POSITION[dense.make.__name__]
    if "tp" in names:
        parallelize_module(model, mesh, plan, strict=True)
    if "cp" in axes:
        context_parallel(model.get_submodule(dense.split), mesh, dense.attention, **dense.options)
    if "ep" in axes and name == "Mixtral":
        expert_parallel(model, mesh, "model.layers.*.mlp.experts")
    elif "ep" in axes:
        data_parallel(model, mesh["ep"])
    if "fsdp" in axes:
        data = mesh["dp", "fsdp"] if "dp" in axes else mesh["fsdp"]
        for layer in model.get_submodule(dense.layers):
            fully_shard(layer, data, **options)
        fully_shard(model, data, **options)
    elif "dp" in axes:
        data_parallel(model, mesh["dp"])
    return model
