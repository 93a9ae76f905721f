"""Models as Hugging Face writes them, made from a config, each with a plan.

Imported only where `transformers` is at hand.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers
from torch import nn

from shardwise import Replicate, Shard
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

#: What the configs of all decoders with grouped heads have in common.
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def llama(num_layers=2, **options):
    config = transformers.LlamaConfig(**SMALL | options, num_hidden_layers=num_layers)
    plan = {f"model.{path}": word for path, word in config.base_model_tp_plan.items()}
    plan["model.embed_tokens"] = "rowwise"
    if not config.tie_word_embeddings:
        plan["lm_head"] = "colwise_rep"
    return transformers.LlamaForCausalLM(config), plan


def few_key_heads():
    """Fewer key heads than ranks."""
    return llama(num_key_value_heads=2)


def llama_prepared(num_layers=2):
    """Inputs that several layers share become DTensors once, and so do their gradients."""
    model, plan = llama(num_layers)
    whole = Replicate()
    plan["model.layers.*.mlp"] = PrepareModuleInput(
        input_layouts=whole, desired_input_layouts=whole
    )
    plan["model.layers.*.self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": whole},
        desired_input_kwarg_layouts={"hidden_states": whole},
    )
    return model, plan


def tied_llama():
    return llama(tie_word_embeddings=True)


#: Norms of each head, which the plans of transformers 5.0 leave out.
NORMS_OF_HEADS = {
    f"model.layers.*.self_attn.{name}": "replicated_with_grad_allreduce"
    for name in ("q_norm", "k_norm")
}


def qwen3():
    """Norms of each head stand between the layers that are split by heads."""
    config = transformers.Qwen3Config(**SMALL, num_hidden_layers=2, head_dim=8)
    plan = {f"model.{path}": word for path, word in config.base_model_tp_plan.items()}
    plan |= {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    plan |= NORMS_OF_HEADS
    return transformers.Qwen3ForCausalLM(config), plan


def gpt2(num_layers=2):
    """One matrix gives queries, keys and values together: it is sharded, its output is not."""
    config = transformers.GPT2Config(
        vocab_size=61,
        n_embd=32,
        n_layer=num_layers,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    plan = {
        "transformer.wte": "rowwise",
        "transformer.h.*.attn.c_attn": "colwise_rep",
        "transformer.h.*.attn.c_proj": "rowwise_rep",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    }
    return transformers.GPT2LMHeadModel(config), plan


def mixtral(num_layers=2):
    """The config's own plans: the one for experts goes before the one for tensors."""
    config = transformers.MixtralConfig(**SMALL, num_hidden_layers=num_layers, num_local_experts=4)
    words = config.base_model_tp_plan | (config.base_model_ep_plan or {})
    plan = {f"model.{path}": word for path, word in words.items()}
    plan |= {"model.embed_tokens": "rowwise", "lm_head": "colwise_rep"}
    return transformers.MixtralForCausalLM(config), plan


def _with_experts(config, model, **more):
    """The config's own plan for tensors, which splits packed stacks of experts."""
    plan = {f"model.{path}": word for path, word in config.base_model_tp_plan.items()} | more
    plan |= {"model.embed_tokens": "rowwise", "lm_head": "colwise_rep"}
    return model(config), plan


def mixtral_packed():
    config = transformers.MixtralConfig(**SMALL, num_hidden_layers=2, num_local_experts=6)
    return _with_experts(config, transformers.MixtralForCausalLM)


def qwen3_moe():
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
    config = transformers.Qwen3MoeConfig(
        **SMALL, **sizes, num_hidden_layers=2, mlp_only_layers=[1], norm_topk_prob=True
    )
    return _with_experts(config, transformers.Qwen3MoeForCausalLM, **NORMS_OF_HEADS)


