"""What test_planner.py runs in processes."""

import torch.distributed as dist

import shardwise
from shardwise.embedding import Table
from shardwise.planner import plan


def planned(memory):
    """Ranks that would plan differently; all get the plan of the first."""
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    tables = [Table(f"t{i}", 1000 * (i + 1), 16) for i in range(6)]
    ids = 1.0 + 20.0 * dist.get_rank()
    found = plan(tables, mesh, batch=256, ids_per_bag=ids, repeated=0.1, memory=memory)
    return dict(found.plan.entries), found.cost_s
