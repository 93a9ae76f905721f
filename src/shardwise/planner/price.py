"""Price a plan for any number of ranks, from layouts alone: nothing is allocated or simulated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.embedding.plan import Plan
from shardwise.lookup.optimizers import RowWiseAdagrad
from shardwise.lookup.routing import rows_are_fewer
from shardwise.lookup.table import Table
from shardwise.planner.costs import ID_BYTES, OPTIMIZERS, Loads, Setting, shard_sizes
from shardwise.planner.problem import Array, Ints
from shardwise.planner.workload import TableUse, Workload


@dataclass(frozen=True, slots=True, eq=False)
class ShardGroup:
    """Ranks whose shards of one table have equal sizes."""

    table: int
    kind: str
    ranks: Ints | slice
    #: Rows or columns of each of them; how many ranks hold any.
    size: int
    holders: int


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """A step of a plan; arrays have one entry per rank."""

    setting: Setting
    #: Seconds of lookups and updates; of exchanges; of requesting, the same on all ranks.
    compute_s: Array
    exchange_s: Array
    asking_s: float
    #: Seconds of further kernel calls: each width on a rank is its own call.
    widths_s: Array
    #: Bytes of tables, of optimizer state, and of the buffers of a step.
    tables: Array
    state: Array
    buffers: Array
    #: Bytes that each rank sends.
    counts_sent: int
    ids_sent: float
    rows_sent: Array
    gradients_sent: float
    copies_sent: float
    squares_sent: float

    @property
    def seconds(self) -> Array:
        return self.compute_s + self.exchange_s + self.asking_s + self.setting.base_s

    @property
    def expected_s(self) -> float:
        """Seconds of the slowest rank with the calls of further widths, which plans ignore."""
        return float((self.seconds + self.widths_s).max())

    @property
    def memory(self) -> Array:
        return self.tables + self.state + self.buffers

    @property
    def sent(self) -> Array:
        """Bytes that each rank gives to collectives, as `CommDebugMode` counts them."""
        alike = self.counts_sent + self.ids_sent + self.gradients_sent
        return self.rows_sent + (alike + self.copies_sent + self.squares_sent)

    @property
    def step_s(self) -> float:
        """Seconds of the slowest rank, or of all if they share too few cores."""
        found = float(self.seconds.max())
        at_once = cores_at_once(self.setting)
        return found if at_once is None else float(max(found, self.seconds.sum() / at_once))


def cores_at_once(setting: Setting) -> float | None:
    """How many ranks compute at the same time; None for all."""
    at_once = setting.constants.at_once
    if at_once is None or at_once >= setting.ranks_per_host:
        return None
    return at_once * (setting.num_ranks // setting.ranks_per_host)


def shard_groups(plan: Plan, tables: Sequence[Table], num_ranks: int) -> Iterator[ShardGroup]:
    """The shards of all tables, grouped by size."""
    for table, (kind, ranks) in enumerate(plan.holders(tables, num_ranks)):
        one = tables[table]
        if kind == "data_parallel":
            yield ShardGroup(table, kind, slice(0, num_ranks), one.num_embeddings, num_ranks)
            continue
        whole = one.embedding_dim if kind == "column_wise" else one.num_embeddings
        num = num_ranks if ranks is None else len(ranks)
        sizes = shard_sizes(whole, num)
        where = None if ranks is None else np.asarray(ranks, np.int64)
        edges = np.flatnonzero(np.diff(sizes)) + 1
        bounds = [0, *edges.tolist(), num]
        holders = int((sizes > 0).sum())
        for start, stop in itertools.pairwise(bounds):
            size = int(sizes[start])
            if size:
                held = slice(start, stop) if where is None else where[start:stop]
                yield ShardGroup(table, kind, held, size, holders)


def price(plan: Plan, work: Workload, setting: Setting) -> Price:
    """What a step of a plan takes, holds and sends, in the dtype that the plan names."""
    setting = replace(setting, exchange_dtype=plan.exchange_dtype)
    tables, num = work.tables, setting.num_ranks
    groups = list(shard_groups(plan, tables, num))
    loads = Loads(setting, [work.uses[group.table] for group in groups])
    by_columns = np.array([group.kind == "column_wise" for group in groups])
    sizes = np.array([group.size for group in groups], float)
    fraction = np.where(by_columns, 1.0, sizes / loads.rows)
    width = np.where(by_columns, sizes, loads.dim)
    held = loads.held(fraction, width)
    copied = loads.copied()
    rows = np.where(by_columns, loads.rows, sizes)
    params = rows * width * setting.number_bytes
    state = setting.state_bytes(rows, width)
    sums_bags = np.array([work.pooled and not _by_id(g, i, loads) for i, g in enumerate(groups)])
    answers = np.where(sums_bags, loads.bags, loads.ids * fraction)
    message = (loads.ids * fraction + np.where(sums_bags, loads.bags, 0.0)) * ID_BYTES
    sent = answers * width * setting.sent_bytes
    exchange = (message + 2 * sent) * setting.owner_byte_s
    sums = np.zeros((6, num))
    asking, buffers = _asking(groups, loads, setting)
    copies = 0.0
    for i, group in enumerate(groups):
        here = group.ranks
        if group.kind == "data_parallel":
            buffer = copied[i, 1] - params[i] - state[i]
            found = (copied[i, 0], 0.0, params[i], state[i], buffer, 0.0)
            copies += float(rows[i] * (width[i] + 1) * setting.number_bytes)
        else:
            buffer = held[i, 1] - params[i] - state[i]
            found = (held[i, 0] - exchange[i], exchange[i], params[i], state[i], buffer, sent[i])
        sums[:, here] += np.asarray(found)[:, None]
        if work.uses[group.table].below and _is_split(group):
            # A sample says how many ids each part of the rows gets.
            busy = _own_shares(groups, i, work.uses[group.table], num)
            more = loads.only(i).held(fraction[i], width[i : i + 1], busy) - held[i]
            sums[0, here] += more[:, 0]
            sums[4, here] += more[:, 1]
            if not sums_bags[i]:
                sums[5, here] += loads.ids[i] * (busy - fraction[i]) * width[i] * setting.sent_bytes
    traffic = _traffic(groups, loads, setting, width)
    stacks = _num_stacks(groups, num, width)
    calls = setting.constants.lookup.call_s + setting.constants.update.call_s
    return Price(
        setting,
        sums[0],
        sums[1],
        asking,
        np.maximum(stacks - 1, 0) * calls,
        sums[2],
        sums[3],
        sums[4] + buffers,
        _counts_bytes(groups, work, num, width) if num > 1 else 0,
        traffic[0] if num > 1 else 0.0,
        sums[5] if num > 1 else sums[5] * 0,
        traffic[1] if num > 1 else 0.0,
        copies if num > 1 else 0.0,
        traffic[2] if num > 1 else 0.0,
    )


def _own_shares(groups: Sequence[ShardGroup], place: int, use: TableUse, num_ranks: int) -> Array:
    """Of each rank of a group: the fraction of the table's ids that go to its rows."""
    group = groups[place]
    before = sum(_count(each, num_ranks) for each in groups[_first(groups, place) : place])
    # Parts without rows have no ids either, and come last.
    return use.shares(group.holders)[before : before + _count(group, num_ranks)]


