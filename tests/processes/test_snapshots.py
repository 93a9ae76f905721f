"""Views that needed communication follow their tensors in real processes too."""

import pytest
from view_programs import run_all

import shardwise

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("start", [1000, 1040])
def test_random_programs_read_what_one_device_reads(processes, mesh_shape, start):
    with shardwise.simulate(4):
        expected = run_all(start, start + 40, mesh_shape)
    for done in processes(run_all, start, start + 40, mesh_shape):
        assert done == expected
