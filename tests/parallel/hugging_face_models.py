"""Models as Hugging Face writes them, made from a config, each with a plan.

Imported only where `transformers` is at hand.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers

from shardwise import Replicate
from shardwise.parallel import PrepareModuleInput

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
    config = transformers.LlamaConfig(**SMALL, num_hidden_layers=num_layers, **options)
    plan = {f"model.{path}": word for path, word in config.base_model_tp_plan.items()}
    plan["model.embed_tokens"] = "rowwise"
    if not config.tie_word_embeddings:
        plan["lm_head"] = "colwise_rep"
    return transformers.LlamaForCausalLM(config), plan


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


def qwen3():
    """Norms of each head stand between the layers that are split by heads."""
    config = transformers.Qwen3Config(**SMALL, num_hidden_layers=2, head_dim=8)
    plan = {f"model.{path}": word for path, word in config.base_model_tp_plan.items()}
    plan |= {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
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
    words = config.base_model_tp_plan | config.base_model_ep_plan
    plan = {f"model.{path}": word for path, word in words.items()}
    plan |= {"model.embed_tokens": "rowwise", "lm_head": "colwise_rep"}
    return transformers.MixtralForCausalLM(config), plan
