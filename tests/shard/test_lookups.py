"""Each rank's own batch, different on each, gives what one device with the whole table gives."""

import functools

import pytest
import torch
from shard_cases import TABLE_SPECS, chunks, per_rank, tiles
from torch import nn
from torch.nn import functional as F

from shardwise import LocalTensor, UnsupportedError
from shardwise.debug import CommDebugMode
from shardwise.shard import shard_tensor

SHAPE = (11, 6)
RANKS = range(4)


@pytest.fixture(params=TABLE_SPECS.values(), ids=TABLE_SPECS.keys())
def spec(request):
    return request.param


def table():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


#: NaN is equal to NaN.
same = functools.partial(torch.testing.assert_close, equal_nan=True)


def on_rank(x, rank):
    return x.on_rank(rank) if isinstance(x, LocalTensor) else x


def check(spec, lookup, *batch, table=None, grad_reduction="mean"):
    """Forward, the weight after it, and gradients of weight and batch, against one device."""
    whole = globals()["table"]() if table is None else table
    st = shard_tensor(whole.clone().requires_grad_(), spec, grad_reduction=grad_reduction)
    batch = [_leaf(x) for x in batch]
    out = lookup(st, *batch)
    expected_grad = torch.zeros_like(whole)
    after = whole.clone()
    upstream = {}
    singles = []
    for rank in RANKS:
        weight = whole.clone().requires_grad_()
        own = [
            _leaf(on_rank(x.detach(), rank)) if _has_grad(x) else on_rank(x, rank) for x in batch
        ]
        single = lookup(weight, *own)
        same(on_rank(out, rank), single, msg=lambda m, r=rank: f"{r}: {m}")
        generator = torch.Generator().manual_seed(rank)
        upstream[rank] = torch.randn(single.shape, generator=generator, dtype=single.dtype)
        (single * upstream[rank]).sum().backward()
        expected_grad += weight.grad / (4 if grad_reduction == "mean" else 1)
        changed = (weight.detach() != whole).any(1)
        after[changed] = weight.detach()[changed]
        singles.append(own)
    (out * LocalTensor.per_rank(upstream.get)).sum().backward()
    same(st.grad.full_tensor().agreed(), expected_grad)
    same(st.detach().full_tensor().agreed(), after)
    for place, x in enumerate(batch):
        if _has_grad(x):
            for rank in RANKS:
                same(on_rank(x.grad, rank), singles[rank][place].grad)


def _has_grad(x):
    return x is not None and x.is_floating_point()


def _leaf(x):
    return x.detach().requires_grad_() if _has_grad(x) else x


def ids_of(*shapes):
    return per_rank(lambda rank, g: torch.randint(0, SHAPE[0], shapes[rank], generator=g))


UNEVEN = ((2, 3), (4, 1), (0, 2), (5, 2))
EVEN = ((3, 2),) * 4


# -- Embedding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [EVEN, UNEVEN, ((4,), (1,), (3,), (0,)), ((),) * 4], ids=str)
def test_embedding(world, spec, shapes):
    check(spec, lambda w, ids: F.embedding(ids, w), ids_of(*shapes))


def test_a_batch_that_all_ranks_share(world, spec):
    check(spec, lambda w, ids: F.embedding(ids, w), torch.tensor([[0, 10], [3, 3]]))


def test_nobody_brings_anything(world, spec):
    check(spec, lambda w, ids: F.embedding(ids, w), ids_of((0,), (0,), (0,), (0,)))


@pytest.mark.parametrize("padding_idx", [0, 5, -1])
def test_embedding_padding_idx(world, spec, padding_idx):
    check(spec, lambda w, ids: F.embedding(ids, w, padding_idx=padding_idx), ids_of(*UNEVEN))


def test_embedding_scale_grad_by_freq(world, spec):
    check(spec, lambda w, ids: F.embedding(ids, w, scale_grad_by_freq=True), ids_of(*UNEVEN))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf")])
def test_embedding_max_norm(world, spec, norm_type):
    def lookup(weight, ids):
        return F.embedding(ids, weight, max_norm=0.9, norm_type=norm_type)

    check(spec, lookup, ids_of(*UNEVEN))


def test_the_sum_of_losses(world, spec):
    check(spec, lambda w, ids: F.embedding(ids, w), ids_of(*UNEVEN), grad_reduction="sum")


