"""What pages and notes name exists: files, folders, modules and their names, and the notes."""

import importlib
import re
from pathlib import Path

from test_layers import LAYER

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = ("src", "tests", "docs", "benchmarks", "examples")
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def known_files():
    """The path of every file from each of its folders on: `a/b.py` and `b.py`."""
    found = set()
    for path in (*ROOT.iterdir(), *(p for name in FOLDERS for p in (ROOT / name).rglob("*"))):
        parts = path.relative_to(ROOT).parts
        found |= {"/".join(parts[first:]) for first in range(len(parts))}
    return found


def exists(name):
    """Whether a dotted name is a module, or can be read off one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_pages_name_files_that_are_there():
    known = known_files()
    named = [
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"`([\w./-]+(?:\.(?:py|md|toml|sh)|/))`", page.read_text())
    ]
    assert len(named) > 50
    assert [pair for pair in named if pair[1].rstrip("/") not in known] == []


def test_the_architecture_page_has_the_layers_and_names_of_the_package():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text, flags=re.MULTILINE)
    table = [(int(layer), name) for layer, cell in rows for name in re.findall(r"\w+", cell)]
    assert sorted(table) == sorted((layer, name) for name, layer in LAYER.items())

    package = "\n".join(path.read_text() for path in SOURCES)
    files = re.findall(r"^\W*(?:\w+: )?([\w/]+/\w+\.py) ", text, flags=re.MULTILINE)
    assert len(files) > 5
    assert [name for name in files if not (ROOT / "src" / "shardwise" / name).exists()] == []
    names = set(re.findall(r"`(\w+)`", text)) | set(re.findall(r"\.py +(\w+)\b", text))
    assert len(names) > 50
    assert [n for n in names if not re.search(rf"\b{n}\b", package) and not is_folder(n)] == []


def is_folder(name):
    return (ROOT / "src" / "shardwise" / name).is_dir()


def test_pages_name_what_can_be_imported():
    text = "\n".join(page.read_text() for page in PAGES)
    names = set(re.findall(r"`(shardwise(?:\.\w+)+)\b", text))
    assert len(names) > 20
    assert [name for name in names if not exists(name)] == []


def test_every_note_that_is_cited_is_written_once():
    written, cited = [], set()
    for path in SOURCES:
        text = path.read_text()
        written += re.findall(r"^(?:# )?Note \[([^\]]+)\]$", text, flags=re.MULTILINE)
        # A citation may run over the end of a line.
        cited |= set(re.findall(r"Note \[([^\]]+)\]", re.sub(r"\s*\n\s*(?:# )?", " ", text)))
    assert len(written) == len(set(written)) > 30
    assert cited <= set(written)


def test_the_page_of_the_command_line_lists_every_training_option():
    from shardwise.report.parity import APPLY

    page = (ROOT / "docs/howto/command-line.md").read_text()
    first_cells = " ".join(re.findall(r"^\| (`[^|]*)\|", page, re.MULTILINE))
    assert not [option for option in APPLY if f"`{option}`" not in first_cells]
