"""A small training that is killed now and then, and goes on from its last checkpoint."""

import os
import random
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import Shard
from shardwise.checkpoint import Checkpoints

NUM_STEPS, EVERY = 12, 3


def train(folder, kill_at=None, during_save=False):
    """Losses by step, from where the checkpoints leave off; one rank may be killed on the way."""
    torch.manual_seed(0)
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(16, 64, bias=False)
    placed = shardwise.distribute_tensor(model.weight.data, mesh, [Shard(0)])
    model.weight = nn.Parameter(placed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(folder, keep=2)
    state = {"model": model, "optimizer": optimizer, "step": 0, "losses": []}
    if checkpoints.latest() is not None:
        state = checkpoints.load(state)
    losses = state["losses"]
    for step in range(state["step"], NUM_STEPS):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        batch = shardwise.distribute_tensor(batch, mesh, [shardwise.Replicate()])
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor().item())
        doomed = kill_at == (dist.get_rank(), step)
        if doomed and not during_save:
            os.kill(os.getpid(), signal.SIGKILL)
        if (step + 1) % EVERY == 0:
            if doomed:
                threading.Thread(target=_die_soon, args=(step,), daemon=True).start()
            checkpoints.save(step + 1, {**state, "step": step + 1, "losses": losses})
        if doomed:
            os.kill(os.getpid(), signal.SIGKILL)
    return losses


def _die_soon(seed):
    time.sleep(random.Random(seed).random() * 0.01)
    os.kill(os.getpid(), signal.SIGKILL)
