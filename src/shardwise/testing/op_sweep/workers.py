"""Processes that play operators: a crash or an endless loop costs one operator, not the sweep."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from shardwise.testing.op_sweep.result import OpResult
from shardwise.testing.op_sweep.table import full_name, operators

#: Operators of one process. A fresh one now and then keeps torch's caches from growing.
CHUNK = 40


def sweep(
    names: Sequence[str],
    options: Sequence[str],
    num_processes: int,
    timeout_s: float,
    done: Callable[[OpResult], None],
) -> list[OpResult]:
    """Play the operators of these names, several at a time; results in the order of `names`."""
    waiting: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    # Several chunks for each process, so that none ends long after the others.
    size = max(1, min(CHUNK, -(-len(names) // (4 * num_processes))))
    for start in range(0, len(names), size):
        waiting.put(list(names[start : start + size]))
    found: dict[str, OpResult] = {}

    def serve() -> None:
        while True:
            try:
                chunk = waiting.get_nowait()
            except queue.Empty:
                return
            while chunk:
                for result in _play_chunk(list(chunk), options, timeout_s):
                    found[result.name] = result
                    chunk.remove(result.name)
                    done(result)

    threads = [threading.Thread(target=serve) for _ in range(num_processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[name] for name in names]


def _play_chunk(
    names: Sequence[str], options: Sequence[str], timeout_s: float
) -> Iterator[OpResult]:
    """What one process gives before it ends, crashes or hangs; the last may be a failure."""
    command = [sys.executable, "-m", "shardwise.testing.op_sweep", "--worker", *options, *names]
    worker = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    assert worker.stdout is not None, "the worker's answers come through a pipe"
    errors: list[str] = []
    drain = threading.Thread(target=lambda: errors.extend(worker.stderr or ()))
    drain.start()
    late = threading.Event()

    def stop() -> None:
        late.set()
        worker.kill()

    for name in names:
        timer = threading.Timer(timeout_s, stop)
        timer.start()
        line = worker.stdout.readline()
        timer.cancel()
        if line:
            yield OpResult(**json.loads(line))
            continue
        _close(worker, drain)
        failed = OpResult(name)
        why = f"no answer in {timeout_s:.0f} s" if late.is_set() else "".join(errors)[-300:]
        failed.add("forward", "timeout" if late.is_set() else "crash", why)
        yield failed
        return
    _close(worker, drain)


def _close(worker: subprocess.Popen[str], drain: threading.Thread) -> None:
    worker.wait()
    drain.join()
    for pipe in (worker.stdout, worker.stderr):
        if pipe is not None:
            pipe.close()


def names_of(patterns: Sequence[str]) -> list[str]:
    return [full_name(entry) for entry in operators(patterns)]
