"""EmbeddingBag in all its forms, against one device."""

import pytest
import torch
from by_hand import lay, value
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import Replicate, Shard
from shardwise.debug import CommDebugMode

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ROWS, COLUMNS = 11, 6
LINE = [S0, Shard(0, sizes=(0, 2, 9, 0)), S1, Shard(1, sizes=(6, 0, 0, 0)), R]
SQUARE = [[R, S0], [S1, R], [S0, S1], [S0, S0]]

_generator = torch.Generator().manual_seed(0)


def _ids(*shape, dtype=torch.long):
    return torch.randint(0, ROWS, shape, dtype=dtype, generator=_generator)


FORMS = {
    "two dims": (_ids(7, 3), None, False),
    "two dims, no bags": (torch.empty(0, 3, dtype=torch.long), None, False),
    "offsets": (_ids(9), torch.tensor([0, 0, 4, 4, 7]), False),
    "last offset": (_ids(9), torch.tensor([0, 0, 4, 4, 9]), True),
    "only empty bags": (torch.empty(0, dtype=torch.long), torch.tensor([0, 0]), False),
    "int32": (_ids(5, 2, dtype=torch.int32), None, False),
}


def check(
    mesh,
    table_placements,
    ids_placements,
    form,
    weighted=False,
    dtype=None,
    columns=COLUMNS,
    weight=None,
    **options,
):
    """Bags and all gradients are those of one device, and lie like the table."""
    ids, offsets, include_last = FORMS[form] if isinstance(form, str) else form
    options |= {"include_last_offset": include_last}
    weight = torch.randn(ROWS, columns, dtype=dtype) if weight is None else weight
    samples = torch.randn(ids.shape, dtype=dtype) if weighted else None
    one = [None if t is None else t.clone().requires_grad_() for t in (weight, samples)]
    expected = F.embedding_bag(ids, one[0], offsets, per_sample_weights=one[1], **options)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)

    everywhere = [R] * mesh.ndim
    sharded = lay(weight, mesh, table_placements).requires_grad_()
    laid = None if samples is None else lay(samples, mesh, ids_placements).requires_grad_()
    starts = None if offsets is None else lay(offsets, mesh, everywhere)
    found = F.embedding_bag(
        lay(ids, mesh, ids_placements), sharded, starts, per_sample_weights=laid, **options
    )
    found.backward(lay(upstream, mesh, everywhere))
    torch.testing.assert_close(value(found), expected.detach(), equal_nan=True)
    grad = sharded.grad.to_dense() if options.get("sparse") else sharded.grad
    torch.testing.assert_close(value(grad), one[0].grad.to_dense(), equal_nan=True)
    if weighted:
        torch.testing.assert_close(value(laid.grad), one[1].grad, equal_nan=True)
    for lies, asked in zip(sharded.grad.placements, table_placements, strict=True):
        assert lies == asked or asked == R
    return found


def odd_table(seed):
    """Few different numbers, so that there are equal ones; some are NaN or infinite."""
    draw = torch.Generator().manual_seed(seed)
    entries = torch.tensor(
        [-1.0, 0.5, 2.0, -torch.inf, -torch.inf, torch.inf, torch.nan, torch.nan]
    )
    return entries[torch.randint(len(entries), (ROWS, COLUMNS), generator=draw)]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("placement", LINE, ids=repr)
def test_entries_that_are_not_finite(mesh, placement, mode):
    """Of a maximum, NaN stays where it is a bag's first entry, as in torch."""
    for seed, form in enumerate(FORMS):
        check(mesh, [placement], [R], form, mode=mode, weight=odd_table(seed))
        check(mesh, [placement], [R], form, mode=mode, weight=odd_table(seed), padding_idx=3)


@pytest.mark.parametrize("placements", SQUARE, ids=repr)
def test_a_maximum_of_entries_that_are_not_finite_on_two_axes(square, placements):
    for seed, form in enumerate(FORMS):
        check(square, placements, [R, R], form, mode="max", weight=odd_table(seed), padding_idx=3)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("placement", LINE, ids=repr)
