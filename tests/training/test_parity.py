"""Ten steps of training take a sharded model where they take it on one device."""

import math

import pytest
import training_runs
from training_runs import RUNS

import shardwise

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dropout", [0.0, 0.2], ids=["", "with dropout"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_simulated(run, dropout):
    expected = training_runs.one_device(run, dropout)
    with shardwise.simulate(math.prod(run.mesh)):
        found = training_runs.sharded(run, dropout)
    training_runs.assert_same(found, expected)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "dropout"), [("GPT, data x tensor", 0.2), ("recommender, rows", 0.0)]
)
def test_in_processes(processes, name, dropout):
    expected = training_runs.one_device(RUNS[name], dropout)
    for found in processes(training_runs.sharded, RUNS[name], dropout, timeout_s=180):
        training_runs.assert_same(found, expected)
