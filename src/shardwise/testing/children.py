"""Child processes that answer one line per name: a crash or an endless loop costs one name."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lost:
    """No answer came: the process ended, with `why` on its stderr, or was `late`."""

    why: str
    late: bool


def serve_all(
    names: Sequence[str],
    size: int,
    num_processes: int,
    answers: Callable[[list[str]], Iterator[tuple[str, str | Lost]]],
    done: Callable[[str, str | Lost], None],
) -> None:
    """Chunks of `size` names, several at a time; `answers` may end early, and is asked again."""
    waiting: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for start in range(0, len(names), size):
        waiting.put(list(names[start : start + size]))

    def serve() -> None:
        while True:
            try:
                chunk = waiting.get_nowait()
            except queue.Empty:
                return
            while chunk:
                for name, answer in answers(list(chunk)):
                    chunk.remove(name)
                    done(name, answer)

    threads = [threading.Thread(target=serve) for _ in range(num_processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ask(
    command: Sequence[str], names: Sequence[str], timeout_s: float
) -> Iterator[tuple[str, str | Lost]]:
    """The lines that one process gives before it ends, crashes or hangs; the last may be lost."""
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
            yield name, line
            continue
        _close(worker, drain)
        why = f"no answer in {timeout_s:.0f} s" if late.is_set() else "".join(errors)[-300:]
        yield name, Lost(why, late.is_set())
        return
    _close(worker, drain)


def _close(worker: subprocess.Popen[str], drain: threading.Thread) -> None:
    worker.wait()
    drain.join()
    for pipe in (worker.stdout, worker.stderr):
        if pipe is not None:
            pipe.close()