# -- EmbeddingBag ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("shapes", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_bags_of_one_length(world, spec, mode, shapes):
    check(spec, lambda w, ids: F.embedding_bag(ids, w, mode=mode), ids_of(*shapes))


def jagged(include_last_offset=False):
    """Bags of different lengths, some empty, one rank without any."""
    lengths = [[2, 0, 3], [1], [], [0, 4, 0, 1, 1]]
    ids = ids_of(*[(sum(each),) for each in lengths])

    def offsets(rank):
        ends = torch.tensor([0, *lengths[rank]]).cumsum(0)
        return ends if include_last_offset else ends[:-1]

    return ids, LocalTensor.per_rank(offsets)


@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_offsets(world, spec, mode, include_last_offset):
    def lookup(weight, ids, offsets):
        return F.embedding_bag(
            ids, weight, offsets, mode=mode, include_last_offset=include_last_offset
        )

    check(spec, lookup, *jagged(include_last_offset))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bag_padding_idx(world, spec, mode):
    def lookup(weight, ids, offsets):
        return F.embedding_bag(ids, weight, offsets, mode=mode, padding_idx=4)

    ids, offsets = jagged()
    with_padding = LocalTensor.per_rank(
        lambda rank: ids.on_rank(rank).masked_fill(ids.on_rank(rank) % 2 == 0, 4)
    )
    check(spec, lookup, with_padding, offsets)


def test_per_sample_weights(world, spec):
    def lookup(weight, ids, offsets, weights):
        return F.embedding_bag(ids, weight, offsets, mode="sum", per_sample_weights=weights)

    ids, offsets = jagged()
    weights = per_rank(
        lambda rank, g: torch.randn(ids.on_rank(rank).shape, generator=g, dtype=torch.float64)
    )
    check(spec, lookup, ids, offsets, weights)


def test_per_sample_weights_of_two_dims(world, spec):
    def lookup(weight, ids, weights):
        return F.embedding_bag(ids, weight, mode="sum", per_sample_weights=weights)

    weights = per_rank(lambda rank, g: torch.randn(UNEVEN[rank], generator=g, dtype=torch.float64))
    check(spec, lookup, ids_of(*UNEVEN), weights)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bag_scale_grad_by_freq(world, spec, mode):
    def lookup(weight, ids, offsets):
        return F.embedding_bag(ids, weight, offsets, mode=mode, scale_grad_by_freq=True)

    check(spec, lookup, *jagged())


@pytest.mark.parametrize("padding_idx", [None, 4])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_entries_that_are_not_finite(world, spec, mode, padding_idx):
    draw = torch.Generator().manual_seed(3)
    entries = torch.tensor([-1.0, 0.5, -torch.inf, torch.inf, torch.nan], dtype=torch.float64)
    odd = entries[torch.randint(5, SHAPE, generator=draw)]

    def lookup(weight, ids, offsets):
        return F.embedding_bag(ids, weight, offsets, mode=mode, padding_idx=padding_idx)

    check(spec, lookup, *jagged(), table=odd)


