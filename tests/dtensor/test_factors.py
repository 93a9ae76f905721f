"""A sum that is still Partial meets numbers that are not finite: one device's result, not NaN."""

import math

import pytest
import torch
from torch.nn import functional as F

import shardwise
from shardwise import Partial, Replicate, Shard, distribute_tensor
from shardwise.comm.watch import implicit_replication
from shardwise.debug import CommDebugMode
from shardwise.parallel import parallel_cross_entropy

TERMS = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -3.0], [0.0, 0.0, 4.0], [-1.0, 0.0, 0.0]])

CALLS = {
    "* inf": lambda s: s * math.inf,
    "* -inf": lambda s: s * -math.inf,
    "* nan": lambda s: s * math.nan,
    "inf *": lambda s: math.inf * s,
    "* too large": lambda s: s * 2.0**1000,
    "* 2.5": lambda s: s * 2.5,
    "/ 0": lambda s: s / 0,
    "/ 0.0": lambda s: s / 0.0,
    "/ -0.0": lambda s: s / -0.0,
    "/ False": lambda s: s / False,
    "/ too small": lambda s: s / 2.0**-1000,
    "/ inf": lambda s: s / math.inf,
    "mul_": lambda s: s.clone().mul_(math.inf),
    "div_": lambda s: s.clone().div_(0),
    "div_ float": lambda s: s.clone().div_(0.0),
    "alpha": lambda s: torch.add(s, s, alpha=math.inf),
    "complex": lambda s: s.double() * complex(0, math.inf),
    "chain": lambda s: (s * math.inf) * 0.5 / 2,
}


def whole(x):
    return x.full_tensor().agreed()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
def test_a_partial_meets_a_number(mesh, call, dtype, reduce):
    plain = reduce(TERMS.to(dtype), 0)
    x = reduce(distribute_tensor(TERMS.to(dtype), mesh, [Shard(0)]), 0)
    assert x.placements == (Partial(),)
    for _ in range(2):  # planned, and known
        found = call(x)
        assert found.placements == (Partial(),)
        torch.testing.assert_close(whole(found), call(plain), equal_nan=True)


@pytest.mark.parametrize("factor", [0.0, math.inf, 2.0])
@pytest.mark.parametrize("kind", ["plain", "replicated", "sum"])
def test_a_partial_meets_a_number_in_a_tensor(mesh, kind, factor):
    number = torch.tensor([factor, 0.0, 0.0, 0.0])
    x = distribute_tensor(TERMS, mesh, [Shard(0)]).sum(0)
    placed = {
        "plain": number.sum(),
        "replicated": distribute_tensor(number, mesh, [Replicate()]).sum(),
        "sum": distribute_tensor(number, mesh, [Shard(0)]).sum(),
    }[kind]
    for op in (torch.mul, torch.div):
        for _ in range(2):
            found, expected = op(x, placed), op(TERMS.sum(0), factor)
            torch.testing.assert_close(whole(found), expected, equal_nan=True)


def test_a_partial_meets_an_index_that_every_rank_has(mesh):
    x = distribute_tensor(TERMS, mesh, [Shard(0)]).sum(0)
    with implicit_replication():
        found = x[torch.tensor([2, 0])]
    torch.testing.assert_close(whole(found), TERMS.sum(0)[[2, 0]])


def test_the_same_plan_serves_all_floats(mesh):
    x = distribute_tensor(TERMS, mesh, [Shard(0)]).sum(0)
    plain = TERMS.sum(0)
    for factor in (2.0, math.inf, 0.5, -math.inf, 3.0):
        with CommDebugMode() as comm:
            found = x * factor
        assert comm.get_total_counts() == (0 if math.isfinite(factor) else 1)
        torch.testing.assert_close(whole(found), plain * factor, equal_nan=True)


def test_an_average_meets_an_infinity(square):
    x = distribute_tensor(TERMS, square, [Shard(0), Replicate()]).sum(0)
    x = x.redistribute(placements=[Partial("sum"), Partial("avg")])
    torch.testing.assert_close(whole(x * math.inf), TERMS.sum(0) * math.inf, equal_nan=True)


def test_gradients_of_an_infinite_loss(mesh):
    x = distribute_tensor(TERMS, mesh, [Shard(0)]).requires_grad_()
    plain = TERMS.clone().requires_grad_()
    for leaf in (x, plain):
        (leaf.square().sum() * math.inf).backward()
    torch.testing.assert_close(whole(x.grad), plain.grad, equal_nan=True)


