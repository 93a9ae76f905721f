"""Worker processes that answer one line of JSON per name; a crash or a hang costs one answer.

A command starts itself as a worker: `serve_all` hands names out, `answer` runs in the worker.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Lost:
    """No answer: the process ended, with `why` on its stderr, or was `late`."""

    why: str
    late: bool


def serve_all(
    command: Sequence[str],
    names: Sequence[str],
    chunk_size: int,
    num_workers: int,
    timeout_s: float,
    done: Callable[[str, str | Lost], None],
) -> None:
    """Hand chunks of names to workers, several at a time; after a crash a new one goes on."""
    waiting: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for start in range(0, len(names), chunk_size):
        waiting.put(list(names[start : start + chunk_size]))

    def serve() -> None:
        while True:
            try:
                chunk = waiting.get_nowait()
            except queue.Empty:
                return
            while chunk:
                for name, line in ask(command, list(chunk), timeout_s):
                    chunk.remove(name)
                    done(name, line)

    threads = [threading.Thread(target=serve) for _ in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ask(
    command: Sequence[str], names: Sequence[str], timeout_s: float
) -> Iterator[tuple[str, str | Lost]]:
    """The lines of one worker until it ends, crashes or hangs; the last may be `Lost`."""
    worker = subprocess.Popen(
        [*command, *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert worker.stdout is not None, "the worker's answers come through a pipe"
    errors: list[str] = []
    drain = threading.Thread(target=lambda: errors.extend(worker.stderr or ()))
    drain.start()
    deadline = _Deadline(timeout_s, worker.kill)
    for name in names:
        deadline.renew()
        line = worker.stdout.readline()
        if line:
            yield name, line
            continue
        deadline.end()
        _close(worker, drain)
        late = deadline.passed
        why = f"no answer in {timeout_s:.0f} s" if late else "".join(errors)[-300:]
        yield name, Lost(why, late)
        return
    deadline.end()
    _close(worker, drain)


class _Deadline:
    """Calls `stop` when `limit_s` have passed since it was last renewed.

    Time is counted in short waits: if this process is suspended, so are its workers, and no time
    counts.
    """

    TICKS = 20

    def __init__(self, limit_s: float, stop: Callable[[], None]) -> None:
        self.passed = False
        self._limit_s, self._stop = limit_s, stop
        self._ended = threading.Event()
        self.renew()
        threading.Thread(target=self._count, daemon=True).start()

    def renew(self) -> None:
        self._ticks = 0

    def end(self) -> None:
        self._ended.set()

    def _count(self) -> None:
        while not self._ended.wait(self._limit_s / self.TICKS):
            self._ticks += 1
            if self._ticks > self.TICKS:
                self.passed = True
                return self._stop()


def _close(worker: subprocess.Popen[str], drain: threading.Thread) -> None:
    worker.wait()
    drain.join()
    for pipe in (worker.stdout, worker.stderr):
        if pipe is not None:
            pipe.close()


def answer(results: Iterable[Any]) -> int:
    """In a worker: print each result, a dataclass, as a line of JSON; the exit code."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch prints goes to stderr
    for result in results:
        print(json.dumps(asdict(result)), file=lines, flush=True)
    return 0


def part_of_several(text: str) -> tuple[int, int]:
    """The argument of `--part`: `3/16`."""
    part, slash, num_parts = text.partition("/")
    if not (slash and part.isdigit() and num_parts.isdigit() and 1 <= int(part) <= int(num_parts)):
        raise argparse.ArgumentTypeError(f"a part of several, such as 3/16; got {text!r}")
    return int(part), int(num_parts)
