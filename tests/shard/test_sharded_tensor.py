"""What a sharded tensor says of itself, how it moves, and what can be done with it."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from parity import through_file
from shard_cases import TABLE_SPECS, chunks, tiles
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import DTensor, LocalTensor, Replicate, distribute_tensor
from shardwise.debug import CommDebugMode
from shardwise.errors import ArgumentError, LayoutError, LeafError, UnsupportedError, WorldError
from shardwise.shard import (
    EnumerableShardingSpec,
    Shard,
    ShardedTensor,
    custom_sharded_op_impl,
    custom_sharding_spec_op,
    empty,
    full,
    init_from_local_shards,
    load_with_process_group,
    ones,
    rand,
    randn,
    shard_tensor,
    zeros,
)
from shardwise.shard.moves import ToDevice

SHAPE = (11, 6)
SPECS = TABLE_SPECS | {"tiles": tiles(SHAPE)}


@pytest.fixture(params=SPECS.values(), ids=SPECS.keys())
def spec(request):
    return request.param


def values(dtype=torch.float32):
    return torch.arange(66).view(SHAPE).to(dtype)


def whole(x):
    return x.detach().full_tensor().agreed()


# -- what it says --------------------------------------------------------------------------------


def test_pieces_are_where_the_spec_says(world, spec):
    st = shard_tensor(values(), spec)
    assert isinstance(st, ShardedTensor)
    assert isinstance(st, DTensor)
    assert st.sharding_spec() == spec
    assert (tuple(st.shape), st.dtype, st.device.type) == (SHAPE, torch.float32, "cpu")
    assert st.metadata().shards_metadata == spec.boxes(SHAPE)
    assert st.metadata().size == torch.Size(SHAPE)
    assert st.metadata().tensor_properties.dtype is torch.float32
    shards = st.local_shards()
    assert {s.metadata for s in shards} == set(spec.boxes(SHAPE))
    for shard in shards:
        (top, left), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        assert torch.equal(shard.tensor, values()[top : top + height, left : left + width])


def test_what_is_written_to_a_piece_is_written_to_the_tensor(world, spec):
    st = shard_tensor(values(), spec)
    for shard in st.local_shards():
        shard.tensor.mul_(2)
    assert torch.equal(whole(st), 2 * values())


def test_blocks(world):
    st = shard_tensor(values(), chunks(0, 2, 0))
    block = st.local_tensor()
    assert torch.equal(block.on_rank(2), values()[:6])
    assert torch.equal(block.on_rank(0), values()[6:])
    assert block.on_rank(1).shape == (0, 6)
    with pytest.raises(UnsupportedError, match="local_shards"):
        shard_tensor(values(), tiles(SHAPE)).local_tensor()


def test_blocks_are_differentiable(world):
    for spec in (chunks(0, 2, 0), chunks(1, 0, 1, 2, 3)):
        st = shard_tensor(values().requires_grad_(), spec)
        (st.local_tensor() * 3).sum().backward()
        assert torch.equal(whole(st.grad), torch.full(SHAPE, 3.0))


def test_source_ranks(world):
    per_rank = LocalTensor.per_rank(lambda rank: values() + 100 * rank)
    spec = chunks(0, 1, 3)
    for source in range(4):
        assert torch.equal(whole(shard_tensor(per_rank, spec, source)), values() + 100 * source)
    own = whole(shard_tensor(per_rank, spec, None))
    assert torch.equal(own, torch.cat([values()[:6] + 100, values()[6:] + 300]))


def test_repr_names_the_spec(world, spec):
    assert "ChunkShardingSpec" in repr(shard_tensor(values(), chunks(0, 0)))
    assert "spec=" in repr(shard_tensor(values(), spec))


# -- moving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_reshard(world, spec, target, dtype):
    x = values() % 3 == 0 if dtype is torch.bool else values(dtype)
    moved = shard_tensor(x, spec).reshard(target)
    assert moved.sharding_spec() == target
    pieces = {s.metadata: s.tensor for s in moved.local_shards()}
    expected = {s.metadata: s.tensor for s in shard_tensor(x, target).local_shards()}
    assert pieces.keys() == expected.keys()
    assert all(torch.equal(pieces[at], expected[at]) for at in pieces)


def test_resharded_is_differentiable(world, spec):
    st = shard_tensor(values().requires_grad_(), spec)
    weights = shard_tensor(values() + 1, chunks(0, 0, 1, 2, 3))
    (st.resharded(weights.sharding_spec()) * weights).sum().backward()
    assert torch.equal(whole(st.grad), values() + 1)


@pytest.mark.parametrize("target", SPECS.values(), ids=SPECS.keys())
def test_reshard_works_in_place(world, spec, target):
    """A parameter, its gradient and what follows move together."""
    layer = nn.Module()
    layer.weight = nn.Parameter(shard_tensor(values(), spec))
    (layer.weight * 2).sum().backward()
    weight = layer.weight
    assert weight.reshard(target) is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.sharding_spec() == target
    assert torch.equal(whole(weight.grad), torch.full(SHAPE, 2.0))
    (weight * 3).sum().backward()
    torch.optim.SGD([weight], lr=1.0).step()
    assert torch.equal(whole(weight), values() - 5)
    assert {s.metadata for s in weight.local_shards()} == set(target.boxes(SHAPE))


def test_reshard_in_place_is_refused_where_autograd_records(world):
    st = shard_tensor(values().requires_grad_(), chunks(0, 0, 1))
    with pytest.raises(LeafError, match=r"x.resharded\(spec\)"):
        (st * 2).reshard(chunks(1, 0, 1))


def test_reshard_sends_what_has_to_move_and_nothing_twice(world):
    st = shard_tensor(values(), chunks(0, 0, 1, 2, 3))
    with CommDebugMode() as comm:
        st.reshard(chunks(1, 0, 1, 2, 3))
    assert [(e.kind, e.num_bytes) for e in comm.events] == [("all_to_all_single", 3 * 6 * 4)]


@pytest.mark.parametrize("dst", range(4))
def test_gather(world, spec, dst):
    st = shard_tensor(values(), spec)
    assert torch.equal(st.gather(dst), values())
    out = torch.zeros(SHAPE, dtype=torch.float64)
    assert st.gather(dst, out, dtype=torch.float64) is out
    assert torch.equal(out, values(torch.float64))


def test_targets_that_are_not_there(world):
    st = shard_tensor(values(), chunks(0, 0))
    with pytest.raises(LayoutError, match="dst=4"):
        st.gather(4)
    with pytest.raises(LayoutError, match=r"ranks \[7\]"):
        st.reshard(chunks(0, 7))
    with pytest.raises(ArgumentError, match="sharding spec"):
        st.reshard("rows")


def test_to(world, spec):
    st = shard_tensor(values(), spec)
    double = st.to(torch.float64)
    assert isinstance(double, ShardedTensor)
    assert double.sharding_spec() == spec
    assert torch.equal(whole(double), values(torch.float64))
    assert st.to("cpu") is st
    assert st.cpu() is st
    assert st.to("cpu", copy=True) is not st
    assert isinstance(st.half(), ShardedTensor)
    group = torch.distributed.new_group([0, 1, 2, 3])
    assert st.to("cpu", non_blocking=True, process_group=group) is st
    assert st.cpu(torch.contiguous_format, group).is_contiguous()
    with pytest.raises(RuntimeError, match="channels_last"):
        st.cpu(memory_format=torch.channels_last)
    with pytest.raises(LayoutError, match=r"process_group has \[0, 1\]"):
        st.to(torch.float64, process_group=torch.distributed.new_group([0, 1]))
    with pytest.raises(TypeError, match="colour"):
        st.cpu(colour="red")
    with pytest.raises(TypeError, match="colour"):
        st.to("cpu", colour="red")


def test_to_another_device(world, spec):
    """Each piece stays on its rank; gradients come back to where the tensor was."""
    st = shard_tensor(values(), spec).requires_grad_()
    there = st.to("meta", torch.float64, non_blocking=True)
    assert (there.device.type, there.dtype) == ("meta", torch.float64)
    assert there.metadata().shards_metadata == tuple(
        dataclasses.replace(box, placement=f"rank:{box.rank}/meta") for box in spec.boxes(SHAPE)
    )
    moved = ToDevice.apply(st, torch.device("cpu"), False, None)
    moved.backward(moved.detach())
    assert st.grad.sharding_spec() == spec
    assert torch.equal(whole(st.grad), values())


def test_a_natural_one_is_a_dtensor_in_every_respect(world):
    st = shard_tensor(values(), chunks(0, 0, 1, 2, 3))
    assert st.placements == (shardwise.Shard(0),)
    assert st.redistribute(placements=[Replicate()]).placements == (Replicate(),)
    assert (st.sum().full_tensor().agreed(), (st.t() @ st).shape) == (values().sum(), (6, 6))


def test_what_no_layout_describes_says_so(world):
    for spec in (chunks(0, 1, 0), tiles(SHAPE)):
        st = shard_tensor(values(), spec)
        with pytest.raises(UnsupportedError, match="reshard"):
            _ = st.placements
        with pytest.raises(UnsupportedError, match="reshard"):
            st.sum(0)
        assert st.sum().full_tensor().agreed() == values().sum()
        assert (st > 64).any().full_tensor().agreed()
        with pytest.raises(UnsupportedError, match="reshard"):
            st + shard_tensor(values(), chunks(0, 0, 1))


# -- ops -----------------------------------------------------------------------------------------


def test_elementwise_ops_keep_the_spec(world, spec):
    st = shard_tensor(values() - 30, spec)
    x = values() - 30
    for found, expected in [
        (F.relu(st), F.relu(x)),
        (F.gelu(st), F.gelu(x)),
        (torch.tanh(st) * 2 - st, torch.tanh(x) * 2 - x),
        (st == st, x == x),
        (st > 3, x > 3),
        (torch.where(st > 3, st, -st), torch.where(x > 3, x, -x)),
        (torch.zeros_like(st), torch.zeros_like(x)),
        (st.clone(), x),
    ]:
        assert isinstance(found, ShardedTensor)
        assert found.sharding_spec() == spec
        torch.testing.assert_close(whole(found), expected)


def test_in_place_ops_return_the_tensor(world, spec):
    st = shard_tensor(values(), spec)
    assert st.mul_(2).add_(1) is st
    assert torch.equal(whole(st), values() * 2 + 1)
    assert torch.equal(whole(st.zero_()), torch.zeros(SHAPE))


def test_elementwise_gradients(world, spec):
    st = shard_tensor((values() - 30).requires_grad_(), spec)
    F.gelu(st).mul(3).backward(ones(spec, SHAPE))
    x = (values() - 30).requires_grad_()
    F.gelu(x).mul(3).sum().backward()
    torch.testing.assert_close(whole(st.grad), x.grad)


def test_comparison(world, spec):
    st = shard_tensor(values(), spec)
    assert torch.equal(st, shard_tensor(values(), chunks(0, 3, 2)))
    assert torch.equal(st, st.clone())
    other = values()
    other[10, 5] += 1e-4
    assert not torch.equal(st, shard_tensor(other, spec))
    assert torch.allclose(st, shard_tensor(other, spec), atol=1e-3)
    assert not torch.allclose(st, shard_tensor(other, spec), rtol=0, atol=1e-6)
    assert not torch.equal(st, shard_tensor(values()[:4], chunks(0, 0)))
    with pytest.raises(ArgumentError, match="full_tensor"):
        torch.equal(st, values())


def test_ops_of_ones_own(world):
    @custom_sharded_op_impl(torch.linalg.matrix_rank)
    def rank_of(types, args=(), kwargs=None, process_group=None):
        assert process_group is not None
        return torch.linalg.matrix_rank(args[0].full_tensor().agreed(), **kwargs)

    st = shard_tensor(values(), chunks(0, 0, 1))
    assert torch.linalg.matrix_rank(st, tol=1e-3) == 2
    with pytest.raises(ArgumentError, match="function"):
        custom_sharded_op_impl(torch.linalg.det)("no function")
    with pytest.raises(TypeError, match="expects signature"):
        custom_sharded_op_impl(torch.linalg.det)(lambda types, args: None)


def test_ops_of_ones_own_for_one_kind_of_spec(world):
    @custom_sharding_spec_op(EnumerableShardingSpec, torch.linalg.slogdet)
    def by_boxes(types, args, kwargs, process_group):
        return "boxes", process_group.size()

    @custom_sharded_op_impl(torch.linalg.slogdet)
    def any_spec(types, args, kwargs, process_group):
        return "any", process_group.size()

    assert torch.linalg.slogdet(shard_tensor(values(), tiles(SHAPE))) == ("boxes", 4)
    assert torch.linalg.slogdet(shard_tensor(values(), chunks(0, 0, 1))) == ("any", 4)
    with pytest.raises(ArgumentError, match="class of sharding specs"):
        custom_sharding_spec_op("rows", torch.linalg.slogdet)


def test_copy_from_anything_of_the_same_shape(world, spec):
    for source in (values(), shard_tensor(values(), spec), shard_tensor(values(), chunks(1, 2))):
        st = zeros(spec, SHAPE)
        assert st.copy_(source) is st
        assert torch.equal(whole(st), values())


def test_values_for_python_and_numpy(world, spec):
    st = shard_tensor(values(), spec)
    assert st.tolist() == values().tolist()
    for found in (st.numpy(), np.asarray(st), st.double().numpy(force=True)):
        assert found.tolist() == values().tolist()


def test_data_brings_its_spec(world, spec):
    for given in (shard_tensor(values() + 1, spec), _dtensor(values() + 1)):
        st = nn.Parameter(zeros(chunks(0, 2, 0, 3), SHAPE))
        st.data = given
        assert torch.equal(whole(st), values() + 1)
        (st * 2).backward(ones(st.sharding_spec(), SHAPE))
        assert st.grad.sharding_spec() == st.sharding_spec()
        boxes = {shard.metadata: shard.tensor for shard in st.local_shards()}
        assert set(boxes) == set(st.sharding_spec().boxes(SHAPE))
        assert all(torch.equal(t, (values() + 1)[b.box.slices]) for b, t in boxes.items())


def _dtensor(x):
    return distribute_tensor(x, shardwise.init_device_mesh("cpu", (4,)), [shardwise.Shard(1)])


def test_views_in_place_are_refused(world, spec):
    st = shard_tensor(values(), spec)
    for turn in (torch.Tensor.t_, lambda x: x.transpose_(0, 1), lambda x: x.unsqueeze_(0)):
        with pytest.raises(UnsupportedError, match="without the underscore"):
            turn(st)
    assert st.detach_() is st
    assert torch.equal(whole(st), values())


@pytest.mark.parametrize("options", [{"dim": 0}, {"dim": (0, 1)}, {"keepdim": True}])
def test_norms_of_dims_are_those_of_one_device_or_refused(world, spec, options):
    st, norm = shard_tensor(values(), spec), torch.linalg.vector_norm
    torch.testing.assert_close(whole(norm(st)), norm(values()))
    if st._tiling.natural:
        torch.testing.assert_close(whole(norm(st, **options)), norm(values(), **options))
    else:
        with pytest.raises(UnsupportedError, match="reductions of all values"):
            norm(st, **options)


LOSSES = {
    "sum": torch.sum,
    "mean": torch.mean,
    "largest": torch.max,
    "norm": torch.linalg.vector_norm,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_gradients_have_the_leafs_spec(world, spec, loss):
    st, x = shard_tensor(values().requires_grad_(), spec), values().requires_grad_()
    st.register_hook(lambda grad: grad * 2)
    loss(st).backward()
    loss(x).backward()
    assert st.grad.sharding_spec() == spec
    torch.testing.assert_close(whole(st.grad), x.grad * 2)


# -- making --------------------------------------------------------------------------------------


def test_factories(world, spec):
    assert torch.equal(whole(zeros(spec, *SHAPE)), torch.zeros(SHAPE))
    assert torch.equal(whole(ones(spec, SHAPE, dtype=torch.int64)), torch.ones(SHAPE).long())
    assert torch.equal(whole(full(spec, SHAPE, 7)), torch.full(SHAPE, 7))
    assert empty(spec, SHAPE, requires_grad=True).requires_grad
    with pytest.raises(ArgumentError, match="sharding spec"):
        zeros(3, 4)


@pytest.mark.parametrize(("make", "one"), [(rand, torch.rand), (randn, torch.randn)])
def test_random_factories_draw_as_one_device(world, spec, make, one):
    torch.manual_seed(3)
    found = whole(make(spec, SHAPE))
    torch.manual_seed(3)
    assert torch.equal(found, one(SHAPE))


INITS = {
    "uniform_": lambda x: nn.init.uniform_(x, -1, 2),
    "normal_": lambda x: nn.init.normal_(x, 1, 3),
    "constant_": lambda x: nn.init.constant_(x, 5),
    "ones_": nn.init.ones_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "trunc_normal_": nn.init.trunc_normal_,
}


@pytest.mark.parametrize("init", INITS.values(), ids=INITS.keys())
def test_init_functions_give_one_devices_numbers(world, spec, init):
    st = empty(spec, SHAPE)
    torch.manual_seed(5)
    assert init(st) is st
    torch.manual_seed(5)
    expected = init(torch.empty(SHAPE))
    torch.testing.assert_close(whole(st), expected)


def test_from_local_shards(world, spec):
    shards = shard_tensor(values(), spec).local_shards()
    st = init_from_local_shards(shards, *SHAPE)
    assert torch.equal(whole(st), values())
    assert set(st.sharding_spec().boxes(SHAPE)) == set(spec.boxes(SHAPE))
    for shard in shards:
        shard.tensor.requires_grad_()
    assert init_from_local_shards(shards, *SHAPE).requires_grad


def test_local_shards_of_chunks_make_a_chunk_spec(world):
    spec = chunks(1, 2, 0, 1)
    shards = shard_tensor(values(), spec).local_shards()
    assert init_from_local_shards(shards, SHAPE).sharding_spec() == spec


def test_local_shards_that_do_not_fit(world):
    good = shard_tensor(values(), chunks(0, 0, 1)).local_shards()
    with pytest.raises(LayoutError, match="does not match tensor volume"):
        init_from_local_shards(good[:1], *SHAPE)
    with pytest.raises(LayoutError, match="the tensor"):
        init_from_local_shards(good, 66)
    with pytest.raises(LayoutError, match="Shard tensor size does not match"):
        Shard(torch.ones(3), good[0].metadata)
    with pytest.raises(LayoutError, match=r"Shard, found"):
        init_from_local_shards([torch.ones(3)], *SHAPE)
    mixed = [good[0], Shard(good[1].tensor.double(), good[1].metadata)]
    with pytest.raises(LayoutError, match="dtype"):
        init_from_local_shards(mixed, *SHAPE)
    good[1].tensor.requires_grad_()
    with pytest.raises(LayoutError, match="one requires_grad"):
        init_from_local_shards(good, *SHAPE)


def test_a_meta_tensor_gets_memory(world):
    st = shard_tensor(torch.empty(SHAPE, device="meta"), chunks(0, 0, 1, 2, 3))
    assert st.device.type == "cpu"
    assert torch.equal(whole(st.fill_(2)), torch.full(SHAPE, 2.0))


def test_tensors_without_values(world):
    for shape in [(0, 4), (5, 0), (0,)]:
        for dim in range(len(shape)):
            st = shard_tensor(torch.empty(shape), chunks(dim, 2, 1, 0))
            assert st.resharded(chunks(0, 0, 1, 2, 3)).full_tensor().shape == shape
            assert (st + 1).shape == shape


def test_bad_arguments(world):
    spec = chunks(0, 0)
    with pytest.raises(LeafError, match="detach"):
        shard_tensor(values().requires_grad_() * 2, spec)
    with pytest.raises(ArgumentError, match="ChunkShardingSpec"):
        shard_tensor(values(), "rows")
    with pytest.raises(ArgumentError, match="grad_reduction"):
        shard_tensor(values(), spec, grad_reduction="max")
    with pytest.raises(LayoutError, match="sharded already"):
        shard_tensor(shard_tensor(values(), spec), spec)
    with pytest.raises(LayoutError, match="src_rank=9"):
        shard_tensor(values(), spec, 9)
    with pytest.raises(LayoutError, match=r"\[4\].*not in the group"):
        shard_tensor(values(), chunks(0, 3, 4))


# -- copies --------------------------------------------------------------------------------------


def test_copies(world, spec):
    st = nn.Parameter(shard_tensor(values().requires_grad_(), spec, grad_reduction="sum"))
    st.grad = st.detach() * 2
    for copied in (
        copy.deepcopy(st),
        pickle.loads(pickle.dumps(st)),
        through_file(st, weights_only=True),
    ):
        assert isinstance(copied, ShardedTensor)
        assert isinstance(copied, nn.Parameter)
        assert (copied.sharding_spec(), copied.grad_reduction) == (spec, "sum")
        assert torch.equal(whole(copied), values())
        copied.detach().zero_()
        assert torch.equal(whole(st), values())
    # As on one device, a leaf keeps its gradient, and a parameter does not.
    assert copy.deepcopy(st).grad is None
    leaf = st.detach().requires_grad_()
    leaf.grad = st.detach() * 2
    assert torch.equal(whole(copy.deepcopy(leaf).grad), values() * 2)


def test_deep_copies_share_memory_as_their_originals_do(world, spec):
    st = shard_tensor(values(), spec)
    copied, alias = copy.deepcopy([st, st.detach()])
    copied.zero_()
    assert not whole(alias).any()
    assert torch.equal(whole(st), values())


def test_loading_on_another_group(world):
    group = torch.distributed.new_group([0, 1])
    st = shard_tensor(values(), chunks(0, 1, 0), process_group=group)
    assert st.process_group.size() == 2
    saved = pickle.dumps(st)
    with pytest.raises(WorldError, match="load_with_process_group"):
        pickle.loads(saved)
    with load_with_process_group(group):
        loaded = pickle.loads(saved)
    assert torch.equal(whole(loaded), values())
    with pytest.raises(WorldError, match="load_with_process_group"):
        pickle.loads(saved)


def test_a_group_of_some_ranks(world):
    group = torch.distributed.new_group([0, 2])
    st = shard_tensor(values().requires_grad_(), chunks(0, 2, 0), 1, group)
    assert torch.equal(whole(st), values())
    ids = LocalTensor.per_rank(lambda rank: torch.tensor([rank, 10]), ranks=[0, 2])
    out = F.embedding(ids, st)
    assert torch.equal(out.on_rank(2), values()[[2, 10]])
    out.sum().backward()
    expected = torch.zeros(SHAPE)
    expected[[0, 2]] = 0.5
    expected[10] = 1
    assert torch.equal(whole(st.grad), expected)
    with pytest.raises(LayoutError, match="not in the group"):
        shard_tensor(values(), chunks(0, 0, 1), process_group=group)


@pytest.mark.parametrize("ways", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_an_optimizer_steps_on_parameters_of_several_specs_at_once(world, make, ways):
    """Shards in any order, several or none of them on a rank, and a plain parameter."""
    numbers = values() / 66
    plain = [nn.Parameter(numbers.clone()) for _ in (*SPECS, "plain")]
    sharded = [nn.Parameter(shard_tensor(numbers.clone(), each)) for each in SPECS.values()]
    sharded.append(nn.Parameter(numbers.clone()))
    for parameters in (plain, sharded):
        optimizer = make(parameters, lr=0.1, weight_decay=0.1, **ways)
        for _ in range(2):
            optimizer.zero_grad()
            for parameter in parameters:
                parameter.pow(3).sum().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            optimizer.step()
    for ours, alone in zip(sharded, plain, strict=True):
        found = whole(ours) if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(found, alone)
