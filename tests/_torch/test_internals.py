"""torch's internals: those here work, and one that is missing costs a feature, not the import."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from shardwise._torch import compat
from shardwise.cli import support

ROOM = Path(shardwise.__file__).parent / "_torch"
FILES = sorted(path.stem for path in ROOM.glob("*.py") if path.stem != "__init__")
WITH_NAMES = [name for name in FILES if name != "compat"]
PROGRAM = Path(__file__).parents[1] / "missing_names_program.py"


def room(file):
    return importlib.import_module(f"shardwise._torch.{file}")


@pytest.fixture(scope="module")
def run_without():
    """Runs each `(names, code)` where torch lacks these names; fails with what went wrong."""
    command = [sys.executable, "-W", "ignore", PROGRAM]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as program:

        def run(jobs):
            program.stdin.write(json.dumps(jobs) + "\n")
            program.stdin.flush()
            answer = json.loads(program.stdout.readline())
            faults = [
                f"without {', '.join(names)}:\n{code}\n{fault}"
                for (names, code), fault in zip(jobs, answer, strict=True)
                if fault
            ]
            if faults:
                pytest.fail("\n".join(faults), pytrace=False)

        yield run


@pytest.mark.parametrize("file", FILES)
def test_this_torch_behaves_as_needed(file):
    found = room(file).probe()
    assert found.ok is not False, found.text


def test_the_doctor_examines_every_file():
    assert {part.__name__ for part in support.INTERNALS} == {room(f).__name__ for f in WITH_NAMES}


def test_a_file_without_one_of_its_names_says_what_is_lost(run_without):
    run_without(
        [
            ([name], f"check_room({file!r}, {name!r})")
            for file in WITH_NAMES
            for name in room(file)._names.known
        ]
    )


def test_a_missing_name_never_stops_the_import(run_without):
    """With all names of a file missing at once: whatever one alone would stop, they stop together.

    What a file itself makes of one missing name is tested above.
    """
    run_without([(list(room(file)._names.known), "import_all()") for file in WITH_NAMES])


_WORLD = """
import_all()
from shardwise import Shard
world = shardwise.simulate(2)
world.__enter__()
mesh = shardwise.init_device_mesh("cpu", (2,))
"""
_TENSOR = f"""{_WORLD}
x = shardwise.ones(4, 6, device_mesh=mesh, placements=[Shard(0)])
assert float((x @ x.t()).sum()) == 96
"""

#: A feature that needs a name, and what raises then; all other features go on working.
FEATURES = {
    "torch._C._swap_tensor_impl": "lambda: x[:2].t_()",
    "torch.utils._python_dispatch.TorchDispatchMode": "shardwise.debug.CommDebugMode",
    "torch._fused_sdp_choice": "lambda: attend(q, q, q, is_causal=True)",
    "torch._decomp.decomposition_table": "lambda: torch.ops.aten.repeat.default(x, [2, 1])",
    "torch.library._register_effectful_op": "lambda: check_place('a sharded module', '')",
}
_FEATURES = f"""{_TENSOR}
from shardwise.effects import check_place
attend = torch.nn.functional.scaled_dot_product_attention
q = shardwise.ones(2, 2, 4, 4, device_mesh=mesh, placements=[Shard(0)])
assert attend(q, q, q).shape == q.shape
""" + "".join(f"expect({use}, {name!r})\n" for name, use in FEATURES.items())

#: Names with a substitute, or of features that the program below does not use.
WITHOUT_LOSS = [
    "torch._C._VariableFunctions",
    "torch._C._dispatch_get_registrations_for_dispatch_key",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._is_any_autocast_enabled",
    "torch._embedding_bag",
    "torch._inductor.ir.FallbackKernel",
    "torch._library.opaque_object.register_opaque_type",
]


def test_what_needs_a_missing_name_says_so_and_the_rest_works(run_without):
    wrapper, kernels = (
        "torch.Tensor._make_wrapper_subclass",
        "torch._C._dispatch_has_kernel_for_dispatch_key",
    )
    tables, frames = "torch.distributed.distributed_c10d._world", "sys._getframe"
    make = f"lambda: shardwise.ones(4, device_mesh=mesh), {wrapper!r}, 'no DTensor can be made'"
    multiply = f"lambda: shardwise.ones(4, device_mesh=mesh) * 2, {kernels!r}"
    watch = f"with shardwise.debug.CommDebugMode():\n    expect(x.full_tensor, {frames!r})"
    run_without(
        [
            ([*FEATURES, *WITHOUT_LOSS], _FEATURES),
            ([frames], f"{_TENSOR}\n{watch}"),
            ([wrapper], f"{_WORLD}\nexpect({make})"),
            ([kernels], f"{_WORLD}\nexpect({multiply})"),
            ([tables], f"import_all()\nexpect(shardwise.simulate(2).__enter__, {tables!r})"),
        ]
    )


def test_a_version_that_is_not_tested_is_told(monkeypatch):
    monkeypatch.setattr(compat, "VERSION", "2.14.0+cpu")
    assert compat.probe() == compat.Probe(False, "shardwise is tested on 2.11 to 2.13")


def test_a_probe_that_finds_another_behaviour_says_what_is_lost():
    names = compat.Names()
    assert names.probe(lambda: False, "this fails") == compat.Probe(False, "this fails")

    def raises():
        raise ValueError("other arguments")

    found = names.probe(raises, "this fails")
    assert found == compat.Probe(False, "this fails (ValueError: other arguments)")