@pytest.mark.parametrize("mode", ["sum", "max"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_bag_max_norm(world, spec, mode, norm_type):
    def lookup(weight, ids, offsets):
        return F.embedding_bag(ids, weight, offsets, mode=mode, max_norm=0.8, norm_type=norm_type)

    check(spec, lookup, *jagged())


def test_ties_in_a_maximum_go_to_the_first_row(world, spec):
    level = torch.ones(SHAPE, dtype=torch.float64)
    ids = torch.tensor([[9, 1, 4], [4, 9, 9]])
    check(spec, lambda w, x: F.embedding_bag(x, w, mode="max"), ids, table=level)


# -- sparse gradients ----------------------------------------------------------------------------

NATURAL = ["rows", "rows twice a rank", "rows by size", "columns", "columns by size", "one rank"]


@pytest.mark.parametrize("spec", [TABLE_SPECS[name] for name in NATURAL], ids=NATURAL)
def test_sparse_gradients(world, spec):
    """The rows that were looked up, the same values as a dense gradient."""
    ids, offsets = jagged()
    weights = per_rank(
        lambda rank, g: torch.randn(ids.on_rank(rank).shape, generator=g, dtype=torch.float64)
    )
    lookups = [
        lambda w, s: F.embedding(ids, w, padding_idx=4, sparse=s),
        lambda w, s: F.embedding_bag(ids, w, offsets, mode="mean", padding_idx=4, sparse=s),
        lambda w, s: F.embedding_bag(
            ids, w, offsets, mode="sum", per_sample_weights=weights, sparse=s
        ),
    ]
    for lookup in lookups:
        found = []
        for sparse in (True, False):
            st = shard_tensor(table().requires_grad_(), spec)
            lookup(st, sparse).square().sum().backward()
            assert st.grad.is_sparse is sparse
            found.append(st.grad.full_tensor().agreed())
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_optimizers_take_sparse_gradients(world, make):
    ids = ids_of(*UNEVEN)
    for spec in (chunks(0, 0, 1, 2, 3), chunks(1, 0, 1, 2, 3)):
        whole = table().requires_grad_()
        st = shard_tensor(table().requires_grad_(), spec)
        optimizers = make([whole], lr=0.1), make([st], lr=0.1)
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = [
                F.embedding(ids.on_rank(rank), whole, sparse=True).square().sum() for rank in RANKS
            ]
            (sum(losses) / 4).backward()
            F.embedding(ids, st, sparse=True).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(st.detach().full_tensor().agreed(), whole.detach())


# -- what travels --------------------------------------------------------------------------------


def sent_by_bags(ids, mode):
    """Bytes of ids and of rows that rank 0 sends, and the results."""
    st = shard_tensor(table().requires_grad_(), chunks(0, 0, 1, 2, 3))
    with CommDebugMode() as comm:
        out = F.embedding_bag(ids, st, mode=mode)
    _, ids_bytes, rows_bytes = [e.num_bytes for e in comm.events]
    return ids_bytes, rows_bytes, out


def test_long_bags_travel_pooled(world):
    """Eleven different ids in a bag cost no more rows on the wire than four."""
    row_bytes = 6 * 8
    for length in (4, 11):
        ids = torch.arange(length).repeat(8, 1)
        _, rows_bytes, out = sent_by_bags(torch.cat([ids, ids, ids], 1), "sum")
        assert rows_bytes == 4 * 8 * row_bytes
        expected = F.embedding_bag(torch.cat([ids, ids, ids], 1), table(), mode="sum")
        torch.testing.assert_close(out.on_rank(3), expected)


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_a_row_that_repeats_travels_once(world, mode):
    """Ids of eight short bags, and of bags whose maximum is taken, however often they repeat."""
    for length in (1, 3):
        ids_bytes, rows_bytes, _ = sent_by_bags(torch.zeros(8, length, dtype=torch.int64), mode)
        assert (ids_bytes, rows_bytes) == (4, 4 * 6 * 8)


def test_only_owners_are_asked(world):
    """Ids that one rank holds cost the others nothing, and padding is asked of nobody."""
    st = shard_tensor(table(), chunks(0, 0, 1, 2, 3))
    per_event = []
    for ids in ([9, 10, 9], [9, 10, 0]):
        asking = LocalTensor.per_rank(lambda rank, ids=ids: torch.tensor(ids if rank == 1 else []))
        with CommDebugMode() as comm:
            out = F.embedding(asking.long(), st)
        per_event.append([e.num_bytes for e in comm.events])
        assert torch.equal(out.on_rank(1), table()[ids])
    # Seen from rank 0: only the second time does it send a row.
    assert [each[1:] for each in per_event] == [[0, 0], [0, 6 * 8]]
    with CommDebugMode() as comm:
        F.embedding_bag(torch.zeros(5, 3, dtype=torch.int64), st, mode="sum", padding_idx=0)
    assert [e.num_bytes for e in comm.events][1:] == [0, 0]


def test_an_owner_that_is_asked_for_nothing_has_a_gradient(world, spec):
    """Also where nobody asks for anything."""
    for ids in (torch.tensor([[1, 1]]), torch.empty(0, 2, dtype=torch.int64)):
        st = shard_tensor(table().requires_grad_(), spec)
        F.embedding_bag(ids, st, mode="max").sum().backward()
        expected = torch.zeros(SHAPE, dtype=torch.float64)
        expected[1] = float(ids.numel() > 0)
        torch.testing.assert_close(st.grad.full_tensor().agreed(), expected)


def test_long_bags(world, spec):
    """The winner of a maximum is one of more than a byte can tell."""
    ids = per_rank(lambda rank, g: torch.randint(0, SHAPE[0], (2, 300), generator=g))
    level = torch.randint(0, 2, SHAPE, generator=torch.Generator().manual_seed(1)).double()
    check(spec, lambda w, x: F.embedding_bag(x, w, mode="max"), ids, table=level)


def test_the_table_does_not_travel(world, spec):
    big = shard_tensor(torch.zeros(5000, 6), chunks(0, *range(4)))
    with CommDebugMode() as comm:
        F.embedding(torch.tensor([1, 2]), big)
    assert sum(event.num_bytes for event in comm.events) < 1000


# -- bad input -----------------------------------------------------------------------------------


def test_an_id_out_of_range(world, spec):
    st = shard_tensor(table(), spec)
    ids = LocalTensor.per_rank(lambda rank: torch.tensor([0, 11 if rank == 2 else 1]))
    with pytest.raises(IndexError, match="11 rows"):
        F.embedding(ids, st)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([1, 2], "first offset is 0"),
        ([0, 3, 2], "do not decrease"),
        ([0, 9], "last offset is 9"),
        ([0, 2, 1, *[3] * 999], r"found 1 after 2 \(bag 1\)\.$"),
        ([0.0, 1.9], "offsets are int32 or int64, found torch.float32"),
        ([[0, 1]], r"one dim, found shape \(1, 2\)"),
        ([], "3 ids but no bags"),
        (None, "need offsets"),
    ],
)
def test_bad_offsets(world, offsets, said):
    st = shard_tensor(table(), chunks(0, 0, 1))
    if offsets is not None:
        offsets = torch.tensor(offsets, dtype=None if offsets else torch.int64)
    with pytest.raises(ValueError, match=said):
        F.embedding_bag(torch.tensor([1, 2, 3]), st, offsets)


