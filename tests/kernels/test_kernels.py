"""The fused kernels against torch's lookups in float64, with an optimizer step written out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from devices import DEVICE, INTERPRETED, of_kernels, skip_without_triton
from torch.nn import functional as F
from torch.testing import assert_close

skip_without_triton()

from shardwise.kernels import lookup, update  # noqa: E402  (after the check for Triton)
from shardwise.kernels.tables import IdBags, OutputRows, TableSet, one_after_another, side_by_side  # noqa: E402
from shardwise.kernels.update import add_gradients  # noqa: E402

pytestmark = of_kernels
ROWS = (11, 5, 30)
FEATURES = (0, 1, 2, 1)
LR, EPS, DECAY, BETAS, STEP = 0.1, 1e-3, 0.01, (0.9, 0.99), 3


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Bags and segments are split early, so that small inputs reach every path."""
    monkeypatch.setattr(lookup, "LONG", 8)
    monkeypatch.setattr(update, "SPAN", 8)
    monkeypatch.setattr(lookup, "SPAN", 8)


@pytest.fixture(autouse=True)
def fresh():
    """On a GPU other inputs in each run; the seed is printed with a failure."""
    if not INTERPRETED:
        print("seed", torch.seed())


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel does not write is not zero by luck."""
    empty = torch.empty

    def with_poison(*args, **options):
        made = empty(*args, **options)
        return made.fill_(float("nan") if made.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", with_poison)


@dataclass
class Batch:
    tables: list[torch.Tensor]
    ids: torch.Tensor
    offsets: torch.Tensor
    batch_size: int

    @property
    def first_bag(self) -> torch.Tensor:
        return torch.arange(len(FEATURES) + 1, device=DEVICE) * self.batch_size

    def bags(self, rows: OutputRows) -> IdBags:
        return IdBags(self.ids, self.offsets, self.first_bag, self.batch_size, rows)

    def of_feature(self, number: int) -> tuple[torch.Tensor, torch.Tensor, slice]:
        """The ids of a feature, its offsets, and where the ids stand."""
        size = self.batch_size
        offsets = self.offsets[number * size : (number + 1) * size + 1]
        part = slice(int(offsets[0]), int(offsets[-1]))
        return self.ids[part], offsets - offsets[0], part


def draw(
    dims=(8, 8, 8), dtypes=(torch.float32,) * 3, batch_size=3, long=False, index=torch.int64
) -> Batch:
    """Random jagged bags; tables of one dim lie in one buffer, others apart."""
    if len(set(dims)) == 1:
        buffer = torch.randn(sum(ROWS), dims[0], device=DEVICE).to(dtypes[0])
        tables = list(buffer.split(ROWS))
    else:
        sizes = zip(ROWS, dims, strict=True)
        drawn = zip((torch.randn(size, device=DEVICE) for size in sizes), dtypes, strict=True)
        tables = [table.to(dtype) for table, dtype in drawn]
    lengths = torch.randint(0, 5, (len(FEATURES) * batch_size,))
    if long:
        lengths[1], lengths[2], lengths[9] = 19, 11, 9
    counts = lengths.view(len(FEATURES), -1).sum(1).tolist()
    parts = [torch.randint(0, ROWS[t], (n,)) for t, n in zip(FEATURES, counts, strict=True)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.cat(parts)
    return Batch(tables, ids.to(DEVICE, index), offsets.to(DEVICE, index), batch_size)


def reference(batch: Batch, mode: str, weights: torch.Tensor | None = None):
    """Torch's lookups in float64: the output, and the leaves that get gradients."""
    leaves = [table.double().requires_grad_() for table in batch.tables]
    outputs = []
    for number, table in enumerate(FEATURES):
        ids, offsets, part = batch.of_feature(number)
        scales = None if weights is None else weights[part]
        outputs.append(
            F.embedding_bag(
                ids.long(),
                leaves[table],
                offsets.long(),
                mode=mode,
                include_last_offset=True,
                per_sample_weights=scales,
            )
        )
    return torch.cat(outputs, 1), leaves


def look_up(batch: Batch, mode="sum", weights=None, first_rows=None):
    tables = TableSet(batch.tables, FEATURES, first_rows)
    rows = side_by_side(tables, batch.batch_size)
    out, trace = lookup.pooled_lookup(
        tables,
        batch.bags(rows),
        mode,
        weights,
        trace=True,
    )
    return tables, rows, out.view(batch.batch_size, -1), trace


