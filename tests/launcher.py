"""Real processes: started once, each runs the functions that it is sent.

Joining takes a moment, so one set of processes serves all tests of a file. A set in which a process
hung or died is killed, and the next test gets a new one.
"""

import contextlib
import datetime
import marshal
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.launch import PRELOADED

# What many programs of tests need on each rank, and what compiling or training a transformer needs,
# is imported once, where processes are forked. A module that is not installed is passed over.
PRELOADED += [
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama",
    "pytest",
    "shardwise.demo.run",
    "shardwise.front",
    "shardwise.interop.torchrec",
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


@contextlib.contextmanager
def forked_python():
    """The path of a program that does what Python does, in a process forked with torch imported.

    The program itself only waits: it ends as that process ends, which ends when it is killed. So it
    serves where commands are, to subprocesses and to torchrun (`PYTHON_EXEC`), but where a test is
    about what is imported or how Python ends.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        path = Path(folder, "python")
        listening.bind(str(path.with_name("socket")))
        listening.listen()
        path.write_text(_PROGRAM.format(python=sys.executable, address=listening.getsockname()))
        path.chmod(0o700)
        process = context.Process(target=_fork_programs, args=(listening,))
        process.start()
        try:
            yield str(path)
        finally:
            process.kill()
            process.join()


_PROGRAM = """#!{python} -IS
import marshal, os, signal, socket, sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = marshal.dumps((sys.argv[1:], os.getcwd(), dict(os.environ)))
    socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(asked)
    code = server.recv(1)
if not code:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(code[0])
"""


def _fork_programs(listening):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how one ended
    while True:
        program, _ = listening.accept()
        with program:
            if not os.fork():
                listening.close()
                _stand_in(program)


def _stand_in(program):
    """Run what a program was asked to, with its streams and environment, and tell it the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(program, 8, 3)
    with program.makefile("rb") as file:
        words, folder, environment = marshal.loads(file.read(int.from_bytes(size, "big")))
    for stream, given in enumerate(streams):
        os.dup2(given, stream)
        os.close(given)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))

    def watch():
        program.recv(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    code = 0
    try:
        _run_as_python(words)
    except SystemExit as ended:
        code = ended.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    program.send(bytes([code]))
    os._exit(code)


def _run_as_python(words):
    if words[0] == "-u":
        words = words[1:]
    if words[0] in ("-m", "-c"):
        how, what, *rest = words
        sys.argv = [how, *rest]
        sys.path.insert(0, os.getcwd())
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(what, {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def _serve(rank, size, port, pipe, timeout_s):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # Here, where the compiler is imported already: whoever starts processes may do without it.
    import unlogged_compiler  # noqa: F401

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
