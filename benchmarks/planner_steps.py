"""Real steps of plans against their predicted costs: 26 tables of skewed sizes, 4 gloo processes.

    python -m benchmarks.planner_steps [--peer-python PYTHON] [--constants FILE] [--rounds 9]

The machine is calibrated first (unless --constants names a file). Then the planned step, all tables
row-wise, column-wise, table-wise, and further drawn plans run in turn in the same processes, round
after round; and once more in new processes. A rank's time is the lower quartile of its CPU seconds
over all rounds, since other programs and ranks on the same core only add to it; the slowest rank
counts. Each rank keeps to its own cores, or shares one where there are too few. It prints the
predicted and measured times, their rank correlation, and that of the two sets of processes with
each other, which no prediction can exceed by much. With --peer-python, torchrec runs the same
tables and batches with its own plan, in its own processes.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.planner_tasks import DLRM_IDS, DLRM_ROWS

RANKS, BAGS = 4, 512
MOST_ROWS = 150_000
DIMS = (16, 32, 64, 128)


def sizes() -> list[tuple[str, int, int, int]]:
    """Name, rows, dim and ids per bag of each table."""
    draw = random.Random(3)
    return [
        (f"t{i}", min(rows, MOST_ROWS), draw.choice(DIMS), min(ids, 40))
        for i, (rows, ids) in enumerate(zip(DLRM_ROWS, DLRM_IDS, strict=True))
    ]


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of all features and the lengths of bags, of one rank; low ids are more frequent."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    values, lengths = [], []
    for _, rows, _, ids in sizes():
        uniform = torch.rand(BAGS * ids, generator=draw, dtype=torch.float64)
        values.append((uniform**2 * rows).long().clamp_(max=rows - 1))
        lengths.append(torch.full((BAGS,), ids))
    return torch.cat(values), torch.cat(lengths)


def keep_to_own_cores() -> None:
    """As in `shardwise.planner.calibrate`, which torchrec's processes cannot import."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // RANKS)
    first = dist.get_rank() * each % len(cores)
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), cores[first : first + each])


def timed(steps: list[Any], rounds: int) -> list[list[float]]:
    """Of each kind of step, this process's CPU seconds in each round.

    Each runs twice in a round, and the second time counts: the first warms the caches.
    """
    keep_to_own_cores()
    batches = [batch_of(dist.get_rank(), number) for number in range(2)]
    found: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + 1):
        for step, times in zip(steps, found, strict=True):
            for values, lengths in batches:
                dist.barrier()
                start = time.process_time()
                step(values, lengths)
                spent = time.process_time() - start
            if number:
                times.append(spent)
    return found


def usual(times: list[float]) -> float:
    return statistics.quantiles(times, n=4)[0]


def slowest(per_rank: list[list[list[float]]]) -> list[float]:
    """Of each kind of step, the seconds of the rank that takes longest."""
    return [max(map(usual, each)) for each in zip(*per_rank, strict=True)]


# -- ours ------------------------------------------------------------------------------------


def run_ours(plans: list[dict[str, Any]], rounds: int) -> list[list[float]]:
    import shardwise
    from shardwise.embedding import EmbeddingBagCollection, Jagged, Plan, RowWiseAdagrad, Table

    torch.set_num_threads(1)
    mesh = shardwise.init_device_mesh("cpu", (RANKS,))
    tables = [Table(name, rows, dim) for name, rows, dim, _ in sizes()]

    def make(entries: dict[str, Any]) -> Any:
        optimizer = RowWiseAdagrad(0.01, across_columns=False)
        bags = EmbeddingBagCollection(tables, optimizer=optimizer, output="tensor", device="meta")
        bags.shard(mesh, Plan(entries))

        def step(values: torch.Tensor, lengths: torch.Tensor) -> None:
            out = bags(Jagged(bags.features, values, lengths=lengths))
            out.backward(torch.ones_like(out))

        return step

    return timed([make(entries) for entries in plans], rounds)


