"""A limit on CPU time, for what would grow without bound if it were wrong."""

import contextlib
import time


@contextlib.contextmanager
def cpu_limit(most_s, doing=""):
    """Raise where the block takes more CPU time.

    A full garbage collection in it passes only over objects of this file: see `_freeze`.
    """
    start = time.process_time()
    yield
    took_s = time.process_time() - start
    assert took_s < most_s, f"{took_s:.2f} s of CPU, the limit is {most_s} s. {doing}"
