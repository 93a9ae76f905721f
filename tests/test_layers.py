"""The layer rule: a room of the package imports only rooms of lower layers, or itself.

A room is a top-level module or package of shardwise. Imports inside functions count; imports
under `if TYPE_CHECKING` do not, because they never run.
"""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "shardwise"

LAYERS = [
    {"errors"},
    {"_torch"},
    {"core"},
    {"simulation"},
    {"comm", "kernels", "launch"},
    {"random", "lookup", "redistribute"},
    {"dispatch"},
    {"dtensor"},
    {"ops"},
    {"plans", "training", "effects"},
    {"parallel", "embedding", "shard", "checkpoint"},
    {"planner", "debug", "testing", "preload"},
    {"report", "interop"},
    {"demo", "safe_globals"},
    {"cli"},
]
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
TOP_LAYER = len(LAYERS) - 1

#: The room for torch's internals; files elsewhere that name some, with the reason.
INTERNALS_ROOM = "_torch"
INTERNALS_ELSEWHERE: dict[str, str] = {}
FRAMES = {
    "_current_frames",
    "_getframe",
    "currentframe",
    "extract_stack",
    "f_back",
    "f_globals",
    "f_locals",
    "tb_frame",
    "walk_stack",
}
#: A DTensor needs its ops for the first call, and they need the class: it brings them along.
UPWARD = ("shardwise.dtensor", "shardwise.ops.catalog")

#: In one folder, besides its `__init__`.
MOST_MODULES = 15

#: Class names that two modules define; CONTRIBUTING.md says why.
TWICE = {"EmbeddingBagCollection", "EmbeddingCollection", "Shard", "ShardingPlan"}

FORBIDDEN = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._shard")
MAY_IMPORT_FORBIDDEN = {"interop"}


@dataclass(frozen=True)
class Import:
    """One imported name: the module that asks, where it asks, and the dotted name it asks for."""

    module: str
    where: str
    name: str


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


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
        tree = parsed(path)
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


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def names_of_torch(tree: ast.AST) -> set[str]:
    """The names that a file has from torch."""
    names = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {
                (alias.asname or alias.name).partition(".")[0]
                for alias in node.names
                if f"{base}{alias.name}.".startswith("torch.")
            }
    return names


def chain(node: ast.expr) -> list[str]:
    """`a.b.c` as a list; empty for what is no name with attributes."""
    if isinstance(node, ast.Name):
        return [node.id]
    return (
        [*found, node.attr]
        if isinstance(node, ast.Attribute) and (found := chain(node.value))
        else []
    )


def names_internals(node: ast.AST, from_torch: set[str]) -> bool:
    """Whether this names a private part of torch, or looks at frames.

    An op, `torch.ops.aten._name`, is none: it is named as public ones are.
    """
    if isinstance(node, ast.Import):
        names = [alias.name.split(".") for alias in node.names]
        return any(name[0] == "torch" and any(map(is_private, name)) for name in names)
    if isinstance(node, ast.ImportFrom):
        parts = (node.module or "").split(".")
        imported = [part for alias in node.names for part in alias.name.split(".")]
        frames = parts[0] in ("sys", "inspect", "traceback") and FRAMES & set(imported)
        return bool(frames) or (parts[0] == "torch" and any(map(is_private, [*parts, *imported])))
    if isinstance(node, ast.Attribute):
        parts = chain(node)
        if node.attr in FRAMES or (parts[:-1] == ["torch"] and node.attr.startswith("_")):
            return True
        private = is_private(node.attr) and parts and parts[0] in from_torch
        return bool(private) and "ops" not in parts
    if isinstance(node, ast.Call):
        texts = [x.value for x in node.args if isinstance(x, ast.Constant) and type(x.value) is str]
        of_torch = bool(node.args) and (chain(node.args[0]) or [""])[0] in from_torch
        return any(
            (text.startswith("torch.") and any(map(is_private, text.split("."))))
            or (of_torch and is_private(text))
            for text in texts
        )
    return False


def internals_faults(package: Path) -> list[str]:
    faults = []
    for path in sorted(package.rglob("*.py")):
        tree = parsed(path)
        from_torch, where = names_of_torch(tree), path.relative_to(package.parent)
        if room(module_name(path, package)) == INTERNALS_ROOM or str(where) in INTERNALS_ELSEWHERE:
            continue
        faults += [
            f"{where}:{node.lineno}: names a private part of torch, or a frame; take it from "
            f"shardwise.{INTERNALS_ROOM}"
            for node in ast.walk(tree)
            if names_internals(node, from_torch)
        ]
    return list(dict.fromkeys(faults))


def unnamed_faults(package: Path) -> list[str]:
    """In the room itself: internals that are not taken by text, so that they could be missing."""
    faults = []
    for path in sorted((package / INTERNALS_ROOM).glob("*.py")):
        tree = parsed(path)
        from_torch = names_of_torch(tree)
        for node in running_nodes(tree):
            last = node.attr if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.Call) or last.startswith(("__", "f_")):
                continue
            if names_internals(node, from_torch):
                where = f"{path.relative_to(package.parent)}:{node.lineno}"
                faults.append(f"{where}: not by Names.find")
    return faults


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
def shardwise() -> Iterator[tuple[set[str], list[Import]]]:
    modules, imports = read_imports(PACKAGE)
    assert modules, f"no package at {PACKAGE}: these tests would check nothing"
    yield modules, [item for item in imports if (item.module, item.name) != UPWARD]
    parsed.cache_clear()


def test_every_room_has_a_layer(shardwise):
    report(unknown_rooms(shardwise[0]))


