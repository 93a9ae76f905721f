"""Faults outside of the program: one clear error on every rank, and nothing is left running."""

import multiprocessing
import shutil
from pathlib import Path

import fault_programs as programs
import pytest

import shardwise
from shardwise.checkpoint import Checkpoints, verify
from shardwise.launch import launch

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("rank-")]


def test_a_full_disk(tmp_path):
    with pytest.raises(shardwise.CheckpointError, match="On rank 1: File too large"):
        launch(programs.save_with_a_full_disk, 2, str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert verify(Checkpoints(tmp_path).path(1)).ok


def test_a_folder_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(shardwise.CheckpointError, match=r"Permission denied.*step-00000001"):
        launch(programs.save_without_permission, 2, str(tmp_path))
    tmp_path.chmod(0o700)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            programs.shard_by_different_plans,
            r"disagree about the plan of a collection. Rank 0 has: b \(8×4\): row_wise \[4, 4\]. "
            r"Rank 1 has: b \(8×4\): column_wise \[2, 2\]",
        ),
        (
            programs.parallelize_by_different_plans,
            "disagree about parallelize_module. Rank 0 has: nothing more. Rank 1 has: '1': .*Row",
        ),
        (
            programs.parallelize_where_one_rank_is_mistaken,
            "parallelize_module fails, so no rank goes on. On rank 0: .*sideways",
        ),
    ],
)
def test_ranks_with_different_plans(program, words):
    with pytest.raises(shardwise.LayoutError, match=words):
        launch(program, 2)


def test_ranks_with_different_code(tmp_path):
    package = Path(shardwise.__file__).parent
    other = shutil.copytree(package, tmp_path / "shardwise")
    (other / "errors.py").write_text("# changed\n")
    words = r"disagree about parallelize_module. Rank 0 has: torch .*code (\w+). Rank 1 has: torch"
    with pytest.raises(shardwise.LayoutError, match=words):
        launch(programs.parallelize_by_different_code, 2, other)
    (other / "errors.py").write_text((package / "errors.py").read_text())
    launch(programs.parallelize_by_different_code, 2, other)
