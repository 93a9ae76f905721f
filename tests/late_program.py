"""A program that one rank imports late: the launcher's environment says which, and how late."""

import multiprocessing
import os
import time

if multiprocessing.current_process().name == os.environ.get("LATE_RANK"):
    time.sleep(float(os.environ["LATE_S"]))


def nothing():
    return os.environ["LATE_S"]
