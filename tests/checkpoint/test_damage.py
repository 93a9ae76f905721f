"""Damaged, truncated and foreign files are refused by name, and nothing is half loaded."""

import json
import os
import re
import resource
import struct
import time

import checkpoint_fuzz
import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import shardwise
from shardwise import CheckpointError, Shard
from shardwise.checkpoint import inspect, load, save, verify
from shardwise.checkpoint.index import INDEX_NAME

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


def test_forged_and_damaged_checkpoints(tmp_path):
    """300 of the cases that `tests/checkpoint_fuzz.py` makes; as a program it runs 10,000."""
    ends = checkpoint_fuzz.run(range(300), tmp_path / "saved")
    assert ends["refused"] > 150, "the cases are too tame"
    assert ends["loaded"] > 30, "the cases are too wild"


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
    content["shardwise"]["format"] = "shardwise checkpoint 3"
    raw = json.dumps(content).encode()
    folder = put(tmp_path / "x", {**saved, INDEX_NAME: raw})
    assert "shardwise checkpoint 3" in refused(folder)


# -- what is no file, or has no end ------------------------------------------------------------


def replace_by(path, kind):
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(kind)


@pytest.mark.parametrize("kind", ["fifo", "folder", "/dev/zero", "/dev/null"])
@pytest.mark.parametrize("place", [0, -1], ids=["a file", "the index"])
def test_only_regular_files_are_read(tmp_path, saved, kind, place):
    folder = put(tmp_path / "x", saved)
    name = sorted(saved)[place]
    replace_by(folder / name, kind)
    start = time.monotonic()
    assert name in refused(folder)
    assert name in verify(folder).faults[0]
    with pytest.raises(CheckpointError, match=re.escape(name)):
        inspect(folder)
    if kind != "folder":
        assert "not a regular file" in refused(folder / name)
    assert time.monotonic() - start < 60


def test_a_file_that_claims_a_terabyte_is_not_read(tmp_path, saved):
    folder = put(tmp_path / "x", saved)
    for name in saved:
        with (folder / name).open("r+b") as file:
            file.truncate(1 << 40)
        assert name in refused(folder)
        (folder / name).write_bytes(saved[name])


def test_names_that_are_too_long_or_none(tmp_path, saved):
    for path in (tmp_path / ("n" * 300), tmp_path / "a\0b"):
        assert len(verify(path).faults) == 1
        with pytest.raises(CheckpointError, match=r"cannot be read|no checkpoint at"):
            load({}, path)
        with pytest.raises(CheckpointError):
            save({"x": 1}, path)
    put(tmp_path / "x", {INDEX_NAME: json.dumps({"weight_map": {"a": "n" * 300}}).encode()})
    assert "too long" in verify(tmp_path / "x").faults[0]


def test_names_in_errors_do_not_reach_the_terminal_raw(tmp_path):
    name = "\x1b]0;title\x07\x1b[2J\u202e"
    save({name: torch.ones(2)}, tmp_path / "x")
    with pytest.raises(CheckpointError) as error:
        load({name: torch.ones(3)}, tmp_path / "x")
    assert r"\x1b]0;title\x07\x1b[2J\u202e has shape (2,)" in str(error.value)
    assert "\x1b" not in str(error.value)
