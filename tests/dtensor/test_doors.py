"""Where local tensors enter and leave, and what their gradients are there."""

import pytest
import torch
from by_hand import blocks, lay, value

import shardwise
from shardwise import DTensor, LayoutError, LocalTensor, Partial, Replicate, Shard
from shardwise.debug import CommDebugMode


def each(fn):
    return LocalTensor.per_rank(lambda rank: torch.tensor(fn(rank)))


def per_rank(x):
    return [x.on_rank(rank).tolist() for rank in x.ranks]


# -- from_local ------------------------------------------------------------------------------


def test_shards_are_joined(mesh):
    x = DTensor.from_local(each(lambda r: [2.0 * r, 2.0 * r + 1]), mesh, [Shard(0)])
    assert x.shape == (8,)
    assert x.placements == (Shard(0),)
    assert x.device_mesh is mesh
    assert x.full_tensor().agreed().tolist() == list(range(8))


def test_replicas_and_terms(mesh):
    same = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
    assert same.full_tensor().agreed().tolist() == [1, 1, 1]
    terms = DTensor.from_local(each(lambda r: [float(r)]), mesh, [Partial()])
    assert terms.shape == (1,)
    assert terms.full_tensor().agreed().item() == 6
    largest = DTensor.from_local(each(lambda r: [float(r)]), mesh, [Partial("max")])
    assert largest.full_tensor().agreed().item() == 3


def test_without_placements_each_rank_holds_all(mesh):
    assert DTensor.from_local(torch.ones(3), mesh).placements == (Replicate(),)


def test_two_axes_on_one_dim(square):
    x = DTensor.from_local(each(lambda r: [r]), square, [Shard(0), Shard(0)])
    assert x.full_tensor().agreed().tolist() == [0, 1, 2, 3]


def test_uneven_parts_need_the_shape(mesh):
    parts = torch.arange(5.0).split([2, 2, 1, 0])
    uneven = LocalTensor.per_rank(lambda rank: parts[rank])
    x = DTensor.from_local(uneven, mesh, [Shard(0)], shape=(5,))
    assert x.full_tensor().agreed().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(shardwise.RankMismatchError, match=r"rank 3.*Shard\(dim, sizes="):
        DTensor.from_local(uneven, mesh, [Shard(0)])


def test_explicit_sizes_say_the_shape(mesh):
    parts = torch.arange(5.0).split([0, 1, 4, 0])
    local = LocalTensor.per_rank(lambda rank: parts[rank])
    x = DTensor.from_local(local, mesh, [Shard(0, sizes=(0, 1, 4, 0))], shape=(5,))
    assert x.full_tensor().agreed().tolist() == [0, 1, 2, 3, 4]


def test_a_part_that_does_not_fit_is_refused(mesh):
    for run_check in (False, True):
        with pytest.raises(ValueError, match=r"coordinate \(2,\).*\(2,\).*\(1,\)"):
            DTensor.from_local(
                LocalTensor.per_rank(lambda rank: torch.ones(2)),
                mesh,
                [Shard(0)],
                shape=(5,),
                run_check=run_check,
            )


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        ([1.0, 2.0], TypeError, "takes a tensor, found a list"),
        (torch.eye(4).to_sparse(), TypeError, "to_dense"),
    ],
)
def test_only_plain_strided_tensors_enter(mesh, part, error, message):
    with pytest.raises(error, match=message):
        DTensor.from_local(part, mesh, [Shard(0)])
    with pytest.raises(error, match=message):
        shardwise.distribute_tensor(part, mesh, [Shard(0)])


def test_a_tensor_is_distributed_once(mesh, square):
    x = shardwise.ones(4, 4, device_mesh=mesh, placements=[Shard(0)])
    with pytest.raises(TypeError, match="distributed already"):
        DTensor.from_local(x, mesh, [Shard(0)])
    assert shardwise.distribute_tensor(x, mesh, [Shard(0)]) is x
    with pytest.raises(ValueError, match="to a different device mesh"):
        shardwise.distribute_tensor(x, square, [Shard(0), Replicate()])
    with pytest.raises(ValueError, match="to different placements"):
        shardwise.distribute_tensor(x, mesh, [Replicate()])


def test_run_check_compares_dtypes(mesh):
    mixed = LocalTensor.per_rank(
        lambda r: torch.ones(2, dtype=torch.float64 if r else torch.float32)
    )
    with pytest.raises(ValueError, match="float64"):
        DTensor.from_local(mixed, mesh, [Shard(0)], run_check=True)


def test_run_check_compares_strides(mesh):
    square = torch.arange(4.0).view(2, 2)
    turned = LocalTensor.per_rank(lambda rank: square.t() if rank == 1 else square)
    with pytest.raises(ValueError, match="stride"):
        DTensor.from_local(turned, mesh, [Shard(0)], run_check=True)


