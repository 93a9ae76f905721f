"""A first look: `python -m shardwise.demo`.

A small model (a lookup in a table and a linear layer) is trained twice: on one device, and with
the table sharded by rows and the layer by columns over simulated ranks. The numbers must agree.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise.debug import CommDebugMode

NUM_ROWS, WIDTH, NUM_CLASSES, BATCH, NUM_IDS = 2_000, 64, 10, 256, 4


class Model(nn.Module):
    """The mean of a few looked-up rows, and a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).mean(1))


@dataclass
class Run:
    """What one training left behind."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    comm: CommDebugMode


def make_batches(num_steps: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids whose class can be learned: it is the last digit of all ids of an example."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_steps):
        tens = torch.randint(NUM_ROWS // NUM_CLASSES, (BATCH, NUM_IDS), generator=generator)
        target = torch.randint(NUM_CLASSES, (BATCH,), generator=generator)
        batches.append((NUM_CLASSES * tens + target[:, None], target))
    return batches


def train(
    model: nn.Module, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], label: str
) -> Run:
    """Plain PyTorch: the same lines whether the model and the batches are sharded or not."""
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    losses = []
    with CommDebugMode() as comm:
        for ids, target in track(batches, label, console=Console(stderr=True), transient=True):
            loss = F.cross_entropy(model(ids), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    parameters = {}
    for name, parameter in model.named_parameters():
        whole = parameter.detach()
        if isinstance(whole, shardwise.DTensor):
            whole = whole.full_tensor()
        if isinstance(whole, shardwise.LocalTensor):
            whole = whole.agreed()
        parameters[name] = whole
    return Run(losses, parameters, comm)


def shard(name: str, module: nn.Module, mesh: shardwise.DeviceMesh) -> None:
    """The table by rows, the layer by its output features."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        sharded = shardwise.distribute_tensor(parameter.data, mesh, [shardwise.Shard(0)])
        module.register_parameter(key, nn.Parameter(sharded))


def train_sharded(num_ranks: int, num_steps: int, seed: int) -> Run:
    with shardwise.simulate(num_ranks):
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,))
        torch.manual_seed(seed)
        model = shardwise.distribute_module(Model(), mesh, shard)
        whole = [shardwise.Replicate()]
        batches = [
            (
                shardwise.distribute_tensor(ids, mesh, whole),
                shardwise.distribute_tensor(target, mesh, whole),
            )
            for ids, target in make_batches(num_steps, seed)
        ]
        return train(model, batches, f"{num_ranks} simulated ranks")


def report(console: Console, one: Run, many: Run, num_ranks: int, num_steps: int) -> bool:
    """Print both runs side by side; True when they agree."""
    console.print(f"[bold]shardwise[/bold]: {num_steps} training steps, twice")
    console.print(
        f"  table ({NUM_ROWS:,} x {WIDTH}) by rows, linear layer by columns, {num_ranks} ranks\n"
    )
    console.print(f"  loss on one device      {one.losses[0]:.6f} -> {one.losses[-1]:.6f}")
    console.print(
        f"  loss on {num_ranks} ranks         {many.losses[0]:.6f} -> {many.losses[-1]:.6f}"
    )
    worst = 0.0
    for name, value in one.parameters.items():
        difference = (value - many.parameters[name]).abs().max().item()
        worst = max(worst, difference)
        console.print(f"  largest difference in {name:14} {difference:.1e}")
    agree = worst < 1e-5
    console.print("  the numbers are one device's" if agree else "  [red]the numbers differ[/red]")
    console.print()
    console.print(_communication(many.comm, num_steps))
    return agree


def _communication(comm: CommDebugMode, num_steps: int) -> Table:
    counts: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for event in comm.events:
        counts[event.kind] += 1
        num_bytes[event.kind] += event.num_bytes
    table = Table(title="Communicated in a step, per rank", title_justify="left")
    table.add_column("collective")
    table.add_column("calls", justify="right")
    table.add_column("bytes", justify="right")
    for kind, count in sorted(counts.items()):
        table.add_row(kind, f"{count / num_steps:g}", f"{num_bytes[kind] / num_steps:,.0f}")
    whole_table = NUM_ROWS * WIDTH * 4
    table.caption = f"the table, {whole_table:,} bytes, stays"
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shardwise.demo", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="simulated ranks (4)")
    parser.add_argument("--steps", type=int, default=30, help="training steps (30)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    one = train(Model(), make_batches(options.steps, options.seed), "one device")
    many = train_sharded(options.ranks, options.steps, options.seed)
    return 0 if report(Console(), one, many, options.ranks, options.steps) else 1


if __name__ == "__main__":
    raise SystemExit(main())