def _count(group: ShardGroup, num_ranks: int) -> int:
    """How many ranks a group has."""
    ranks = group.ranks
    return len(range(*ranks.indices(num_ranks))) if isinstance(ranks, slice) else len(ranks)


def _asking(groups: Sequence[ShardGroup], loads: Loads, setting: Setting) -> tuple[float, float]:
    """Seconds and bytes of every rank to request rows, of all tables together."""
    seconds = bytes_held = 0.0
    done: set[int] = set()
    for i, group in enumerate(groups):
        if group.kind == "data_parallel" or group.table in done:
            continue
        done.add(group.table)
        one = loads.only(i)
        by_rows = group.kind != "column_wise"
        width = one.dim if by_rows else one.dim / group.holders
        found = one.requested(group.holders, width, by_rows=by_rows)[0]
        seconds, bytes_held = seconds + float(found[0]), bytes_held + float(found[1])
    return seconds, bytes_held


def _traffic(
    groups: Sequence[ShardGroup], loads: Loads, setting: Setting, width: Array
) -> tuple[float, float, float]:
    """Bytes of ids, gradients and squares that every rank sends."""
    ids = gradients = squares = 0.0
    num = setting.num_ranks
    summed = OPTIMIZERS[setting.optimizer] is RowWiseAdagrad
    for i, group in enumerate(groups):
        if group.kind == "data_parallel":
            continue
        count = _count(group, num)
        own_ids, own_bags = loads.ids[i] / num, loads.bags[i] / num
        part = 1.0 if group.kind == "column_wise" else group.size / loads.rows[i]
        sums_bags = setting.pooled and not _by_id(group, i, loads)
        sent = count * (own_ids * part + (own_bags if sums_bags else 0.0))
        ids += sent * ID_BYTES
        numbers = own_bags if sums_bags else own_ids * part
        gradients += count * numbers * width[i] * setting.sent_bytes
        if summed and group.kind == "column_wise" and group.holders > 1 and i == _first(groups, i):
            rows = loads.rows[i] if group.holders < num else loads.unique[i]
            squares += rows * setting.number_bytes
    return ids, gradients, squares