def test_only_run_check_communicates(mesh):
    local = LocalTensor.per_rank(lambda rank: torch.ones(2))
    with CommDebugMode() as comm:
        DTensor.from_local(local, mesh, [Shard(0)])
    assert comm.get_total_counts() == 0
    with CommDebugMode() as comm:
        DTensor.from_local(local, mesh, [Shard(0)], run_check=True)
    assert comm.get_total_counts() > 0


def test_the_mesh_may_be_given_by_a_with_block(mesh):
    with pytest.raises(TypeError, match="No mesh"):
        DTensor.from_local(torch.ones(2))
    with mesh:
        assert DTensor.from_local(torch.ones(2)).device_mesh is mesh


def test_a_mesh_is_asked_for(mesh):
    with pytest.raises(TypeError, match="DeviceMesh"):
        DTensor.from_local(torch.ones(2), "cpu", [Replicate()])


def test_a_column_major_part_makes_a_column_major_tensor(mesh):
    local = LocalTensor.per_rank(lambda rank: torch.arange(6.0).view(2, 3).t())
    x = DTensor.from_local(local, mesh, [Shard(0)])
    assert x.shape == (12, 2)
    assert x.stride() == (1, 12)


# -- to_local and full_tensor ----------------------------------------------------------------


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
@pytest.mark.parametrize(
    "turn", [torch.t, lambda x: x.t()[1:], lambda x: x], ids=["turned", "cut", "as it is"]
)
def test_the_gradient_of_the_whole_keeps_its_memory_order(mesh, placement, turn):
    """On one device a copy hands its gradient on; a draw like the gradient shows the order."""

    def strides(x, whole):
        view = turn(x * 1)
        full = whole(view)
        weight = torch.arange(1.0, 1 + full.numel()).view(full.shape)
        return [g.stride() for g in torch.autograd.grad((full * weight).sum(), [x, view])]

    value = torch.randn(3, 4)
    expected = strides(value.clone().requires_grad_(), torch.clone)
    assert strides(lay(value, mesh, placement).requires_grad_(), DTensor.full_tensor) == expected


@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Shard(1)],
        [Shard(1), Shard(1)],
        [Replicate(), Shard(0, sizes=(0, 5))],
        [Partial(), Shard(0)],
    ],
)
def test_each_rank_gets_its_block(square, placements):
    whole = torch.arange(15.0).view(5, 3)
    x = lay(whole, square, placements)
    local = x.to_local()
    assert isinstance(local, LocalTensor)
    if not any(p.is_partial() for p in placements):
        for rank, held in enumerate(blocks(whole, (2, 2), placements).values()):
            assert torch.equal(local.on_rank(rank), held)
    assert torch.equal(x.full_tensor().agreed(), whole)


def test_to_local_shares_memory(mesh):
    x = lay(torch.zeros(4), mesh, [Shard(0)])
    x.to_local().add_(1)
    assert torch.equal(value(x), torch.ones(4))


# -- gradients: Note [Gradients are global] --------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "of_gradient"),
    [
        (Shard(0), Shard(0)),
        (Replicate(), Replicate()),
        (Partial(), Replicate()),
        (Partial("avg"), Replicate()),
    ],
)
def test_gradients_of_to_local(mesh, placement, of_gradient):
    """The gradient that comes back from each rank is taken to be laid out by the table."""
    x = lay(torch.zeros(8), mesh, [placement]).requires_grad_()
    upstream = lay(torch.arange(8.0), mesh, [of_gradient]).to_local()
    (grad,) = torch.autograd.grad(x.to_local(), x, upstream)
    assert grad.placements == (of_gradient,)
    assert torch.equal(value(grad), torch.arange(8.0))


def test_a_gradient_for_to_local_may_be_laid_out_otherwise(mesh):
    """Each rank computes a term of the loss out of a replicated value: the terms add up."""
    x = lay(torch.ones(2), mesh, [Replicate()]).requires_grad_()
    local = x.to_local(grad_placements=[Partial()])
    (local * each(lambda r: [1.0 * r, 10.0 * r])).sum().backward()
    assert x.grad.placements == (Partial(),)
    assert value(x.grad).tolist() == [6, 60]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (Shard(0), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (Replicate(), [[0, 1, 2, 3, 4, 5, 6, 7]] * 4),
        (Partial(), [[0, 1, 2, 3, 4, 5, 6, 7]] * 4),
        # A quarter of a change of one term arrives in the average of four.
        (Partial("avg"), [[0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]] * 4),
    ],
)
@pytest.mark.parametrize("upstream", [Replicate(), Shard(0), Partial()])
def test_gradients_of_from_local(mesh, placement, expected, upstream):
    """Each local tensor gets its part of the one gradient, however that was laid out."""
    local = lay(torch.ones(8), mesh, [placement]).to_local().requires_grad_()
    x = DTensor.from_local(local, mesh, [placement], shape=(8,))
    (grad,) = torch.autograd.grad(x, local, lay(torch.arange(8.0), mesh, [upstream]))
    assert per_rank(grad) == expected


