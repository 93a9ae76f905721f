"""The best sharding plan of a collection's tables, with a bound on what a better one could save."""

from shardwise.planner.costs import Constants
from shardwise.planner.planning import PlanResult, plan
from shardwise.planner.price import Price, price
from shardwise.planner.solve import NoPlanFits
from shardwise.planner.workload import TableUse, Workload, read_tables, workload

__all__ = [
    "Constants",
    "NoPlanFits",
    "PlanResult",
    "Price",
    "TableUse",
    "Workload",
    "plan",
    "price",
    "read_tables",
    "workload",
]
