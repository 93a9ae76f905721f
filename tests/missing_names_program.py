"""Runs code in interpreters in which torch lacks some private names; used by tests/_torch.

Reads lists of `[names, code]`, one a line, and writes for each pair what went wrong, or "". Each
runs in a process of its own, forked before shardwise is imported: that saves the import of torch.
"""

import functools
import importlib
import json
import os
import sys
import traceback

import torch
import torch.distributed.checkpoint  # noqa: F401

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "src"))
import shardwise
from shardwise._torch import compat
from shardwise.errors import ShardwiseError

#: Where names are that take long to import.
SLOW = (
    "torch._decomp.",
    "torch._dynamo.",
    "torch._inductor.",
    "torch.distributed._functional_collectives",
    "torch.distributed.tensor.",
    "torch.fx.experimental.",
    "torch.utils._sympy.",
)


def take_away(names: set[str], only_ask: bool) -> None:
    """Without import of slow names where a job only asks whether they are there."""
    real = compat.resolve

    def resolve(name: str):
        if name in names:
            raise AttributeError(name)
        return object() if only_ask and name.startswith(SLOW) else real(name)

    compat.resolve = resolve


def expect(use, *texts: str) -> None:
    """`use()` raises an error of this package that has these texts in it."""
    try:
        use()
    except ShardwiseError as error:
        said = str(error)
    else:
        raise AssertionError(f"nothing raised; expected {texts}")
    assert all(text in said for text in texts), f"{texts} expected, found: {said}"


def import_all() -> None:
    for name in dir(shardwise):
        getattr(shardwise, name)
    for name in shardwise.__all__:
        getattr(shardwise, name)


def check_room(file: str, name: str) -> None:
    """A file without one of its names: what stood for it raises, and the probe says so."""
    module = importlib.import_module(f"shardwise._torch.{file}")
    without, substitute = module._names.known[name]
    found = module.probe()
    assert found.ok is (None if substitute else False), found
    assert f"no {name}: {without}" in found.text, found
    if substitute:
        module._names.require()
        return
    values = list(vars(module).values())
    later = [
        value()
        for value in values
        if isinstance(value, functools.partial) and value.func == module._names.find
    ]
    missing = [v for v in (*values, *later) if type(v) is compat.Missing and v._name == name]
    assert missing, f"nothing stands for {name}"
    for stand_in in missing:
        expect(stand_in, name, stand_in._without)
        expect(lambda: stand_in.attribute, name)  # noqa: B023
        expect(lambda: isinstance(1, stand_in), name)  # noqa: B023
        expect(_derived(stand_in), name)
    expect(module._names.require, name)


def _derived(base):
    class Derived(base):
        def __init__(self, value: int) -> None:
            self.value = value

    return lambda: Derived(1)


def run(names: list[str], code: str) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        found = ""
        try:
            take_away(set(names), only_ask=code.startswith("check_room"))
            exec(code, globals())
        except BaseException:
            found = traceback.format_exc()
        with os.fdopen(writing, "w") as pipe:
            pipe.write(found)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    status = os.waitpid(child, 0)[1]
    return found or ("" if status == 0 else f"the process ended with status {status}")


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps([run(*job) for job in json.loads(line)]), flush=True)
