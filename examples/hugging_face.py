"""A Llama of Hugging Face's, made parallel by the plan in its own config. No weights are loaded.

pip install transformers; python examples/hugging_face.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import say, world

import shardwise
from shardwise.parallel import parallelize_module


def main():
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(256, (2, 16))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    plan = {f"model.{path}": word for path, word in config.base_model_tp_plan.items()}
    plan |= {"model.embed_tokens": "rowwise", "lm_head": "colwise_rep"}
    with world(4) as num_ranks, torch.no_grad():
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
        model = parallelize_module(model, mesh, plan)
        found = model(input_ids=ids).logits
        found = found.agreed() if isinstance(found, shardwise.LocalTensor) else found
    difference = (found - expected).abs().max().item()
    say(f"logits {tuple(found.shape)}, largest difference from one device {difference:.1e}")
    assert difference < 1e-4


if __name__ == "__main__":
    main()