def drawn_plan(seed: int) -> dict[str, Any]:
    """Tables on random ranks, some of them split."""
    draw = random.Random(seed)
    split = draw.random()
    entries: dict[str, Any] = {}
    for name, rows, _, _ in sizes():
        if rows < 2000 and draw.random() < 0.3:
            entries[name] = "data_parallel"
        elif draw.random() < split:
            kind = draw.choice(["row_wise", "column_wise", "grid"])
            ranks = sorted(draw.sample(range(RANKS), 2))
            entries[name] = {"kind": kind, "ranks": ranks} if kind != "row_wise" else kind
        else:
            # The fewer ranks are used, the worse the plan.
            entries[name] = {"kind": "table_wise", "rank": draw.randrange(1 + seed % RANKS)}
    return entries


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python")
    parser.add_argument("--constants")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.peer:
        peer(options.rounds)
        return
    from shardwise.embedding import Plan, Table
    from shardwise.launch import launch
    from shardwise.planner import Constants, plan, price, workload
    from shardwise.planner.calibrate import calibrate
    from shardwise.planner.workload import with_sample

    torch.set_num_threads(1)
    constants = Constants.of(options.constants) if options.constants else calibrate(num_ranks=RANKS)
    tables = [Table(name, rows, dim) for name, rows, dim, _ in sizes()]
    work = with_sample(workload(tables), whole_batches(), num_ranks=RANKS)
    # Squares of column-split rows are kept apart, as torchrec does: nothing more is sent, and so
    # the costs are those of an optimizer without squares.
    # Kernel calls and reductions, which the bound leaves out, are more than a tenth of a step: of
    # plans within a tenth of the bound, the one that is expected to be fastest with them is taken.
    found = plan(work, RANKS, constants=constants, optimizer="sgd", gap=0.1)
    plans: dict[str, dict[str, Any]] = {
        "planned": dict(found.plan.entries),
        "all row-wise": {"*": "row_wise"},
        "all column-wise": {"*": "column_wise"},
        "greedy table-wise": {"*": "table_wise"},
    }
    for seed in range(options.plans - len(plans)):
        plans[f"drawn {seed}"] = drawn_plan(seed)
    predicted = {
        name: price(Plan(entries), work, found.setting).expected_s
        for name, entries in plans.items()
    }
    runs = [
        launch(run_ours, RANKS, list(plans.values()), options.rounds, collective_timeout_s=300)
        for _ in range(2)
    ]
    both = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(*runs, strict=True)]
    measured = dict(zip(plans, slowest(both), strict=True))
    print(f"{'plan':<20} {'predicted ms':>12} {'measured ms':>12}")
    for name in sorted(plans, key=measured.__getitem__):
        print(f"{name:<20} {1e3 * predicted[name]:12.2f} {1e3 * measured[name]:12.2f}")
    order = list(plans)
    correlation = rank_correlation([predicted[n] for n in order], [measured[n] for n in order])
    others = ("all row-wise", "all column-wise", "greedy table-wise")
    best = min(others, key=measured.__getitem__)
    agree = rank_correlation(*map(slowest, runs))
    print(f"rank correlation of {len(plans)} plans: {correlation:.3f}; of two runs: {agree:.3f}")
    ratio = measured["planned"] / measured[best]
    print(f"planned over the best of the three ({best}): {ratio:.3f}")
    if options.peer_python is None:
        print("no --peer-python: torchrec was not run")
    else:
        theirs = peer_times(options.peer_python, options.rounds)
        print(
            f"torchrec with its own plan: {1e3 * theirs:.2f} ms; planned over it: "
            f"{measured['planned'] / theirs:.3f}"
        )


def whole_batches() -> list[Any]:
    """The batches of all ranks together, two steps."""
    from shardwise.embedding import Jagged

    found = []
    for step in range(2):
        parts = [batch_of(rank, step) for rank in range(RANKS)]
        names, values, lengths = [], [], []
        at = 0
        for name, _, _, ids in sizes():
            names.append(name)
            num = BAGS * ids
            values += [part[0][at : at + num] for part in parts]
            lengths.append(torch.full((RANKS * BAGS,), ids))
            at += num
        found.append(Jagged(names, torch.cat(values), lengths=torch.cat(lengths)))
    return found


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's."""

    def places(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).argsort().argsort().double()

    pair = torch.stack([places(first), places(second)])
    return float(torch.corrcoef(pair)[0, 1])


# -- torchrec --------------------------------------------------------------------------------


def peer_times(python: str, rounds: int) -> float:
    ran = subprocess.run(
        [python, __file__, "--peer", "--rounds", str(rounds)], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
    )  # fmt: skip
    if ran.returncode:
        raise SystemExit(f"torchrec failed: {ran.stderr[-2000:]}")
    return float(ran.stdout.splitlines()[-1])


def peer(rounds: int) -> None:
    import torch.multiprocessing as mp

    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_peer_rank, (29_700 + os.getpid() % 200, rounds, queue), nprocs=RANKS)
    print(max(queue.get() for _ in range(RANKS)))


def _peer_rank(rank: int, port: int, rounds: int, queue: Any) -> None:
    import logging

    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=[name])
        for name, rows, dim, _ in sizes()
    ]
    bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    constraints = {
        # The default kernel ignores the fused optimizer.
        name: ParameterConstraints(pooling_factors=[float(ids)], compute_kernels=["fused"])
        for name, _, _, ids in sizes()
    }
    topology = Topology(world_size=RANKS, local_world_size=RANKS, compute_device="cpu")
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=BAGS, constraints=constraints, stats=[]
    )
    plan = planner.collective_plan(bags, [sharder], dist.group.WORLD)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = sharder.shard(bags, plan.plan[""], env, device=torch.device("cpu"))
    keys = [name for name, *_ in sizes()]

    def step(values: torch.Tensor, lengths: torch.Tensor) -> None:
        found = sharded(KeyedJaggedTensor(keys=keys, values=values, lengths=lengths))
        out = found.wait().values() if hasattr(found, "wait") else found.values()
        out.backward(torch.ones_like(out))

    queue.put(usual(timed([step], rounds)[0]))
    dist.barrier()


if __name__ == "__main__":
    main()
