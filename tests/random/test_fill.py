"""Blocks of a draw, chunk by chunk, against the draw at once."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import random
from shardwise.random import Draw, DrawnShard, Whole, fill_exactly, fill_quickly

pytestmark = pytest.mark.slow

DRAWS = {
    "normal": (lambda t, _: t.normal_(0.5, 2.0), (torch.float32, torch.float64, torch.bfloat16)),
    "complex normal": (lambda t, _: t.normal_(0.5, 2.0), (torch.complex64,)),
    "uniform": (lambda t, _: t.uniform_(-1, 2), (torch.float32, torch.float64, torch.float16)),
    "bernoulli": (lambda t, _: t.bernoulli_(0.3), (torch.float32, torch.bool, torch.int64)),
    "exponential": (lambda t, _: t.exponential_(1.5), (torch.float32, torch.float64)),
    "geometric": (lambda t, _: t.geometric_(0.3), (torch.float32, torch.int64)),
    "cauchy": (lambda t, _: t.cauchy_(), (torch.float32, torch.float64)),
    "log normal": (lambda t, _: t.log_normal_(), (torch.float32, torch.bfloat16)),
    "random": (lambda t, _: t.random_(), (torch.float32, torch.int64, torch.int8)),
    "random in a range": (lambda t, _: t.random_(-3, 900), (torch.float32, torch.int64)),
    "random in a wide range": (lambda t, _: t.random_(0, 2**50), (torch.int64,)),
}
KINDS = [(name, dtype) for name, (_, dtypes) in DRAWS.items() for dtype in dtypes]


@contextlib.contextmanager
def chunks_of(length):
    before, random.CHUNK = random.CHUNK, length
    try:
        yield
    finally:
        random.CHUNK = before


@st.composite
def wholes(draw):
    """A tensor in any memory order, with gaps between its values or without."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    order = draw(st.permutations(range(len(shape))))
    gap = draw(st.sampled_from([1, 1, 2]))
    stride, step = [0] * len(shape), gap
    for dim in reversed(order):
        stride[dim], step = step, step * shape[dim]
    return tuple(shape), tuple(stride)


def cut(shape, draw):
    """Blocks that need not cover the whole, nor lie apart."""
    for _ in range(draw(st.integers(1, 3))):
        starts = [draw(st.integers(0, n)) for n in shape]
        stops = [draw(st.integers(a, n)) for a, n in zip(starts, shape, strict=True)]
        yield tuple(starts), tuple(b - a for a, b in zip(starts, stops, strict=True))


@given(whole=wholes(), length=st.sampled_from([16, 32, 48, 4096]), data=st.data())
def test_blocks_hold_what_one_device_draws(whole, length, data):
    shape, stride = whole
    cuts = list(cut(shape, data.draw))
    for name, dtype in KINDS:
        run = DRAWS[name][0]
        torch.manual_seed(5)
        expected = torch.empty_strided(shape, stride, dtype=dtype)
        run(expected, None)
        after = torch.get_rng_state()
        blocks = [DrawnShard(at, torch.zeros(n, dtype=dtype)) for at, n in cuts]
        torch.manual_seed(5)
        with chunks_of(length):
            fill_exactly(Whole(shape, stride, dtype), blocks, Draw(run, name))
        assert torch.equal(torch.get_rng_state(), after), (name, dtype)
        for block in blocks:
            sizes = zip(block.offset, block.part.shape, strict=True)
            part = expected[tuple(slice(o, o + n) for o, n in sizes)]
            assert torch.equal(block.part, part), (name, dtype)


