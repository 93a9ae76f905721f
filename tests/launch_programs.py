"""What launched processes run in the tests of the launcher."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.errors import LayoutError
from shardwise.launch import launch


def total(number):
    value = torch.tensor([dist.get_rank() + number])
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def end_the_group():
    """As programs for torchrun do at their end."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank


def noted_total(note, number):
    note(dist.get_rank())
    return total(number)


def sum_on_a_gpu():
    """Adam asks for the state of the GPU, also where parameters are on the CPU."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.Adam([weight], lr=0.5).step()
    return torch.tensor([1.0, 2.0], device="cuda").sum().item()


def where_it_listens():
    dist.barrier()
    return [address for address, _ in listening()]


def listening():
    """The addresses and ports that this process listens on, as the kernel writes them."""
    mine = set()
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            mine.add(str(number.readlink()))
    rows = []
    for table in ("tcp", "tcp6"):
        rows += [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    found = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    return [(text.split(":")[0], int(text.split(":")[1], 16)) for text in found]


def die(rank, kind):
    """One rank ends; the others wait for it in a collective."""
    if dist.get_rank() == rank:
        if kind == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit":
            os._exit(7)
        if kind == "ours":
            raise LayoutError("this rank has no room")
        raise ValueError("nothing good")
    dist.all_reduce(torch.ones(1))


def sleep(rank):
    if dist.get_rank() == rank:
        time.sleep(600)


def tell_pid_and_sleep(folder):
    with open(f"{folder}/{dist.get_rank()}", "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


if __name__ == "__main__":
    launch(tell_pid_and_sleep, 2, sys.argv[1])
