"""Reading and writing plan files: TOML or JSON, by the file's name.

    format = "shardwise plan 1"

    [modules]
    "layers.*.up" = "colwise"
    "layers.*.norm" = { style = "SequenceParallel", sequence_dim = 1 }

An entry is a word, or a table with a `style` and its options. Other plans have another format line
and another section. Nothing in a file is executed.
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ArgumentError, LayoutError

FORMAT = "shardwise plan 1"
#: Enough for ten thousand entries.
MAX_PLAN_BYTES = 2 << 20
#: In a line of TOML; the time of Python's parser is quadratic in the length of a dotted key.
MAX_DOTS = 200
Entry = str | dict[str, Any]


def read_plan_file(
    path: str | os.PathLike[str], *, form: str = FORMAT, section: str = "modules"
) -> dict[str, Entry]:
    """The entries of a plan file, by pattern, in the order of the file."""
    file = Path(path)
    content = read_content(file)
    if not isinstance(content, dict) or content.get("format") != form:
        raise LayoutError(f'{file} is no plan: it does not say format = "{form}".')
    entries = content.get(section)
    if not isinstance(entries, dict) or len(content) != 2:
        raise LayoutError(
            f"{file} should hold format and {section}, a table from names to entries; found "
            f"{', '.join(sorted(content))}."
        )
    for pattern, entry in entries.items():
        if not isinstance(entry, (str, dict)):
            raise LayoutError(f"{file}: {pattern!r} has {entry!r}; an entry is a word or a table.")
    return entries


def read_content(file: Path) -> Any:
    """The content of a TOML or JSON file; see `MAX_PLAN_BYTES` and `MAX_DOTS`."""
    is_toml = _is_toml(file)
    with file.open("rb") as opened:
        raw = opened.read(MAX_PLAN_BYTES + 1)
    if len(raw) > MAX_PLAN_BYTES:
        raise LayoutError(f"{file} is no plan: it has more than {MAX_PLAN_BYTES} bytes.")
    try:
        text = raw.decode()
        if is_toml and any(line.count(".") > MAX_DOTS for line in text.splitlines()):
            raise ValueError(f"a line has more than {MAX_DOTS} dots")
        return tomllib.loads(text) if is_toml else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"{file} cannot be read as a plan: {str(error)[:200]}.") from error


def write_plan_file(
    path: str | os.PathLike[str],
    entries: Mapping[str, Entry],
    *,
    form: str = FORMAT,
    section: str = "modules",
) -> None:
    """Write a plan atomically."""
    file = Path(path)
    if _is_toml(file):
        lines = [f"format = {json.dumps(form)}", "", f"[{section}]"]
        lines += [f"{json.dumps(pattern)} = {_toml(entry)}" for pattern, entry in entries.items()]
        text = "\n".join(lines) + "\n"
    else:
        text = json.dumps({"format": form, section: dict(entries)}, indent=2) + "\n"
    number, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with open(number, "w", encoding="utf-8") as half:
            half.write(text)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def _is_toml(file: Path) -> bool:
    if file.suffix not in (".toml", ".json"):
        raise ArgumentError(f"A plan file ends in .toml or .json; found {str(file)!r}.")
    return file.suffix == ".toml"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
