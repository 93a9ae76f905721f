"""A single rank's collections, by the fused kernels alone: as by torch's, and bad batches too."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from devices import DEVICE, of_kernels, skip_without_triton
from torch.testing import assert_close

skip_without_triton()

sys.path.insert(0, str(Path(__file__).parents[1] / "embedding"))
import embedding_cases as cases  # noqa: E402
import test_bad_batches as bad  # noqa: E402

from shardwise.embedding import (  # noqa: E402
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagCollection,
    Jagged,
    RowWiseAdagrad,
    Table,
)
from shardwise.kernels import lookup  # noqa: E402
from shardwise.kernels.launch import Launches  # noqa: E402

pytestmark = of_kernels


def pair(tables=cases.TABLES, **options):
    """Two collections of the same values: by torch's kernels, and by the fused ones."""
    torch.manual_seed(0)
    plain = EmbeddingBagCollection(tables, backend="torch", device=DEVICE, **options)
    fused = EmbeddingBagCollection(tables, backend="triton", device=DEVICE, **options)
    fused.load_state_dict(plain.state_dict())
    assert fused._engine.alone is not None
    return plain, fused


def step(collection: EmbeddingBagCollection, batch: Jagged) -> None:
    out = collection(batch)
    assert collection._check == "auto", "an invalid batch should have raised"
    cases.loss_of(out).backward()
    collection.synchronize()


def shuffled(batch: Jagged) -> Jagged:
    """The same bags, the features in another order."""
    names = list(reversed(batch.features))
    bags = {name: batch.bags(name) for name in names}
    return Jagged.from_lists(bags)


@pytest.mark.parametrize("output", ["tensor", "dict"])
@pytest.mark.parametrize("optimizer", [SGD, Adagrad, RowWiseAdagrad, Adam])
@pytest.mark.parametrize("weighted", [False, True])
def test_steps(output, optimizer, weighted):
    plain, fused = pair(output=output, optimizer=optimizer(lr=0.1, weight_decay=0.01))
    for seed in range(3):
        batch = cases.batch(seed, weighted=weighted, uneven=output == "dict" and seed == 1)
        if seed == 2 and not weighted:
            batch = shuffled(batch)
        batch = batch.to(DEVICE)
        outputs = []
        for collection in (plain, fused):
            found = collection(batch)
            tensors = [found] if output == "tensor" else list(found.values())
            outputs.append(tensors)
            sum((x * x.detach().cos()).sum() for x in tensors).backward()
        for mine, theirs in zip(outputs[1], outputs[0], strict=True):
            assert_close(mine, theirs)
    fused.synchronize()
    for mine, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_of_parameters_and_of_weights(sparse):
    plain, fused = pair(sparse=sparse)
    batch = cases.batch(5, weighted=True).to(DEVICE)
    found = []
    for collection in (plain, fused):
        batch.weights = batch.weights.detach().requires_grad_()
        cases.loss_of(collection(batch)).backward()
        found.append(batch.weights.grad)
    assert_close(found[1], found[0])
    for mine, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad.to_dense(), theirs.grad.to_dense())


def test_frozen_tables_and_held_updates():
    plain, fused = pair(optimizer=SGD(0.1))
    for collection in (plain, fused):
        collection.parameter("item").requires_grad_(False)
        with collection.optimizer.hold():
            for seed in range(2):
                cases.loss_of(collection(cases.batch(seed).to(DEVICE))).backward()
        collection.optimizer.step()
    for mine, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        assert_close(mine, theirs)


def test_copies_and_conversions_have_their_own_tables():
    _, fused = pair(optimizer=SGD(0.1))
    batch = cases.batch(1).to(DEVICE)
    before = [p.detach().clone() for p in fused.parameters()]
    copied = copy.deepcopy(fused)
    cases.loss_of(copied(batch)).backward()
    for mine, start in zip(fused.parameters(), before, strict=True):
        assert torch.equal(mine, start)
    assert not all(map(torch.equal, copied.parameters(), before))
    fused.to(torch.bfloat16)
    found = fused(batch)
    assert {x.dtype for x in found.values()} == {torch.bfloat16}
    fused.parameter("user").data = fused.parameter("user").data.clone()
    with pytest.raises(Exception, match="was replaced by a tensor of its own"):
        fused(batch)


@pytest.mark.parametrize("check", ["auto", "now"])
@pytest.mark.parametrize("what", sorted(bad.BAD))
def test_a_bad_batch_raises_and_changes_no_row(what, check, monkeypatch):
    if check == "now":  # also in two launches, and bags in turn
        monkeypatch.setattr(lookup, "SMALL", 0)
        monkeypatch.setattr(lookup, "NARROW", 0)
    make, error, text = bad.BAD[what]
    torch.manual_seed(0)
    collection = EmbeddingBagCollection(
        bad.TABLES, backend="triton", device=DEVICE, optimizer=Adam(0.1), check=check
    )
    twin = copy.deepcopy(collection)
    good = Jagged.from_lists(bad.GOOD).to(DEVICE)
    for each in (collection, twin):
        cases.loss_of(each(good)).backward()
    before = [p.detach().clone() for p in collection.parameters()]
    wrong = make()
    if isinstance(wrong, Jagged) and wrong.problem is None:
        wrong = wrong.to(DEVICE)
    with pytest.raises(error, match=text) as caught:
        step(collection, wrong)
    assert caught.type is error
    assert all(map(torch.equal, collection.parameters(), before))
    for each in (collection, twin):
        cases.loss_of(each(good)).backward()
    collection.synchronize()
    for mine, theirs in zip(collection.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_bad_id_at_every_position():
    collection = EmbeddingBagCollection(
        bad.TABLES, backend="triton", device=DEVICE, optimizer=SGD(0.1)
    )
    good = Jagged.from_lists(bad.GOOD)
    for position in range(len(good.values)):
        for wrong in (-1, 6, 2**40):
            values = good.values.clone()
            values[position] = wrong
            batch = Jagged(good.features, values, lengths=good.lengths).to(DEVICE)
            with pytest.raises(IndexError, match=f"id {wrong} "):
                step(collection, batch)


def counted(num_tables: int, monkeypatch) -> tuple[int, int]:
    """The launches and the Python calls of one step of `num_tables` tables."""
    launches = []
    monkeypatch.setattr(Launches, "run", lambda self, kernel, *_, **__: launches.append(kernel))
    tables = [Table(f"t{number}", 5, 4) for number in range(num_tables)]
    collection = EmbeddingBagCollection(
        tables, backend="triton", device=DEVICE, optimizer=RowWiseAdagrad(0.1), output="tensor"
    )
    ids = torch.zeros(40 * num_tables, dtype=torch.int64, device=DEVICE)
    lengths = torch.full((2 * num_tables,), 20, device=DEVICE)
    batch = Jagged([table.name for table in tables], ids, lengths=lengths)

    def step():
        out = collection(batch)
        out.backward(torch.ones_like(out))

    for _ in range(3):
        step()
    launches.clear()
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(launches), calls


def test_a_step_makes_as_many_calls_for_many_tables_as_for_few(monkeypatch):
    few = counted(26, monkeypatch)
    assert few[0] <= 5
    assert counted(100, monkeypatch) == few
    assert counted(1000, monkeypatch) == few
