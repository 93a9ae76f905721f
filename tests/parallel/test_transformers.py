"""Models as Hugging Face writes them, made from a config and sharded by plan."""

import copy
import re
from collections import Counter

import parallel_programs
import pytest
import torch
from parity import assert_gradients
from torch.nn import functional as F

import shardwise
from shardwise.debug import CommDebugMode
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError
from shardwise.parallel import (
    check_plan,
    context_parallel,
    data_parallel,
    expert_parallel,
    parallelize_module,
)

pytest.importorskip("transformers")
models = pytest.importorskip("hugging_face_models")

MODELS = [models.llama, models.tied_llama, models.gpt2, models.mixtral]
MIXTURES = [models.mixtral_packed, models.qwen3_moe, models.deepseek_v3]
MORE_MODELS = [models.llama_prepared, models.qwen3, *MIXTURES]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("make", MODELS + MORE_MODELS, ids=lambda make: make.__name__)
def test_as_on_one_device(make, num_ranks):
    with shardwise.simulate(num_ranks):
        parallel_programs.hugging_face(make, num_ranks)


@pytest.mark.processes
@pytest.mark.parametrize("num_ranks", [4, 2])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_in_processes(processes, make, num_ranks):
    processes(parallel_programs.hugging_face, make, num_ranks, timeout_s=120)


#: What the table in docs/howto/parallel.md says of a layer, and of what runs once: how many
#: collectives of so many hidden widths for each token. Forward, then backward.
LAYER = {
    "llama": ([1] * 2, [1] * 5),
    "llama_prepared": ([1] * 2, [1] * 2),
    "gpt2": ([0.75, 1, 1], [0.25, 1, 1]),
    "mixtral": ([1] * 2, [1] * 3 + [1, 2 / 32]),
}


@pytest.mark.parametrize("name", LAYER)
def test_what_a_layer_sends(name):
    """One layer more sends what the table says, in units of one activation."""
    sent = {}
    for num_layers in (1, 2):
        torch.manual_seed(0)
        model, plan = getattr(models, name)(num_layers=num_layers)
        ids = torch.randint(1, 61, (2, 10))
        with shardwise.simulate(4):
            parallelize_module(model, shardwise.init_device_mesh("cpu", (4,)), plan, strict=True)
            model(input_ids=ids, labels=ids).loss.backward()  # the first checks plain gradients
            with CommDebugMode() as comm:
                loss = model(input_ids=ids, labels=ids).loss
                forward = len(comm.events)
                loss.backward()
        activation = ids.numel() * 32 * 4
        sizes = [event.num_bytes / activation for event in comm.events]
        sent[num_layers] = Counter(sizes[:forward]), Counter(sizes[forward:])
    for found, more, expected in zip(sent[1], sent[2], LAYER[name], strict=True):
        assert more - found == Counter(expected)


