"""Faults outside of the program: one clear error on every rank, and nothing is left running."""

import multiprocessing
import re
import shutil
import time
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
            r"disagree about the plan of a collection. Rank 0 has: b \(8×4\): row_wise \[4, 4\], "
            r"sum of b. Rank 1 has: b \(8×4\): column_wise \[2, 2\]",
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


# -- who waits how long ----------------------------------------------------------------------


def test_every_group_waits_as_long_as_the_world(processes):
    assert processes(programs.timeouts_s) == [[60, 60, 60, 1800]] * 4


def test_the_timeout_of_a_job_reaches_every_group():
    timeouts = launch(programs.timeouts_s, 4, collective_timeout_s=33)
    assert timeouts == [[33, 33, 33, 33]] * 4
    begin = time.monotonic()
    with pytest.raises(shardwise.CollectiveError, match="imed out"):
        launch(programs.wait_for_a_rank_that_never_comes, 4, collective_timeout_s=2)
    assert time.monotonic() - begin < 30


# -- an error on one rank --------------------------------------------------------------------


def test_an_error_of_any_kind_on_one_rank_is_that_of_all(processes, tmp_path):
    heard = processes(programs.fail_on_one_rank, str(tmp_path))
    assert all(each == heard[0] for each in heard)
    *steps, save_key, save_name, load_key, load_name = heard[0]
    for error, text in zip(programs.ERRORS, steps, strict=True):
        assert text.startswith(f"CheckpointError: On rank 1: {type(error).__name__}")
    for text in (save_key, load_key):
        assert text.startswith("CheckpointError: On rank 1: KeyError: 'k'")
    for text in (save_name, load_name):
        assert text.startswith("CheckpointError: On rank 1: AttributeError: a")
    (plan,) = set(processes(programs.plan_with_an_error_of_its_own))
    assert "fails, so no rank goes on. On rank 1: KeyError: 'missing'" in plan


def test_a_rank_that_exits_in_a_save_tells_the_others(processes, tmp_path):
    heard = dict(processes(programs.exit_on_one_rank, str(tmp_path)))
    assert heard.pop(1) == "SystemExit: enough"
    assert set(heard.values()) == {"CheckpointError: On rank 1: SystemExit: enough"}


def test_the_first_checkpoint_says_who_is_missing(tmp_path):
    first, late = launch(
        programs.save_where_a_rank_comes_late, 2, str(tmp_path), collective_timeout_s=1
    )
    assert late is None
    assert first.startswith("CollectiveError: the start of the first checkpoint at ")
    assert "rank 1 said nothing" in first


def test_a_wrong_argument_on_one_rank_is_an_error_of_all(processes, tmp_path):
    heard = processes(programs.ask_wrongly_on_one_rank, str(tmp_path))
    assert all(each == heard[0] for each in heard)
    words = ["TypeError: ", "TypeError: ", "A step is", "A step is", "A step is", "copy_bytes is"]
    for text, word in zip(heard[0], [*words, "Mute: (its text raises ValueError)"], strict=True):
        assert text.startswith(f"CheckpointError: On rank 1: {word}")


# -- ranks that do different things ----------------------------------------------------------


def test_one_rank_with_an_extra_step():
    words = (
        r"all_reduce.*failed on rank 1: .*imed out.*What the ranks did: ranks 0, 2 had returned "
        r"from step_once_more; rank 1 was in all_reduce.* at fault_programs.py:\d+"
    )
    with pytest.raises(shardwise.CollectiveError, match=words):
        launch(programs.step_once_more, 3, collective_timeout_s=3)


@pytest.mark.parametrize("on_ranks", [(1,), (0, 1, 2)])
def test_a_sharded_parameter_that_ranks_have_replaced(on_ranks):
    """One rank's error ends the job, long before the others' collective times out."""
    begin = time.monotonic()
    with pytest.raises(shardwise.LayoutError, match="'weight' is fully sharded, and its"):
        launch(programs.replace_a_sharded_parameter, 3, on_ranks, collective_timeout_s=100)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("axes", [{"dp": 4}, {"rep": 2, "dp": 2}, {"dp": 2, "tp": 2}])
def test_a_sharded_parameter_replaced_by_a_rank_that_goes_on(processes, axes):
    for rank, (errors, grad) in enumerate(processes(programs.replace_it_and_go_on, axes)):
        assert len(errors) == (4 if rank == 1 else 0)
        assert all("is fully sharded, and its module is given nothing" in text for text in errors)
        assert grad.tolist() == [[4.0] * 4] * 4


def test_a_save_against_a_load(processes, tmp_path):
    (text,) = set(processes(programs.save_against_load, str(tmp_path)))
    assert text.startswith("CollectiveError: The ranks are not in the same checkpoint. ")
    assert "On ranks 0, 2-3: it saves" in text
    assert "On rank 1: it loads" in text


def test_a_save_against_a_step(tmp_path):
    with pytest.raises(shardwise.ShardwiseError, match="What the ranks did: ") as caught:
        launch(programs.save_against_step, 4, str(tmp_path), collective_timeout_s=3)
    text = str(caught.value)
    assert re.search(r"rank 1 was in a checkpoint \(it saves \(.*at fault_programs.py:\d+", text)
    assert re.search(r"was in all_reduce.*at fault_programs.py:\d+", text)
