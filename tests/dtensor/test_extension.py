"""Rules that a program adds, functions of local tensors, and the fallback."""

import warnings

import pytest
import torch
from parity import whole

import shardwise
from shardwise import Partial, Replicate, Shard, distribute_tensor, register_rule
from shardwise.debug import CommDebugMode
from shardwise.dispatch.catalog import REGISTERED, rule_caches
from shardwise.dispatch.rule import Choice
from shardwise.testing import Sample, check_rule, missing_choices


@torch.library.custom_op("shardwise_tests::rows", mutates_args=())
def rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each row times the weight, and then its running sum."""
    return (x * weight).cumsum(-1)


@rows.register_fake
def _(x, weight):
    return torch.empty_like(x)


@torch.library.custom_op("shardwise_tests::add_one_", mutates_args=("x",))
def add_one_(x: torch.Tensor) -> None:
    x.add_(1)


OP = torch.ops.shardwise_tests.rows.default


@pytest.fixture(autouse=True)
def _forget():
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)
    for forget in rule_caches:
        forget()


def test_a_line_of_notation(mesh):
    register_rule(OP, "... [n], [n] -> ... [n]", linear=[(0,), (1,)])
    sample = Sample(OP, (torch.randn(4, 3, 5), torch.randn(5)))
    assert check_rule(sample).ok
    assert not missing_choices(sample)
    x = distribute_tensor(torch.randn(6, 5), mesh, [Shard(0)])
    weight = distribute_tensor(torch.randn(5), mesh, [Replicate()])
    with CommDebugMode() as comm:
        found = rows(x, weight)
    assert found.placements == (Shard(0),)
    assert not comm.events
    torch.testing.assert_close(whole(found), rows(whole(x), whole(weight)))


def test_a_wrong_line_is_found_by_the_checker():
    register_rule(OP, "... n, n -> ... n")
    assert check_rule(Sample(OP, (torch.randn(4, 5), torch.randn(5)))).mistakes


def test_a_function(mesh):
    def choices(call):
        yield call.replicated()
        yield shardwise.dispatch.rule.Choice((Shard(0), Replicate()), (Shard(0),))

    register_rule(rows, choices)
    x = distribute_tensor(torch.randn(6, 5), mesh, [Shard(0)])
    weight = distribute_tensor(torch.randn(5), mesh, [Replicate()])
    assert rows(x, weight).placements == (Shard(0),)


def test_a_new_rule_forgets_the_plans_of_the_old_one(mesh):
    x = distribute_tensor(torch.randn(6, 5), mesh, [Shard(0)])
    weight = distribute_tensor(torch.randn(5), mesh, [Replicate()])
    register_rule(OP, "[m] [n], [n] -> [m] [n]")
    assert rows(x, weight).placements == (Replicate(),)
    with pytest.raises(shardwise.LayoutError, match=r"has a rule already.*replace=True"):
        register_rule(OP, "... [n], [n] -> ... [n]")
    register_rule(OP, "... [n], [n] -> ... [n]", replace=True)
    assert rows(x, weight).placements == (Shard(0),)


def test_bad_rules_say_what_is_wrong():
    with pytest.raises(shardwise.LayoutError, match=r"twice: a comma is missing"):
        register_rule(OP, "... [n] ... [n] -> ... [n]")
    with pytest.raises(shardwise.LayoutError, match=r"has 2 tensor arguments, the line 1"):
        register_rule(OP, "... [n] -> ... [n]")
    with pytest.raises(shardwise.LayoutError, match=r"has 1 tensor results, the line 2"):
        register_rule(OP, "... [n], [n] -> ... [n], [n]")
    with pytest.raises(shardwise.LayoutError, match=r"rows.*cannot be read.*'->'"):
        register_rule(OP, "m n")
    with pytest.raises(shardwise.ArgumentError, match="custom_op"):
        register_rule(lambda x: x, "... -> ...")
    with pytest.raises(shardwise.ArgumentError, match="overloads"):
        register_rule(torch.ops.aten.add, "..., ... -> ...")
    with pytest.raises(shardwise.LayoutError, match=r"'axis' names no argument.*weight"):
        register_rule(OP, "... [n], [n] -> ... [n]", n="axis")
    with pytest.raises(shardwise.ArgumentError, match="found 3"):
        register_rule(OP, 3)


def test_an_option_that_names_nothing_is_refused():
    """It would be ignored, and the rule give wrong numbers."""
    with pytest.raises(shardwise.LayoutError, match=r"m='weight' names no letter"):
        register_rule(OP, "... [n], [n] -> ... [n]", m="weight")
    with pytest.raises(shardwise.LayoutError, match=r"\(1, 2\) names operands.*0 to 1"):
        register_rule(OP, "... [n], [n] -> ... [n]", linear=[(1, 2)])
    with pytest.raises(shardwise.LayoutError, match=r"\(-1,\) names operands"):
        register_rule(OP, "... [n], [n] -> ... [n]", added=(-1,))
    with pytest.raises(shardwise.LayoutError, match=r"'mean'.*is not a reduction"):
        register_rule(OP, "... [n], [n] -> ... [n]", reduce_op="mean")


def test_a_letter_stands_for_one_dim_of_an_operand():
    """A shard of a matrix has no shard of its diagonal."""
    with pytest.raises(shardwise.LayoutError, match=r"'n n' in .* has a letter twice"):
        register_rule(OP, "n n, n -> n")


@pytest.mark.parametrize("torchs_form", [False, True])
def test_dims_of_a_function_may_count_from_the_end(mesh, torchs_form):
    shards = (Shard(-2), Replicate()), (Shard(-2),)
    if torchs_form:
        shardwise.register_sharding(OP)(lambda x, weight: [(shards[1], shards[0])])
    else:
        register_rule(OP, lambda call: [Choice(*shards)])
    x, weight = torch.randn(6, 5), torch.randn(5)
    found = rows(
        distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Replicate()])
    )
    assert found.placements == (Shard(0),)
    torch.testing.assert_close(whole(found), rows(x, weight))


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        (Choice((Shard(2), Replicate()), (Shard(0),)), r"Shard\(2\) of .*rows.* is out of range"),
        (Choice(("S(0)", Replicate()), (Shard(0),)), r"Placements are.*found 'S\(0\)'"),
        (Choice((Shard(0),), (Shard(0),)), "1 placements for 2 tensor arguments"),
        ((Shard(0), Replicate()), "has to yield Choices"),
    ],
)
def test_a_choice_that_does_not_fit_the_call(mesh, choice, error):
    register_rule(OP, lambda call: [choice])
    x = distribute_tensor(torch.randn(6, 5), mesh, [Shard(0)])
    weight = distribute_tensor(torch.randn(5), mesh, [Replicate()])
    with pytest.raises(shardwise.ShardwiseError, match=error):
        rows(x, weight)


def test_register_sharding(mesh):
    seen = []

    @shardwise.register_sharding(OP)
    def shardings(x, weight):
        seen.append((tuple(x.shape), x.ndim, weight.dtype))
        return [
            ([Replicate()], [Replicate(), Replicate()]),
            ([Shard(0)], [Shard(0), Replicate()]),
        ]

    x = distribute_tensor(torch.randn(6, 5), mesh, [Shard(0)])
    weight = distribute_tensor(torch.randn(5), mesh, [Replicate()])
    found = rows(x, weight)
    assert found.placements == (Shard(0),)
    assert seen[0] == ((6, 5), 2, torch.float32)
    torch.testing.assert_close(whole(found), rows(whole(x), whole(weight)))
    assert check_rule(Sample(OP, (torch.randn(4, 5), torch.randn(5)))).ok


def test_register_sharding_counts_the_placements(mesh):
    shardwise.register_sharding([OP])(lambda x, weight: [([Shard(0)], [Shard(0), None])])
    x = distribute_tensor(torch.randn(6, 5), mesh, [Shard(0)])
    weight = distribute_tensor(torch.randn(5), mesh, [Replicate()])
    with pytest.raises(shardwise.LayoutError, match="1 placements for 2 tensor arguments"):
        rows(x, weight)


def test_register_sharding_of_an_op_with_tensors_by_keyword(mesh):
    library = torch.library.Library("shardwise_test_keywords", "FRAGMENT")
    library.define("scaled(Tensor x, *, Tensor weight, float by=2.0) -> Tensor")
    library.impl(
        "scaled", lambda x, *, weight, by=2.0: x * weight * by, "CompositeExplicitAutograd"
    )
    op = torch.ops.shardwise_test_keywords.scaled.default

    @shardwise.register_sharding(op)
    def shardings(x, *, weight, by=2.0):
        assert (weight.ndim, by) == (1, 3.0)
        return [([Shard(0)], [Shard(0), Replicate()])]

    x, weight = torch.randn(6, 5), torch.randn(5)
    found = op(
        distribute_tensor(x, mesh, [Shard(0)]),
        weight=distribute_tensor(weight, mesh, [Replicate()]),
        by=3.0,
    )
    assert found.placements == (Shard(0),)
    torch.testing.assert_close(whole(found), x * weight * 3)


# -- local_map -------------------------------------------------------------------------------


def product(x, w):
    return x @ w


@pytest.mark.parametrize("size", [8, 5], ids=["even", "uneven"])
def test_local_map(mesh, size):
    mapped = shardwise.local_map(
        product, out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)])
    )
    left, right = torch.randn(3, size), torch.randn(size, 2)
    x = distribute_tensor(left, mesh, [Shard(1)]).requires_grad_()
    w = distribute_tensor(right, mesh, [Shard(0)])
    found = mapped(x, w)
    torch.testing.assert_close(whole(found), left @ right)
    found.sum().backward()
    torch.testing.assert_close(whole(x.grad), right.sum(1).expand(3, size))


def test_local_map_of_uneven_parts_knows_the_whole_shape(mesh):
    mapped = shardwise.local_map(lambda x: (x * 2, 3), out_placements=([Shard(0)], None))
    x = distribute_tensor(torch.randn(5, 2), mesh, [Shard(0)])
    found, number = mapped(x)
    assert number == 3
    assert found.shape == (5, 2)
    torch.testing.assert_close(whole(found), whole(x) * 2)


def test_local_map_moves_inputs_when_asked(mesh):
    options = {"out_placements": [Shard(0)], "in_placements": ([Shard(0)],)}
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(1)])
    with pytest.raises(ValueError, match=r"Argument 0 of .*set redistribute_inputs=True"):
        shardwise.local_map(torch.neg, **options)(x)
    found = shardwise.local_map(torch.neg, **options, redistribute_inputs=True)(x)
    torch.testing.assert_close(whole(found), -whole(x))


def test_local_map_knows_the_order_of_axes(square):
    both = [Shard(0), Shard(0)]
    x = distribute_tensor(torch.arange(8.0), square, both)
    x = x.redistribute(placements=both, order=[1, 0])
    with pytest.raises(shardwise.LayoutError, match=r"order=\(1, 0\)"):
        shardwise.local_map(torch.neg, both, (both,))(x)
    found = shardwise.local_map(torch.neg, both, (both,), redistribute_inputs=True)(x)
    torch.testing.assert_close(whole(found), -torch.arange(8.0))


def test_local_map_says_what_does_not_fit(mesh):
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    with pytest.raises(shardwise.ArgumentError, match="in_placements has 2 entries"):
        shardwise.local_map(torch.neg, [Shard(0)], ([Shard(0)], None))(x)
    with pytest.raises(shardwise.ArgumentError, match="plain tensor"):
        shardwise.local_map(product, [Shard(0)], ([Shard(0)], [Replicate()]))(x, torch.ones(4, 4))
    with pytest.raises(shardwise.ArgumentError, match="out_placements is None"):
        shardwise.local_map(lambda x: (x, 1), (None, None))(x)
    plain = torch.randn(3)
    assert torch.equal(shardwise.local_map(torch.neg, [Shard(0)])(plain), -plain)


def test_local_map_takes_a_placement_for_a_mesh_of_one_axis(mesh):
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(1)])
    assert shardwise.local_map(torch.neg, Shard(1), (Shard(1),))(x).placements == (Shard(1),)
    with pytest.raises(shardwise.ArgumentError, match=r"in_placements is Shard\(1\): give a tuple"):
        shardwise.local_map(torch.neg, Shard(1), Shard(1))(x)


def test_local_map_decorates(mesh):
    @shardwise.local_map(out_placements=[Shard(0)])
    def double(x):
        return x * 2

    x = distribute_tensor(torch.randn(8), mesh, [Shard(0)])
    torch.testing.assert_close(whole(double(x)), whole(x) * 2)
    assert double.__name__ == "double"


# -- the fallback ----------------------------------------------------------------------------


def test_without_a_rule_an_op_raises_unless_the_fallback_is_on(mesh):
    x = distribute_tensor(torch.randn(6, 5), mesh, [Shard(0)])
    weight = distribute_tensor(torch.randn(5), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match="does not have a sharding strategy"):
        rows(x, weight)
    with shardwise.fallback("replicate"):
        with pytest.warns(shardwise.ReplicationWarning, match=r"rows.*2 operands.* 140 bytes"):
            found = rows(x, weight)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rows(x, weight)  # told of once
    assert found.placements == (Replicate(),)
    torch.testing.assert_close(whole(found), rows(whole(x), whole(weight)))
    with pytest.raises(NotImplementedError):
        rows(x, weight)
    with pytest.raises(shardwise.ArgumentError, match="replicate"), shardwise.fallback("gather"):
        pass


def test_the_fallback_writes_in_place(mesh):
    x = torch.randn(6, 5)
    placed = distribute_tensor(x, mesh, [Shard(0)])
    with shardwise.fallback("replicate"), pytest.warns(shardwise.ReplicationWarning):
        add_one_(placed)
    assert placed.placements == (Shard(0),)
    torch.testing.assert_close(whole(placed), x + 1)


def test_an_op_that_has_a_kernel_and_nothing_else(mesh):
    """No formula for its gradient, none for autograd to pass it on: as C++ extensions define it."""
    library = torch.library.Library("shardwise_test_bare", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x * 2, "CPU")
    library.impl("doubled", torch.empty_like, "Meta")
    op = torch.ops.shardwise_test_bare.doubled.default
    x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match="sharding strategy"):
        op(x)
    register_rule(op, "n -> n")
    doubled = op(x)
    assert doubled.placements == (Shard(0),)
    assert torch.equal(whole(doubled), torch.arange(6.0) * 2)


@torch.library.custom_op("shardwise_tests::threshold", mutates_args=())
def threshold(x: torch.Tensor, least: float) -> torch.Tensor:
    return x * (x > least)


@threshold.register_fake
def _(x, least):
    return torch.empty_like(x)


def test_a_rule_that_reads_a_number(mesh):
    """Plans of ops in the catalog ignore floats; those of a program's own rules do not."""

    def choices(call):
        yield call.replicated()
        if call.args[1] > 0:
            yield Choice((Shard(0),), (Shard(0),))

    op = torch.ops.shardwise_tests.threshold.default
    register_rule(op, choices)
    x = distribute_tensor(torch.randn(8, 3), mesh, [Shard(0)])
    assert [op(x, least).placements for least in (0.5, -0.5, 0.25)] == [
        (Shard(0),),
        (Replicate(),),
        (Shard(0),),
    ]
