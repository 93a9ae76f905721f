"""shardwise rules: which ops have rules, and what one of them allows."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from shardwise._torch.dispatch import has_kernel
from shardwise.cli.console import console
from shardwise.core.placements import short
from shardwise.dispatch.catalog import find_rule
from shardwise.dispatch.notation import parse
from shardwise.dispatch.rule import Call, Choice, Rule, TensorMeta
from shardwise.dtensor.fallback import decomposition_of
from shardwise.errors import ArgumentError
from shardwise.ops.catalog import RULES

#: In the example whose choices are shown: the size of a dim, and how many dims `...` stands for.
SIZE, BATCH_DIMS = 8, 2


def run_rules(op: str | None) -> None:
    if op is None:
        _coverage()
    else:
        for found in ops_named(op):
            _one(found)


def ops_named(name: str) -> list[Any]:
    """The ops that a name stands for: `mm`, `aten.mm` or `aten.mm.default`.

    >>> ops_named("aten.mm.default")
    [<OpOverload(op='aten.mm', overload='default')>]
    """
    parts = name.replace("::", ".").removeprefix("torch.ops.").split(".")
    namespace = "aten" if len(parts) == 1 or not hasattr(torch.ops, parts[0]) else parts.pop(0)
    space = getattr(torch.ops, namespace)
    packet = getattr(space, parts[0], None)
    if packet is None:
        near = difflib.get_close_matches(parts[0], dir(space), n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ArgumentError(f"torch has no op {name!r}.{hint}")
    overloads = parts[1:] or [o for o in packet.overloads() if "out" not in o.split("_")]
    found = [getattr(packet, overload, None) for overload in overloads]
    if None in found:
        raise ArgumentError(f"{packet} has the overloads {', '.join(packet.overloads())}.")
    return found


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
            takes = any("Tensor" in str(a.type) for a in op._schema.arguments)
            gives = any("Tensor" in str(r.type) for r in op._schema.returns)
            if takes and gives and not any(a.is_out for a in op._schema.arguments):
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
