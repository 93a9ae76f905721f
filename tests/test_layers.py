"""The layer rule: a room of the package imports only rooms of lower layers, or itself.

A room is a top-level module or package of shardwise. Imports inside functions count; imports
under `if TYPE_CHECKING` do not, because they never run.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "shardwise"

LAYERS = [
    {"errors"},
    {"core"},
    {"comm", "random", "kernels", "launch"},
    {"redistribute"},
    {"rules"},
    {"dtensor"},
    {"ops"},
    {"exchange", "planfile", "training"},
    {"parallel", "embedding", "shard", "checkpoint", "interop"},
    {"planner", "debug", "testing", "preload", "safe_globals"},
    {"report"},
    {"demo"},
    {"cli"},
]
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
TOP_LAYER = len(LAYERS) - 1

#: A DTensor needs its ops for the first call, and they need the class: it brings them along.
UPWARD = ("shardwise.dtensor", "shardwise.ops.catalog")

FORBIDDEN = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._shard")
MAY_IMPORT_FORBIDDEN = {"interop"}


@dataclass(frozen=True)
class Import:
    """One imported name: the module that asks, where it asks, and the dotted name it asks for."""

    module: str
    where: str
    name: str


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below this one that can run: all but the bodies of `if TYPE_CHECKING`."""
    yield node
    if isinstance(node, ast.If) and is_type_checking(node.test):
        children: list[ast.AST] = list(node.orelse)
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from running_nodes(child)


