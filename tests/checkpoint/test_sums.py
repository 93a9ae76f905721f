"""The checksum of blocks: what it is made of, and what it does not miss."""

import random
import zlib

import hypothesis
from hypothesis import strategies as st

from shardwise.checkpoint.safetensors import BLOCK_BYTES, Sums, block_sum


def by_hand(data):
    """The definition, word by word."""
    data += bytes(-len(data) % 8192)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    columns, rows = [0] * 1024, [0] * (len(words) // 1024)
    for i, word in enumerate(words):
        z = (i % 1024 + 1) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        weight = (z ^ z >> 31) | 1
        columns[i % 1024] ^= word
        rows[i // 1024] = (rows[i // 1024] + weight * word) % 2**64
    return zlib.crc32(b"".join(w.to_bytes(8, "little") for w in columns + rows))


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.integers(1, 40_000), st.integers(0, 1000))
def test_by_hand(length, seed):
    data = random.Random(seed).randbytes(length)
    assert block_sum(memoryview(data)) == by_hand(data)


@hypothesis.given(st.integers(0, 1000), st.data())
def test_one_to_three_flipped_bits_are_seen(seed, data):
    """Above all those that a sum modulo 2**64 cannot see: the top bits of two words."""
    block = bytearray(random.Random(seed).randbytes(5 * 8192))
    right = block_sum(memoryview(block))
    top_bits = st.integers(0, len(block) // 8 - 1).map(lambda word: 64 * word + 63)
    bits = st.lists(st.integers(0, 8 * len(block) - 1) | top_bits, min_size=1, max_size=3)
    for bit in set(data.draw(bits)):
        block[bit // 8] ^= 1 << bit % 8
    assert block_sum(memoryview(block)) != right


def test_moved_rows_words_and_zeroed_stretches_are_seen():
    block = random.Random(0).randbytes(BLOCK_BYTES)
    found = {block_sum(memoryview(block))}
    changed = [
        block[8192:16384] + block[:8192] + block[16384:],
        block[8:16] + block[:8] + block[16:],
        block[8:] + block[:8],
        bytes(512) + block[512:],
        block[:-512] + bytes(512),
        bytes(BLOCK_BYTES),
    ]
    found |= {block_sum(memoryview(other)) for other in changed}
    assert len(found) == 1 + len(changed)


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.lists(st.integers(1, BLOCK_BYTES), max_size=5))
def test_a_stream_in_any_parts(lengths):
    data = random.Random(1).randbytes(sum(lengths))
    sums, position = Sums(), 0
    for length in lengths:
        sums.add(memoryview(data)[position : position + length])
        position += length
    blocks = [memoryview(data)[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)]
    assert sums.text() == "".join(f"{block_sum(block):08x}" for block in blocks)
