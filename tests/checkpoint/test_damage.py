"""Damaged, truncated and foreign files are refused by name, and nothing is half loaded."""

import contextlib
import json
import resource
import struct

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import shardwise
from shardwise import CheckpointError, Shard
from shardwise.checkpoint import inspect, load, save, verify
from shardwise.checkpoint.index import INDEX_NAME, _checksum
from shardwise.checkpoint.safetensors import read_header

WHOLES = {"a": torch.arange(24.0).view(6, 4), "b": torch.arange(10)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The files of a small checkpoint, by name."""
    path = tmp_path_factory.mktemp("damage") / "saved"
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        state = {n: shardwise.distribute_tensor(t, mesh, [Shard(0)]) for n, t in WHOLES.items()}
        save({**state, "step": 3}, path)
    return {file.name: file.read_bytes() for file in path.iterdir()}


def put(folder, files):
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def refused(path):
    """Loading either gives the right values or raises, and then has changed nothing."""
    state = {"a": torch.full((6, 4), -1.0), "b": torch.full((10,), -1), "step": 0}
    try:
        found = load(state, path)
    except CheckpointError as error:
        assert (state["a"] == -1).all(), "half loaded"
        assert (state["b"] == -1).all(), "half loaded"
        return str(error)
    assert found["step"] == 3
    for name, whole in WHOLES.items():
        assert torch.equal(state[name], whole), f"wrong values of {name} were loaded"
    return None


def test_every_flipped_bit_is_found(tmp_path_factory, saved):
    """In any byte of any file."""
    folder = put(tmp_path_factory.mktemp("flip") / "x", saved)
    for name, data in saved.items():
        for position in range(0, len(data), 1 if name != INDEX_NAME else 3):
            damaged = bytearray(data)
            damaged[position] ^= 1 << (position % 8)
            (folder / name).write_bytes(damaged)
            message = refused(folder)
            assert message is not None, f"byte {position} of {name}"
            assert name in message or (name == INDEX_NAME and str(folder) in message)
        (folder / name).write_bytes(data)
    assert refused(folder) is None


@hypothesis.given(st.data())
def test_truncated_or_grown(tmp_path_factory, saved, data):
    name = data.draw(st.sampled_from(sorted(saved)))
    length = data.draw(
        st.integers(0, len(saved[name]) + 20).filter(lambda n: n != len(saved[name]))
    )
    changed = (saved[name] + bytes(20))[:length]
    folder = put(tmp_path_factory.mktemp("cut") / "x", {**saved, name: changed})
    assert name in refused(folder)
    assert not verify(folder).ok


def test_a_file_that_is_missing_or_of_another_checkpoint(tmp_path, saved):
    first, second = sorted(n for n in saved if n != INDEX_NAME)
    folder = put(tmp_path / "missing", {n: d for n, d in saved.items() if n != second})
    assert second in refused(folder)
    folder = put(tmp_path / "swapped", {**saved, first: saved[second], second: saved[first]})
    assert first in refused(folder)
    folder = put(tmp_path / "none", {first: saved[first]})
    assert "neither" in refused(folder)
    assert "no checkpoint at" in refused(tmp_path / "nowhere")


def test_verify_names_everything_that_is_damaged(tmp_path, saved):
    folder = put(tmp_path / "x", saved)
    whole = verify(folder)
    assert whole.ok
    assert whole.num_bytes == sum(t.numel() * t.element_size() for t in WHOLES.values())
    for name in sorted(n for n in saved if n != INDEX_NAME):
        damaged = bytearray(saved[name])
        damaged[-1] ^= 1
        (folder / name).write_bytes(damaged)
    faults = verify(folder).faults
    assert len(faults) == 2
    assert all("do not fit their checksum" in fault for fault in faults)


# -- crafted files ---------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
KEYS = ["files", "tensors", "ties", "ranks", "state", "format", "a", "b", "dtype", "shape",
        "pieces", "dict", "tensor", "list", "weight_map", "data_offsets"]  # fmt: skip


@st.composite
def mutated(draw, content):
    """JSON with a part somewhere replaced by something else."""
    if isinstance(content, dict) and content and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(content)))
        if draw(st.integers(0, 9)) == 0:
            return {draw(st.sampled_from(KEYS)) if k == key else k: v for k, v in content.items()}
        return {**content, key: draw(mutated(content[key]))}
    if isinstance(content, list) and content and draw(st.integers(0, 5)):
        place = draw(st.integers(0, len(content) - 1))
        return [*content[:place], draw(mutated(content[place])), *content[place + 1 :]]
    numbers = st.sampled_from([-1, 0, 1, 5, 2**31, 2**62, 2**63, 10**30])
    return draw(numbers | json_values)


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.data())
def test_crafted_indexes(tmp_path_factory, saved, data):
    """An index whose checksum is right and whose content is not."""
    content = json.loads(saved[INDEX_NAME])
    del content["shardwise"]["checksum"]
    content = data.draw(mutated(content))
    if isinstance(content, dict) and isinstance(content.get("shardwise"), dict):
        content["shardwise"]["checksum"] = f"{_checksum(content):08x}"
    raw = json.dumps(content).encode()
    folder = put(tmp_path_factory.mktemp("index") / "x", {**saved, INDEX_NAME: raw})
    state = {"a": torch.zeros(6, 4), "b": torch.zeros(10, dtype=torch.int64), "step": 0}
    for use in (inspect, verify, lambda path: load(state, path)):
        with contextlib.suppress(CheckpointError):
            use(folder)


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.data())
def test_crafted_headers(tmp_path_factory, saved, data):
    name = min(saved)
    (length,) = struct.unpack("<Q", saved[name][:8])
    header = data.draw(mutated(json.loads(saved[name][8 : 8 + length])))
    raw = json.dumps(header).encode()
    claimed = data.draw(st.sampled_from([len(raw), len(raw), len(raw) - 1, 2**40, 2**64 - 1, 0]))
    path = tmp_path_factory.mktemp("header") / "x.safetensors"
    path.write_bytes(struct.pack("<Q", max(claimed, 0)) + raw + saved[name][8 + length :])
    with contextlib.suppress(CheckpointError):
        read_header(path)
        load({}, path)


@hypothesis.given(st.binary(max_size=200))
def test_noise(tmp_path_factory, noise):
    folder = tmp_path_factory.mktemp("noise")
    for name in ("x.safetensors", INDEX_NAME):
        (folder / name).write_bytes(noise)
        with pytest.raises(CheckpointError):
            load({}, folder / name)


BOMBS = {
    "lists": b"[" + b"[]," * 4_000_000 + b"[]]",
    "depth": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "depth of lists": b"[" * 3_000_000,
    "digits": b'{"a":' + b"9" * 1_000_000 + b"}",
    "twice": b'{"a":1,"a":2}',
}


@pytest.mark.parametrize("kind", sorted(BOMBS))
def test_a_crafted_header_costs_no_memory(tmp_path, kind):
    raw = BOMBS[kind]
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    (tmp_path / INDEX_NAME).write_bytes(raw)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("x.safetensors", INDEX_NAME):
        with pytest.raises(CheckpointError):
            load({}, tmp_path / name)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 150_000, f"{grown} kB"


def test_a_claimed_size_allocates_nothing(tmp_path):
    header = b'{"x":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="end at byte 4000000000086, the file at 86"):
        load({}, path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b", "..", ""])
def test_an_index_reaches_no_file_outside_its_folder(tmp_path, name):
    put(tmp_path / "x", {INDEX_NAME: json.dumps({"weight_map": {"a": name}}).encode()})
    with pytest.raises(CheckpointError, match="not in its folder"):
        load({}, tmp_path / "x")


def test_a_pickle_is_not_read(tmp_path):
    torch.save({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load({}, tmp_path / "x.safetensors")


def test_a_newer_format_is_named(tmp_path, saved):
    content = json.loads(saved[INDEX_NAME])
    content["shardwise"]["format"] = "shardwise checkpoint 2"
    raw = json.dumps(content).encode()
    folder = put(tmp_path / "x", {**saved, INDEX_NAME: raw})
    assert "shardwise checkpoint 2" in refused(folder)
