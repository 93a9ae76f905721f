"""torchrec's planner on one task, in its own process: `python planner_peer.py NUMBER FILE`.

Writes torchrec's search space with its costs, the plan that it found, and its CPU seconds.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.planner import (  # noqa: E402
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.storage_reservations import (  # noqa: E402
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError  # noqa: E402
from torchrec.modules.embedding_configs import EmbeddingBagConfig  # noqa: E402
from torchrec.modules.embedding_modules import EmbeddingBagCollection  # noqa: E402

from benchmarks.planner_tasks import Task, tasks  # noqa: E402

logging.disable(logging.CRITICAL)
torch.set_num_threads(1)


def run(task: Task) -> dict[str, Any]:
    configs = [
        EmbeddingBagConfig(
            num_embeddings=t.rows, embedding_dim=t.dim, name=t.name, feature_names=[f"f_{t.name}"]
        )
        for t in task.tables
    ]
    bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    topology = Topology(
        world_size=task.ranks,
        local_world_size=task.ranks_per_host,
        compute_device="cuda",
        hbm_cap=task.memory,
    )
    constraints = {
        t.name: ParameterConstraints(pooling_factors=[t.ids_per_bag]) for t in task.tables
    }
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=task.batch,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        debug=False,
        stats=[],
    )
    sharders: Any = [EmbeddingBagCollectionSharder()]
    space = planner._enumerator.enumerate(bags, sharders)
    planner._enumerator._last_stored_module = None  # its own time counts the enumeration
    start = time.process_time()
    try:
        planner.plan(bags, sharders)
        best = planner._best_plan
        assert best is not None
        cost = planner._perf_model.rate(best)
        kinds = [[o.name, o.sharding_type, o.compute_kernel] for o in best]
    except PlannerError as error:
        cost, kinds = None, str(error)[:200]
    cpu_s = time.process_time() - start
    storage = topology.devices[0].storage
    options = [
        {
            "table": option.name,
            "kind": option.sharding_type,
            "kernel": option.compute_kernel,
            "by": option.partition_by,
            "shards": [[s.perf.total, s.storage.hbm, s.storage.ddr] for s in option.shards],
        }
        for option in space
    ]
    return {
        "task": task.name,
        "cost": cost,
        "kinds": kinds,
        "cpu_s": cpu_s,
        "capacity": [storage.hbm, storage.ddr],
        "ranks": task.ranks,
        "ranks_per_host": task.ranks_per_host,
        "options": options,
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(tasks()[int(sys.argv[1])])))
