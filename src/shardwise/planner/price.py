"""Price a plan for any number of ranks, from layouts alone: nothing is allocated or simulated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.embedding.optimizers import RowWiseAdagrad
from shardwise.embedding.plan import Plan
from shardwise.embedding.table import Table
from shardwise.planner.costs import ID_BYTES, OPTIMIZERS, Loads, Setting, piece_sizes
from shardwise.planner.problem import Array, Ints
from shardwise.planner.workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Ranks that hold equally much of one table."""

    table: int
    kind: str
    ranks: Ints | slice
    #: Rows or columns of each of them; how many ranks hold any.
    size: int
    holders: int


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """A step of a plan, per rank: arrays with one entry for each."""

    setting: Setting
    #: Seconds: of lookups and updates; of exchanges; of asking, which is alike on all ranks.
    compute_s: Array
    exchange_s: Array
    asking_s: float
    #: Kernel calls for tables of further widths: each width of a rank is a call of its own.
    widths_s: Array
    #: Bytes held: tables, what the optimizer keeps, and what a step needs beside.
    tables: Array
    state: Array
    buffers: Array
    #: Bytes that each rank puts into exchanges.
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
        """Of the slowest rank, with the calls for further widths, which no plan is chosen by."""
        return float((self.seconds + self.widths_s).max())

    @property
    def memory(self) -> Array:
        return self.tables + self.state + self.buffers

    @property
    def sent(self) -> Array:
        """Bytes that each rank puts into collectives, as `CommDebugMode` counts them."""
        alike = self.counts_sent + self.ids_sent + self.gradients_sent
        return self.rows_sent + (alike + self.copies_sent + self.squares_sent)

    @property
    def step_s(self) -> float:
        """Seconds of the slowest rank, or of all where they share too few cores."""
        found = float(self.seconds.max())
        at_once = cores_at_once(self.setting)
        return found if at_once is None else float(max(found, self.seconds.sum() / at_once))


def cores_at_once(setting: Setting) -> float | None:
    """How many ranks compute at the same time, where that is fewer than there are."""
    at_once = setting.constants.at_once
    if at_once is None or at_once >= setting.ranks_per_host:
        return None
    return at_once * (setting.num_ranks // setting.ranks_per_host)


def shares_of(plan: Plan, tables: Sequence[Table], num_ranks: int) -> Iterator[Share]:
    """Who holds what, grouped by size."""
    for table, (kind, ranks) in enumerate(plan.holders(tables, num_ranks)):
        one = tables[table]
        if kind == "data_parallel":
            yield Share(table, kind, slice(0, num_ranks), one.num_embeddings, num_ranks)
            continue
        whole = one.embedding_dim if kind == "column_wise" else one.num_embeddings
        num = num_ranks if ranks is None else len(ranks)
        sizes = piece_sizes(whole, num)
        where = None if ranks is None else np.asarray(ranks, np.int64)
        edges = np.flatnonzero(np.diff(sizes)) + 1
        bounds = [0, *edges.tolist(), num]
        holders = int((sizes > 0).sum())
        for start, stop in itertools.pairwise(bounds):
            size = int(sizes[start])
            if size:
                held = slice(start, stop) if where is None else where[start:stop]
                yield Share(table, kind, held, size, holders)


def price(plan: Plan, work: Workload, setting: Setting) -> Price:
    """What a step of a plan takes, holds and sends."""
    tables, num = work.tables, setting.num_ranks
    shares = list(shares_of(plan, tables, num))
    per_share = Loads(setting, [work.uses[share.table] for share in shares])
    by_columns = np.array([share.kind == "column_wise" for share in shares])
    sizes = np.array([share.size for share in shares], float)
    share_of = np.where(by_columns, 1.0, sizes / per_share.rows)
    width = np.where(by_columns, sizes, per_share.dim)
    held = per_share.held(share_of, width)
    copied = per_share.copied()
    rows = np.where(by_columns, per_share.rows, sizes)
    params = rows * width * setting.number_bytes
    state = setting.state_bytes(rows, width)
    answers = per_share.bags if work.pooled else per_share.ids * share_of
    message = (per_share.ids * share_of + (per_share.bags if work.pooled else 0.0)) * ID_BYTES
    sent = answers * width * setting.number_bytes
    exchange = (message + 2 * sent) * setting.owner_byte_s
    sums = np.zeros((6, num))
    asking, buffers = _asking(shares, per_share, setting)
    copies = 0.0
    for i, share in enumerate(shares):
        here = share.ranks
        if share.kind == "data_parallel":
            buffer = copied[i, 1] - params[i] - state[i]
            found = (copied[i, 0], 0.0, params[i], state[i], buffer, 0.0)
            copies += float(rows[i] * (width[i] + 1) * setting.number_bytes)
        else:
            buffer = held[i, 1] - params[i] - state[i]
            found = (held[i, 0] - exchange[i], exchange[i], params[i], state[i], buffer, sent[i])
        sums[:, here] += np.asarray(found)[:, None]
    traffic = _traffic(shares, per_share, setting, width)
    stacks = _num_stacks(shares, num, width)
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
        _counts_bytes(int(stacks.max()), work, num) if num > 1 else 0,
        traffic[0] if num > 1 else 0.0,
        sums[5] if num > 1 else sums[5] * 0,
        traffic[1] if num > 1 else 0.0,
        copies if num > 1 else 0.0,
        traffic[2] if num > 1 else 0.0,
    )


