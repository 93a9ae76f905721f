"""shardwise doctor: what works on this machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwise import __version__
from shardwise._torch import (
    autograd,
    c10d,
    compat,
    dispatch,
    dynamo,
    effects,
    frames,
    functions,
    inductor,
    symint,
)
from shardwise.cli.console import console
from shardwise.launch import LOOPBACK, launch

#: The files of shardwise._torch, but for compat, which is examined as "torch".
INTERNALS = (
    dispatch,
    functions,
    autograd,
    c10d,
    symint,
    dynamo,
    effects,
    inductor,
    frames,
)

MARKS = {True: "[green]works[/green]", False: "[red]fails[/red]", None: "[dim]note [/dim]"}


@dataclass(frozen=True)
class Finding:
    """`ok` is None for a mere note."""

    name: str
    ok: bool | None
    text: str


def run_doctor() -> int:
    """0 when nothing fails, else 1."""
    out = console()
    out.print(f"shardwise {__version__}, Python {platform.python_version()}, {platform.platform()}")
    broken = 0
    for examine in (_torch, _simulation, _gloo, _nccl, _ports, _cores, _kernels, _extras):
        found = _try(examine)
        out.print(f"{MARKS[found.ok]}  [bold]{found.name}[/bold]: ", end="")
        out.print(found.text, markup=False)
        broken += found.ok is False
    broken += _print_internals(out)
    return int(broken > 0)


def _print_internals(out: Console) -> int:
    """Print the probes of torch's internals; returns the number that failed."""
    table = Table("", "torch's internals", "what they are for, or what stops working", box=None)
    broken = 0
    for module in INTERNALS:
        found = module.probe()
        text = found.text or (module.__doc__ or "").partition("\n")[0]
        table.add_row(MARKS[found.ok], module.__name__.rpartition(".")[2], escape(text))
        broken += found.ok is False
    out.print(table)
    return broken


def _try(examine: Callable[[], Finding]) -> Finding:
    try:
        return examine()
    except Exception as error:
        return Finding(examine.__name__.lstrip("_"), False, f"{type(error).__name__}: {error}")


def _torch() -> Finding:
    found = compat.probe()
    return Finding("torch", found.ok, "; ".join(filter(None, (compat.VERSION, found.text))))


def _simulation() -> Finding:
    from shardwise import Shard, distribute_tensor, init_device_mesh, simulate

    with simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        right = float(x.sum()) == 4.0
    return Finding(
        "simulated ranks", right, "a sum over 2 ranks is right" if right else "wrong sum"
    )


def _add_up() -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return float(value)


def _gloo() -> Finding:
    if not dist.is_gloo_available():
        return Finding("gloo", False, "this torch has no gloo: processes on CPU cannot talk")
    right = launch(_add_up, 2) == [2.0, 2.0]
    return Finding("gloo", right, "2 processes added a number over loopback")


def _nccl() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", None, "none here: simulate() and gloo on CPU work, NCCL does not")
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    text = f"{torch.cuda.device_count()} × {', '.join(sorted(names))}"
    if not dist.is_nccl_available():
        return Finding("GPU", False, f"{text}, but this torch has no NCCL")
    return Finding("GPU", True, f"{text}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")


def _ports() -> Finding:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
    port = os.environ.get("MASTER_PORT", "29500")
    with socket.socket() as usual:
        try:
            usual.bind((LOOPBACK, int(port)))
        except OSError as error:
            return Finding("ports", None, f"{port}, torchrun's, is not available: {error.strerror}")
    return Finding("ports", True, f"{port}, torchrun's, is free")


def _cores() -> Finding:
    text = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads for torch"
    if os.environ.get("OMP_NUM_THREADS") is None and (os.cpu_count() or 1) > 1:
        text += "; several processes on one machine want OMP_NUM_THREADS set"
    return Finding("CPU", None, text)


def _kernels() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding("Triton", None, "not installed: tables use torch's kernels")
    text = "fused kernels for tables" if torch.cuda.is_available() else "installed; needs a GPU"
    return Finding("Triton", True if torch.cuda.is_available() else None, text)


def _extras() -> Finding:
    names = ("highspy", "fbgemm_gpu", "torchrec", "transformers")
    found = [name for name in names if importlib.util.find_spec(name) is not None]
    return Finding("also installed", None, ", ".join(found) or f"none of {', '.join(names)}")