def test_terms_of_a_maximum_have_no_gradient(mesh):
    local = LocalTensor.per_rank(lambda rank: torch.ones(2)).requires_grad_()
    with pytest.raises(NotImplementedError, match=r"Partial\(max\)"):
        DTensor.from_local(local, mesh, [Partial("max")])


def test_a_gradient_for_from_local_may_be_laid_out_otherwise(mesh):
    """As terms that add up, where what made the local tensors adds up their gradients."""
    local = LocalTensor.per_rank(lambda rank: torch.ones(2)).requires_grad_()
    x = DTensor.from_local(local, mesh, [Replicate()], grad_placements=[Partial()])
    (grad,) = torch.autograd.grad(x, local, lay(torch.tensor([3.0, 4.0]), mesh, [Replicate()]))
    assert sum(grad.on_rank(rank) for rank in range(4)).tolist() == [3, 4]


@pytest.mark.parametrize("shard", [Shard(0), Shard(0, sizes=(1, 0, 3, 1))], ids=repr)
def test_a_shard_used_locally_gets_its_gradient(mesh, shard):
    """In and out again, with ops in between, on shards of unequal length."""
    whole = torch.arange(5.0)
    x = lay(whole, mesh, [shard]).requires_grad_()
    squared = x.to_local() ** 2
    y = DTensor.from_local(squared, mesh, [shard], shape=(5,))
    y.sum().backward()
    assert x.grad.placements == (shard,)
    assert torch.equal(value(x.grad), 2 * whole)


def test_a_sum_of_unequal_shards_gives_gradients_of_their_shapes(mesh):
    x = lay(torch.arange(5.0), mesh, [Shard(0)]).requires_grad_()
    x.to_local().sum().backward()
    assert per_rank(x.grad.to_local()) == [[1, 1], [1, 1], [1], []]
    assert torch.equal(x.grad.full_tensor().agreed(), torch.ones(5))


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()])
def test_the_gradient_of_full_tensor_is_not_counted_per_rank(mesh, placement):
    x = lay(torch.ones(6), mesh, [placement]).requires_grad_()
    (x.full_tensor() * torch.arange(6.0)).sum().backward()
    assert torch.equal(value(x.grad), torch.arange(6.0))


def test_no_gradient_is_tracked_where_none_is_wanted(mesh):
    x = lay(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    with torch.no_grad():
        assert not x.to_local().requires_grad
        assert not x.full_tensor().requires_grad
        assert not DTensor.from_local(x.to_local(), mesh, [Shard(0)]).requires_grad
    assert not x.detach().to_local().requires_grad


def test_gradients_of_sums_over_local_tensors_are_added_up(mesh):
    x = lay(torch.ones(4, 2), mesh, [Replicate()]).requires_grad_()
    for _ in range(2):
        x.to_local().sum().backward()
    assert x.grad.full_tensor().agreed().tolist() == [[2.0, 2.0]] * 4


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=repr)
def test_the_gradient_of_a_transposed_view_may_lie_otherwise(mesh, placement):
    """Its strides are those of its layout: a view of it, as backward of `reshape` makes, fits."""
    weights, grads = torch.randn(2, 3, 2, 2), []
    whole = torch.randn(6, 4)
    for x in (whole.clone(), lay(whole, mesh, [placement])):
        turned = x.requires_grad_().reshape(2, 2, 3, 2).transpose(1, 2)
        read = turned if x.__class__ is torch.Tensor else turned.full_tensor()
        (read.sin() * weights).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(value(grads[1]), grads[0])


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("placements", [[], [Replicate()] * 2, [Shard(3)]], ids=str)
def test_placements_of_a_gradient_are_checked_without_one_too(mesh, placements, requires_grad):
    x = shardwise.distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_(requires_grad)
    local = torch.ones(1, requires_grad=requires_grad)
    for door in (
        lambda: x.to_local(grad_placements=placements),
        lambda: x.full_tensor(grad_placements=placements),
        lambda: DTensor.from_local(local, mesh, [Shard(0)], grad_placements=placements),
    ):
        with pytest.raises(LayoutError, match=r"one placement per axis|out of range"):
            door()