#: The first layer is dense; the others have experts of their own and one that all share.
LATENT = SMALL | {
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 12,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


def deepseek_v2():
    """The plan splits latent attention too: all heads share the rotary part of the keys."""
    config = transformers.DeepseekV2Config(**LATENT, topk_method="group_limited_greedy")
    shared = {"model.layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj"}
    model, plan = _with_experts(config, transformers.DeepseekV2ForCausalLM, **shared)
    plan.pop("model.layers.*.self_attn.q_proj")  # what takes its place is in the plan too
    return model, plan


def deepseek_v3():
    config = transformers.DeepseekV3Config(**LATENT)
    return _with_experts(config, transformers.DeepseekV3ForCausalLM)


def bert(num_layers=2):
    """The decoder is tied to the embedding, and its bias to one of the head."""
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        intermediate_size=44,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    layer = "bert.encoder.layer.*"
    plan = {f"{layer}.attention.self.{each}": "colwise" for each in ("query", "key", "value")}
    plan |= {
        f"{layer}.attention.output.dense": "rowwise",
        f"{layer}.intermediate.dense": "colwise",
        f"{layer}.output.dense": "rowwise",
        "bert.embeddings.word_embeddings": "rowwise",
    }
    return transformers.BertForMaskedLM(config), plan


class Encoder(nn.Module):
    def __init__(self, layers, layernorm):
        super().__init__()
        self.layers, self.layernorm = layers, layernorm

    def forward(self, hidden_states):
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.layernorm(hidden_states)


class PatchLabels(nn.Module):
    """A label for each patch of an image."""

    def __init__(self, vit, num_labels):
        super().__init__()
        self.embeddings, self.encoder = vit.embeddings, Encoder(vit.layers, vit.layernorm)
        self.head = nn.Linear(vit.config.hidden_size, num_labels)

    def forward(self, pixel_values):
        return self.head(self.encoder(self.embeddings(pixel_values)[:, 1:]))


def vit(num_layers=2):
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        intermediate_size=44,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    layer = "encoder.layers.*"
    plan = {f"{layer}.attention.{each}_proj": "colwise" for each in "qkv"}
    plan |= {
        f"{layer}.attention.o_proj": "rowwise",
        f"{layer}.mlp.fc1": "colwise",
        f"{layer}.mlp.fc2": "rowwise",
    }
    return PatchLabels(transformers.ViTModel(config, add_pooling_layer=False), 61), plan


#: Between the layers that are split by heads or columns, each rank has some positions.
SOME, WHOLE = Shard(1), Replicate()
GATHERED = PrepareModuleInput(
    input_layouts=SOME, desired_input_layouts=WHOLE, use_local_output=True
)
GATHERED_BY_NAME = PrepareModuleInput(
    input_kwarg_layouts={"hidden_states": SOME},
    desired_input_kwarg_layouts={"hidden_states": WHOLE},
    use_local_output=True,
)
SPLIT = PrepareModuleOutput(
    output_layouts=WHOLE, desired_output_layouts=SOME, use_local_output=False
)
SCATTERED = RowwiseParallel(output_layouts=SOME, use_local_output=False)
LLAMA_BY_POSITION = {
    "model.embed_tokens": RowwiseParallel(output_layouts=SOME, use_local_output=False),
    "model.layers.*.*_layernorm": SequenceParallel(),
    "model.layers.*.self_attn": GATHERED_BY_NAME,
    "model.layers.*.self_attn.o_proj": SCATTERED,
    "model.layers.*.mlp": GATHERED,
    "model.norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=SOME, output_layouts=WHOLE),
}
#: By the name of a model, what replaces entries of its plan.
BY_POSITION = {
    "llama": LLAMA_BY_POSITION | {"model.layers.*.mlp.down_proj": SCATTERED},
    "mixtral": LLAMA_BY_POSITION
    | {
        "model.layers.*.mlp": PrepareModuleInputOutput(
            input_layouts=SOME,
            desired_input_layouts=WHOLE,
            use_local_input=True,
            output_layouts=WHOLE,
            desired_output_layouts=SOME,
            use_local_output=False,
        )
    },
    "gpt2": {
        "transformer.drop": SPLIT,
        "transformer.h.*.ln_*": SequenceParallel(),
        "transformer.h.*.attn": GATHERED,
        "transformer.h.*.attn.c_proj": RowwiseParallel(
            input_layouts=WHOLE, output_layouts=SOME, use_local_output=False
        ),
        "transformer.h.*.mlp": GATHERED,
        "transformer.h.*.mlp.c_proj": SCATTERED,
        "transformer.ln_f": SequenceParallel(),
    },
    "bert": {
        "bert.embeddings": SPLIT,
        "bert.encoder.layer.*.attention.self": GATHERED,
        "bert.encoder.layer.*.attention.output.dense": SCATTERED,
        "bert.encoder.layer.*.*.LayerNorm": SequenceParallel(),
        "bert.encoder.layer.*.attention.output.LayerNorm": SequenceParallel(),
        "bert.encoder.layer.*.intermediate": GATHERED,
        "bert.encoder.layer.*.output.dense": SCATTERED,
        "cls": GATHERED,
    },
    "vit": {
        "encoder.layers.0": PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=SOME),
        "encoder.layers.*.layernorm_*": SequenceParallel(),
        "encoder.layers.*.attention": PrepareModuleInput(
            input_layouts=(SOME, None), desired_input_layouts=(WHOLE, None), use_local_output=True
        ),
        "encoder.layers.*.attention.o_proj": SCATTERED,
        "encoder.layers.*.mlp": GATHERED,
        "encoder.layers.*.mlp.fc2": SCATTERED,
        "encoder.layernorm": SequenceParallel(),
        "head": GATHERED,
    },
}