def absolute_base(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    num_dropped = node.level - 1 if is_package else node.level
    kept = parts[: max(len(parts) - num_dropped, 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def read_imports(package: Path) -> tuple[set[str], list[Import]]:
    """The modules of the package, and all that they import, in the order of files and lines."""
    paths = sorted(package.rglob("*.py"))
    imports = []
    for path in paths:
        module = module_name(path, package)
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for node in running_nodes(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = absolute_base(node, module, path.name == "__init__.py")
                names = [f"{base}.{alias.name}" for alias in node.names]
            else:
                continue
            where = f"{path.relative_to(package.parent)}:{node.lineno}"
            imports += [Import(module, where, name) for name in names]
    return {module_name(path, package) for path in paths}, imports


def target(name: str, modules: set[str]) -> str | None:
    """The module of the package that holds a dotted name; None for a name from elsewhere."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def room(module: str) -> str | None:
    """The room a module belongs to; None for the front: the package, re-exports, `python -m`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] not in ("front", "__main__") else None


def unknown_rooms(modules: set[str]) -> list[str]:
    rooms = {room(module) for module in modules} - {None}
    return [
        f"shardwise.{name} is in no layer: add it to LAYERS in {Path(__file__).name}"
        for name in sorted(rooms - set(LAYER))
    ]


def layer_faults(modules: set[str], imports: list[Import]) -> list[str]:
    faults = []
    for item in imports:
        asked = target(item.name, modules)
        asking_room = room(item.module)
        if asked is None or asking_room not in LAYER:
            continue
        here = LAYER[asking_room]
        asked_room = room(asked)
        if asked_room is None:
            if here != TOP_LAYER:
                faults.append(
                    f"{item.where}: {asking_room} imports {item.name} from the front; "
                    "import it from the room that defines it"
                )
        elif asked_room != asking_room and asked_room in LAYER and LAYER[asked_room] >= here:
            faults.append(
                f"{item.where}: {asking_room} (layer {here}) imports "
                f"{asked} (layer {LAYER[asked_room]}); only lower layers are open to it"
            )
    return faults


def forbidden_faults(imports: list[Import]) -> list[str]:
    return [
        f"{item.where}: imports {item.name}; only {', '.join(MAY_IMPORT_FORBIDDEN)} may"
        for item in imports
        if room(item.module) not in MAY_IMPORT_FORBIDDEN
        and any(f"{item.name}.".startswith(f"{name}.") for name in FORBIDDEN)
    ]


def shortest_path(start: str, goal: str, graph: dict[str, set[str]]) -> list[str] | None:
    paths = [[start]]
    seen = {start}
    for path in paths:
        if path[-1] == goal:
            return path
        for following in sorted(graph.get(path[-1], set()) - seen):
            seen.add(following)
            paths.append([*path, following])
    return None


def cycle_faults(modules: set[str], imports: list[Import]) -> list[str]:
    """Every import that lies on a cycle, with the shortest way back from it."""
    graph: dict[str, set[str]] = {}
    edges = []
    for item in imports:
        asked = target(item.name, modules)
        if asked is not None:
            graph.setdefault(item.module, set()).add(asked)
            edges.append((item, asked))
    faults = []
    for item, asked in edges:
        back = shortest_path(asked, item.module, graph)
        if back is not None:
            faults.append(f"{item.where}: cycle {' -> '.join([item.module, *back])}")
    return list(dict.fromkeys(faults))


def report(faults: list[str]) -> None:
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


@pytest.fixture(scope="module")
def shardwise() -> tuple[set[str], list[Import]]:
    modules, imports = read_imports(PACKAGE)
    assert modules, f"no package at {PACKAGE}: these tests would check nothing"
    return modules, [item for item in imports if (item.module, item.name) != UPWARD]


def test_every_room_has_a_layer(shardwise):
    report(unknown_rooms(shardwise[0]))


def test_rooms_import_only_lower_layers(shardwise):
    report(layer_faults(*shardwise))


def test_torch_dtensor_is_imported_only_by_interop(shardwise):
    report(forbidden_faults(shardwise[1]))


def test_files_import_each_other_without_cycles(shardwise):
    report(cycle_faults(*shardwise))


# The rest checks the checker on small packages: one that sees nothing would call any house clean.


def play(tmp_path: Path, files: dict[str, str]) -> tuple[set[str], list[Import]]:
    package = tmp_path / "shardwise"
    for name, text in {"__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_imports(package)


@pytest.mark.parametrize(
    "text",
    [
        "from shardwise.rules import catalog",
        "from shardwise import rules",
        "from ..rules.catalog import RULES",
        "from .. import rules",
        "def f():\n    import shardwise.rules.catalog",
        "from shardwise import DTensor",
        "import shardwise",
        "from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    from .. import rules",
        "import typing\nif typing.TYPE_CHECKING:\n    pass\nelse:\n    from .. import rules",
    ],
)
def test_upward_import_is_seen(tmp_path, text):
    house = play(
        tmp_path,
        {
            "core/__init__.py": "",
            "core/layout.py": text,
            "rules/__init__.py": "",
            "rules/catalog.py": "",
        },
    )
    line = text.count("\n") + 1
    faults = layer_faults(*house)
    assert len(faults) == 1
    assert faults[0].startswith(f"shardwise/core/layout.py:{line}: ")


def test_lawful_imports_pass(tmp_path):
    house = play(
        tmp_path,
        {
            "__init__.py": "from .rules import catalog\nfrom .core.layout import Layout",
            "core/__init__.py": "from .layout import Layout",
            "core/layout.py": (
                "import typing\nfrom . import chunks\n"
                "if typing.TYPE_CHECKING:\n    from ..rules import catalog"
            ),
            "core/chunks.py": "import torch.distributed",
            "rules/__init__.py": "",
            "rules/catalog.py": "from ..core import Layout",
            "interop/__init__.py": "from torch.distributed.tensor import DTensor",
            "cli.py": "import shardwise",
        },
    )
    assert unknown_rooms(house[0]) == []
    assert layer_faults(*house) == []
    assert forbidden_faults(house[1]) == []
    assert cycle_faults(*house) == []


def test_siblings_of_one_layer_stay_apart(tmp_path):
    house = play(tmp_path, {"comm.py": "", "random.py": "import os\nfrom .comm import Comm"})
    assert [fault.partition(" ")[0] for fault in layer_faults(*house)] == ["shardwise/random.py:2:"]


def test_unknown_room_is_named(tmp_path):
    modules, _ = play(tmp_path, {"attic/__init__.py": ""})
    assert unknown_rooms(modules) == [
        "shardwise.attic is in no layer: add it to LAYERS in test_layers.py"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed.tensor",
        "from torch.distributed import tensor",
        "from torch.distributed import _shard",
        "from torch.distributed._tensor.api import DTensor",
    ],
)
def test_forbidden_import_is_seen(tmp_path, text):
    _, imports = play(tmp_path, {"core.py": text})
    assert len(forbidden_faults(imports)) == 1


def test_neighbours_of_the_forbidden_names_are_allowed(tmp_path):
    text = "from torch.distributed import tensors\nimport torch.distributed.device_mesh"
    _, imports = play(tmp_path, {"core.py": text})
    assert forbidden_faults(imports) == []


def test_cycle_lists_each_import_on_it(tmp_path):
    house = play(
        tmp_path,
        {
            "core/__init__.py": "from .a import x",
            "core/a.py": "from .b import x",
            "core/b.py": "def f():\n    from .c import x",
            "core/c.py": "import os\nfrom . import a",
        },
    )
    assert cycle_faults(*house) == [
        "shardwise/core/a.py:1: cycle shardwise.core.a -> shardwise.core.b"
        " -> shardwise.core.c -> shardwise.core.a",
        "shardwise/core/b.py:2: cycle shardwise.core.b -> shardwise.core.c"
        " -> shardwise.core.a -> shardwise.core.b",
        "shardwise/core/c.py:2: cycle shardwise.core.c -> shardwise.core.a"
        " -> shardwise.core.b -> shardwise.core.c",
    ]
