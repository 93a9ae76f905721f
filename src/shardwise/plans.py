"""Plan files and the paths in them: one reader and writer, one matcher of module paths.

    format = "shardwise plan 1"

    [modules]
    "layers.*.up" = "colwise"
    "layers.*.norm" = { style = "SequenceParallel", sequence_dim = 1 }

An entry is a word, or a table with a `style` and its options. Plans of other kinds have another
format line and another section. Nothing in a file is executed.
"""

from __future__ import annotations

import difflib
import json
import os
import secrets
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import ArgumentError, LayoutError, PathError, PlanError

FORMAT = "shardwise plan 1"
#: Enough for ten thousand entries.
MAX_PLAN_BYTES = 2 << 20
#: In a line of TOML; the time of Python's parser is quadratic in the length of a dotted key.
MAX_DOTS = 200
#: Of a pattern, whose compilation may take quadratic time.
MAX_PATTERN_CHARS = 1000
#: The largest number in a file: beyond it, Python's ints exceed floats, and sums overflow.
LARGEST = 1e300
Entry = str | dict[str, Any]


def read_plan_file(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """The entries of a plan file for modules, by pattern, in the order of the file."""
    return read_plan_with(path, (), form=FORMAT, section="modules")[0]


def read_plan_with(
    path: str | os.PathLike[str], settings: Sequence[str], *, form: str, section: str
) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The entries of a plan file, and those of its settings that it has."""
    file = Path(path)
    content = read_content(file)
    if not isinstance(content, dict) or content.get("format") != form:
        raise LayoutError(f'{file} is not a plan: it does not say format = "{form}".')
    entries = content.get(section)
    if not isinstance(entries, dict) or set(content) - {"format", section, *settings}:
        also = f" It may have {', '.join(settings)}." if settings else ""
        raise LayoutError(
            f"{file} should hold format and {section}, a table from names to entries; found "
            f"{', '.join(sorted(content))}.{also}"
        )
    for pattern, entry in entries.items():
        if len(pattern) > MAX_PATTERN_CHARS:
            raise LayoutError(
                f"{file}: the name {pattern[:40]!r}... has {len(pattern):,} characters, more than "
                f"{MAX_PATTERN_CHARS:,}."
            )
        if not isinstance(entry, (str, dict)):
            said = repr(entry)[:200]
            raise LayoutError(f"{file}: {pattern!r} has {said}; an entry is a word or a table.")
    return entries, {name: content[name] for name in settings if name in content}


def read_content(file: Path) -> Any:
    """The content of a TOML or JSON file; see `MAX_PLAN_BYTES` and `MAX_DOTS`."""
    is_toml = _is_toml(file)
    if file.exists() and not file.is_file():  # a pipe would block, and a device never ends
        raise LayoutError(f"{file} is not a plan: it is not a regular file.")
    with file.open("rb") as opened:
        raw = opened.read(MAX_PLAN_BYTES + 1)
    if len(raw) > MAX_PLAN_BYTES:
        raise LayoutError(f"{file} is not a plan: it has more than {MAX_PLAN_BYTES} bytes.")
    try:
        text = raw.decode()
        if is_toml and any(line.count(".") > MAX_DOTS for line in text.splitlines()):
            raise ValueError(f"a line has more than {MAX_DOTS} dots")
        return tomllib.loads(text) if is_toml else json.loads(text)
    except (ValueError, RecursionError) as error:
        form = "TOML" if is_toml else "JSON"
        raise LayoutError(f"{file} cannot be read as {form}: {str(error)[:200]}.") from error


def write_plan_file(
    path: str | os.PathLike[str],
    entries: Mapping[str, Entry],
    *,
    form: str = FORMAT,
    section: str = "modules",
    settings: Mapping[str, str] | None = None,
) -> None:
    """Write a plan atomically."""
    head = {"format": form, **(settings or {})}
    file = Path(path)
    if _is_toml(file):
        lines = [*(f"{k} = {_toml(v)}" for k, v in head.items()), "", f"[{section}]"]
        lines += [f"{_toml(pattern)} = {_toml(entry)}" for pattern, entry in entries.items()]
        text = "\n".join(lines) + "\n"
    else:
        text = json.dumps({**head, section: dict(entries)}, indent=2) + "\n"
    write_text(file, text)


def write_text(file: Path, text: str) -> None:
    """Write a file whole or not at all. No link that waits beside it is followed."""
    half = file.with_name(f".{file.name}.half-{secrets.token_hex(6)}")
    with half.open("x", encoding="utf-8") as opened:
        try:
            opened.write(text)
            opened.close()
            os.replace(half, file)
        except BaseException:
            half.unlink()
            raise


def _is_toml(file: Path) -> bool:
    if file.suffix not in (".toml", ".json"):
        raise ArgumentError(f"A plan file ends in .toml or .json; found {str(file)!r}.")
    return file.suffix == ".toml"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # Like JSON, but for characters that TOML does not take as two halves, or unescaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# -- paths ---------------------------------------------------------------------------------------
# Paths in plans: the modules and tensors that they name, and suggestions where there are none.


def matching_modules(root: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules whose path matches, name by name; the root for "".

    >>> stack = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ReLU())
    >>> [path for path, _ in matching_modules(stack, "*.[01]")]
    ['0.0', '0.1']
    """
    found = [("", root)]
    for part in pattern.split(".") if pattern else ():
        found = [
            (f"{path}.{name}" if path else name, child)
            for path, module in found
            for name, child in module._modules.items()
            if child is not None and fnmatchcase(name, part)
        ]
    return found


def modules_at(
    root: nn.Module, patterns: str | Sequence[str], caller: str
) -> list[tuple[str, nn.Module]]:
    """The modules that match any of the patterns, each once; raises if a pattern matches none."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = matching_modules(root, pattern)
        if not matches:
            raise LayoutError(f"{caller}: {no_match(root, pattern)}")
        for path, module in matches:
            found.setdefault(id(module), (path, module))
    return list(found.values())


def all_paths(root: nn.Module, path: str = "") -> Iterator[str]:
    """The path of every module below the root, in the order of definition."""
    for name, child in root._modules.items():
        if child is not None:
            below = f"{path}.{name}" if path else name
            yield below
            yield from all_paths(child, below)


def no_match(root: nn.Module, pattern: str) -> str:
    """A sentence for an error: nothing matches, and what is similar."""
    hint = did_you_mean(pattern, list(all_paths(root)))
    return f"no module of {type(root).__name__} matches {pattern!r}{hint}"


def did_you_mean(path: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(path, known, n=3, cutoff=0.4)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else "."


def find_tensor(root: nn.Module, path: str) -> tuple[nn.Module, str, torch.Tensor]:
    """The module, the name in it, and the parameter or buffer at a path."""
    module_path, _, name = path.rpartition(".")
    owner = find_module(root, module_path, asked=path)
    tensor: torch.Tensor | None = owner._parameters.get(name)
    if tensor is None:
        tensor = owner._buffers.get(name)
    if tensor is None:
        raise PathError(_no_such("parameter", root, path, _tensor_paths(root)))
    return owner, name, tensor


def find_module(root: nn.Module, path: str, asked: str | None = None) -> nn.Module:
    """The module at a path; the root for ""."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        known = list(all_paths(root))
        known += _tensor_paths(root) if asked is not None else []
        what = "module" if asked is None else "parameter"
        raise PathError(_no_such(what, root, asked or path, known)) from None


def _tensor_paths(root: nn.Module) -> list[str]:
    return [name for name, _ in (*root.named_parameters(), *root.named_buffers())]


def _no_such(what: str, root: nn.Module, path: str, known: Sequence[str]) -> str:
    hint = did_you_mean(path, known)
    return f"The plan names {path!r}, but {type(root).__name__} has no such {what}{hint}"


def check_conflicts(plan: Mapping[str, Any], replaced: Sequence[str]) -> None:
    """Raise where an entry is inside a module that another entry replaces (`replaced`)."""
    for outer in replaced:
        inside = [p for p in plan if p != outer and (not outer or p.startswith(f"{outer}."))]
        if inside:
            raise PlanError(
                f"The sharder for {outer!r} replaces that module, but the plan also names "
                f"{', '.join(map(repr, inside))} inside it: a sharder's path should not conflict "
                "with the submodule tree of other entries. Let the sharder do both."
            )


def owners_of(root: nn.Module, tensor: torch.Tensor) -> list[tuple[dict[str, Any], str]]:
    """Every dict and name in the module that holds the tensor: several where it is tied."""
    found: list[tuple[dict[str, Any], str]] = []
    for module in root.modules():
        for held in (module._parameters, module._buffers):
            found += [(held, name) for name, each in held.items() if each is tensor]
    return found
