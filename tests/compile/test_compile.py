"""torch.compile gives what eager gives, in one graph, for any batch size.

Sizes that meet in a test are all different: torch takes equal ones for the same symbol, and makes
graphs of their own for 0 and 1.
"""

import copy
import pickle

import pytest
import torch
from by_hand import lay, value
from compiling import compiled
from torch.nn import functional as F

import shardwise
from shardwise import Replicate, Shard, distribute_tensor
from shardwise.debug import CommDebugMode
from shardwise.dtensor import compile

pytestmark = pytest.mark.slow

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def lookup(ids, table):
    return F.embedding(ids, table) * 2


def linear(x, weight, bias):
    return F.linear(x, weight, bias).relu()


def outcome(fn, inputs, place):
    """The value of `fn(*inputs)`, and the gradients of those that want one."""
    out = fn(*inputs)
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape)
    wanted = [x for x in inputs if x.requires_grad]
    grads = torch.autograd.grad(out, wanted, place(upstream, out.device_mesh, [R]))
    return value(out), *map(value, grads)


def assert_as_eager(fn, fast, inputs, place=shardwise.distribute_tensor):
    expected = outcome(fn, inputs, place)
    torch.testing.assert_close(outcome(fast, inputs, place), expected)


def lookup_inputs(mesh, placement, num_ids):
    """Uneven by rows on two ranks, and either way on four."""
    ids = torch.randint(0, 11, (num_ids,))
    return lay(ids, mesh, [R]), lay(torch.randn(11, 14), mesh, [placement]).requires_grad_()


def linear_inputs(mesh, placement, batch, batch_placement=R):
    return (
        lay(torch.randn(batch, 20), mesh, [batch_placement]).requires_grad_(),
        lay(torch.randn(36, 20), mesh, [placement]).requires_grad_(),
        lay(torch.randn(36), mesh, [R]).requires_grad_(),
    )


@pytest.mark.parametrize("placement", [S0, Shard(0, sizes=(0, 9, 2, 0)), S1, R], ids=repr)
def test_a_lookup_of_any_batch_size_is_compiled_once(mesh, placement):
    fast, counter = compiled(lookup, dynamic=True)
    for num_ids in (8, 9, 23):
        assert_as_eager(lookup, fast, lookup_inputs(mesh, placement, num_ids))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("placement", "batch"), [(S0, R), (S1, R), (R, S0)], ids=["column", "row", "batch"]
)
def test_a_linear_layer_of_any_batch_size_is_compiled_once(pair, placement, batch):
    fast, counter = compiled(linear, dynamic=True)
    for size in (27, 31, 45):
        assert_as_eager(linear, fast, linear_inputs(pair, placement, size, batch))
    assert counter.frame_count == 1


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="older torch cannot trace placements as arguments of a method",
)
def test_redistribute_inside_a_compiled_function(pair):
    def gathered(ids, table):
        return F.embedding(ids, table).redistribute(placements=[Replicate()])

    fast, _ = compiled(gathered, dynamic=True)
    assert_as_eager(gathered, fast, lookup_inputs(pair, S0, 8))


def test_a_batch_smaller_than_the_mesh(mesh):
    """Two ranks have no row at all."""
    fast, _ = compiled(linear, dynamic=True)
    assert_as_eager(linear, fast, linear_inputs(mesh, R, 2, S0))


def test_a_gradient_that_each_rank_keeps_a_copy_of(pair):
    """Ranks that hold equal tensors need not hold the same one."""
    fast, _ = compiled(lookup, dynamic=True)
    assert_as_eager(lookup, fast, lookup_inputs(pair, S0, 8), place=lay)


@pytest.mark.parametrize("placement", [S0, S1], ids=repr)
def test_inductor_lookup(pair, placement):
    fast, counter = compiled(lookup, "inductor", dynamic=True)
    for num_ids in (8, 9):
        assert_as_eager(lookup, fast, lookup_inputs(pair, placement, num_ids))
    assert counter.frame_count == 1


def test_inductor_linear(pair):
    fast, _ = compiled(linear, "inductor", dynamic=True)
    assert_as_eager(linear, fast, linear_inputs(pair, S0, 27))


