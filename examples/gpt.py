"""A small language model, tensor-parallel by a plan of words.

python examples/gpt.py
torchrun --nproc-per-node 4 examples/gpt.py
"""

import torch
from torch.nn import functional as F
from worlds import say, world

import shardwise
from shardwise.demo.tasks import LENGTH, TENSOR_PLAN, LanguageModel, python_text
from shardwise.parallel import parallelize_module


def main():
    torch.manual_seed(0)
    text = python_text()
    with world(4) as num_ranks:
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
        model = parallelize_module(LanguageModel(), mesh, TENSOR_PLAN, strict=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        draw = torch.Generator().manual_seed(0)
        for step in range(10):
            starts = torch.randint(len(text) - LENGTH - 1, (8, 1), generator=draw)
            cut = text[starts + torch.arange(LENGTH + 1)]
            loss = F.cross_entropy(model(cut[:, :-1]).flatten(0, 1), cut[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            say(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
