"""torchrec's plans and state dicts, without torchrec; tests/processes has the real ones."""

from types import SimpleNamespace

import pytest
import torch

from shardwise import LayoutError, UnsupportedError
from shardwise.embedding import EmbeddingBagCollection, Jagged, RowWiseAdagrad, Table
from shardwise.interop import load_torchrec, plan_from_torchrec, tables_from_torchrec


def sharding(kind, ranks=None, spec=None):
    return SimpleNamespace(sharding_type=kind, ranks=ranks, sharding_spec=spec)


def test_plans():
    shards = [SimpleNamespace(placement=SimpleNamespace(rank=lambda r=r: r)) for r in (2, 3)]
    module = {
        "a": sharding("table_wise", [1]),
        "b": sharding("row_wise", [0, 1]),
        "c": sharding("column_wise", [1, 0]),
        "d": sharding("data_parallel", [0, 1]),
        "e": sharding("table_row_wise", [2, 3], SimpleNamespace(shards=shards)),
    }
    plan = plan_from_torchrec(SimpleNamespace(plan={"model.ebc": module}))
    assert plan == plan_from_torchrec(module)
    assert plan.entries == {
        "a": {"kind": "table_wise", "rank": 1},
        "b": "row_wise",
        "c": {"kind": "column_wise", "ranks": [1, 0]},
        "d": "data_parallel",
        "e": {"kind": "grid", "ranks": [2, 3]},
    }
    two = SimpleNamespace(plan={"x": module, "y": module})
    with pytest.raises(TypeError, match=r"modules \['x', 'y'\]"):
        plan_from_torchrec(two)
    assert plan_from_torchrec(two, "y") == plan
    with pytest.raises(UnsupportedError, match="several column shards on one rank"):
        plan_from_torchrec({"a": sharding("column_wise", [0, 0])})
    with pytest.raises(UnsupportedError, match="'grid_shard', which has no counterpart"):
        plan_from_torchrec({"a": sharding("grid_shard", [0, 1])})


def configs():
    return [
        SimpleNamespace(
            name=name,
            num_embeddings=5,
            embedding_dim=4,
            feature_names=[f"f_{name}"],
            pooling=SimpleNamespace(name="MEAN"),
        )
        for name in "ab"
    ]


def test_tables():
    wanted = [Table(name, 5, 4, features=(f"f_{name}",), pooling="mean") for name in "ab"]
    assert tables_from_torchrec(configs()) == wanted
    assert tables_from_torchrec(SimpleNamespace(embedding_bag_configs=configs)) == wanted


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "data_parallel"])
def test_whole_tables_and_states_are_taken_over(mesh, kind):
    """The sums of two column shards become those of the whole row: their mean."""
    optimizer = RowWiseAdagrad(0.1)
    bags = EmbeddingBagCollection(tables_from_torchrec(configs()), optimizer=optimizer)
    bags.shard(mesh, kind)
    names = [f"ebc.embedding_bags.{name}.weight" for name in "ab"]
    state = {name: torch.rand(5, 4) for name in names}
    sums = torch.rand(2, 5)
    states = {names[0]: {"a.momentum1": sums.flatten()}, names[1]: {"b.momentum1": sums[0]}}
    load_torchrec(bags, state, {"state": states}, prefix="ebc.")
    for name, table in zip(names, "ab", strict=True):
        torch.testing.assert_close(bags.parameter(table).full_tensor(), state[name])
    held = {name: values["sum"] for name, values in bags.optimizer.state.items()}
    torch.testing.assert_close(held["a"].full_tensor(), sums.mean(0).unsqueeze(1))
    torch.testing.assert_close(held["b"].full_tensor(), sums[0].unsqueeze(1))
    bags(Jagged.from_lists({"f_a": [[1]], "f_b": [[2]]}))["f_a"].sum().backward()


def test_what_does_not_fit(mesh):
    bags = EmbeddingBagCollection(tables_from_torchrec(configs())).shard(mesh, "row_wise")
    with pytest.raises(LayoutError, match="has nothing for embedding_bags"):
        load_torchrec(bags, {})
    with pytest.raises(LayoutError, match=r"shape \(4, 4\), the collection \(5, 4\)"):
        load_torchrec(bags, {"embedding_bags.a.weight": torch.ones(4, 4)})
    with pytest.raises(TypeError, match="no fused optimizer"):
        load_torchrec(bags, {}, {"state": {}})
