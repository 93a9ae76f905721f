"""What was saved in one layout, mesh and world is loaded in any other."""

import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import shardwise
from shardwise import Replicate, Shard
from shardwise.checkpoint import inspect, load, save

WORLDS = {1: [(1,)], 2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2)], 6: [(2, 3)]}


@st.composite
def laid_out(draw, shape):
    """A world, a mesh of it, and placements for `shape`, uneven and explicit ones included."""
    size = draw(st.sampled_from(sorted(WORLDS)))
    mesh = draw(st.sampled_from(WORLDS[size]))
    placements, explicit = [], set()
    for extent in mesh:
        dim = draw(st.sampled_from([None, *range(len(shape))]))
        if dim is None or dim in explicit:
            placements.append(Replicate())
        elif draw(st.booleans()) and not any(p.is_shard(dim) for p in placements):
            cuts = sorted(
                draw(st.lists(st.integers(0, shape[dim]), min_size=extent - 1, max_size=extent - 1))
            )
            ends = [0, *cuts, shape[dim]]
            placements.append(Shard(dim, tuple(b - a for a, b in itertools.pairwise(ends))))
            explicit.add(dim)
        else:
            placements.append(Shard(dim))
    return size, mesh, placements


@st.composite
def moves(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    return shape, draw(laid_out(shape)), draw(laid_out(shape))


@hypothesis.given(moves())
def test_any_layout_to_any_other(tmp_path_factory, move):
    shape, (size, mesh_shape, placements), (new_size, new_mesh_shape, new_placements) = move
    path = tmp_path_factory.mktemp("reshard") / "saved"
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    with shardwise.simulate(size):
        mesh = shardwise.init_device_mesh("cpu", mesh_shape)
        save({"x": shardwise.distribute_tensor(whole, mesh, placements)}, path)
    assert inspect(path).num_bytes == whole.numel() * 4
    files = sum(f.stat().st_size for f in path.glob("*.safetensors"))
    assert files <= whole.numel() * 4 + 2048 * size, "a replica was written twice"
    with shardwise.simulate(new_size):
        mesh = shardwise.init_device_mesh("cpu", new_mesh_shape)
        new = shardwise.distribute_tensor(torch.full(shape, -1.0), mesh, new_placements)
        load({"x": new}, path)
        assert torch.equal(new.full_tensor().agreed(), whole)
    alone = torch.full(shape, -1.0)
    load({"x": alone}, path)
    assert torch.equal(alone, whole)


def test_axes_that_share_a_dim_in_either_order(tmp_path):
    whole = torch.arange(7.0)
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (2, 2))
        even = shardwise.distribute_tensor(whole, mesh, [Replicate(), Replicate()])
        swapped = even.redistribute(placements=[Shard(0), Shard(0)], order=(1, 0))
        save({"x": swapped}, tmp_path / "saved")
        target = torch.zeros_like(swapped)
        load({"x": target}, tmp_path / "saved")
        assert torch.equal(target.full_tensor().agreed(), whole)
    plain = torch.zeros(7)
    load({"x": plain}, tmp_path / "saved")
    assert torch.equal(plain, whole)


DTYPES = [
    torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
    torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    bits = torch.randint(0, 2, (6, dtype.itemsize), dtype=torch.uint8)
    whole = bits.view(dtype).view(6)
    save({"x": whole, "scalar": whole[0].clone()}, tmp_path / "saved")
    new, scalar = torch.zeros(6, dtype=dtype), torch.zeros((), dtype=dtype)
    load({"x": new, "scalar": scalar}, tmp_path / "saved")
    assert torch.equal(new.view(torch.uint8), whole.view(torch.uint8))
    assert torch.equal(scalar.reshape(1).view(torch.uint8), whole[:1].view(torch.uint8))


def test_memory_in_another_order(tmp_path):
    picture = torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last)
    save({"x": picture, "y": picture.transpose(0, 3)}, tmp_path / "saved")
    new = torch.zeros(4, 3, 5, 6).to(memory_format=torch.channels_last)
    turned = torch.zeros(6, 3, 5, 4)
    load({"x": new, "y": turned}, tmp_path / "saved")
    assert torch.equal(new, picture)
    assert torch.equal(turned, picture.transpose(0, 3))


def test_pieces_larger_than_what_is_read_at_a_time(tmp_path):
    """Several blocks and slabs, with rows that are short, long and longer than a slab."""
    wholes = {
        "long": torch.randn(3, 1_500_000),
        "short": torch.randn(700_000, 3),
        "wide": torch.randn(40, 40_000),
    }
    with shardwise.simulate(3):
        mesh = shardwise.init_device_mesh("cpu", (3,))
        state = {n: shardwise.distribute_tensor(t, mesh, [Shard(1)]) for n, t in wholes.items()}
        save(state, tmp_path / "saved")
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        for dim in (0, 1):
            new = {
                n: shardwise.distribute_tensor(torch.zeros_like(t), mesh, [Shard(dim)])
                for n, t in wholes.items()
            }
            load(new, tmp_path / "saved")
            for name, whole in wholes.items():
                assert torch.equal(new[name].full_tensor().agreed(), whole), name


class Patchwork:
    """A tensor in any tiling, as an object of another package would hold it."""

    def __init__(self, shape, boxes):
        self.shape, self.dtype = shape, torch.float32
        self.parts = [(rank, offset, torch.zeros(size)) for rank, offset, size in boxes]

    def __checkpoint_pieces__(self):
        return self.parts


def test_several_irregular_pieces_per_rank(tmp_path):
    """Five blocks around one in the middle: no layout of a mesh has these."""
    boxes = [
        (0, (0, 0), (1, 2)), (0, (1, 2), (2, 1)), (1, (0, 2), (1, 1)),
        (1, (1, 0), (1, 2)), (1, (2, 0), (1, 2)),
    ]  # fmt: skip
    whole = torch.arange(9.0).view(3, 3)
    with shardwise.simulate(2):
        source = Patchwork((3, 3), boxes)
        for _, (row, column), part in source.parts:
            part.copy_(whole[row : row + part.shape[0], column : column + part.shape[1]])
        save({"x": source}, tmp_path / "saved")
        assert len(inspect(tmp_path / "saved").tensors[0].pieces) == 5
        back = Patchwork((3, 3), boxes)
        load({"x": back}, tmp_path / "saved")
        for mine, other in zip(back.parts, source.parts, strict=True):
            assert torch.equal(mine[2], other[2])
    plain = torch.zeros(3, 3)
    load({"x": plain}, tmp_path / "saved")
    assert torch.equal(plain, whole)


def test_a_tiling_with_a_hole_or_an_overlap_is_refused(tmp_path):
    with shardwise.simulate(2):
        with pytest.raises(shardwise.CheckpointError, match="x as pieces of one tensor: 2 of 4"):
            save({"x": Patchwork((4,), [(0, (0,), (2,))])}, tmp_path / "hole")
        overlap = Patchwork((4,), [(0, (0,), (3,)), (1, (2,), (2,))])
        with pytest.raises(shardwise.CheckpointError, match="overlap"):
            save({"x": overlap}, tmp_path / "overlap")
    assert not list(tmp_path.iterdir())