def test_strict_mode_knows_it(mesh):
    x = distribute_tensor(TERMS, mesh, [Shard(0)]).sum(0)
    with shardwise.explicit_redistribution():
        assert (x * 2.0).placements == (Partial(),)
        with pytest.raises(shardwise.RedistributionError):
            x * math.inf


# -- reductions of nothing -------------------------------------------------------------------

NO_DIMS = {
    "any": lambda x: torch.any(x, dim=[]),
    "all": lambda x: torch.all(x, dim=[]),
    "any kept": lambda x: torch.any(x, dim=(), keepdim=True),
    "nansum": lambda x: torch.nansum(x, []),
    "nansum kept": lambda x: torch.nansum(x, [], keepdim=True),
    "sum": lambda x: torch.sum(x, []),
    "amax": lambda x: torch.amax(x, []),
    "count_nonzero": lambda x: torch.count_nonzero(x, []),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("reduce", NO_DIMS.values(), ids=NO_DIMS.keys())
def test_no_dims_are_named(mesh, placement, dtype, reduce):
    values = TERMS[:, :3].to(dtype)
    x = distribute_tensor(values, mesh, [placement])
    fits(reduce(x), reduce(values))


def fits(found, expected):
    layout = found._layout
    for coordinate in layout.grid.coordinates.values():
        part = found.to_local().on_rank(coordinate[0])
        assert (tuple(part.shape), part.dtype) == (layout.local_shape(coordinate), layout.dtype)
    assert found.dtype == expected.dtype
    assert torch.equal(whole(found), expected)


@pytest.mark.parametrize("exponent", [True, False])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_a_bool_as_exponent(mesh, dtype, exponent):
    values = TERMS.to(dtype)
    x = distribute_tensor(values, mesh, [Shard(0)])
    fits(x**exponent, values**exponent)
    fits(x.clone().pow_(exponent), values.clone().pow_(exponent))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_the_mean_of_no_losses_is_no_number(mesh, placement):
    scores = distribute_tensor(torch.zeros(0, 3), mesh, [placement]).requires_grad_()
    for loss in (F.cross_entropy, parallel_cross_entropy):
        if loss is not F.cross_entropy and placement != Shard(1):
            continue  # classes must be sharded there
        found = loss(scores, distribute_tensor(torch.zeros(0, 3), mesh, [placement]))
        assert whole(found.detach()).isnan()
        found.backward()
        assert scores.grad.shape == (0, 3)


def test_a_mask_without_dims_meets_a_partial(mesh):
    x, values = (
        shardwise.DTensor.from_local(torch.tensor(1.0), mesh, [Partial()]),
        torch.tensor(3.0),
    )
    total = whole(x)
    for mask in (True, False):
        found = torch.masked_scatter(
            x, distribute_tensor(torch.tensor(mask), mesh, [Replicate()]), values
        )
        assert whole(found) == (values if mask else total)


# -- tensors with entries that are not finite ------------------------------------------------

FACTORS = torch.tensor([[math.inf, 1.0, -2.0], [0.5, -math.inf, 3.0], [1.0, 2.0, math.nan]])
ZEROS = torch.tensor([[0.0, 1.0, -2.0], [0.5, -0.0, 3.0], [1.0, 2.0, 0.0]])
SUM = torch.tensor([[1.0, 2.0, -3.0], [4.0, 0.0, 5.0], [-6.0, 7.0, 8.0]])

PRODUCTS = {
    "mul": torch.mul,
    "mul, swapped": lambda s, f: f * s,
    "mul by a row": lambda s, f: s * f[0],
    "mul_": lambda s, f: s.clone().mul_(f),
    "foreach": lambda s, f: torch._foreach_mul([s, s], [f, f])[1],
    "mm": torch.mm,
    "mm, swapped": lambda s, f: f @ s,
    "bmm": lambda s, f: torch.bmm(s[None], f[None]),
    "mv": lambda s, f: s @ f[0],
    "dot": lambda s, f: torch.dot(s[0], f[0]),
    "outer": lambda s, f: torch.outer(s[0], f[0]),
    "linear": F.linear,
    "linear with a bias": lambda s, f: F.linear(s, f, s[0]),
    "addmm": lambda s, f: torch.addmm(s, s, f),
    "einsum": lambda s, f: torch.einsum("ij,ij->i", s, f),
    "bilinear": lambda s, f: F.bilinear(s, s, f[None]),
    "conv": lambda s, f: F.conv1d(s[None], f[:, :, None]),
    "complex": lambda s, f: torch.view_as_real(torch.complex(s.double(), s.double()) * f),
    "div by inf": torch.div,
}
DIVISIONS = {
    "div": torch.div,
    "div by a row": lambda s, f: s / f[0],
    "div_": lambda s, f: s.clone().div_(f),
    "foreach": lambda s, f: torch._foreach_div([s, s], [f, f])[1],
    "by integers": lambda s, f: s / (f == 0).long(),
    "by bools": lambda s, f: s / (f == 0),
    "by what is nearly zero": lambda s, f: s / f.masked_fill(f == 0, 1e-40),
    "by complex numbers": lambda s, f: torch.view_as_real(
        s.double() / torch.complex(f.double(), f.double())
    )[..., 0],
}
MET = [(name, f, FACTORS) for name, f in PRODUCTS.items()]
MET += [(name, f, ZEROS) for name, f in DIVISIONS.items()]


@pytest.mark.parametrize(("call", "factors"), [m[1:] for m in MET], ids=[m[0] for m in MET])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_partial_meets_a_tensor(mesh, call, factors, dtype):
    values, factors = SUM.to(dtype), factors.to(dtype)
    terms = torch.stack([values * n for n in (0, 2, 0, -1)])
    s = distribute_tensor(terms, mesh, [Shard(0)]).sum(0)
    f = distribute_tensor(factors, mesh, [Replicate()])
    assert s.placements == (Partial(),)
    for _ in range(2):  # planned, and known
        torch.testing.assert_close(whole(call(s, f)), call(values, factors), equal_nan=True)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
@pytest.mark.parametrize("call", [torch.mul, torch.mm], ids=["mul", "mm"])
def test_factors_sharded_along_another_axis(square, call, placement):
    terms = torch.stack([SUM * 2, -SUM])
    s = distribute_tensor(terms, square, [Shard(0), Replicate()]).sum(0)
    f = distribute_tensor(FACTORS, square, [Replicate(), placement])
    torch.testing.assert_close(whole(call(s, f)), call(SUM, FACTORS), equal_nan=True)
    torch.testing.assert_close(whole(call(f, s)), call(FACTORS, SUM), equal_nan=True)


def test_only_factors_that_are_not_finite_cost_communication(mesh):
    s = distribute_tensor(TERMS, mesh, [Shard(0)]).sum(0)
    for value, expected in ((2.0, 0), (math.inf, 1), (3e38, 0)):
        f = distribute_tensor(torch.full((3,), value), mesh, [Replicate()])
        with CommDebugMode() as comm:
            found = s * f
        assert (found.placements, comm.get_total_counts()) == ((Partial(),), expected)
    for value, expected in ((2.0, 0), (-2.0, 0), (0.0, 1)):
        f = distribute_tensor(torch.full((3,), value), mesh, [Replicate()])
        with CommDebugMode() as comm:
            found = s / f
        assert (found.placements, comm.get_total_counts()) == ((Partial(),), expected)


def test_a_number_beside_a_product_of_shards(mesh):
    x, y = torch.ones(2, 4), torch.ones(4, 2)
    bias = torch.tensor([[1.0, -2.0], [3.0, 0.0]])
    operands = [
        distribute_tensor(t, mesh, [p])
        for t, p in ((bias, Replicate()), (x, Shard(1)), (y, Shard(0)))
    ]
    for how in ({"alpha": math.inf}, {"beta": math.inf}, {"alpha": 2.0, "beta": -math.inf}):
        found, expected = torch.addmm(*operands, **how), torch.addmm(bias, x, y, **how)
        torch.testing.assert_close(whole(found), expected, equal_nan=True)


def test_weights_of_a_bag(mesh):
    ids, weights = torch.tensor([[0, 1, 2]]), torch.tensor([[math.inf, 1.0, 2.0]])
    terms = torch.stack([SUM * n for n in (0, 2, 0, -1)])
    table = distribute_tensor(terms, mesh, [Shard(0)]).sum(0)
    placed = [distribute_tensor(t, mesh, [Replicate()]) for t in (ids, weights)]
    found = F.embedding_bag(placed[0], table, mode="sum", per_sample_weights=placed[1])
    expected = F.embedding_bag(ids, SUM, mode="sum", per_sample_weights=weights)
    torch.testing.assert_close(whole(found), expected, equal_nan=True)