def on_one_device(make, *shape):
    """A model, its plan, a copy after backward of a loss, and that loss's ids and target."""
    torch.manual_seed(0)
    model, plan = make()
    alone = copy.deepcopy(model)
    ids, target = torch.randint(1, 61, (2, *shape))
    F.cross_entropy(alone(input_ids=ids).logits.flatten(0, 1), target.flatten()).backward()
    return model, plan, alone, ids, target


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_long_sequences(name):
    """Positions split along one axis, heads along the other."""
    model, plan, alone, ids, target = on_one_device(getattr(models, name), 2, 16)
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        parallelize_module(model, mesh, plan, strict=True)
        layers = "transformer.h.*.attn" if name == "gpt2" else "model.layers.*.self_attn"
        context_parallel(model, mesh, layers)
        logits = model(input_ids=ids, use_cache=False).logits
        mine = shardwise.LocalTensor.per_rank(lambda rank: target.chunk(2, 1)[rank // 2])
        F.cross_entropy(logits.flatten(0, 1), mine.flatten()).backward()
        assert_gradients(model, alone, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_more_ranks_than_key_heads(name, implementation):
    """8 query heads, 4 key heads, 8 ranks: each key head is on two of them."""
    torch.manual_seed(0)
    model, plan = getattr(models, name)()
    model.set_attn_implementation(implementation)
    alone = copy.deepcopy(model)
    ids, mask = torch.randint(1, 61, (2, 10)), torch.ones(2, 10, dtype=torch.int64)
    mask[1, :3] = 0
    alone(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    with shardwise.simulate(8):
        mesh = shardwise.init_device_mesh("cpu", (8,))
        assert not check_plan(model, plan, 8).mistakes
        parallelize_module(model, mesh, plan, strict=True)
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        assert_gradients(model, alone, rtol=1e-4, atol=2e-6)


@pytest.mark.processes
def test_more_processes_than_key_heads(processes):
    processes(parallel_programs.hugging_face, models.few_key_heads, 4, timeout_s=120)


@pytest.mark.parametrize("num_ranks", [3, 16])
def test_heads_that_do_not_divide(num_ranks):
    """An error before anything changes, which names the module, its heads and what works."""
    model, plan = models.llama()
    said = r"'model.layers.0.self_attn'.* 8, 4, 4 heads.* of 1, 2, 4, 8 works"
    assert re.search(said, str(check_plan(model, plan, num_ranks)))
    with shardwise.simulate(num_ranks):
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,))
        with pytest.raises(LayoutError, match=said):
            parallelize_module(model, mesh, plan)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def test_latent_attention():
    """The config's plan as it is; beside split layers it leaves parameters plain."""
    model, plan, alone, ids, target = on_one_device(models.deepseek_v2, 2, 10)
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh, plan, strict=True)
        mine = [shardwise.LocalTensor.per_rank(lambda r, x=x: x[[r // 2]]) for x in (ids, target)]
        logits = model(input_ids=mine[0]).logits
        F.cross_entropy(logits.flatten(0, 1), mine[1].flatten()).backward()
        assert_gradients(model, alone)


@pytest.mark.parametrize("make", MIXTURES, ids=lambda make: make.__name__)
def test_experts_exchange_tokens(make):
    """Each rank has its own sequences and some of the experts."""
    model, _, alone, ids, target = on_one_device(make, 4, 10)
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        paths = [p for p, m in model.named_modules() if p.endswith("mlp.experts")]
        expert_parallel(model, mesh, paths)
        assert paths
        mine = [
            shardwise.LocalTensor.per_rank(lambda rank, x=x: x[rank : rank + 1])
            for x in (ids, target)
        ]
        logits = model(input_ids=mine[0]).logits
        F.cross_entropy(logits.flatten(0, 1), mine[1].flatten()).backward()
        assert_gradients(model, alone, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("names", [("ep", "cp"), ("dp", "cp"), ("cp", "tp")])
def test_experts_and_long_sequences(names):
    """Axes of their own; or one axis for tokens, experts and positions, and one for heads."""
    model, plan, alone, ids, target = on_one_device(models.mixtral_packed, 2, 16)
    plan = {path: word for path, word in plan.items() if "experts" not in path}
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        if "tp" in names:
            parallelize_module(model, mesh, plan, strict=True)
        context_parallel(model, mesh, "model.layers.*.self_attn")
        if "dp" in names:
            data_parallel(model, mesh["dp"])
        expert_parallel(model, mesh, "model.layers.*.mlp.experts", axis=names[0])

        def part(rank, x):
            """Sequences along the first axis, unless that is the one of positions."""
            return x if names[0] == "cp" else x[rank // 2 : rank // 2 + 1]

        def place(rank):
            return rank // 2 if names[0] == "cp" else rank % 2

        mine = shardwise.LocalTensor.per_rank(lambda rank: part(rank, ids))
        wanted = shardwise.LocalTensor.per_rank(
            lambda rank: part(rank, target).chunk(2, 1)[place(rank)].flatten()
        )
        logits = model(input_ids=mine, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), wanted).backward()
        assert_gradients(model, alone, rtol=1e-4, atol=2e-6)


def test_a_static_cache_takes_what_all_ranks_share(mesh):
    from transformers import LlamaConfig, StaticCache

    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=2
    )
    cache = StaticCache(config=config, max_cache_len=4)
    whole = torch.randn(1, 2, 1, 4)
    states = shardwise.distribute_tensor(whole, mesh, [shardwise.Shard(1)]).full_tensor()
    keys, values = cache.update(states, states, 0, {"cache_position": torch.tensor([0])})
    torch.testing.assert_close(keys[:, :, :1], whole)
    assert values.shape == (1, 2, 4, 4)
