"""Collections with fused optimizer state, and sharded tensors, from one plan or spec to another."""

import pytest
import torch

import shardwise
from shardwise.checkpoint import load, save
from shardwise.embedding import Adagrad, EmbeddingBagCollection, Jagged, RowWiseAdagrad, Table
from shardwise.shard import EnumerableShardingSpec, ShardMetadata, shard_tensor

KINDS = ["row_wise", "column_wise", "table_wise", "data_parallel"]


def trained(num_ranks, kind, seed, optimizer):
    """A collection after one step, so that its weights and its state are its own."""
    torch.manual_seed(seed)
    tables = [Table("a", 11, 4), Table("b", 7, 4)]
    mesh = shardwise.init_device_mesh("cpu", (num_ranks,))
    collection = EmbeddingBagCollection(tables, optimizer=optimizer).shard(mesh, kind)
    stepped(collection)
    return collection


def stepped(collection):
    out = collection(Jagged.from_lists({"a": [[1, 2], [3]], "b": [[0], [5, 6]]}))
    sum(value.square().sum() for value in out.values()).backward()


def held(collection):
    weights = {n: p.full_tensor().agreed() for n, p in collection.named_parameters()}
    state = collection.optimizer.state
    return weights, {
        f"{t}.{n}": v.full_tensor().agreed() for t, s in state.items() for n, v in s.items()
    }


@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", KINDS)
def test_a_collection_from_plan_to_plan(tmp_path, before, after):
    with shardwise.simulate(4):
        old = trained(4, before, 0, Adagrad(lr=0.1))
        weights, states = held(old)
        save({"tables": old, "fused": old.optimizer}, tmp_path / "saved")
    with shardwise.simulate(2):
        new = trained(2, after, 1, Adagrad(lr=0.5))
        load({"tables": new, "fused": new.optimizer}, tmp_path / "saved")
        new_weights, new_states = held(new)
        assert new.optimizer.settings.lr == 0.1
    for name, value in {**weights, **states}.items():
        assert torch.equal({**new_weights, **new_states}[name], value), name
    assert any(value.any() for value in states.values()), "there was no state to move"


SOME = {"a": {"kind": "column_wise", "ranks": [1, 0]}, "b": {"kind": "column_wise", "ranks": [2]}}


@pytest.mark.parametrize(
    ("before", "after"),
    [("column_wise", "row_wise"), ("row_wise", "column_wise"), (SOME, "data_parallel"),
     ("table_wise", SOME), ("column_wise", SOME), (SOME, SOME)],
    ids=str,
)  # fmt: skip
def test_state_per_row_from_plan_to_plan(tmp_path, before, after):
    """One number per row, whoever holds the row's columns, and the next step is the same."""
    with shardwise.simulate(4):
        old = trained(4, before, 0, RowWiseAdagrad(lr=0.1))
        save({"tables": old, "fused": old.optimizer}, tmp_path / "saved")
        stepped(old)
        expected = held(old)[0]
    with shardwise.simulate(3):
        new = trained(3, after, 1, RowWiseAdagrad(lr=0.1))
        load({"tables": new, "fused": new.optimizer}, tmp_path / "saved")
        stepped(new)
        torch.testing.assert_close(held(new)[0], expected)


def tiles(*rows):
    return EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{r}/cpu") for r, o, s in rows])


def test_a_sharded_tensor_with_several_pieces_per_rank(tmp_path):
    whole = torch.arange(24.0).view(6, 4)
    loose = tiles(
        (1, (0, 0), (3, 2)), (0, (0, 2), (3, 2)), (0, (3, 0), (3, 2)), (1, (3, 2), (3, 2))
    )  # fmt: skip
    swapped = tiles((1, (0, 0), (2, 4)), (0, (2, 0), (4, 4)))
    with shardwise.simulate(2):
        save({"x": shard_tensor(whole, loose)}, tmp_path / "saved")
        for spec in (loose, swapped):
            new = shard_tensor(torch.zeros(6, 4), spec)
            load({"x": new}, tmp_path / "saved")
            assert torch.equal(new.gather(), whole)
    plain = torch.zeros(6, 4)
    load({"x": plain}, tmp_path / "saved")
    assert torch.equal(plain, whole)