def test_rooms_import_only_lower_layers(shardwise):
    report(layer_faults(*shardwise))


def test_torch_dtensor_is_imported_only_by_interop(shardwise):
    report(forbidden_faults(shardwise[1]))


def test_files_import_each_other_without_cycles(shardwise):
    report(cycle_faults(*shardwise))


def test_internals_of_torch_have_one_room():
    report(internals_faults(PACKAGE))


def test_internals_of_torch_are_taken_by_name():
    report(unnamed_faults(PACKAGE))


def crowded(package: Path) -> list[str]:
    """Folders with more modules than a reader takes in at a glance."""
    faults = []
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        count = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        if count > MOST_MODULES:
            faults.append(f"{folder.relative_to(package.parent)} has {count} modules")
    return faults


def test_no_folder_is_crowded():
    report(crowded(PACKAGE))


def test_no_class_name_is_defined_twice():
    """But for public names that torch and torchrec gave."""
    names: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name for name, files in names.items() if len(files) > 1} == TWICE


def test_every_folder_says_what_lives_there():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    silent = [
        f"{folder.relative_to(PACKAGE.parent)}/__init__.py has no docstring"
        for folder in sorted(folders)
        if not ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8")))
    ]
    report(silent)


def test_the_architecture_names_every_folder():
    page = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text("utf-8")
    rooms = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    report(
        [f"docs/architecture.md does not name {room}" for room in rooms if f"`{room}`" not in page]
    )


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
        "from shardwise.dispatch import catalog",
        "from shardwise import dispatch",
        "from ..dispatch.catalog import RULES",
        "from .. import dispatch",
        "def f():\n    import shardwise.dispatch.catalog",
        "from shardwise import DTensor",
        "import shardwise",
        "from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    from .. import dispatch",
        "import typing\nif typing.TYPE_CHECKING:\n    pass\nelse:\n    from .. import dispatch",
    ],
)
def test_upward_import_is_seen(tmp_path, text):
    house = play(
        tmp_path,
        {
            "core/__init__.py": "",
            "core/layout.py": text,
            "dispatch/__init__.py": "",
            "dispatch/catalog.py": "",
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
            "__init__.py": "from .dispatch import catalog\nfrom .core.layout import Layout",
            "core/__init__.py": "from .layout import Layout",
            "core/layout.py": (
                "import typing\nfrom . import sizes\n"
                "if typing.TYPE_CHECKING:\n    from ..dispatch import catalog"
            ),
            "core/sizes.py": "import torch.distributed",
            "dispatch/__init__.py": "",
            "dispatch/catalog.py": "from ..core import Layout",
            "interop/__init__.py": "from torch.distributed.tensor import DTensor",
            "cli.py": "import shardwise",
        },
    )
    assert unknown_rooms(house[0]) == []
    assert layer_faults(*house) == []
    assert forbidden_faults(house[1]) == []
    assert cycle_faults(*house) == []


def test_siblings_of_one_layer_stay_apart(tmp_path):
    house = play(tmp_path, {"comm.py": "", "launch.py": "import os\nfrom .comm import Comm"})
    assert [fault.partition(" ")[0] for fault in layer_faults(*house)] == ["shardwise/launch.py:2:"]


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


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "import torch.utils._pytree as pytree",
        "from torch import _C",
        "from torch._C import _distributed_c10d",
        "from torch.utils.checkpoint import _CachingTorchDispatchMode",
        "x = torch._C.DispatchKey",
        "x = torch.__version__",
        "x = torch.Tensor._make_wrapper_subclass",
        "from torch.optim import optimizer as hooks\nx = hooks._global_optimizer_pre_hooks",
        "x = getattr(torch.autograd, '_get_sequence_nr', None)",
        "import importlib\nx = importlib.import_module('torch._inductor.ir')",
        "import sys\nx = sys.modules.get('torch._inductor.lowering')",
        "import sys\nx = sys._getframe(1)",
        "import inspect\nx = inspect.currentframe()",
        "from inspect import currentframe",
        "def f(frame):\n    return frame.f_back",
        "import typing\nif typing.TYPE_CHECKING:\n    from torch._ops import OpOverload",
    ],
)
def test_internal_is_seen(tmp_path, text):
    play(tmp_path, {"core/__init__.py": "", "core/a.py": text, "_torch/__init__.py": text})
    faults = internals_faults(tmp_path / "shardwise")
    line = text.count("\n") + 1
    assert [fault.partition(" ")[0] for fault in faults] == [f"shardwise/core/a.py:{line}:"]


def test_what_torch_promises_is_no_internal(tmp_path):
    text = """
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import guard_or_false
x = torch.ops.aten._unsafe_view.default, torch.Tensor.__getitem__, nn.Module.__mro__
y = getattr(x, "_layout"), x._schema, {"torch._lowrank": 1}
"""
    play(tmp_path, {"core.py": text})
    assert internals_faults(tmp_path / "shardwise") == []


def test_internal_that_is_not_taken_by_name_is_seen(tmp_path):
    text = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from torch._ops import OpOverload
else:
    OpOverload = names.find("torch._ops.OpOverload", "")
key = torch._C.DispatchKey
"""
    play(tmp_path, {"_torch/__init__.py": "", "_torch/dispatch.py": text})
    faults = unnamed_faults(tmp_path / "shardwise")
    assert faults == ["shardwise/_torch/dispatch.py:7: not by Names.find"]


def test_crowded_folder_is_seen(tmp_path):
    play(tmp_path, {f"core/m{number}.py": "" for number in range(MOST_MODULES + 1)})
    assert crowded(tmp_path / "shardwise") == [f"shardwise/core has {MOST_MODULES + 1} modules"]
