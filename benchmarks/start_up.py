"""Start-up time on top of `import torch`: the import, the first tensor, and the first result.

    python -m benchmarks.start_up [--repeats 7] [--json out.json]

Every sample is a process of its own. Imports are those of new processes, the rest is timed in forks
of one that has imported torch. They share cached byte code, as with an installed package.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.timing import Result, add_options, print_table, summarize, write_json

#: Prints the seconds of CPU time that `{timed}` takes after `{before}`.
_SCRIPT = """
import time
{before}
start = time.process_time()
{timed}
print(time.process_time() - start)
"""

_WORLD = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (1,))
x = torch.ones(8, 8)
"""

_SIMULATED = {
    "ours": """
world = system.simulate(4)
world.__enter__()
""",
    # torch has no simulated world: this is rank 0 of a fake group of 4.
    "theirs": """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
""",
}
_MESH = """
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (4,))
x = torch.ones(8, 8)
"""
_ADD = """
x = system.distribute_tensor(x, mesh, [system.Shard(0)])
y = x + x
"""

_MODULES = {"ours": "shardwise", "theirs": "torch.distributed.tensor"}


def scripts() -> dict[str, dict[str, str]]:
    """Per case and side, the program to run."""
    cases: dict[str, dict[str, str]] = {
        "import": {},
        "first distribute_tensor": {},
        "import to first add, one process": {},
        "import to first add, simulated": {},
    }
    cases["import"]["local"] = _SCRIPT.format(before="", timed="import torch")
    for side, module in _MODULES.items():
        cases["import"][side] = _SCRIPT.format(before="import torch", timed=f"import {module}")
        cases["first distribute_tensor"][side] = _SCRIPT.format(
            before=f"import torch\nimport {module} as system{_WORLD}",
            timed="system.distribute_tensor(x, mesh, [system.Shard(0)])",
        )
        for name, world in (("one process", _WORLD), ("simulated", _SIMULATED[side] + _MESH)):
            cases[f"import to first add, {name}"][side] = _SCRIPT.format(
                before="import torch", timed=f"import {module} as system{world}{_ADD}"
            )
    return cases


#: Runs each file whose name it reads in a fork; then it prints an empty line.
_FORKING = """
import gc, os, sys, torch
gc.freeze()
for line in sys.stdin:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        with open(line.strip()) as file:
            exec(file.read(), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit("A program failed.")
    print(flush=True)
"""


class Starts:
    """Runs programs in processes of their own; `byte_code` is where Python caches it."""

    def __init__(self, byte_code: str) -> None:
        self._env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": byte_code}
        self._program = Path(byte_code) / "program.py"
        self._forking = subprocess.Popen(
            [sys.executable, "-c", _FORKING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._env,
        )

    def fresh_s(self, program: str) -> float:
        """The seconds that the program prints in a new process."""
        asked = [sys.executable, "-c", program]
        done = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True, env=self._env)
        return float(done.stdout.split()[-1])

    def forked_s(self, program: str) -> float:
        """The seconds that the program prints in a process that has imported torch."""
        self._program.write_text(program)
        assert self._forking.stdin is not None
        assert self._forking.stdout is not None
        print(self._program, file=self._forking.stdin, flush=True)
        *_, last = itertools.takewhile(str.strip, self._forking.stdout)
        return float(last)

    def close(self) -> None:
        self._forking.communicate()


def measure(
    name: str, programs: dict[str, str], num_repeats: int, run_s: Callable[[str], float]
) -> Result:
    samples: dict[str, list[float]] = {side: [] for side in programs}
    for program in programs.values():  # fills the page cache and writes byte code
        run_s(program)
    for _ in range(num_repeats):
        for side, program in programs.items():
            samples[side].append(run_s(program))
    return summarize(name, samples)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_options(parser, repeats=7)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as byte_code:
        starts = Starts(byte_code)
        results = []
        for name, programs in scripts().items():
            # To fork costs the child some milliseconds, as many as our import.
            run_s = starts.fresh_s if name == "import" else starts.forked_s
            results.append(measure(name, programs, options.repeats, run_s))
        starts.close()
    print_table("start-up, on top of torch", results, unit="ms", local="import torch")
    write_json(options.json, results, benchmark="start_up")


if __name__ == "__main__":
    main()
