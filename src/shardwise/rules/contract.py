"""Products written with letters: `contract`, and how einsum and matmul are spelled in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.core.chunks import Size, equal
from shardwise.rules.notation import Dims, linear_choices, parse, pattern_choices, sharded_choices
from shardwise.rules.rule import Call, Choice, Rule, Table, table

aten = torch.ops.aten


def contract(equation: str, *operands: Any) -> Any:
    """`torch.einsum` of an equation without `...`, broadcasting or repeated letters.

    Dense: how torch leaves the dims in memory depends on sizes, which parts have of their own.
    """
    return torch.einsum(equation, *operands).contiguous()


def contract_choices(call: Call) -> Iterator[Choice]:
    """Any letter may be sharded; one that is summed over leaves a Partial."""
    inputs, output = split_equation(call.args[0])
    dims = Dims(tuple(map(tuple, inputs)), (tuple(output),))
    yield call.replicated()
    yield from sharded_choices(call, dims, frozenset(), (), "sum")
    yield from linear_choices(call, [(i,) for i in range(len(inputs))])


def split_equation(equation: str) -> tuple[list[str], str]:
    """
    >>> split_equation("ab,bc->ac")
    (['ab', 'bc'], 'ac')
    """
    left, _, right = equation.partition("->")
    return left.split(","), right


def spelled(equation: str, shapes: Sequence[Sequence[Size]]) -> str | None:
    """An einsum equation for `contract`, or None where that has no form for it.

    >>> spelled("...k, kn", [(2, 3, 4), (4, 5)])
    'ABk,kn->ABn'
    """
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    if len(operands) != len(shapes):
        return None
    batch = max(
        (len(s) - len(o) + 3 for o, s in zip(operands, shapes, strict=True) if "..." in o),
        default=0,
    )
    used = {c for c in equation if c.isalpha()}
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in used]
    if batch > len(free):
        return None
    letters = "".join(free[:batch])
    found = []
    for operand, shape in zip(operands, shapes, strict=True):
        here = letters[batch - (len(shape) - len(operand) + 3) :] if "..." in operand else ""
        found.append(operand.replace("...", here))
    if not arrow:
        named = [c for o in operands for c in o if c.isalpha()]
        right = letters + "".join(sorted(c for c in set(named) if named.count(c) == 1))
    output = right.replace("...", letters)
    return f"{','.join(found)}->{output}" if _plain(found, output, shapes) else None


def _plain(operands: Sequence[str], output: str, shapes: Sequence[Sequence[Size]]) -> bool:
    """Each letter stands once in an operand, has one size, and comes from somewhere."""
    sizes: dict[str, Size] = {}
    for letters, shape in zip(operands, shapes, strict=True):
        if len(letters) != len(shape) or len(set(letters)) != len(letters):
            return False
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                return False
    return len(set(output)) == len(output) and set(output) <= sizes.keys()


# -- matmul ----------------------------------------------------------------------------------

#: By whether each operand has more than one dim.
_MATMUL = {
    (False, False): parse("k, k -> "),
    (True, False): parse("... m k, k -> ... m"),
    (False, True): parse("k, ... k n -> ... n"),
    (True, True): parse("... m k, ... k n -> ... m n"),
}


def product(left: Any, right: Any) -> Any:
    """`torch.matmul`, dense as `contract` is."""
    return torch.matmul(left, right).contiguous()


def matmul_choices(call: Call) -> Iterator[Choice]:
    """All shapes that `torch.matmul` takes, as one product: nothing is merged into rows."""
    left, right = call.inputs
    pattern = _MATMUL[left.ndim > 1, right.ndim > 1]
    yield from pattern_choices(pattern, call, linear=((0,), (1,)))


def matmul_letters(left: Sequence[Size], right: Sequence[Size]) -> tuple[str, str, str]:
    """Letters for both operands and the result; a stretched dim has a letter of its own.

    >>> matmul_letters((2, 3, 4), (4, 5))
    ('AMK', 'KN', 'AMN')
    """
    batch = max(len(left) - 2, len(right) - 2, 0)
    names = "ABCDEFGHIJ"[:batch]
    results = list(names)
    sides = []
    for shape, other in ((left, right), (right, left)):
        letters = []
        for place in range(batch):
            at, its = len(shape) - 2 - batch + place, len(other) - 2 - batch + place
            if at < 0:
                continue
            stretched = its >= 0 and not equal(shape[at], other[its]) and equal(shape[at], 1)
            letters.append(names[place].lower() if stretched else names[place])
        sides.append("".join(letters))
    rows, columns = "M" if len(left) > 1 else "", "N" if len(right) > 1 else ""
    return f"{sides[0]}{rows}K", f"{sides[1]}K{columns}", "".join(results) + rows + columns


RULES: Table = table(
    ((contract,), Rule(contract_choices, "einsum")),
    ((product, aten.matmul.default), Rule(matmul_choices, "... m k, ... k n -> ... m n")),
)
