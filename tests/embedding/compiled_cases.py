"""A model of tables and a dense part, compiled; for both worlds."""

import embedding_cases as cases
import torch
import torch.distributed as dist

import shardwise


class Recommender(torch.nn.Module):
    """Bags of ids, side by side, into one layer."""

    def __init__(self, plan=None, optimizer=None):
        super().__init__()
        self.bags = cases.make(output="tensor", optimizer=optimizer)
        if plan is not None:
            self.bags.shard(shardwise.init_device_mesh("cpu", (4,)), plan)
        torch.manual_seed(1)
        self.dense = torch.nn.Linear(42, 3)

    def forward(self, batch):
        return torch.tanh(self.dense(self.bags(batch))).pow(2).sum()


def trained_compiled(plan, optimizer, sizes):
    """In four gloo processes: the tables after a step for each number of bags."""
    model = Recommender(plan, optimizer)
    compiled = torch.compile(model, backend="aot_eager")
    for number, num_bags in enumerate(sizes):
        compiled(cases.batch(10 * number + dist.get_rank(), num_bags)).backward()
    return {name: cases.whole(p.detach()) for name, p in model.bags.named_parameters()}