def test_every_form(mesh, placement, form, mode):
    check(mesh, [placement], [R], form, mode=mode)
    check(mesh, [placement], [R], form, mode=mode, padding_idx=3)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("placement", LINE, ids=repr)
def test_bags_of_a_sharded_batch_stay_sharded(mesh, placement, mode):
    found = check(mesh, [placement], [S0], "two dims", mode=mode, padding_idx=-1)
    assert found.placements == ((placement,) if placement.is_shard(1) else (S0,))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("placements", SQUARE, ids=str)
def test_a_table_on_a_grid(square, placements, mode):
    check(square, placements, [R, R], "offsets", mode=mode, padding_idx=3)
    check(square, placements, [S0, R], "two dims", mode=mode)
    check(square, placements, [S0, S0], "two dims", mode=mode)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("form", ["two dims", "last offset"])
@pytest.mark.parametrize("placement", LINE, ids=repr)
def test_weights_of_the_samples(mesh, placement, form, sparse):
    check(mesh, [placement], [R], form, weighted=True, mode="sum", padding_idx=3, sparse=sparse)
    if form == "two dims":
        check(mesh, [placement], [S0], form, weighted=True, mode="sum", sparse=sparse)


@pytest.mark.parametrize("placement", [S0, S1, R], ids=repr)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_sparse_gradients(mesh, placement, mode):
    check(mesh, [placement], [R], "offsets", mode=mode, sparse=True)
    check(mesh, [placement], [S0], "two dims", mode=mode, sparse=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("placement", [S0, S1, R], ids=repr)
def test_floating_dtypes(mesh, placement, dtype):
    for mode in ("sum", "mean", "max"):
        # Half the rows have one term each: no rounding depends on the order of a sum.
        ids = torch.arange(8).view(4, 2)
        weight = torch.randn(ROWS, COLUMNS).to(dtype)
        found = F.embedding_bag(lay(ids, mesh, [R]), lay(weight, mesh, [placement]), mode=mode)
        expected = F.embedding_bag(ids, weight, mode=mode)
        torch.testing.assert_close(value(found), expected)


@pytest.mark.parametrize("placement", [S0, S1, R], ids=repr)
def test_gradients_are_scaled_by_how_often_an_id_occurs(mesh, placement):
    """Torch's own bags on the CPU divide by the count of another row: told by hand."""
    ids, weight = torch.tensor([[1, 1], [1, 8]]), torch.randn(ROWS, COLUMNS)
    sharded = lay(weight, mesh, [placement]).requires_grad_()
    F.embedding_bag(
        lay(ids, mesh, [R]), sharded, mode="sum", scale_grad_by_freq=True
    ).sum().backward()
    expected = torch.zeros(ROWS, COLUMNS)
    expected[1], expected[8] = 1.0, 1.0
    torch.testing.assert_close(value(sharded.grad), expected)


def test_rows_of_a_maximal_norm(mesh):
    weight, ids = torch.randn(ROWS, COLUMNS), torch.randint(0, ROWS, (4, 2))
    for placement in (S0, R):
        one, sharded = weight.clone(), lay(weight, mesh, [placement])
        expected = F.embedding_bag(ids, one, mode="sum", max_norm=1.0)
        found = F.embedding_bag(lay(ids, mesh, [S0]), sharded, mode="sum", max_norm=1.0)
        torch.testing.assert_close(value(found), expected)
        torch.testing.assert_close(value(sharded), one)


def test_a_module_trains_as_on_one_device(mesh):
    one = nn.EmbeddingBag(ROWS, COLUMNS, mode="mean", padding_idx=2)
    sharded = nn.EmbeddingBag(ROWS, COLUMNS, mode="mean", padding_idx=2)
    sharded.weight = nn.Parameter(lay(one.weight.detach().clone(), mesh, [S0]))
    for module, place in ((one, lambda x: x), (sharded, lambda x: lay(x, mesh, [S0]))):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for _ in range(3):
            module(place(torch.randint(0, ROWS, (5, 3)))).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(value(sharded.weight), one.weight.detach())


SHORT = [
    {"mode": "sum"},
    {"mode": "mean"},
    {"mode": "mean", "padding_idx": 8},
    {"mode": "sum", "sparse": True},
    {"mode": "sum", "weighted": True, "padding_idx": -3},
]


@pytest.mark.parametrize("options", SHORT, ids=str)
@pytest.mark.parametrize("axes", [(4,), (2, 2)], ids=str)
def test_rows_of_short_bags_are_exchanged(axes, options):
    """Many bags of fewer ids than there are ranks: rows come to the bags, and are pooled there."""
    table, ids, shape = {
        1: ([S0], [S0], (997, 2)),
        2: ([S0, S1], [S0, R], (4001, 1)),
    }[len(axes)]
    form = (torch.randint(0, ROWS, shape), None, False)
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", axes)
        with CommDebugMode() as comm:
            found = check(mesh, table, ids, form, dtype=torch.float64, columns=64, **options)
    assert found.placements[0] == S0
    kinds = [event.kind for event in comm.events]
    assert kinds.count("all_to_all_single") == 4  # counts, ids, rows; gradients
    assert "all_gather_into_tensor" not in kinds
    assert "reduce_scatter_tensor" not in kinds


def test_only_sums_travel(mesh):
    """Sharded ids of a row-wise table: ids are gathered, one sum per bag is reduce-scattered."""
    weight = lay(torch.randn(ROWS, COLUMNS), mesh, [S0])
    ids = lay(torch.randint(0, ROWS, (8, 3)), mesh, [S0])
    with CommDebugMode() as comm:
        F.embedding_bag(ids, weight, mode="sum")
    assert [(e.kind, e.num_bytes) for e in comm.events] == [
        ("all_gather_into_tensor", 2 * 3 * 8),
        ("reduce_scatter_tensor", 8 * COLUMNS * 4),
    ]


def test_a_table_stays_where_it_is(mesh):
    """Also where it is smaller than the ids and the bags."""
    weight = lay(torch.randn(ROWS, 128), mesh, [S0])
    ids = lay(torch.randint(0, ROWS, (256, 15)), mesh, [S0])
    with CommDebugMode() as comm:
        found = F.embedding_bag(ids, weight, mode="sum")
    assert found.placements == (S0,)
    assert [(e.kind, e.num_bytes) for e in comm.events] == [
        ("all_gather_into_tensor", 64 * 15 * 8),
        ("reduce_scatter_tensor", 256 * 128 * 4),
    ]


@pytest.mark.parametrize("placement", LINE, ids=repr)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_an_id_out_of_range_is_an_error(mesh, placement, mode):
    weight = lay(torch.randn(ROWS, COLUMNS), mesh, [placement])
    for bad in (ROWS, -1):
        ids = torch.tensor([[0, 1], [2, 3], [4, bad]])
        for ids_placement in (R, S0):
            with pytest.raises(IndexError, match="out of range"):
                F.embedding_bag(lay(ids, mesh, [ids_placement]), weight, mode=mode)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("placement", [S0, S1, R])
@pytest.mark.parametrize("include_last", [False, True])
def test_bad_offsets(mesh, placement, mode, include_last):
    weight = lay(torch.randn(ROWS, COLUMNS), mesh, [placement])
    ids = lay(torch.arange(6), mesh, [R])
    for offsets, said in (
        ([0, 3, 2, 5], r"do not decrease, found 2 after 3 \(bag 1\)"),
        ([0, 2, 5, 4], "do not decrease, found 4 after 5"),
        ([0, 2, 7], "last offset is 7, but there are 6 ids"),
        ([1, 2], "first offset is 0, found 1"),
        ([0.0, 2.0], "offsets are int32 or int64, found torch.float32"),
    ):
        given = lay(torch.tensor(offsets), mesh, [R])
        with pytest.raises(ValueError, match=said):
            F.embedding_bag(ids, weight, given, mode=mode, include_last_offset=include_last)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("placement", [S0, S1, R])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.float32])
