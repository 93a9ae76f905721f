"""What launched processes run in the tests of the launcher."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from shardwise.launch import launch


def total(number):
    value = torch.tensor([dist.get_rank() + number])
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def die(rank, kind):
    """One rank ends; the others wait for it in a collective."""
    if dist.get_rank() == rank:
        if kind == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit":
            os._exit(7)
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