def test_what_a_graph_knows_of_a_tensor_is_one_object_per_value(pair):
    """Guards compare it by identity: copies and emptied caches must lead to the same object."""

    def known(placement, rows=6):
        return distribute_tensor(torch.ones(rows, 4), pair, [placement]).__tensor_flatten__()[1]

    first = known(S0)
    compile._cached_context.cache_clear()
    assert known(S0, rows=8) is first
    assert copy.deepcopy(first) is first
    assert pickle.loads(pickle.dumps(first)) is first
    assert known(S1) is not first


def test_other_placements_are_compiled_anew_and_known_ones_found_again(pair):
    fast, counter = compiled(linear, dynamic=True)
    for placement in (S0, S1, S0, S1):
        compile._cached_context.cache_clear()
        assert_as_eager(linear, fast, linear_inputs(pair, placement, 27))
    assert counter.frame_count == 2


def test_two_worlds_do_not_share_compiled_code():
    fast, counter = compiled(lookup, dynamic=True)
    for size in (2, 3):
        with shardwise.simulate(size):
            mesh = shardwise.init_device_mesh("cpu", (size,))
            assert_as_eager(lookup, fast, lookup_inputs(mesh, S0, 8))
    assert counter.frame_count == 2


# -- tables ----------------------------------------------------------------------------------


def bags(ids, table):
    return F.embedding_bag(ids, table, mode="mean") * 2


@pytest.mark.parametrize("placements", [(S0, S0), (R, S0)], ids=str)
def test_sharded_ids(pair, placements):
    """Ids are gathered and rows reduce-scattered: no size depends on the ids."""
    fast, counter = compiled(lookup, dynamic=True)
    for size in (31, 43):
        table = lay(torch.randn(11, 14), pair, [placements[0]]).requires_grad_()
        ids = lay(torch.randint(0, 11, (size,)), pair, [placements[1]])
        assert_as_eager(lookup, fast, (ids, table))
        assert fast(ids, table).placements == (S0,)
    assert counter.frame_count == 1


@pytest.mark.parametrize("placement", [S0, S1, R], ids=repr)
def test_bags(pair, placement):
    fast, counter = compiled(bags, dynamic=True)
    for size in (31, 43):
        table = lay(torch.randn(11, 14), pair, [placement]).requires_grad_()
        ids = lay(torch.randint(0, 11, (size, 3)), pair, [R])
        assert_as_eager(bags, fast, (ids, table))
    assert counter.frame_count == 1


@pytest.mark.parametrize("placement", [S0, R], ids=repr)
def test_rows_of_a_maximal_norm(pair, placement):
    """The region writes to a parameter, which gets a gradient too."""

    def scaled(ids, table):
        return F.embedding(ids, table, max_norm=1.0) * 2

    fast, _ = compiled(scaled, dynamic=True)
    weight, ids = torch.randn(11, 14), torch.randint(0, 11, (26,))
    one = weight.clone().requires_grad_()
    table = lay(weight, pair, [placement]).requires_grad_()
    for _ in range(2):
        found, expected = fast(lay(ids, pair, [R]), table), scaled(ids, one)
        torch.testing.assert_close(value(found), expected)
        torch.testing.assert_close(value(table.detach()), one.detach())
        torch.testing.assert_close(
            value(torch.autograd.grad(found.square().sum(), table)[0]),
            torch.autograd.grad(expected.square().sum(), one)[0],
        )
        with torch.no_grad():
            table.mul_(3), one.mul_(3)


def test_plain_tensors_meet_numbers_and_nothing_else(pair):
    plain = torch.arange(4.0)
    scaled, _ = compiled(lambda number, x: number * x, dynamic=True)
    number = shardwise.distribute_tensor(torch.tensor(3.0), pair, [R])
    assert torch.equal(scaled(number, plain), plain * 3)
    mixed, _ = compiled(lambda laid_out, x: laid_out * x, dynamic=True)
    with pytest.raises(Exception, match="Wrap it"):
        mixed(lay(torch.ones(4), pair, [S0]), plain)