def test_ids_of_other_dtypes_as_on_one_device(mesh, placement, mode, dtype):
    """Smaller integers are promoted to the dtype of the offsets; ids of two dims have none."""
    table, ids = torch.randn(ROWS, COLUMNS), torch.tensor([1, 0, 1, 1, 0, 0, 1, 1]).to(dtype)
    weight, offsets = lay(table, mesh, [placement]), torch.tensor([0, 3, 4])
    for ids_placement in (R, S0):
        given = lay(ids, mesh, [ids_placement]), weight, lay(offsets, mesh, [R])
        if dtype == torch.float32:
            with pytest.raises(ValueError, match=f"ids are int32 or int64, found {dtype}"):
                F.embedding_bag(*given, mode=mode)
        else:
            expected = F.embedding_bag(ids, table, offsets, mode=mode)
            torch.testing.assert_close(F.embedding_bag(*given, mode=mode).full_tensor(), expected)
        if dtype != torch.bool:  # of which torch makes no offsets
            with pytest.raises(ValueError, match=f"ids are int32 or int64, found {dtype}"):
                F.embedding_bag(lay(ids.view(4, 2), mesh, [ids_placement]), weight, mode=mode)


@pytest.mark.parametrize("placement", [S0, S1, R])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex64])
def test_weights_of_another_dtype_than_the_table(mesh, placement, trains, dtype):
    weight = lay(torch.randn(ROWS, COLUMNS), mesh, [placement]).requires_grad_(trains)
    ids, ones = torch.arange(8).view(4, 2) % ROWS, torch.ones(4, 2, dtype=dtype)
    for where in (R, S0):
        given = lay(ones, mesh, [where])
        with pytest.raises(RuntimeError, match="to have the same type"):
            F.embedding_bag(lay(ids, mesh, [where]), weight, per_sample_weights=given, mode="sum")


