"""The simulated world stays below: no file above its room names LocalTensor or asks for the world.

Names in code count; what a docstring or an error tells a user does not. `simulation.ranks` and
`simulation.ranks` have what code above needs instead.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "shardwise"

#: The room itself, and what it is built on: a world knows what it is.
BELOW = {"simulation", "core", "errors"}
#: The class, and the questions which world it is.
FORBIDDEN = {"LocalTensor", "in_simulated_world", "simulated_world"}
#: What a world and a LocalTensor are asked for.
FORBIDDEN_ATTRIBUTES = {"LocalTensor", "_parts", "_roster", "simulated"}
#: Where one of these may stand, and why.
EXCEPTIONS = {
    ("front.py", "LocalTensor"): "the public name",
}


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The forbidden names in the code, with their lines; attributes asked for as text included."""
    for node in ast.walk(tree):
        found, forbidden = "", FORBIDDEN
        if isinstance(node, ast.Name):
            found = node.id
        elif isinstance(node, ast.alias):
            found = node.name.rpartition(".")[2]
        elif isinstance(node, ast.Attribute):
            found, forbidden = node.attr, FORBIDDEN_ATTRIBUTES
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            found, forbidden = str(getattr(node.args[1], "value", "")), FORBIDDEN_ATTRIBUTES
        if found in forbidden:
            yield found, node.lineno


def faults(package: Path) -> tuple[list[str], set[tuple[str, str]]]:
    """The forbidden names that are used, and the exceptions that are needed."""
    found, needed = [], set()
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if place.parts[0].removesuffix(".py") in BELOW:
            continue
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in FORBIDDEN | FORBIDDEN_ATTRIBUTES):
            continue
        for name, line in names(ast.parse(text, str(path))):
            if (place.as_posix(), name) in EXCEPTIONS:
                needed.add((place.as_posix(), name))
            else:
                found.append(f"{place}:{line}: {name}")
    return found, needed


def test_nothing_above_asks_for_the_world():
    found, needed = faults(PACKAGE)
    assert found == []
    assert needed == set(EXCEPTIONS), "an exception that nobody needs"


@pytest.mark.parametrize(
    "text",
    [
        "from shardwise.simulation.local_tensor import LocalTensor",
        "isinstance(x, local_tensor.LocalTensor)",
        "if grid.world.simulated: pass",
        "getattr(x, '_roster', None)",
        "y = x._parts[0]",
        "def f(x: LocalTensor): pass",
    ],
)
def test_a_question_is_seen(tmp_path, text):
    (tmp_path / "dtensor").mkdir()
    (tmp_path / "dtensor" / "views.py").write_text(
        f'"""LocalTensor."""\n{text}\n', encoding="utf-8"
    )
    found, _ = faults(tmp_path)
    assert [fault.partition(": ")[0] for fault in found] == ["dtensor/views.py:2"]


def test_the_room_itself_may_ask(tmp_path):
    (tmp_path / "simulation").mkdir()
    text = "LocalTensor(parts, roster)\nworld.simulated\n"
    (tmp_path / "simulation" / "ranks.py").write_text(text, encoding="utf-8")
    assert faults(tmp_path) == ([], set())