def _first(groups: Sequence[ShardGroup], place: int) -> int:
    while place and groups[place - 1].table == groups[place].table:
        place -= 1
    return place


def _num_stacks(groups: Sequence[ShardGroup], num_ranks: int, width: Array) -> Array:
    """How many stacks each rank has: one per width, and one per width of replicated tables."""
    stacks: dict[tuple[bool, int], Array] = {}
    for i, group in enumerate(groups):
        key = (group.kind == "data_parallel", int(width[i]))
        stacks.setdefault(key, np.zeros(num_ranks))[group.ranks] = 1.0
    return sum(stacks.values(), np.zeros(num_ranks))


def _by_id(group: ShardGroup, place: int, loads: Loads) -> bool:
    """Whether ids and rows are exchanged; see Note [Rows instead of sums] of `embedding`."""
    return _is_split(group) and rows_are_fewer(loads.ids[place], loads.bags[place], group.holders)


def _is_split(group: ShardGroup) -> bool:
    return group.kind not in ("column_wise", "data_parallel") and group.holders > 1


def _counts_bytes(
    groups: Sequence[ShardGroup], work: Workload, num_ranks: int, width: Array
) -> int:
    """Bytes of the exchange of counts; see `lookup.messages`."""
    holders: dict[int, tuple[int, ...]] = {}
    for group in groups:
        if _is_split(group):
            before = holders.get(group.table, ())
            if isinstance(group.ranks, slice):
                first = before[0] if before else group.ranks.start
                holders[group.table] = (first, group.ranks.stop)
            else:
                holders[group.table] = (*before, *group.ranks.tolist())
    blocks: dict[tuple[int, tuple[int, ...]], Array] = {}
    for i, group in enumerate(groups):
        if group.kind != "data_parallel":
            key = (int(width[i]), holders.get(group.table, ()))
            blocks.setdefault(key, np.zeros(num_ranks))[group.ranks] = 1.0
    most = int(sum(blocks.values(), np.zeros(num_ranks)).max())
    num_groups = sum(1 for _, where in blocks if where)
    told = 1 + 2 * num_groups if num_groups else 0
    features = sum(len(table.features) for table in work.tables)
    per_block = 2 if num_groups and work.pooled else 1
    return (features + most * per_block + 2 + told) * 8 * num_ranks