def test_plain_offsets_are_refused(mesh):
    weight = lay(torch.randn(ROWS, COLUMNS), mesh, [S0])
    ids = lay(torch.randint(0, ROWS, (6,)), mesh, [R])
    with pytest.raises(shardwise.MixedTensorsError, match="offsets is a plain tensor"):
        F.embedding_bag(ids, weight, torch.tensor([0, 1]))
    with pytest.raises(shardwise.MixedTensorsError, match="indices"):
        F.embedding_bag(torch.zeros(2, 2, dtype=torch.long), weight)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("written", ["ids", "offsets"])
def test_backward_refuses_what_a_write_changed_in_the_bags(mode, written):
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        table = shardwise.distribute_tensor(torch.randn(4, 2), mesh, [shardwise.Shard(0)])
        table.requires_grad_()
        given = {"ids": torch.tensor([0, 1, 2, 1]), "offsets": torch.tensor([0, 2])}
        whole = {
            name: shardwise.distribute_tensor(x, mesh, [shardwise.Replicate()])
            for name, x in given.items()
        }
        out = F.embedding_bag(whole["ids"], table, whole["offsets"], mode=mode)
        whole[written].fill_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("trained", ["table", "weights", "both"])
@pytest.mark.parametrize("written", ["table", "weights", "ids"])
def test_what_may_be_written_to_before_backward(mesh, trained, written):
    """A step may update the table first, as on one device, where no gradient reads it."""

    def outcome(place):
        tensors = {"table": torch.randn(4, 2), "weights": torch.randn(2, 2)}
        placed = {name: place(x) for name, x in tensors.items()}
        for name in placed if trained == "both" else [trained]:
            placed[name].requires_grad_()
        placed["ids"] = place(torch.tensor([[0, 1], [2, 1]]))
        out = F.embedding_bag(
            placed["ids"], placed["table"], mode="sum", per_sample_weights=placed["weights"]
        )
        with torch.no_grad():
            placed[written].mul_(1)
        try:
            out.sum().backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)

    assert outcome(lambda x: shardwise.distribute_tensor(x, mesh, [R])) == outcome(torch.clone)