@pytest.mark.parametrize("kind", KINDS, ids=lambda v: f"{v[0]}-{v[1]}".replace(" ", "-"))
@pytest.mark.parametrize("turned", [False, True])
def test_real_chunks(kind, turned):
    """Three chunks of the real length, the last one short."""
    run, dtype = DRAWS[kind[0]][0], kind[1]
    rows = 2 * random.CHUNK // 641 + 3
    stride = (1, rows) if turned else (641, 1)
    torch.manual_seed(5)
    expected = torch.empty_strided((rows, 641), stride, dtype=dtype)
    run(expected, None)
    after = torch.get_rng_state()
    tail = DrawnShard((rows - 5, 0), torch.zeros(5, 641, dtype=dtype))
    column = DrawnShard((0, 640), torch.zeros(rows, 1, dtype=dtype))
    torch.manual_seed(5)
    fill_exactly(Whole((rows, 641), stride, dtype), [tail, column], Draw(run, kind[0]))
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(tail.part, expected[-5:])
    assert torch.equal(column.part, expected[:, 640:])
    tried = [agree for key, agree in random._agree.items() if key[0] == kind[0]]
    assert tried
    assert all(tried), "this build of torch draws otherwise in chunks"


@given(whole=wholes(), data=st.data())
def test_probabilities_are_needed_only_where_a_block_is(whole, data):
    shape, stride = whole
    chances = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    expected = torch.empty_strided(shape, stride).bernoulli_(chances)
    after = torch.get_rng_state()
    blocks = []
    for at, sizes in cut(shape, data.draw):
        box = tuple(slice(o, o + n) for o, n in zip(at, sizes, strict=True))
        blocks.append(DrawnShard(at, torch.zeros(sizes), chances[box]))
    torch.manual_seed(5)
    with chunks_of(32):
        fill_exactly(
            Whole(shape, stride, torch.float32),
            blocks,
            Draw(lambda t, p: t.bernoulli_(p), "bernoulli of a tensor"),
        )
    assert torch.equal(torch.get_rng_state(), after)
    for block in blocks:
        sizes = zip(block.offset, block.part.shape, strict=True)
        assert torch.equal(block.part, expected[tuple(slice(o, o + n) for o, n in sizes)])


def test_a_draw_that_chunks_differ_in_is_drawn_at_once():
    """As through MKL: each call takes one number and makes a sequence of its own from it."""

    def reseeds(tensor, _):
        seed = torch.randint(2**31, ()).item()
        tensor.normal_(generator=torch.Generator().manual_seed(seed))

    torch.manual_seed(5)
    expected = torch.empty(200)
    reseeds(expected, None)
    block = DrawnShard((150,), torch.zeros(50))
    torch.manual_seed(5)
    with chunks_of(64):
        fill_exactly(Whole((200,), (1,), torch.float32), [block], Draw(reseeds, "reseeds"))
    assert torch.equal(block.part, expected[150:])


class Largest(TorchDispatchMode):
    """The most values of any tensor that an op makes."""

    num_values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.num_values = max(self.num_values, tensor.untyped_storage().size() // 4)
        return result


def test_no_tensor_is_larger_than_a_chunk():
    part = torch.empty(4, 10 * random.CHUNK // 40)
    whole = Whole((40, part.shape[1]), (part.shape[1], 1), torch.float32)
    with Largest() as largest:
        fill_exactly(whole, [DrawnShard((8, 0), part)], Draw(lambda t, _: t.normal_(), "normal"))
    assert part.numel() < largest.num_values * 4 < 40 * part.shape[1]
    assert largest.num_values <= max(part.numel(), random.CHUNK + 16)


def test_quick_draws_depend_on_the_block_and_on_the_state():
    def drawn(offset):
        block = DrawnShard(offset, torch.empty(3, 4))
        fill_quickly([block], Draw(lambda t, _: t.normal_(), "normal"))
        return block.part

    torch.manual_seed(3)
    first, second = drawn((0, 0)), drawn((0, 0))
    torch.manual_seed(3)
    again = drawn((0, 0))
    torch.manual_seed(3)
    elsewhere = drawn((3, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, elsewhere)


def test_a_quick_draw_leaves_a_state_that_does_not_depend_on_the_blocks():
    states = []
    for sizes in ([4], [1, 7]):
        torch.manual_seed(3)
        blocks = [DrawnShard((i,), torch.empty(n)) for i, n in enumerate(sizes)]
        fill_quickly(blocks, Draw(lambda t, _: t.normal_(), "normal"))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
