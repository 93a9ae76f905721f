"""A limit on CPU time, for what would grow without bound if it were wrong."""

import contextlib
import gc
import time


@contextlib.contextmanager
def cpu_limit(most_s, doing=""):
    """Raise where the block takes more CPU time.

    Objects of earlier tests are left to one side: a full garbage collection of a long test process
    takes a second by itself, and whoever allocates next pays for it.
    """
    gc.freeze()
    start = time.process_time()
    try:
        yield
        took_s = time.process_time() - start
    finally:
        gc.unfreeze()
    assert took_s < most_s, f"{took_s:.2f} s of CPU, the limit is {most_s} s. {doing}"
