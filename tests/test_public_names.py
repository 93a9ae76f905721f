"""What may be imported, and what importing it brings along."""

import importlib
import inspect
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest
import torch

import shardwise
import shardwise.embedding
import shardwise.shard
from shardwise import errors

HERE = Path(__file__).resolve().parent
PACKAGES = (
    "checkpoint",
    "debug",
    "embedding",
    "interop",
    "launch",
    "parallel",
    "planner",
    "report",
    "shard",
    "testing",
)
MODULES = (
    "shardwise",
    *(f"shardwise.{name}" for name in PACKAGES),
    "shardwise.interop.torchrec",
)
#: Public, but not for `import *`: torch's optimizers and the placement have these names.
BY_NAME = {"shardwise.embedding": ["SGD", "Adagrad", "Adam"], "shardwise.shard": ["Shard"]}


def parameters(value):
    """The parameters of a function or class of ours, in brackets; the annotations left out."""
    plain = (bool, int, float, str, type(None))
    if isinstance(value, type) and issubclass(value, (Exception, Enum, torch.Tensor)):
        return ""
    if not getattr(value, "__module__", "").startswith("shardwise") or not callable(value):
        return ""
    shown = []
    for each in inspect.signature(value).parameters.values():
        if each.default is not each.empty and not isinstance(each.default, plain):
            each = each.replace(default=...)
        shown.append(each.replace(annotation=each.empty))
    return str(inspect.Signature(shown)).replace("Ellipsis", "...")


def public_names():
    for module in map(importlib.import_module, MODULES):
        for name in [*module.__all__, *BY_NAME.get(module.__name__, [])]:
            yield f"{module.__name__}.{name}{parameters(getattr(module, name))}"


def test_every_public_name_and_its_parameters():
    """Whoever changes one changes the list: `python tests/test_public_names.py` prints it."""
    listed = (HERE / "public_names.txt").read_text().splitlines()
    assert list(public_names()) == listed


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_there_once(module):
    found = importlib.import_module(module)
    assert len(set(found.__all__)) == len(found.__all__)
    for name in found.__all__:
        assert getattr(found, name, None) is not None, name


def own_members(kind):
    return {name for name in dir(kind) if not name.startswith("_")} - set(dir(torch.Tensor))


def test_members_of_the_tensors():
    ours = {"device_mesh", "from_local", "full_tensor", "placements", "redistribute", "to_local"}
    assert own_members(shardwise.DTensor) == ours | {"wrap"}
    assert own_members(shardwise.LocalTensor) == {
        "agreed",
        "held_like",
        "on_rank",
        "per_rank",
        "ranks",
    }
    assert own_members(shardwise.shard.ShardedTensor) == {
        *own_members(shardwise.DTensor),
        "grad_reduction",
        "local_shards",
        "local_tensor",
        "metadata",
        "over",
        "process_group",
        "reshard",
        "resharded",
        "sharding_spec",
    }


def test_wrap_is_deprecated():
    with shardwise.simulate(2):
        x = shardwise.ones(4, device_mesh=shardwise.init_device_mesh("cpu", (2,)))
        with pytest.warns(DeprecationWarning, match="from_local"):
            again = shardwise.DTensor.wrap(x._local, x._layout)
        assert torch.equal(again.full_tensor().agreed(), torch.ones(4))


def test_every_error_is_public():
    for name, value in vars(errors).items():
        if isinstance(value, type) and value.__module__ == "shardwise.errors":
            assert getattr(shardwise, name) is value


def test_optimizers_of_torch_are_not_replaced():
    public = set(shardwise.embedding.__all__)
    assert not public & {name for name in dir(torch.optim) if name[0].isupper()}


def test_the_api_page_has_every_package():
    page = (HERE.parent / "docs" / "api" / "index.md").read_text().splitlines()
    for module in ("shardwise.front", *MODULES[1:]):
        assert f"::: {module}" in page


def test_the_mesh_is_torchs_own():
    from torch.distributed import device_mesh

    assert shardwise.DeviceMesh is device_mesh.DeviceMesh
    with shardwise.simulate(2):
        assert type(shardwise.init_device_mesh("cpu", (2,))) is device_mesh.DeviceMesh


def test_errors_are_caught_as_the_builtins_that_ordinary_code_names():
    assert issubclass(shardwise.LayoutError, ValueError)
    assert issubclass(shardwise.ArgumentError, TypeError)
    assert issubclass(shardwise.UnsupportedError, NotImplementedError)
    assert issubclass(shardwise.WorldError, RuntimeError)
    assert issubclass(shardwise.RankMismatchError, RuntimeError)
    assert issubclass(shardwise.MixedTensorsError, NotImplementedError)
    assert issubclass(shardwise.RedistributionError, RuntimeError)
    for name in shardwise.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(shardwise, name), shardwise.ShardwiseError)


def test_what_shardwise_replaces_is_not_imported():
    """Nor torch's compiler, which takes longer to import than all the rest."""
    program = """
import sys, shardwise, shardwise.debug, shardwise.shard
for name in ("torch.distributed.tensor", "torch.distributed._shard", "torch._dynamo"):
    assert name not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_packages_need_no_import_of_their_own():
    program = """
import sys, shardwise
assert "torch" not in sys.modules
for name in sys.argv[1:]:
    assert getattr(shardwise, name) is sys.modules[f"shardwise.{name}"]
    assert name in dir(shardwise)
assert not hasattr(shardwise, "tensors")
for name in ("torch.distributed.tensor", "torch.distributed._shard"):
    assert name not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", program, *PACKAGES], check=True, timeout=60)


if __name__ == "__main__":
    print(*public_names(), sep="\n")