@pytest.mark.parametrize("placement", [S0, R], ids=repr)
def test_an_id_out_of_range_is_asserted(pair, placement):
    fast, _ = compiled(lookup, dynamic=True)
    table = lay(torch.randn(11, 14), pair, [placement])
    with pytest.raises((RuntimeError, IndexError), match="out of range"):
        fast(lay(torch.tensor([0, 3, 11]), pair, [S0]), table)


@pytest.mark.parametrize("placement", [S0, S1, R], ids=repr)
def test_strides_that_are_squares_of_sizes(pair, placement):
    """As those of the scores of attention, with as many queries as keys."""
    fn = lambda x: (x @ x.mT).softmax(-1) @ x  # noqa: E731
    fast, counter = compiled(fn, dynamic=True)
    for length in (5, 9):
        inputs = (lay(torch.randn(4, 2, length, 3), pair, [placement]).requires_grad_(),)
        assert_as_eager(fn, fast, inputs)
    assert counter.frame_count == 1


def test_strides_of_results_that_are_squares(pair):
    """The parts of complex numbers are such a view, of a tensor that no input is like."""

    def sizes(x):
        return torch.view_as_real(torch.linalg.eig(x)[1]).square().sum(-1)

    fast, counter = compiled(sizes, dynamic=True)
    for rows in (5, 7):
        assert_as_eager(sizes, fast, (lay(torch.randn(3, rows, rows), pair, [R]).requires_grad_(),))
    assert counter.frame_count == 1


def test_attention_with_any_number_of_heads(pair):
    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    fast, counter = compiled(attend, dynamic=True)
    for heads, length in ((4, 7), (6, 9)):
        each = [torch.randn(3, heads, length, 5) for _ in range(3)]
        inputs = [lay(x, pair, [S1]).requires_grad_() for x in each]
        assert_as_eager(attend, fast, inputs)
    assert counter.frame_count == 1


@pytest.mark.parametrize("placement", [S0, S1, R], ids=repr)
def test_a_number_written_to_a_position(pair, placement):
    def fn(x):
        y = x * 2
        y[2, 1] = 5.0
        y[-1, -1] = 3.0
        return y * 3

    fast, _ = compiled(fn, dynamic=True)
    for rows in (5, 9):
        assert_as_eager(fn, fast, (lay(torch.randn(rows, 4), pair, [placement]).requires_grad_(),))


def test_columns_of_any_number_of_rows(pair):
    """`:` is a slice of a symbolic size: it takes all rows, so nothing is communicated."""

    def fn(x):
        y = x[:, ::2] * 2
        y[:, 0] = 5.0
        y[:, 1:].mul_(3)
        y[:, -1] = x[:, 1]
        return y

    fast, counter = compiled(fn, dynamic=True)
    for rows in (5, 7, 9):
        inputs = (lay(torch.randn(rows, 6), pair, [S0]).requires_grad_(),)
        assert_as_eager(fn, fast, inputs)
        with CommDebugMode() as comm:
            assert fast(*inputs).placements == (S0,)
        assert comm.get_total_counts() == 0
    assert counter.frame_count == 1


def test_numbers_that_change(pair):
    fast, counter = compiled(lambda x, factor: (x * factor).relu(), dynamic=True)
    x = torch.randn(5, 4)
    for factor in (0.5, 1.5, -2.5, 3.5):
        found = value(fast(lay(x, pair, [S0]), factor))
        torch.testing.assert_close(found, (x * factor).relu())
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["LocalTensor", S0, Shard(0, sizes=(1, 4)), R], ids=str)
def test_an_output_without_a_gradient(pair, kind):
    """A cache of keys, which a model returns beside its logits."""
    if kind == "LocalTensor":
        x = shardwise.LocalTensor.per_rank(lambda rank: torch.randn(5) + rank)
    else:
        x = lay(torch.randn(5), pair, [kind])
    fast, _ = compiled(lambda x: (x.sin(), x.exp(), x * 2), dynamic=True)
    x.requires_grad_()
    first, _, last = fast(x)
    (found,) = torch.autograd.grad(first.sum() + last.sum(), x)
    assert type(found) is type(x)
    expected = x.detach().cos() + 2
    if kind != "LocalTensor":
        found, expected = value(found), value(expected)
    torch.testing.assert_close(found, expected)
