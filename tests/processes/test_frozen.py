"""Parameters that some ranks freeze: one device's numbers, or the same error on all ranks."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import DTensor
from shardwise.errors import LayoutError, RankMismatchError
from shardwise.parallel import data_parallel, fully_shard, parallelize_module
from shardwise.training import reducer

pytestmark = pytest.mark.processes


class Model(nn.Module):
    """Two tables, of which one gets row-sparse gradients, and two layers of one size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.sparse, self.dense = nn.Embedding(5, 3, sparse=True), nn.Embedding(5, 3)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, ids):
        return self.second(self.first(self.sparse(ids) + self.dense(ids)).tanh())


NAMES = [name for name, _ in Model().named_parameters()]
BATCHES = torch.tensor([[0, 1, 2], [2, 4, 4]])


def mesh():
    return shardwise.init_device_mesh("cpu", (2,))


def freeze(model, names):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)


def gradients(model):
    return {name: _whole(p.grad) for name, p in model.named_parameters()}


def _whole(grad):
    if grad is None:
        return None
    return grad.full_tensor() if isinstance(grad, DTensor) else grad.to_dense()


def layers_in_parallel(model, mesh):
    parallelize_module(model, mesh, {"first": "colwise", "second": "rowwise"})


def frozen_before(door):
    model = Model()
    freeze(model, ["first.bias"] if dist.get_rank() else [])
    door(model, mesh())


def layers_fully_sharded(model, mesh):
    fully_shard(model.second, mesh)
    return fully_shard(model, mesh)


def frozen_after(door, names):
    """Frozen on each rank between two steps; and a step after the error."""
    model, rank = door(Model(), mesh()), dist.get_rank()
    model(BATCHES[rank]).sum().backward()
    freeze(model, names[rank])
    said = None
    try:
        model(BATCHES[rank]).sum().backward()
    except RankMismatchError as error:
        said = str(error)
    freeze(model, [])
    model.zero_grad()
    model(BATCHES[rank]).sum().backward()
    return said, gradients(model)


def frozen_alike(door, steps, accumulate):
    """Steps in which all ranks freeze these parameters."""
    model, rank, found = door(Model(), mesh()), dist.get_rank(), []
    for names in steps:
        freeze(model, names)
        model.zero_grad()
        if accumulate:
            with unreduced(model):
                model(BATCHES[1 - rank]).sum().backward()
        model(BATCHES[rank]).sum().backward()
        found.append(gradients(model))
    return found


class _OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cpu = False


def flags_that_are_read_later(with_sparse):
    """Rank 1 freezes a parameter; what each step raises, on each rank."""
    model, rank, said = Model(), dist.get_rank(), []
    model.sparse.sparse = with_sparse
    data_parallel(model, mesh())
    real = reducer.one_part
    reducer.one_part = lambda row: real(row).as_subclass(_OnGpu)
    try:
        for _ in range(2):
            model.first.bias.requires_grad_(rank == 0)
            try:
                model(BATCHES[rank]).sum().backward()
            except RankMismatchError as error:
                said.append(str(error))
                break
            said.append(None)
    finally:
        reducer.one_part = real
    return said


@contextlib.contextmanager
def unreduced(model):
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def on_one_device(names, factor=1):
    model = Model()
    freeze(model, names)
    (model(BATCHES.flatten()).sum() / 2 * factor).backward()
    return gradients(model)


@pytest.mark.parametrize("door", [data_parallel, fully_shard, layers_in_parallel])
def test_frozen_on_one_rank_from_the_start(two_processes, door):
    answers = two_processes.run(frozen_before, door)
    assert len({answer.message for answer in answers}) == 1
    for answer in answers:
        assert issubclass(answer.kind, LayoutError)
        assert "Rank 1 has: " in answer.message
        assert "bias is frozen" in answer.message


@pytest.mark.parametrize(
    "names",
    [
        ([], ["first.bias"]),
        (["first.weight", "first.bias"], ["second.weight", "second.bias"]),
        (["dense.weight"], []),
        ([], ["sparse.weight"]),
        ([name for name in NAMES if name != "sparse.weight"], ["sparse.weight"]),
        (NAMES[1:], NAMES[2:]),
    ],
    ids=["one", "as many", "a table", "a sparse table", "all but one", "all but few"],
)
def test_frozen_on_one_rank_between_steps(two_processes, names):
    """Ranks stay in step, and are right again when all train the same."""
    first, second = two_processes(frozen_after, data_parallel, names)
    assert first[0] == second[0]
    for rank, frozen in enumerate(names):
        assert f"On rank {rank}: {', '.join(frozen) or 'none'}" in first[0].replace(
            "frozen: ", ""
        ).replace("none is frozen", "none")
    for _, found in (first, second):
        torch.testing.assert_close(found, on_one_device([]))


def test_on_a_gpu_ranks_without_a_change_hear_of_others_in_the_next_step(two_processes):
    first, second = two_processes(flags_that_are_read_later, False)
    assert first[0] is None
    assert first[1] == second[0]
    assert "Some ranks train other parameters" in first[1]


def test_on_a_gpu_ranks_hear_of_changes_with_the_kinds_of_row_gradients(two_processes):
    first, second = two_processes(flags_that_are_read_later, True)
    assert first == second
    assert "On rank 1: frozen: first.bias" in first[0]


@pytest.mark.parametrize("names", [([], ["first.bias"]), (["dense.weight"], ["first.weight"])])
def test_frozen_on_one_rank_of_a_fully_sharded_group(two_processes, names):
    first, second = two_processes(frozen_after, layers_fully_sharded, names)
    assert first[0] == second[0]
    assert f"On rank 1: frozen: {names[1][0]}" in first[0]
    for _, found in (first, second):
        torch.testing.assert_close(found, on_one_device([]))


@pytest.mark.parametrize("door", [data_parallel, layers_fully_sharded])
@pytest.mark.parametrize("accumulate", [False, True])
def test_frozen_on_all_ranks_between_steps(two_processes, door, accumulate):
    steps = (
        [],
        ["first.bias"],
        ["sparse.weight", "second.bias"],
        NAMES[:-1],
        ["sparse.weight"],
        ["dense.weight"],
        NAMES[1:],
        [],
    )
    for found in two_processes(frozen_alike, door, steps, accumulate):
        for names, grads in zip(steps, found, strict=True):
            torch.testing.assert_close(grads, on_one_device(names, 2 if accumulate else 1))
