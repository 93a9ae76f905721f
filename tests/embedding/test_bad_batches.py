"""Batches that do not fit: the same error on every rank, before any id is sent."""

import embedding_cases as cases
import pytest
import torch

from shardwise import DTensor, LocalTensor
from shardwise.debug import CommDebugMode
from shardwise.embedding import (
    SGD,
    EmbeddingBagCollection,
    EmbeddingCollection,
    Jagged,
    Plan,
    RowWiseAdagrad,
    Table,
)
from shardwise.errors import ArgumentError, BatchError, IdRangeError, LayoutError, ShardwiseError

TABLES = [Table("user", 5, 4), Table("item", 6, 4, features=("seen", "bought"))]
GOOD = {"user": [[1], [2, 3]], "seen": [[0], []], "bought": [[5], [4]]}


def batch(**changes):
    good = Jagged.from_lists(GOOD)
    options = {
        "features": good.features,
        "values": good.values,
        "lengths": good.lengths,
        **changes,
    }
    if "offsets" in options:
        del options["lengths"]
    return Jagged(options.pop("features"), options.pop("values"), **options)


def ints(*numbers):
    return torch.tensor(numbers)


BAD = {
    "unknown feature": (
        lambda: batch(features=["user", "seen", "sold"]),
        BatchError,
        "feature 'sold' belongs to no table; of the tables, 'user' has user; 'item' has seen, bou",
    ),
    "missing feature": (
        lambda: batch(features=["user", "seen"], values=ints(1, 2, 3, 0), lengths=ints(1, 2, 1, 0)),
        BatchError,
        "feature 'bought' of table 'item' is missing",
    ),
    "feature twice": (
        lambda: batch(features=["user", "seen", "seen"]),
        BatchError,
        "feature 'seen' of table 'item' is there more than once",
    ),
    "offsets decrease": (
        lambda: batch(offsets=ints(0, 1, 3, 2, 4, 5, 6)),
        BatchError,
        "feature 'seen' of table 'item': offsets decrease, bag 0 has length -1",
    ),
    "offsets overrun": (
        lambda: batch(offsets=ints(0, 1, 3, 4, 4, 5, 9)),
        BatchError,
        "sum to 9, up to feature 'bought' of table 'item', but there are 6 ids",
    ),
    "offsets begin late": (
        lambda: batch(offsets=ints(1, 1, 3, 4, 4, 5, 7)),
        BatchError,
        "feature 'user' of table 'user': offsets must begin with 0",
    ),
    "lengths do not sum": (
        lambda: batch(lengths=ints(1, 2, 1, 0, 1, 0)),
        BatchError,
        "sum to 5, up to feature 'bought' of table 'item', but there are 6 ids",
    ),
    "lengths whose sum overflows": (
        lambda: batch(lengths=ints(2**62, 2**62, 2**62, 2**62, 1, 5)),
        BatchError,
        f"sum to {2**64 + 6}, up to feature 'bought' of table 'item', but there are 6 ids",
    ),
    "bags do not divide": (
        lambda: batch(lengths=ints(1, 2, 1, 2)),
        BatchError,
        r"4 bags do not divide among 3 features \(feature 'user' of table 'user', feature",
    ),
    "ids of another dtype": (
        lambda: batch(values=torch.ones(6)),
        BatchError,
        r"values are int32 or int64, found torch.float32; convert them first \(feature 'user' of",
    ),
    "batch sizes": (
        lambda: batch(batch_sizes=[2, 2, 3]),
        BatchError,
        r"batch_sizes \[2, 2, 3\] do not fit 3 features with 6 bags \(feature 'user' of table",
    ),
    "weights of another dtype": (
        lambda: batch(weights=torch.ones(6, dtype=torch.int64)),
        BatchError,
        "weights are floating-point numbers, found torch.int64; convert them first",
    ),
    "weights of another length": (
        lambda: batch(weights=torch.ones(4)),
        BatchError,
        r"weights have shape \(4,\), the ids \(6,\), up to feature 'bought' of table 'item'",
    ),
    "id too large": (
        lambda: batch(values=ints(1, 2, 5, 0, 5, 4)),
        IdRangeError,
        r"feature 'user' of table 'user': id 5 \(number 2 of the feature\) is out of range, "
        "the table has rows 0 to 4",
    ),
    "id negative": (
        lambda: batch(values=ints(1, 2, 3, 0, -1, 4)),
        IdRangeError,
        "feature 'bought' of table 'item': id -1",
    ),
}