@pytest.mark.parametrize("batch", [None, [1, 2, 3]])
def test_a_batch_that_is_no_tensor(world, batch):
    st, ids, starts = shard_tensor(table(), chunks(0, 0, 1)), torch.arange(3), torch.tensor([0, 1])
    kind = type(batch).__name__
    with pytest.raises(ValueError, match=f"ids are int32 or int64, found {kind}"):
        F.embedding(batch, st)
    with pytest.raises(ValueError, match=f"ids are int32 or int64, found {kind}"):
        F.embedding_bag(batch, st, starts)
    if batch is not None:
        with pytest.raises(ValueError, match="offsets are int32 or int64, found list"):
            F.embedding_bag(ids, st, batch)
        with pytest.raises(ValueError, match="per_sample_weights are a tensor, found list"):
            F.embedding_bag(ids, st, starts, per_sample_weights=batch, mode="sum")


def test_options_that_do_not_exist(world):
    st = shard_tensor(table(), chunks(0, 0, 1))
    ids = torch.tensor([[1]])
    with pytest.raises(TypeError, match="mode is one of"):
        F.embedding_bag(ids, st, mode="median")
    with pytest.raises(TypeError, match="sparse gradients, as in torch"):
        F.embedding_bag(ids, st, mode="max", sparse=True)
    with pytest.raises(UnsupportedError, match="order of ranks"):
        F.embedding(ids, shard_tensor(table(), chunks(0, 1, 0)), sparse=True)
    with pytest.raises(UnsupportedError, match="mode='sum'"):
        F.embedding_bag(ids, st, mode="mean", per_sample_weights=torch.ones(1, 1))
    with pytest.raises(TypeError, match="padding_idx=11"):
        F.embedding(ids, st, padding_idx=11)
    with pytest.raises(ValueError, match="float"):
        F.embedding(torch.ones(2), st)


def test_tiles_are_for_storage(world):
    st = shard_tensor(table(), tiles(SHAPE))
    with pytest.raises(UnsupportedError, match="one shard per rank"):
        F.embedding(torch.tensor([1]), st)


