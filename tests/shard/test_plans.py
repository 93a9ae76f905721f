"""Plans as data, and what they say of themselves."""

import pytest
import torch
from shard_cases import chunks, stretches, tiles
from shard_models import HalfAndHalf, Towers
from torch import nn

import shardwise
from shardwise.debug import CommDebugMode
from shardwise.errors import ArgumentError, LayoutError, PathError
from shardwise.parallel import load_plan as load_parallel_plan
from shardwise.parallel import save_plan as save_parallel_plan
from shardwise.shard import ShardingPlan, load_plan, save_plan, shard_module

PLAN = ShardingPlan(
    {"user.weight": chunks(0, 3, 1), "item.weight": tiles((9, 6))},
    output_plan={"dense": stretches(0, (4, 2), (1, 3)), "": chunks(-1, 0)},
    return_local_tensor=["dense", "item"],
)


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_files(tmp_path, suffix):
    file = tmp_path / f"plan.{suffix}"
    save_plan(PLAN, file)
    assert load_plan(file) == PLAN
    save_plan(ShardingPlan({}), file)
    assert load_plan(file) == ShardingPlan({})


def test_one_format_for_both_kinds_of_plans(tmp_path):
    file = tmp_path / "plan.toml"
    save_parallel_plan({"up": "colwise"}, file)
    with pytest.raises(LayoutError, match=r"'colwise' for 'up'.*shardwise\.parallel"):
        load_plan(file)
    save_plan(PLAN, file)
    with pytest.raises(ArgumentError, match="ChunkShardingSpec"):
        load_parallel_plan(file)


def test_what_files_cannot_hold(tmp_path):
    with pytest.raises(ArgumentError, match="HalfAndHalf, which is code"):
        save_plan(ShardingPlan({"x": HalfAndHalf()}), tmp_path / "plan.toml")
    assert not list(tmp_path.iterdir())
    plan = ShardingPlan({"x": chunks(0, 0)}, return_local_tensor=["x"])
    with pytest.raises(ArgumentError, match="a parameter and a module"):
        save_plan(plan, tmp_path / "plan.toml")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('{ style = "ChunkShardingSpec", dim = 0 }', "lacks 'placements'"),
        (
            '{ style = "ChunkShardingSpec", dim = 0, placements = ["x/y"] }',
            "'x/y' names no rank",
        ),
        ('{ style = "ChunkShardingSpec", dim = 0, ranks = [0] }', r"has \['ranks'\]"),
        ('{ style = "EnumerableShardingSpec", shards = [] }', "at least one"),
        ('{ style = "Output", locale = true }', r"has \['locale'\]"),
        ('{ style = "Rows" }', "'Rows'"),
    ],
)
def test_mistakes_in_files(tmp_path, entry, said):
    file = tmp_path / "plan.toml"
    file.write_text(f'format = "shardwise plan 1"\n[modules]\n"x" = {entry}\n')
    with pytest.raises(LayoutError, match=said):
        load_plan(file)


def test_a_loaded_plan_shards(tmp_path, world):
    save_plan(ShardingPlan({"user.weight": chunks(0, 3, 1)}), tmp_path / "p.json")
    model = shard_module(Towers(), load_plan(tmp_path / "p.json"))
    assert model.user.weight.sharding_spec() == chunks(0, 3, 1)


# -- describe --------------------------------------------------------------------------------------


def test_bytes_and_balance():
    with torch.device("meta"):
        model = Towers()
    report = ShardingPlan({"user.weight": chunks(0, 3, 1), "dense": HalfAndHalf()}).describe(model)
    table, bag = 6 * 6 * 4, 5 * 6 * 4
    item = 9 * 6 * 4
    assert report.sharded["user.weight"][2] == (0, bag, 0, table)
    assert report.bytes_per_rank == (item, item + bag, item, item + table)
    assert report.whole == ("item.weight",)
    assert report.balance == pytest.approx((item + table) * 4 / (4 * item + table + bag))
    text = str(report)
    assert "user.weight (11, 6) split along dim 0: 0 B, 120 B, 0 B, 144 B" in text
    assert "dense is left to HalfAndHalf" in text
    assert "whole on every rank: item.weight" in text


def test_paths_that_lead_nowhere():
    with pytest.raises(PathError, match=r"'user\.weight'"):
        ShardingPlan({"usr.weight": chunks(0, 0)}).describe(Towers())


MODULES = {
    "embedding": (lambda: nn.Embedding(11, 6), torch.ones(5, 3).long()),
    "bag sum": (lambda: nn.EmbeddingBag(11, 6, mode="sum"), torch.ones(5, 3).long()),
    "bag max": (lambda: nn.EmbeddingBag(11, 6, mode="max"), torch.ones(5, 3).long()),
    "bag norm": (lambda: nn.EmbeddingBag(11, 6, max_norm=1.0), torch.ones(5, 3).long()),
    "bag by frequency": (
        lambda: nn.EmbeddingBag(11, 6, scale_grad_by_freq=True),
        torch.ones(5, 3).long(),
    ),
    "linear": (lambda: nn.Linear(6, 11, bias=False), torch.ones(5, 6)),
}

#: Each of the four ranks names row 1 with all of its 15 ids, and rank 0 holds it.
COUNTS = {
    "lookup": 1,
    "row of this rank": 5,
    "row of this rank, to each rank": 20,
    "row of all ranks": 20,
    "id and bag of this rank": 20,
    "bag of all ranks": 20,
    "different id of all ranks": 1,
    "different id of this rank": 1,
    "different id that this rank is asked for": 4,
    "different id of this rank; in long bags, per id and bag": 1,
    "different id that this rank is asked for; in long bags, per bag of all ranks": 4,
}


@pytest.mark.parametrize("spec", [chunks(0, 0, 1, 2, 3), chunks(1, 0, 1, 2, 3)], ids=["0", "1"])
@pytest.mark.parametrize(("make", "x"), MODULES.values(), ids=MODULES.keys())
def test_what_is_announced_is_what_is_sent(world, make, x, spec):
    model = nn.Sequential(make())
    plan = ShardingPlan({"0.weight": spec})
    (_, announced) = plan.describe(model).forwards["0"]
    shard_module(model, plan)
    with CommDebugMode() as comm:
        model(x)
    expected = [(t.kind, t.num_bytes * COUNTS[t.per]) for t in announced]
    kinds = {
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_to_all_single": "all_to_all",
    }
    # First the ranks tell each other how much they bring: eight numbers for each, at most.
    first, *sent = [(kinds.get(e.kind, e.kind), e.num_bytes) for e in comm.events]
    assert first[1] <= 4 * 8 * 8
    assert sent == expected


def test_simulated_sizes_of_other_worlds(world):
    with shardwise.simulate(2):
        report = ShardingPlan({"user.weight": chunks(0, 0, 1)}).describe(Towers(), world_size=8)
    assert len(report.bytes_per_rank) == 8
