"""A training loop of an accelerate user, here; the comments are the lines that it replaces."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardwise import checkpoint, init_device_mesh
from shardwise.parallel import data_parallel, fully_shard

ACCUMULATED = 2


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))


def make_data():
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.rand(32, 6, generator=draw), torch.rand(32, 1, generator=draw))


def main(folder, fully, dtype):
    # accelerator = Accelerator(mixed_precision=…, gradient_accumulation_steps=2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    is_main_process = dist.get_rank() == 0

    # model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model = make()
    model = fully_shard(model, mesh) if fully else data_parallel(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    data = make_data()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))

    losses = []
    for number, (x, target) in enumerate(loader, start=1):
        # with accelerator.accumulate(model):
        last = number % ACCUMULATED == 0
        if fully:
            model.set_requires_gradient_sync(last)
        # with accelerator.autocast():
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            loss = nn.functional.mse_loss(model(x).float(), target) / ACCUMULATED
        # accelerator.backward(loss)
        if fully or last:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()
        if last:
            # accelerator.clip_grad_norm_(model.parameters(), 1.0)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        # accelerator.reduce(loss, "mean")
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())

    # accelerator.save_state(folder), accelerator.load_state(folder)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpoint.save(state, folder)
    with torch.no_grad():
        model[0].weight.zero_()
    checkpoint.load(state, folder)

    # accelerator.get_state_dict(model), for accelerator.save on the main process
    whole = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    # accelerator.print(…)
    if is_main_process:
        print(f"{len(losses)} batches, the last loss is {losses[-1]:.3f}")
    return losses, whole
