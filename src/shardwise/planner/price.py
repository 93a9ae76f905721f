"""Price a plan for any number of ranks, from layouts alone: nothing is allocated or simulated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.core.sizes import lengths
from shardwise.embedding.plan import Plan
from shardwise.lookup.tiling import Table
from shardwise.planner.costs import ID_BYTES, Loads, Setting, rows_pay
from shardwise.planner.problem import Array, Ints, Mask
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
    #: Seconds that are not a sum over tables: a kernel call per width on a rank, a request per
    #: group of tables that are split by rows, and one all-reduce for all replicated tables.
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
        """Seconds of the slowest rank with `widths_s`, which the search ignores."""
        return float((self.seconds + self.widths_s).max())

    @property
    def memory(self) -> Array:
        return self.tables + self.state + self.buffers

    @property
    def sent(self) -> Array:
        """Bytes that each rank sends in collectives, as `CommDebugMode` counts them."""
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
        sizes = np.asarray(lengths(whole, num, None))
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
    """The seconds, memory and bytes of a step of a plan, sent in the dtype that the plan names."""
    setting = replace(setting, exchange_dtype=plan.exchange_dtype)
    num = setting.num_ranks
    groups = list(shard_groups(plan, work.tables, num))
    loads = Loads(setting, work, [group.table for group in groups])
    by_columns = np.array([group.kind == "column_wise" for group in groups])
    sizes = np.array([group.size for group in groups], float)
    fraction = np.where(by_columns, 1.0, sizes / loads.rows)
    width = np.where(by_columns, sizes, loads.dim)
    owners = _owners(groups)
    by_id = _by_id(groups, owners, loads)
    held = loads.held(fraction, width, by_id)
    copied = loads.copied()
    rows = np.where(by_columns, loads.rows, sizes)
    params = rows * width * setting.number_bytes
    state = setting.state_bytes(rows, width)
    message, answers = _messages(loads, fraction, by_id)
    sent = answers * width * setting.sent_bytes
    exchange = (message + 2 * sent) * setting.owner_byte_s
    compute_s, exchange_s, tables, states, buffers, rows_sent = np.zeros((6, num))
    for i, group in enumerate(groups):
        here, use = group.ranks, work.uses[group.table]
        tables[here] += params[i]
        states[here] += state[i]
        if group.kind == "data_parallel":
            seconds, num_bytes = copied[i]
        else:
            seconds, num_bytes = held[i]
            seconds -= exchange[i]
            exchange_s[here] += exchange[i]
            rows_sent[here] += sent[i]
        compute_s[here] += seconds
        buffers[here] += num_bytes - params[i] - state[i]
        if use.below and owners[i]:
            # A sample says how many ids each part of the rows gets.
            busy = _own_shares(groups, i, use, num)
            own = loads.only(i).held(fraction[i], width[i : i + 1], by_id[i : i + 1], busy)
            compute_s[here] += own[:, 0] - held[i, 0]
            buffers[here] += own[:, 1] - held[i, 1]
            if by_id[i] or not work.pooled:
                rows_sent[here] += sent[i] * (busy / fraction[i] - 1)
    asking_s, asking_bytes = _asking(groups, loads, by_id)
    several = int(num > 1)
    counts = np.array([_count(group, num) for group in groups])
    travels = np.array([group.kind != "data_parallel" for group in groups])
    ids_sent, gradients_sent = ((counts * travels) @ np.stack([message, sent], 1)) / num * several
    holders = np.array([group.holders for group in groups])
    cut = _firsts(groups) & by_columns & (holders > 1)
    copies = (loads.rows * (loads.dim + 1))[~travels].sum() * setting.number_bytes
    c = setting.constants
    width_s = c.lookup.call_s + c.update.call_s if c.width_s is None else c.width_s
    num_groups = len({(loads.dim[i], own) for i, own in enumerate(owners) if own})
    shared_s = num_groups * c.group_s + (c.copies_s if num > 1 and not travels.all() else 0.0)
    return Price(
        setting=setting,
        compute_s=compute_s,
        exchange_s=exchange_s,
        asking_s=float(asking_s),
        widths_s=np.maximum(_num_stacks(groups, num, width) - 1, 0) * width_s + shared_s,
        tables=tables,
        state=states,
        buffers=buffers + asking_bytes,
        counts_sent=_counts_bytes(groups, owners, work, num, width) * several,
        ids_sent=float(ids_sent),
        rows_sent=rows_sent * several,
        gradients_sent=float(gradients_sent),
        copies_sent=float(copies) * several,
        squares_sent=float(loads.squares(holders)[cut].sum()) * setting.number_bytes * several,
    )


def _messages(loads: Loads, fraction: Array, by_id: Mask) -> tuple[Array, Array]:
    """Per group of shards: the bytes of ids that one of them gets, and the rows it returns."""
    ids = np.where(by_id, loads.different, loads.ids) * fraction
    sums = loads.setting.pooled & ~by_id
    return (ids + np.where(sums, loads.bags, 0.0)) * ID_BYTES, np.where(sums, loads.bags, ids)


def _own_shares(groups: Sequence[ShardGroup], place: int, use: TableUse, num_ranks: int) -> Array:
    """Of each rank of a group: the fraction of the table's ids that go to its rows."""
    group, first = groups[place], place
    while first and groups[first - 1].table == group.table:
        first -= 1
    before = sum(_count(each, num_ranks) for each in groups[first:place])
    # Parts without rows have no ids either, and come last.
    return use.shares(group.holders)[before : before + _count(group, num_ranks)]


