"""What it costs to begin, on top of `import torch`: the import, and the first distributed tensor.

    python -m benchmarks.start_up [--repeats 7] [--json out.json]

Every sample is a fresh process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

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

_MODULES = {"ours": "shardwise", "theirs": "torch.distributed.tensor"}


def scripts() -> dict[str, dict[str, str]]:
    """Per case and side, the program to run."""
    cases: dict[str, dict[str, str]] = {"import": {}, "first distribute_tensor": {}}
    cases["import"]["local"] = _SCRIPT.format(before="", timed="import torch")
    for side, module in _MODULES.items():
        cases["import"][side] = _SCRIPT.format(before="import torch", timed=f"import {module}")
        cases["first distribute_tensor"][side] = _SCRIPT.format(
            before=f"import torch\nimport {module} as system{_WORLD}",
            timed="system.distribute_tensor(x, mesh, [system.Shard(0)])",
        )
    return cases


def run_s(script: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout.split()[-1])


def measure(name: str, programs: dict[str, str], num_repeats: int) -> Result:
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
    results = [measure(name, programs, options.repeats) for name, programs in scripts().items()]
    print_table("start-up, on top of torch", results, unit="ms", local="import torch")
    write_json(options.json, results, benchmark="start_up")


if __name__ == "__main__":
    main()