def stepped(optimizer, weight, grad, states):
    """What one step makes of all rows, in float64."""
    grad = grad + DECAY * weight
    if optimizer == "sgd":
        return weight - LR * grad
    if optimizer == "adagrad":
        states[0] += grad * grad
        return weight - LR * grad / (states[0].sqrt() + EPS)
    if optimizer == "rowwise_adagrad":
        states[0] += (grad * grad).mean(1)
        return weight - LR * grad / (states[0].sqrt() + EPS)[:, None]
    mean, square = states
    mean.mul_(BETAS[0]).add_(grad, alpha=1 - BETAS[0])
    square.mul_(BETAS[1]).add_(grad * grad, alpha=1 - BETAS[1])
    mean, square = mean / (1 - BETAS[0] ** STEP), square / (1 - BETAS[1] ** STEP)
    return weight - LR * mean / (square.sqrt() + EPS)


def draw_states(optimizer: str, tables: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    if optimizer == "sgd":
        return []
    if optimizer == "rowwise_adagrad":
        return [[torch.rand(len(t), device=DEVICE) for t in tables]]
    count = 2 if optimizer == "adam" else 1
    return [[torch.rand(t.shape, device=DEVICE) for t in tables] for _ in range(count)]


MIXED = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    {},
    {"mode": "mean", "optimizer": "adagrad"},
    {"mode": "max", "optimizer": "rowwise_adagrad"},
    {"weighted": True, "optimizer": "adam"},
    {"dims": (8, 4, 12), "index": torch.int32},
    {"dims": (8, 4, 12), "mode": "max", "optimizer": "adam"},
    {"dims": (3, 1, 5), "mode": "mean", "optimizer": "rowwise_adagrad"},
    {"dtypes": (torch.bfloat16,) * 3},
    {"dtypes": (torch.float16,) * 3, "mode": "mean"},
    {"dims": (8, 4, 12), "dtypes": MIXED, "optimizer": "adagrad"},
    {"long": True},
    {"long": True, "mode": "max"},
    {"long": True, "two_launches": True, "weighted": True, "index": torch.int32},
    {"long": True, "two_launches": True, "mode": "max", "dims": (8, 4, 12)},
    {"long": True, "two_launches": True, "mode": "mean", "optimizer": "rowwise_adagrad"},
    {"long": True, "in_turn": True},
    {"long": True, "in_turn": True, "weighted": True, "dims": (8, 4, 12)},
    {"in_turn": True, "mode": "mean", "dtypes": MIXED, "dims": (3, 1, 5), "batch_size": 7},
    {"batch_size": 1},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lookup_and_step_are_torchs(monkeypatch, case):
    case = dict(case)
    in_turn = case.pop("in_turn", False)
    if in_turn:  # as the bags of wide rows
        monkeypatch.setattr(lookup, "NARROW", 0)
    if case.pop("two_launches", in_turn):
        monkeypatch.setattr(lookup, "SMALL", 0)
        monkeypatch.setattr(lookup, "_CHUNK_PROGRAMS", 3)
    mode, optimizer = case.pop("mode", "sum"), case.pop("optimizer", "sgd")
    weighted = case.pop("weighted", False)
    batch = draw(**case)
    weights = torch.rand(batch.ids.numel(), device=DEVICE) if weighted else None
    expected, leaves = reference(batch, mode, None if weights is None else weights.double())
    before = [table.double() for table in batch.tables]
    tables, _, out, trace = look_up(batch, mode, weights)
    assert_close(out.double(), expected.detach(), rtol=1e-5, atol=1e-5)

    grad = torch.randn_like(out)
    expected.backward(grad.double())
    states = draw_states(optimizer, batch.tables)
    wanted_states = [[state.double() for state in each] for each in states]
    update.update(
        tables,
        trace,
        grad.flatten(),
        optimizer,
        states,
        lr=LR,
        eps=EPS,
        weight_decay=DECAY,
        betas=BETAS,
        step=STEP,
    )
    for number, table in enumerate(batch.tables):
        near = 1e-4 if table.dtype == torch.float32 else 2e-2
        tolerance = {"rtol": near, "atol": near}
        touched = torch.zeros(len(table), dtype=torch.bool, device=DEVICE)
        for feature, of in enumerate(FEATURES):
            if of == number:
                touched[batch.of_feature(feature)[0].long()] = True
        mine = [each[number] for each in wanted_states]
        old = [state.clone() for state in mine]
        wanted = stepped(optimizer, before[number], leaves[number].grad, mine)
        assert_close(table[touched].double(), wanted[touched], **tolerance)
        assert torch.equal(table[~touched].double(), before[number][~touched])
        for each, new, unchanged in zip(states, mine, old, strict=True):
            assert_close(each[number][touched].double(), new[touched], **tolerance)
            assert torch.equal(each[number][~touched].double(), unchanged[~touched])


def test_a_plain_gradient_can_be_asked_for():
    batch = draw(dims=(8, 4, 12), batch_size=5)
    expected, leaves = reference(batch, "sum")
    _, _, out, trace = look_up(batch)
    grad = torch.randn_like(out)
    expected.backward(grad.double())
    grads = [torch.zeros_like(table) for table in batch.tables]
    add_gradients(TableSet(grads, FEATURES), trace, grad.flatten())
    for found, leaf in zip(grads, leaves, strict=True):
        assert_close(found.double(), leaf.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("long", [False, True])
def test_weights_of_samples_get_their_gradient(long):
    batch = draw((8, 4, 12), long=long)
    weights = torch.rand(batch.ids.numel(), device=DEVICE)
    leaf = weights.double().requires_grad_()
    expected, _ = reference(batch, "sum", leaf)
    tables, rows, out, _ = look_up(batch, "sum", weights)
    grad = torch.randn_like(out)
    expected.backward(grad.double())
    found = lookup.per_sample_weight_grads(tables, batch.bags(rows), grad.flatten())
    assert_close(found.double(), leaf.grad, rtol=1e-5, atol=1e-5)


def test_a_row_wise_shard_skips_the_ids_of_others():
    """The outputs of two halves of each table add up to the whole, and each half steps its rows."""
    batch = draw(batch_size=5)
    expected, leaves = reference(batch, "sum")
    grad = torch.randn(expected.shape, device=DEVICE)
    expected.backward(grad.double())
    halves = [[table[: len(table) // 2].clone() for table in batch.tables]]
    halves.append([table[len(table) // 2 :].clone() for table in batch.tables])
    total = torch.zeros_like(grad)
    for number, tables in enumerate(halves):
        firsts = [len(table) // 2 * number for table in batch.tables]
        part = Batch(tables, batch.ids, batch.offsets, batch.batch_size)
        known, _, out, trace = look_up(part, first_rows=firsts)
        total += out
        update.update(known, trace, grad.flatten(), "sgd", lr=LR)
    assert_close(total.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    for number, leaf in enumerate(leaves):
        table = torch.cat([half[number] for half in halves])
        assert_close(table.double(), leaf.detach() - LR * leaf.grad, rtol=1e-4, atol=1e-4)


def test_rows_can_be_looked_up_one_by_one():
    batch = draw(dims=(8, 4, 12))
    tables = TableSet(batch.tables, FEATURES)
    parts = [batch.of_feature(number)[0] for number in range(len(FEATURES))]
    counts = [len(part) for part in parts]
    rows = one_after_another(tables, counts)
    first_id = torch.tensor([sum(counts[:n]) for n in range(len(counts) + 1)], device=DEVICE)
    out, trace = lookup.row_lookup(tables, batch.ids, first_id, max(counts), rows, trace=True)
    expected = [batch.tables[t][part] for t, part in zip(FEATURES, parts, strict=True)]
    assert torch.equal(out, torch.cat([rows.flatten() for rows in expected]))
    before = [table.clone() for table in batch.tables]
    grad = torch.randn_like(out)
    update.update(tables, trace, grad, "sgd", lr=LR)
    start = 0
    for t, part, block in zip(FEATURES, parts, expected, strict=True):
        rows_grad = grad[start : start + block.numel()].view_as(block)
        before[t].index_add_(0, part.long(), rows_grad, alpha=-LR)
        start += block.numel()
    for table, wanted in zip(batch.tables, before, strict=True):
        assert_close(table, wanted)


def test_two_runs_agree_in_every_bit():
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        batch = draw(long=True)
        tables, _, out, trace = look_up(batch)
        update.update(tables, trace, torch.randn_like(out).flatten(), "sgd", lr=LR)
        results.append([out, *batch.tables])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_nothing_to_look_up():
    batch = draw(batch_size=3)
    empty = Batch(batch.tables, batch.ids[:0], torch.zeros_like(batch.offsets), 3)
    before = [table.clone() for table in batch.tables]
    for mode in ("sum", "mean", "max"):
        tables, _, out, trace = look_up(empty, mode)
        assert not out.any()
        update.update(tables, trace, torch.ones_like(out).flatten(), "sgd", lr=LR)
    assert all(torch.equal(a, b) for a, b in zip(batch.tables, before, strict=True))


@pytest.mark.skipif(not INTERPRETED, reason="a failed assertion on the device ends the process")
@pytest.mark.parametrize("wrong", [-1, 11])
def test_an_id_out_of_range_is_an_error(wrong):
    batch = draw(batch_size=5)
    batch.ids[0] = wrong
    with pytest.raises(IndexError, match="out of the range"):
        look_up(batch)