def _count(group: ShardGroup, num_ranks: int) -> int:
    """How many ranks a group has."""
    ranks = group.ranks
    return len(range(*ranks.indices(num_ranks))) if isinstance(ranks, slice) else len(ranks)


def _firsts(groups: Sequence[ShardGroup]) -> Mask:
    """Which groups are the first of their table."""
    tables = [-1, *(group.table for group in groups)]
    return np.diff(tables) != 0


def _asking(groups: Sequence[ShardGroup], loads: Loads, by_id: Mask) -> Array:
    """Seconds and bytes of every rank to request rows, of all tables together."""
    by_rows = np.array([group.kind != "column_wise" for group in groups])
    holders = np.array([group.holders for group in groups], float)
    width = np.where(by_rows, loads.dim, loads.dim / holders)
    found = loads.requested(holders, width, by_id, by_rows)
    asked = np.array([group.kind != "data_parallel" for group in groups])
    return np.asarray(found[asked & _firsts(groups)].sum(0))


def _num_stacks(groups: Sequence[ShardGroup], num_ranks: int, width: Array) -> Array:
    """How many stacks each rank has: one per width, and one per width of replicated tables."""
    stacks: dict[tuple[bool, int], Array] = {}
    for i, group in enumerate(groups):
        key = (group.kind == "data_parallel", int(width[i]))
        stacks.setdefault(key, np.zeros(num_ranks))[group.ranks] = 1.0
    return sum(stacks.values(), np.zeros(num_ranks))


def _by_id(groups: Sequence[ShardGroup], owners: Sequence[tuple[int, ...]], loads: Loads) -> Mask:
    """Which tables exchange ids and rows instead of sums.

    Tables of one width whose rows are split over the same ranks decide together.
    """
    found, first = np.zeros(len(groups), bool), _firsts(groups)
    together: dict[tuple[float, tuple[int, ...]], list[int]] = {}
    for i, own in enumerate(owners):
        if own and loads.setting.pooled:
            together.setdefault((loads.dim[i], own), []).append(i)
    for places in together.values():
        once = [i for i in places if first[i]]
        sums = loads.bags[once].sum() * groups[places[0]].holders
        found[places] = rows_pay(loads.different[once].sum(), loads.ids[once].sum(), sums)
    return found


def _owners(groups: Sequence[ShardGroup]) -> list[tuple[int, ...]]:
    """Per group, the ranks that hold rows of its table; () if its rows are not split."""
    found: dict[int, tuple[int, ...]] = {}
    for group in groups:
        if group.kind not in ("column_wise", "data_parallel") and group.holders > 1:
            before = found.get(group.table, ())
            if isinstance(group.ranks, slice):
                first = before[0] if before else group.ranks.start
                found[group.table] = (first, group.ranks.stop)
            else:
                found[group.table] = (*before, *group.ranks.tolist())
    return [found.get(group.table, ()) for group in groups]


def _counts_bytes(
    groups: Sequence[ShardGroup],
    owners: Sequence[tuple[int, ...]],
    work: Workload,
    num_ranks: int,
    width: Array,
) -> int:
    """Bytes of the exchange of counts; see `lookup.messages`."""
    blocks: dict[tuple[int, tuple[int, ...]], Array] = {}
    for i, group in enumerate(groups):
        if group.kind != "data_parallel":
            key = (int(width[i]), owners[i])
            blocks.setdefault(key, np.zeros(num_ranks))[group.ranks] = 1.0
    most = int(sum(blocks.values(), np.zeros(num_ranks)).max())
    num_groups = sum(1 for _, where in blocks if where)
    told = 1 + 2 * num_groups if num_groups else 0
    features = sum(len(table.features) for table in work.tables)
    per_block = 2 if num_groups and work.pooled else 1
    return (features + most * per_block + 2 + told) * 8 * num_ranks