every_bad = pytest.mark.parametrize(("make", "kind", "says"), BAD.values(), ids=BAD)


@every_bad
def test_alone(make, kind, says):
    with pytest.raises(kind, match=says):
        EmbeddingBagCollection(TABLES)(make())


@pytest.mark.parametrize("plan", [None, "row_wise", "table_wise"])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: batch(weights=[1.0] * 6), "weights are a tensor of floating-point numbers, found"),
        (lambda: {"user": [[1]]}, "nested tensor of layout torch.jagged"),
        (lambda: "user", "found str"),
    ],
)
def test_lists_and_texts(mesh, plan, make, says):
    """Other ranks would wait for a rank that raises before all have met."""
    bags = EmbeddingBagCollection(TABLES)
    bags = bags if plan is None else bags.shard(mesh, plan)
    with pytest.raises(BatchError, match=says):
        bags(make())
    bags(batch())


PLANS = ["row_wise", "column_wise", "table_wise", "data_parallel"]


def pair(mesh, plan, **options):
    """Two collections with the same values, after a step."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        bags = EmbeddingBagCollection(TABLES, optimizer=RowWiseAdagrad(0.1), **options)
        found.append(bags if mesh is None else bags.shard(mesh, plan))
    good_step(*found)
    return found


def good_step(*collections):
    for bags in collections:
        cases.loss_of(bags(Jagged.from_lists(GOOD))).backward()


def values_of(bags):
    return [whole(parameter) for parameter in bags.parameters()]


def whole(parameter):
    found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return found.agreed().clone() if isinstance(found, LocalTensor) else found.detach().clone()


@every_bad
@pytest.mark.parametrize("check", ["auto", "now"])
@pytest.mark.parametrize("plan", PLANS)
def test_on_one_rank_of_four(mesh, make, kind, says, plan, check):
    bags, twin = pair(mesh, plan, check=check)
    before = values_of(bags)
    bad = make()
    if bad.features != ("user", "seen", "bought"):
        given = bad  # names are the same on every rank of a simulated world: none is named
        where = ""
    else:
        # Ranks whose batch is fine have the same tensors where the bad one has any.
        good = Jagged.from_lists(GOOD, {k: [[1.0] * len(b) for b in v] for k, v in GOOD.items()})
        good.first = ints(0)
        good.batch_sizes = ints(2, 2, 2)

        def per_rank(name):
            if getattr(bad, name) is None:
                return None
            return LocalTensor.per_rank(lambda r: getattr(bad if r == 2 else good, name))

        given = Jagged(
            bad.features,
            per_rank("values"),
            lengths=per_rank("lengths"),
            weights=per_rank("weights"),
            batch_sizes=per_rank("batch_sizes"),
        )
        given.first = per_rank("first")
        where = "On rank 2: "
    with CommDebugMode() as comm, pytest.raises(kind, match=says) as raised:
        bags(given)
    assert str(raised.value).startswith(where or "feature")
    # The counts, in which the complaint is announced, and its text; no ids.
    ops = {event.op for event in comm.events}
    assert ops == {"counts of a batch", "what is wrong with a batch"}
    assert all(map(torch.equal, values_of(bags), before))
    good_step(bags, twin)
    assert all(map(torch.equal, values_of(bags), values_of(twin)))


def wrong_at(position):
    """Batches whose ids, offsets or lengths are wrong from one position on."""
    good = Jagged.from_lists(GOOD)
    for wrong in (-1, 6, 2**40):
        values = good.values.clone()
        values[position] = wrong
        yield batch(values=values), IdRangeError, f"id {wrong} "
    offsets = torch.cat([ints(0), good.lengths.cumsum(0)])
    for change, says in ((-7, "offsets decrease"), (9, "offsets decrease|sum to")):
        moved = offsets.clone()
        moved[position + 1] += change
        yield batch(offsets=moved), BatchError, says
    lengths = good.lengths.clone()
    lengths[position] += 1
    yield batch(lengths=lengths), BatchError, "sum to 7"


@pytest.mark.parametrize("check", ["auto", "now"])
@pytest.mark.parametrize("plan", [None, *PLANS])
def test_wrong_at_every_position(mesh, plan, check):
    bags, twin = pair(None if plan is None else mesh, plan, check=check)
    before = values_of(bags)
    for position in range(6):
        for bad, kind, says in wrong_at(position):
            with pytest.raises(kind, match=says):
                cases.loss_of(bags(bad)).backward()
    assert all(map(torch.equal, values_of(bags), before))
    good_step(bags, twin)
    assert all(map(torch.equal, values_of(bags), values_of(twin)))


@pytest.mark.parametrize("plan", PLANS)
def test_a_rank_without_bags(mesh, plan):
    """Its batch is empty, which is no error; nor is it if all are."""
    bags, twin = pair(mesh, plan)
    good = Jagged.from_lists(GOOD)
    nothing = ints()[:0].long()

    def given(is_empty):
        parts = (
            LocalTensor.per_rank(lambda r, x=x: nothing if is_empty(r) else x)
            for x in (good.values, good.lengths)
        )
        values, lengths = parts
        return Jagged(good.features, values, lengths=lengths)

    out = bags(given(lambda r: r == 2))
    assert [out["user"].on_rank(r).shape[0] for r in range(4)] == [2, 2, 0, 2]
    cases.loss_of(out).backward()
    before = values_of(bags)
    assert not all(map(torch.equal, before, values_of(twin)))
    cases.loss_of(bags(given(lambda r: True))).backward()
    assert all(map(torch.equal, values_of(bags), before))


@pytest.mark.parametrize(
    "changes",
    [
        {"values": torch.ones(500)},
        {"lengths": torch.ones(501, dtype=torch.int64)},
        {"batch_sizes": [1] * 499},
        {"features": ["other", *(f"t{i}" for i in range(1, 500))]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_error_names_some_of_many_features(changes):
    bags = EmbeddingBagCollection([Table(f"t{i}", 4, 2) for i in range(500)])
    given = {"features": bags.features, "values": torch.ones(500, dtype=torch.int64)}
    given |= {"lengths": torch.ones(500, dtype=torch.int64), **changes}
    with pytest.raises(BatchError, match=r" and 49[12] more") as raised:
        bags(Jagged(given.pop("features"), given.pop("values"), **given))
    assert len(str(raised.value)) < 500


def test_an_error_is_an_ordinary_one():
    assert issubclass(BatchError, ValueError)
    assert issubclass(IdRangeError, IndexError)


def test_after_an_error_the_collection_works(mesh):
    bags = EmbeddingBagCollection(TABLES).shard(mesh, "row_wise")
    with pytest.raises(IdRangeError):
        bags(batch(values=ints(1, 2, 5, 0, 5, 4)))
    assert bags(batch())["user"].on_rank(0).shape == (2, 4)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Table("a", 0, 4), ArgumentError, "num_embeddings must be a positive int"),
        (lambda: Table("a.b", 1, 4), ArgumentError, "without dots"),
        (lambda: Table("a", 1, 4, features="x"), ArgumentError, "a sequence of names"),
        (lambda: Table("a", 1, 4, pooling="max"), LayoutError, "one of sum, mean"),
        (lambda: EmbeddingBagCollection([]), ArgumentError, "at least one Table"),
        (
            lambda: EmbeddingBagCollection([Table("a", 1, 4), Table("a", 1, 4)]),
            LayoutError,
            "twice there: a",
        ),
        (lambda: EmbeddingBagCollection(TABLES, backend="abacus"), ArgumentError, "'abacus'"),
        (
            lambda: EmbeddingBagCollection(TABLES, output="list"),
            ArgumentError,
            "'dict' or 'tensor'",
        ),
        (
            lambda: EmbeddingBagCollection(TABLES, optimizer=torch.optim.SGD),
            ArgumentError,
            r"found the class torch\.optim\.\w+\.SGD\. An optimizer of torch takes the parameters",
        ),
        (
            lambda: EmbeddingCollection(
                TABLES, optimizer=torch.optim.SGD([torch.ones(1, requires_grad=True)])
            ),
            ArgumentError,
            r"found an object of torch\.optim\.\w+\.SGD\. An optimizer of torch takes the param",
        ),
        (
            lambda: EmbeddingBagCollection(TABLES, optimizer=SGD),
            ArgumentError,
            r"found the class shardwise\.\S+\.SGD\. Make an instance: SGD\(lr=0\.1\)\.",
        ),
        (lambda: SGD(-1), ArgumentError, "SGD: lr is a number from 0 on, found -1"),
        (lambda: Jagged(["a"], ints(1)), ArgumentError, "lengths or offsets"),
        (lambda: Jagged("a", ints(1), lengths=ints(1)), ArgumentError, "a list of features"),
        (lambda: EmbeddingBagCollection(TABLES)([1, 2]), BatchError, "found list"),
    ],
)
def test_what_cannot_be_made(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_sharding_twice(mesh):
    bags = EmbeddingBagCollection(TABLES).shard(mesh, "row_wise")
    with pytest.raises(ShardwiseError, match="sharded already"):
        bags.shard(mesh, "row_wise")


def test_a_mesh_with_two_axes(square):
    all_ranks = r"init_device_mesh\('cpu', \(4,\)\)"
    with pytest.raises(LayoutError, match=f"one axis.*{all_ranks}"):
        EmbeddingBagCollection(TABLES).shard(square, "row_wise")


def test_a_reduction_that_is_not_known(mesh):
    with pytest.raises(ArgumentError, match="grad_reduction is 'mean' or 'sum', found 'max'"):
        EmbeddingBagCollection(TABLES).shard(mesh, "row_wise", grad_reduction="max")


def test_a_plan_that_leaves_a_table_out_changes_nothing(mesh):
    bags = EmbeddingBagCollection(TABLES)
    with pytest.raises(LayoutError, match="leaves out: item"):
        bags.shard(mesh, Plan({"user": "row_wise"}))
    assert bags.plan is None
    assert type(bags.parameter("user").data) is torch.Tensor


@pytest.mark.parametrize("num", [1, 3])
def test_features_side_by_side_have_equally_many_bags(num):
    bags = {"user": [[1], [2]], "seen": [[0], [0]], "bought": [[5]] * num}
    says = f"'user' has 2 bags, feature 'bought' of table 'item' {num}; output='tensor' needs"
    with pytest.raises(BatchError, match=says):
        EmbeddingBagCollection(TABLES, output="tensor")(Jagged.from_lists(bags))


def test_a_batch_of_another_collection(mesh):
    first = cases.make().shard(mesh, "row_wise")
    second = cases.make().shard(mesh, "row_wise")
    with pytest.raises(BatchError, match="another collection"):
        second(first.prefetch(cases.batch(0)))


def test_a_parameter_that_was_replaced():
    bags = EmbeddingBagCollection(TABLES)
    bags.parameter("user").data = torch.zeros(5, 4)
    with pytest.raises(ShardwiseError, match="'user' was replaced"):
        bags(batch())