def _asking(shares: Sequence[Share], loads: Loads, setting: Setting) -> tuple[float, float]:
    """Seconds and bytes that every rank has for asking, all tables together."""
    seconds = bytes_held = 0.0
    done: set[int] = set()
    for i, share in enumerate(shares):
        if share.kind == "data_parallel" or share.table in done:
            continue
        done.add(share.table)
        one = loads.only(i)
        by_rows = share.kind != "column_wise"
        width = one.dim if by_rows else one.dim / share.holders
        found = one.asked(share.holders, width, by_rows=by_rows)[0]
        seconds, bytes_held = seconds + float(found[0]), bytes_held + float(found[1])
    return seconds, bytes_held


def _traffic(
    shares: Sequence[Share], loads: Loads, setting: Setting, width: Array
) -> tuple[float, float, float]:
    """Bytes of ids, gradients and squares that every rank puts in."""
    ids = gradients = squares = 0.0
    num = setting.num_ranks
    summed = OPTIMIZERS[setting.optimizer] is RowWiseAdagrad
    for i, share in enumerate(shares):
        if share.kind == "data_parallel":
            continue
        count = (
            len(range(*share.ranks.indices(num)))
            if isinstance(share.ranks, slice)
            else len(share.ranks)
        )
        own_ids, own_bags = loads.ids[i] / num, loads.bags[i] / num
        part = 1.0 if share.kind == "column_wise" else share.size / loads.rows[i]
        sent = count * (own_ids * part + (own_bags if setting.pooled else 0.0))
        ids += sent * ID_BYTES
        numbers = own_bags if setting.pooled else own_ids * part
        gradients += count * numbers * width[i] * setting.number_bytes
        if summed and share.kind == "column_wise" and share.holders > 1 and i == _first(shares, i):
            rows = loads.rows[i] if share.holders < num else loads.unique[i]
            squares += rows * setting.number_bytes
    return ids, gradients, squares


def _first(shares: Sequence[Share], place: int) -> int:
    while place and shares[place - 1].table == shares[place].table:
        place -= 1
    return place


def _num_stacks(shares: Sequence[Share], num_ranks: int, width: Array) -> Array:
    """How many widths each rank holds tables of, copied ones apart."""
    stacks: dict[tuple[bool, int], Array] = {}
    for i, share in enumerate(shares):
        key = (share.kind == "data_parallel", int(width[i]))
        stacks.setdefault(key, np.zeros(num_ranks))[share.ranks] = 1.0
    return sum(stacks.values(), np.zeros(num_ranks))


def _counts_bytes(most_stacks: int, work: Workload, num_ranks: int) -> int:
    """What the first small exchange carries: see `embedding.exchange.routing.note`."""
    features = sum(len(table.features) for table in work.tables)
    return (features + most_stacks + 2) * 8 * num_ranks
