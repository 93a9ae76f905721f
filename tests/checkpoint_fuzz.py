"""Random damage and forgery of checkpoints: each is loaded, or refused by a CheckpointError.

    python tests/checkpoint_fuzz.py --cases 10000

A case is a seed: it changes the index or a file of a small checkpoint in one to three places and
then inspects, verifies and loads it. Nothing else may be raised, no case may take a second, and a
load that is refused must not have changed the state.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import struct
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from time_limit import cpu_limit
from torch import nn

import shardwise
from shardwise import CheckpointError, Shard
from shardwise.checkpoint import inspect, load, save, verify
from shardwise.checkpoint.index import INDEX_NAME, _checksum

MOST_SECONDS = 1.0
WORDS = [
    "", "a", "dict", "list", "tuple", "tensor", "float", "bytes", "dtype", "float32", "nan", "F32",
    "I64", "state", "params", "param_groups", "model.weight", "__metadata__", "..", "../x",
    "/dev/zero", "a" * 300, "\x1b]0;x\x07", "\ud800", "00000000", "zzzzzzzz",
]  # fmt: skip
NUMBERS = [-1, 0, 1, 3, 4, 2**31, 2**62, 2**63, 10**30, 0.5, 1e300, float("inf"), True, None]


def make_checkpoint(path: Path) -> None:
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        state = make_state()
        a = shardwise.distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0)])
        for parameter in state["model"].parameters():
            parameter.grad = torch.ones_like(parameter)
        state["optimizer"].step()
        values = {"values": [1, (2.5, "x"), {"k": b"\0"}, float("inf"), torch.float16, []]}
        save({**state, "a": a, **values, "step": 3}, path)


def make_state() -> dict:
    model = nn.Linear(2, 3)
    nn.init.constant_(model.weight, -1)
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model, "optimizer": optimizer, "a": torch.full((6, 4), -1.0), "step": 0,
            "values": None}  # fmt: skip


class Case:
    """One seed: what it changes, and what came of it."""

    def __init__(self, seed: int, folder: Path, files: dict[str, bytes]) -> None:
        self.random = random.Random(seed)
        self.folder, self.files = folder, files
        self.changed: set[str] = set()
        self.did: list[str] = []

    def run(self) -> str:
        """What happened: "loaded", or the kinds of error."""
        try:
            self._damage()
            with cpu_limit(MOST_SECONDS, self.did):
                return self._use()
        finally:
            self._restore()

    def _use(self) -> str:
        for look in (inspect, verify):
            with contextlib.suppress(CheckpointError):
                look(self.folder)
        state = make_state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                load(state, self.folder)
            except CheckpointError as error:
                text = str(error).replace("\n", "")
            else:
                return "loaded"
        assert text.isprintable(), "raw text in an error"
        assert (state["a"] == -1).all(), f"half loaded: {self.did}"
        assert (state["model"].weight == -1).all(), f"half loaded: {self.did}"
        assert not state["optimizer"].state, f"half loaded: {self.did}"
        return "refused"

    # -- damage ------------------------------------------------------------------------------

    def _damage(self) -> None:
        kinds = [self._forge_index] * 6 + [self._forge_header] * 2
        kinds += [self._bytes, self._foreign, self._odd_file]
        self.random.choice(kinds)()

    def _put(self, name: str, data: bytes) -> None:
        self.changed.add(name)
        (self.folder / name).unlink(missing_ok=True)
        (self.folder / name).write_bytes(data)

    def _forge_index(self) -> None:
        """An index whose checksum is right and whose content is not."""
        content = json.loads(self.files[INDEX_NAME])
        del content["shardwise"]["checksum"]
        for _ in range(self.random.randint(1, 3)):
            content = self._mutated(content)
        if isinstance(content, dict) and isinstance(content.get("shardwise"), dict):
            content["shardwise"]["checksum"] = f"{_checksum(content):08x}"
        self._put(INDEX_NAME, json.dumps(content).encode())

    def _forge_header(self) -> None:
        name = self._tensor_file()
        data = self.files[name]
        (length,) = struct.unpack("<Q", data[:8])
        header = self._mutated(json.loads(data[8 : 8 + length]))
        raw = json.dumps(header).encode()
        claimed = self.random.choice([len(raw)] * 4 + [len(raw) - 1, 2**40, 2**64 - 1, 0])
        self._put(name, struct.pack("<Q", max(claimed, 0)) + raw + data[8 + length :])
        if self.random.random() < 0.5:
            self._foreign()

    def _bytes(self) -> None:
        name = self.random.choice(sorted(self.files))
        data = bytearray(self.files[name])
        for _ in range(self.random.randint(1, 4)):
            place = self.random.randrange(len(data) + 1)
            how = self.random.randrange(3)
            if how == 0:
                data[place : place + 1] = bytes([self.random.randrange(256)])
            elif how == 1:
                del data[place : place + self.random.randint(1, 50)]
            else:
                data[place:place] = self.random.randbytes(self.random.randint(1, 20))
        self.did.append(f"bytes of {name}")
        self._put(name, bytes(data))

    def _foreign(self) -> None:
        """As Hugging Face has it: nothing but a map of files."""
        names = ["model.weight", "model.bias", "a", "step", "x"]
        files = [*self.files, "nowhere", *self.random.sample(WORDS, 2)]
        table = {name: self.random.choice(files) for name in names}
        self._put(INDEX_NAME, json.dumps({"weight_map": self._mutated(table)}).encode())

    def _odd_file(self) -> None:
        """Something else than a regular file where one should be."""
        name = self.random.choice(sorted(self.files))
        path = self.folder / name
        self.changed.add(name)
        path.unlink()
        how = self.random.randrange(5)
        self.did.append(f"{name} is odd thing {how}")
        if how == 0:
            os.mkfifo(path)
        elif how == 1:
            path.mkdir()
        elif how == 2:
            path.symlink_to(self.random.choice(["/dev/zero", "/dev/null", "/proc/self/mem", name]))
        elif how == 3:
            with path.open("wb") as file:
                file.truncate(1 << 40)
        # Else it is missing.

    def _tensor_file(self) -> str:
        return self.random.choice(sorted(name for name in self.files if name != INDEX_NAME))

    def _mutated(self, content):
        """JSON with a part somewhere replaced, removed, renamed or doubled."""
        chance = self.random
        if isinstance(content, dict) and content and chance.random() < 0.85:
            key = chance.choice(sorted(content))
            how = chance.random()
            if how < 0.08:
                self.did.append(f"rename {key!r}")
                return {chance.choice(WORDS) if k == key else k: v for k, v in content.items()}
            if how < 0.16:
                self.did.append(f"drop {key!r}")
                return {k: v for k, v in content.items() if k != key}
            return {**content, key: self._mutated(content[key])}
        if isinstance(content, list) and content and chance.random() < 0.85:
            place = chance.randrange(len(content))
            how = chance.random()
            if how < 0.06:
                self.did.append("drop an item")
                return [*content[:place], *content[place + 1 :]]
            if how < 0.12:
                self.did.append("double an item")
                return [*content, content[place]]
            return [*content[:place], self._mutated(content[place]), *content[place + 1 :]]
        new = self._anything(3)
        self.did.append(f"{str(content)[:30]!r} becomes {str(new)[:30]!r}")
        return new

    def _anything(self, depth: int):
        chance = self.random
        how = chance.random()
        if depth and how < 0.15:
            return [self._anything(depth - 1) for _ in range(chance.randrange(4))]
        if depth and how < 0.35:
            return {chance.choice(WORDS): self._anything(depth - 1) for _ in range(2)}
        if how < 0.37:
            return [[]] * chance.choice([10, 1000, 1000, 1000, 100_000])
        return chance.choice(NUMBERS if how < 0.7 else WORDS)

    def _restore(self) -> None:
        for name in self.changed:
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
            path.write_bytes(self.files[name])


def run(seeds, folder: Path) -> collections.Counter:
    """How the cases ended; raises where one should not have ended so."""
    make_checkpoint(folder)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert Case(0, folder, files)._use() == "loaded"
    ends: collections.Counter = collections.Counter()
    for seed in seeds:
        try:
            ends[Case(seed, folder, files).run()] += 1
        except Exception as error:
            raise AssertionError(f"case {seed}") from error
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description="Damage and forge checkpoints.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ends = run(range(asked.first, asked.first + asked.cases), Path(folder) / "saved")
    print(f"{asked.cases} cases in {time.monotonic() - start:.0f} s: {dict(ends)}", file=sys.stdout)


if __name__ == "__main__":
    main()
