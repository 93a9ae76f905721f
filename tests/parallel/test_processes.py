"""The same in four gloo processes."""

import parallel_programs as programs
import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "program",
    [
        programs.block_as_on_one_device,
        programs.block_split_along_the_sequence,
        programs.uneven_hidden_width,
        programs.loss_by_classes,
        programs.beside_ddp,
        programs.uneven_use,
        programs.copies_on_one_rank,
        programs.experts_as_on_one_device,
        programs.gradient_penalties,
        programs.numeric_second_derivatives,
    ],
    ids=lambda program: program.__name__,
)
def test_program(processes, program):
    processes(program)


@pytest.mark.parametrize(
    "declared", [[""], ["early", "late"], ["late", "early"]], ids=["model", "parts", "turned"]
)
def test_uneven_use_beside_other_collectives(processes, declared):
    processes(programs.uneven_use_beside_other_collectives, declared)


@pytest.mark.parametrize("whole_mesh", [True, False])
def test_tensor_and_data_axes(processes, whole_mesh):
    processes(programs.tensor_and_data_axes, whole_mesh)


def test_modules_from_files(processes, tmp_path):
    processes(programs.modules_from_files, str(tmp_path))


@pytest.mark.parametrize("door", ["data_parallel", "expert_parallel", "context_parallel"])
def test_a_mistake_on_one_rank_is_an_error_on_all(two_processes, door):
    for said in two_processes(programs.mistake_on_one_rank, door):
        assert f"{door} fails, so no rank goes on. On rank 1: " in said


def test_tied_parameters(processes, tmp_path):
    processes(programs.tied_parameters, str(tmp_path))
