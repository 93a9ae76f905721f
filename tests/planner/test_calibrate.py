"""Fitting: constants that made some times are found again."""

import numpy as np
import pytest

from benchmarks.planner_gpu import KernelTiming, fit_kernel
from shardwise.embedding import EmbeddingBagCollection, Jagged, Table
from shardwise.errors import ArgumentError, LayoutError
from shardwise.planner import price, workload
from shardwise.planner.calibrate import (
    TOUCHED,
    draw_batch,
    fit_steps,
    least_squares_from_zero,
    sampled,
    step_cases,
)
from shardwise.planner.costs import Constants, Kernel, Setting
from shardwise.planner.workload import with_sample


def test_least_squares_from_zero_has_no_negative_numbers():
    matrix = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 2.0, 0.0]])
    assert least_squares_from_zero(matrix, np.array([1.0, 3.0, 5.0])) == pytest.approx([1, 2, 0])
    assert least_squares_from_zero(matrix, np.array([5.0, 3.0, 1.0])).min() >= 0


def test_pieces_are_found_again():
    truth = Kernel(1e-4, 1e-5, 1e-9, 2e-8, (1e5, 4e6, 2e8), (1e-11, 1e-10, 4e-10), 1e-10)
    draw = np.random.default_rng(0)
    samples = []
    for _ in range(60):
        tiles = int(draw.integers(1, 30))
        ids, bags = 10 ** draw.uniform(2, 6), 10 ** draw.uniform(1, 5)
        row, touched = float(draw.choice([16, 64, 512])), 10 ** draw.uniform(4, 9)
        seconds = truth.call_s + tiles * truth.tile_s
        seconds += float(truth.seconds(ids, bags, row, touched)) - truth.tile_s
        samples.append(KernelTiming(tiles, ids, bags, row, touched, seconds))
    found = fit_kernel(samples, TOUCHED)
    assert found.byte_s == pytest.approx(truth.byte_s, rel=0.01)
    assert found.call_s == pytest.approx(truth.call_s, rel=0.01)


def test_constants_of_steps_are_found_again():
    """Not each of them, as some always occur together, but the steps that they make."""
    terms = (0.0, 1e-5, 1e-8, 2e-8, TOUCHED, (1e-11, 1e-10, 2e-10), 1e-10)
    truth = Constants(
        name="truth", lookup=Kernel(*terms), update=Kernel(*terms, 1e-7, 1e-9, 3e-7),
        latency_s=0.0, latency_between_s=0.0, owner_byte_s=3e-10, owner_byte_between_s=3e-10,
        asker_byte_s=4e-10, leg_s=1e-5, send_id_s=1e-8, split_id_s=2e-8, copy_byte_s=2e-9,
        copy_byte_between_s=2e-9, step_s=3e-3, width_s=1e-3, sum_id_s=1e-7, group_s=4e-4,
        copies_s=2e-3, split_leg_s=0.0,
    )  # fmt: skip
    cases = step_cases(4)
    works = [sampled(case, 4) for case in cases]

    def seconds(constants):
        setting = Setting(4, 4, constants, "sgd")
        found = [price(case.plan, work, setting) for case, work in zip(cases, works, strict=True)]
        return np.stack([each.seconds + each.widths_s for each in found], 1)

    wanted = seconds(truth)
    assert seconds(fit_steps(cases, wanted, 3e-10)) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_drawn_steps_have_every_kind(num_ranks):
    cases = step_cases(num_ranks)
    kinds = set()
    for case in cases:
        for kind, ranks in case.plan.holders(case.tables, num_ranks):
            kinds.add(kind)
            assert ranks is None or max(ranks) < num_ranks
    assert kinds == {"table_wise", "row_wise", "column_wise", "grid", "data_parallel"}


def test_a_sample_gives_figures():
    tables = [Table("user", 10, 4), Table("item", 10, 4, features=("seen", "bought"))]
    work = workload(tables)
    batch = Jagged.from_lists(
        {"seen": [[1, 1], [2]], "user": [[3], []], "bought": [[1], [4, 5, 6]]}
    )
    found = with_sample(work, [batch, batch])
    user, item = found.uses
    assert (user.ids_per_bag, user.repeated, user.bags) == (0.5, 0.0, 2.0)
    assert (item.ids_per_bag, item.bags) == (7 / 4, 4.0)
    assert item.repeated == pytest.approx(1 - 5 / 7)
    assert found.assumed() == {}
    assert EmbeddingBagCollection(tables)(batch)["seen"].shape == (2, 4)


def test_samples_that_do_not_fit():
    work = workload([Table("user", 10, 4)])
    with pytest.raises(ArgumentError, match="no batch"):
        with_sample(work, [])
    with pytest.raises(LayoutError, match="no feature 'user'"):
        with_sample(work, [Jagged.from_lists({"item": [[1]]})])
    with pytest.raises(LayoutError, match="id 10"):
        with_sample(work, [Jagged.from_lists({"user": [[10]]})])


def test_batches_are_drawn_skewed():
    even, skewed = (draw_batch([Table("a", 1000, 4)], 100, 10, skew) for skew in (1.0, 4.0))
    assert skewed.values.float().mean() < even.values.float().mean()
    assert int(even.values.max()) < 1000
