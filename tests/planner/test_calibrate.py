"""Fitting: constants that made some times are found again."""

import numpy as np
import pytest

from shardwise.embedding import EmbeddingBagCollection, Jagged, Table
from shardwise.errors import ArgumentError, LayoutError
from shardwise.planner import workload
from shardwise.planner.calibrate import (
    KernelTiming,
    draw_batch,
    fit_kernel,
    least_squares_from_zero,
    measure_case,
)
from shardwise.planner.constants import Kernel
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
    found = fit_kernel(samples)
    assert found.byte_s == pytest.approx(truth.byte_s, rel=0.01)
    assert found.call_s == pytest.approx(truth.call_s, rel=0.01)


def test_a_case_is_measured():
    forward, backward = measure_case((2, 100, 4, 8, 2, 1.0), repeats=1)
    assert forward.seconds > 0
    assert backward.seconds > 0
    assert (forward.tiles, forward.ids, forward.bags) == (2, 32.0, 16.0)


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
