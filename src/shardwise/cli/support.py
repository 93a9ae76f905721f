"""shardwise doctor and rules: what works on this machine, and which ops have rules."""

from __future__ import annotations

import difflib
import importlib.util
import os
import platform
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardwise import __version__
from shardwise._torch import autograd, c10d, compat, dispatch, dynamo, effects, frames, functions
from shardwise._torch.dispatch import has_kernel
from shardwise.cli.console import console
from shardwise.core.placements import short
from shardwise.dispatch.catalog import find_rule
from shardwise.dispatch.rule import Call, Choice, Rule, TensorMeta, parse
from shardwise.dtensor.fallback import decomposition_of
from shardwise.errors import ArgumentError
from shardwise.launch import LOOPBACK, launch
from shardwise.ops.catalog import RULES

#: The files of shardwise._torch, but for compat, which is examined as "torch".
INTERNALS = (
    dispatch,
    functions,
    autograd,
    c10d,
    dynamo,
    effects,
    frames,
)

MARKS = {True: "[green]works[/green]", False: "[red]fails[/red]", None: "[dim]note [/dim]"}


@dataclass(frozen=True)
class Finding:
    """`ok` is None for a note that is neither good nor bad."""

    name: str
    ok: bool | None
    text: str


def run_doctor() -> int:
    """0 when nothing fails, else 1."""
    out = console()
    out.print(f"shardwise {__version__}, Python {platform.python_version()}, {platform.platform()}")
    broken = 0
    for examine in (_torch, _simulation, _gloo, _nccl, _ports, _cores, _kernels, _extras):
        found = _try(examine)
        out.print(f"{MARKS[found.ok]}  [bold]{found.name}[/bold]: ", end="")
        out.print(found.text, markup=False)
        broken += found.ok is False
    broken += _print_internals(out)
    return int(broken > 0)


def _print_internals(out: Console) -> int:
    """Print the probes of torch's internals; returns the number that failed."""
    table = Table("", "torch's internals", "what they are for, or what stops working", box=None)
    broken = 0
    for module in INTERNALS:
        found = module.probe()
        text = found.text or (module.__doc__ or "").partition("\n")[0]
        table.add_row(MARKS[found.ok], module.__name__.rpartition(".")[2], escape(text))
        broken += found.ok is False
    out.print(table)
    return broken


def _try(examine: Callable[[], Finding]) -> Finding:
    try:
        return examine()
    except Exception as error:
        return Finding(examine.__name__.lstrip("_"), False, f"{type(error).__name__}: {error}")


def _torch() -> Finding:
    found = compat.probe()
    return Finding("torch", found.ok, "; ".join(filter(None, (compat.VERSION, found.text))))


def _simulation() -> Finding:
    from shardwise import Shard, distribute_tensor, init_device_mesh, simulate

    with simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        right = float(x.sum()) == 4.0
    return Finding(
        "simulated ranks", right, "a sum over 2 ranks is right" if right else "wrong sum"
    )


def _add_up() -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return float(value)


def _gloo() -> Finding:
    if not dist.is_gloo_available():
        return Finding("gloo", False, "this torch has no gloo: processes on CPU cannot talk")
    right = launch(_add_up, 2) == [2.0, 2.0]
    return Finding("gloo", right, "2 processes added a number over loopback")


def _nccl() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", None, "none here: simulate() and gloo on CPU work, NCCL does not")
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    text = f"{torch.cuda.device_count()} × {', '.join(sorted(names))}"
    if not dist.is_nccl_available():
        return Finding("GPU", False, f"{text}, but this torch has no NCCL")
    return Finding("GPU", True, f"{text}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")


def _ports() -> Finding:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
    port = os.environ.get("MASTER_PORT", "29500")
    with socket.socket() as usual:
        try:
            usual.bind((LOOPBACK, int(port)))
        except OSError as error:
            return Finding("ports", None, f"{port}, torchrun's, is not available: {error.strerror}")
    return Finding("ports", True, f"{port}, torchrun's, is free")


def _cores() -> Finding:
    text = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads for torch"
    if os.environ.get("OMP_NUM_THREADS") is None and (os.cpu_count() or 1) > 1:
        text += "; several processes on one machine want OMP_NUM_THREADS set"
    return Finding("CPU", None, text)


def _kernels() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding("Triton", None, "not installed: tables use torch's kernels")
    text = "fused kernels for tables" if torch.cuda.is_available() else "installed; needs a GPU"
    return Finding("Triton", True if torch.cuda.is_available() else None, text)


def _extras() -> Finding:
    names = ("highspy", "fbgemm_gpu", "torchrec", "transformers")
    found = [name for name in names if importlib.util.find_spec(name) is not None]
    return Finding("also installed", None, ", ".join(found) or f"none of {', '.join(names)}")


