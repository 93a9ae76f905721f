"""Real processes: started once, each runs the functions that it is sent.

Joining takes a moment, so one set of processes serves all tests of a file. A set in which a process
hung or died is killed, and the next test gets a new one.
"""

import datetime
import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.launch import PRELOADED

# Many tests compile or train a transformer on each rank: what that needs is imported once, where
# processes are forked. A module that is not installed is passed over.
PRELOADED += [
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama",
]


@dataclass(frozen=True)
class Failure:
    """An exception on one rank."""

    kind: type
    message: str
    trace: str


class Processes:
    """`size` processes that talk through gloo on this machine."""

    def __init__(self, size, timeout_s=60):
        """`timeout_s` is how long a collective waits for the other ranks."""
        self.size = size
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, self._store.port, theirs, timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.run(dist.get_rank, timeout_s=120)

    def __call__(self, fn, *args, timeout_s=60):
        """What `fn(*args)` returns on each rank; fails when it raises on any."""
        results = self.run(fn, *args, timeout_s=timeout_s)
        for rank, result in enumerate(results):
            assert not isinstance(result, Failure), f"rank {rank}:\n{result.trace}"
        return results

    def run(self, fn, *args, timeout_s=60) -> list[Any]:
        """What `fn(*args)` returns on each rank, or the Failure in its place."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((fn, args)))
        deadline = time.monotonic() + timeout_s
        results: list[Any] = []
        silent, ended = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                if pipe.poll(max(0, deadline - time.monotonic())):
                    results.append(pickle.loads(pipe.recv_bytes()))
                    continue
                silent.append(rank)
            except EOFError:
                ended.append(rank)
        if silent or ended:
            self.kill()
            found = [r.trace if isinstance(r, Failure) else "returned" for r in results]
            raise TimeoutError(
                f"{fn.__name__}: ranks {silent} did not answer within {timeout_s} s, the "
                f"processes of {ended} ended; the others: {found}"
            )
        return results

    @property
    def alive(self):
        return all(process.is_alive() for process in self._processes)

    def kill(self):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def run_script(path, timeout_s=240):
    """What a script prints, in a process of its own that is forked with torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        process = context.Process(target=_run_as_program, args=(str(path), str(printed)))
        process.start()
        process.join(timeout_s)
        process.kill()
        process.join()
        output = printed.read_text()
    assert process.exitcode == 0, f"exit code {process.exitcode}\n{output[-3000:]}"
    return output


def _run_as_program(path, printed):
    with open(printed, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = [path]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")
    sys.stdout.flush()


def _serve(rank, size, port, pipe, timeout_s):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # Here, where the compiler is imported already: whoever starts processes may do without it.
    import unmeasured_guards  # noqa: F401

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            fn, args = pickle.loads(message)
            answer = pickle.dumps(fn(*args))
        except Exception as error:
            answer = pickle.dumps(Failure(type(error), str(error), traceback.format_exc()))
        pipe.send_bytes(answer)