# -- Linear --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", ["none", "plain", "sharded"])
def test_linear(world, spec, bias):
    offset = torch.randn(11, dtype=torch.float64)
    held = {
        "none": None,
        "plain": offset.clone().requires_grad_(),
        "sharded": shard_tensor(offset.clone().requires_grad_(), chunks(0, 3, 0, 1)),
    }[bias]

    def apply(weight, x):
        own = offset if type(weight) is torch.Tensor and bias != "none" else held
        return F.linear(x, weight, own)

    shapes = [(2, 3, 6), (5, 1, 6), (0, 2, 6), (1, 4, 6)]
    x = per_rank(lambda rank, g: torch.randn(shapes[rank], generator=g, dtype=torch.float64))
    check(spec, apply, x)
    if bias == "sharded":
        ups = [
            torch.randn(
                (*shapes[rank][:-1], 11),
                generator=torch.Generator().manual_seed(rank),
                dtype=torch.float64,
            ).reshape(-1, 11)
            for rank in RANKS
        ]
        expected = sum(each.sum(0) for each in ups) / 4
        torch.testing.assert_close(held.grad.full_tensor().agreed(), expected)


def test_a_sharded_bias_alone(world):
    layer = nn.Linear(3, 5)
    x = torch.randn(2, 3)
    expected = layer(x)
    bias = shard_tensor(layer.bias.detach().requires_grad_(), chunks(0, 1, 2))
    out = F.linear(x, layer.weight.detach(), bias)
    torch.testing.assert_close(out.agreed(), expected)
    out.sum().backward()
    torch.testing.assert_close(bias.grad.full_tensor().agreed(), torch.full((5,), 2.0))


def test_inputs_that_do_not_fit(world):
    st = shard_tensor(table(), chunks(0, 0, 1))
    with pytest.raises(ValueError, match=r"shape \(\.\.\., 6\)"):
        F.linear(torch.ones(2, 5, dtype=torch.float64), st)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16])
def test_ids_of_smaller_integers_are_promoted_as_on_one_device(world, spec, dtype):
    """To the dtype of the offsets; ids of two dims have none."""
    ids, offsets = torch.tensor([1, 0, 1, 1]), torch.tensor([0, 3])
    for make in (F.embedding_bag, lambda *args: F.embedding_bag(*args, mode="max")):
        expected = make(ids.to(dtype), table(), offsets)
        found = make(ids.to(dtype), shard_tensor(table(), spec), offsets)
        for rank in RANKS:
            torch.testing.assert_close(on_rank(found, rank), expected)
    with pytest.raises(ValueError, match=f"ids are int32 or int64, found {dtype}"):
        F.embedding_bag(ids.view(2, 2).to(dtype), shard_tensor(table(), spec))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.complex64])
@pytest.mark.parametrize("on", [RANKS, [2]], ids=["all ranks", "one rank"])
def test_weights_of_another_dtype_than_the_table(world, spec, dtype, on):
    """An error as on one device, on every rank."""
    ids, offsets, ones = torch.arange(4), torch.tensor([0, 3]), torch.ones(4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="to have the same type"):
        F.embedding_bag(ids, table(), offsets, per_sample_weights=ones.to(dtype), mode="sum")
    weights = LocalTensor.per_rank(lambda rank: ones.to(dtype) if rank in on else ones)
    said = f"per_sample_weights have dtype {dtype}, the table torch.float64"
    st = shard_tensor(table(), spec)
    with pytest.raises(ValueError, match=said):
        F.embedding_bag(ids, st, offsets, per_sample_weights=weights, mode="sum")
    with pytest.raises(ValueError, match=said):
        F.embedding_bag(ids.view(2, 2), st, per_sample_weights=weights.view(2, 2), mode="sum")


def test_weights_of_uneven_batches_where_gradients_are_scaled_by_frequency(mesh):
    ids = LocalTensor.per_rank(lambda rank: (torch.arange(3 * rank) % 11).view(rank, 3))
    weights = LocalTensor.per_rank(lambda rank: torch.ones(rank, 3, dtype=torch.float64))
    weights.requires_grad_()
    st = shard_tensor(table().requires_grad_(), chunks(0, 0, 1, 2, 3))
    bags = F.embedding_bag(ids, st, mode="sum", per_sample_weights=weights, scale_grad_by_freq=True)
    bags.sum().backward()
    for rank in RANKS:
        expected = table()[ids.on_rank(rank)].sum(2)
        torch.testing.assert_close(weights.grad.on_rank(rank), expected)