#: In the example whose choices are shown: the size of a dim, and how many dims `...` stands for.
SIZE, BATCH_DIMS = 8, 2


def run_rules(op: str | None) -> None:
    if op is None:
        _coverage()
    else:
        for found in ops_named(op):
            _one(found)


def ops_named(name: str) -> list[Any]:
    """The ops that a name stands for: `mm`, `torch.mm`, `aten.mm` or `aten.mm.default`.

    >>> ops_named("aten.mm.default")
    [<OpOverload(op='aten.mm', overload='default')>]
    """
    parts = name.replace("::", ".").removeprefix("torch.").removeprefix("ops.").split(".")
    namespace = "aten" if len(parts) == 1 or not hasattr(torch.ops, parts[0]) else parts.pop(0)
    space = getattr(torch.ops, namespace)
    packet = getattr(space, parts[0], None)
    if packet is None:
        near = difflib.get_close_matches(parts[0], dir(space), n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ArgumentError(f"torch has no op {name!r}.{hint}")
    overloads = parts[1:] or _overloads_of_tensors(packet) or packet.overloads()
    found = [getattr(packet, overload, None) for overload in overloads]
    if None in found:
        raise ArgumentError(f"{packet} has the overloads {', '.join(packet.overloads())}.")
    return found


def _overloads_of_tensors(packet: Any) -> list[str]:
    """The overloads that take or give tensors, without those for `out=`."""
    found = [o for o in packet.overloads() if "out" not in o.split("_")]
    return [o for o in found if any(_has_tensors(getattr(packet, o)))]


def _has_tensors(op: Any) -> tuple[bool, bool]:
    """Whether tensors are among the arguments; whether they are among the results."""
    schema = op._schema
    takes, gives = (
        any("Tensor" in str(value.type) for value in values)
        for values in (schema.arguments, schema.returns)
    )
    return takes, gives


def how(op: Any) -> str:
    """How an op is covered."""
    if op in RULES:
        return "a rule of its own"
    if find_rule(op) is not None:
        return "the rule of its kind"
    # The dispatcher does not know a few ops that only TorchScript uses.
    known = has_kernel(op.name())
    return "decomposed" if known and decomposition_of(op) is not None else "no rule"


def _coverage() -> None:
    counts: Counter[str] = Counter()
    for op in _aten():
        counts[how(op)] += 1
    total = counts.total()
    out = console()
    table = Table(title="Ops of aten", title_justify="left")
    table.add_column("covered by")
    table.add_column("overloads", justify="right")
    table.add_column("share", justify="right")
    for kind, count in counts.most_common():
        table.add_row(kind, f"{count:,}", f"{count / total:.0%}")
    out.print(table)
    out.print(f"{len(RULES):,} entries in the catalog. shardwise rules mm shows one.")
    names = sorted({str(op).rpartition(".")[0] for op in RULES if hasattr(op, "_schema")})
    out.print(Text(" ".join(name.removeprefix("aten.") for name in names)))


def _aten() -> Iterator[Any]:
    """Every overload that computes tensors from tensors and writes to no `out`."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            op = getattr(packet, overload)
            if all(_has_tensors(op)) and not any(a.is_out for a in op._schema.arguments):
                yield op


def _one(op: Any) -> None:
    out = console()
    rule = find_rule(op)
    out.print(Text(f"{op}: {how(op)}", style="bold"))
    if rule is None:
        return
    out.print(Text(f"  {rule.text}"))
    choices = example_choices(op, rule)
    if choices is None:
        out.print(Text("  its choices depend on the call: shardwise.debug.explain shows them"))
        return
    table = Table()
    table.add_column("inputs")
    table.add_column("outputs")
    for choice in choices:
        table.add_row(Text(short(choice.inputs)), Text(short(choice.outputs)))
    out.print(table)


def example_choices(op: Any, rule: Rule) -> list[Choice] | None:
    """The choices for a small call, where the rule is one line of the notation."""
    try:
        pattern = parse(rule.text)
        inputs = tuple(map(_meta, pattern.inputs))
        outputs = tuple(map(_meta, pattern.outputs))
        call = Call(op, inputs, {}, inputs, outputs, axis_size=2)
        return list(dict.fromkeys(rule.choices(call)))
    except Exception:  # a rule that needs more than shapes
        return None


def _meta(letters: tuple[str, ...]) -> TensorMeta:
    num_dims = sum(BATCH_DIMS if letter == "..." else 1 for letter in letters)
    shape = (SIZE,) * num_dims
    stride = tuple(SIZE ** (num_dims - 1 - dim) for dim in range(num_dims))
    return TensorMeta(shape, stride, torch.float32)
