"""Products written with letters: einsum, bilinear and matmul as one op, `contract` or `product`.

Torch decomposes einsum into products of matrices and merges dims; a sharded inner dim would have to
be gathered. As one op, above autograd, every dim may be sharded. See Note [Above autograd].
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from shardwise._torch.dispatch import is_autocast
from shardwise.core.sizes import Size, equal, unrecorded
from shardwise.core.untraced import SkipsNone
from shardwise.dispatch.rule import (
    Call,
    Choice,
    Dims,
    Rule,
    Table,
    linear_choices,
    parse,
    pattern_choices,
    sharded_choices,
    table,
)
from shardwise.dtensor.autograd import direct_apply
from shardwise.dtensor.tensor import DTensor, run
from shardwise.ops.operands import all_distributed, as_view, fake

aten = torch.ops.aten


def contract(equation: str, *operands: Any) -> Any:
    """`torch.einsum` of an equation without `...`, broadcasting or repeated letters.

    Made contiguous: torch's strides depend on sizes, which differ for shards.
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


def as_contraction(equation: str, shapes: Sequence[Sequence[Size]]) -> str | None:
    """An einsum equation for `contract`, or None if there is no such form.

    >>> as_contraction("...k, kn", [(2, 3, 4), (4, 5)])
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
    """Whether no operand repeats a letter, each letter has one size, and the inputs have all."""
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
    """`torch.matmul`, contiguous like `contract`."""
    return torch.matmul(left, right).contiguous()


def matmul_choices(call: Call) -> Iterator[Choice]:
    """Every shape that `torch.matmul` takes, as one product without merged dims."""
    left, right = call.inputs
    pattern = _MATMUL[left.ndim > 1, right.ndim > 1]
    yield from pattern_choices(pattern, call, linear=((0,), (1,)))


def matmul_letters(left: Sequence[Size], right: Sequence[Size]) -> tuple[str, str, str]:
    """Letters for both operands and the result; a broadcast dim has a letter of its own.

    >>> matmul_letters((2, 3, 4), (4, 5))
    ('AMK', 'KN', 'AMN')
    """
    batch = max(len(left) - 2, len(right) - 2, 0)
    names = "ABCDEFGHIJ"[:batch]
    sides = []
    for shape, other in ((left, right), (right, left)):
        letters = []
        for place in range(batch):
            at, its = len(shape) - 2 - batch + place, len(other) - 2 - batch + place
            if at < 0:
                continue
            broadcast = its >= 0 and not equal(shape[at], other[its]) and equal(shape[at], 1)
            letters.append(names[place].lower() if broadcast else names[place])
        sides.append("".join(letters))
    rows, columns = "M" if len(left) > 1 else "", "N" if len(right) > 1 else ""
    return f"{sides[0]}{rows}K", f"{sides[1]}K{columns}", names + rows + columns


# -- einsum and bilinear, above autograd -----------------------------------------------------


class Like(NamedTuple):
    """The shape of an operand's gradient, and whether it is complex."""

    shape: Any
    is_complex: bool

    @classmethod
    def of(cls, x: Any) -> Like:
        return cls(x.shape, x.is_complex())


class Contract(SkipsNone):
    """With `inner`, autocast applies to the products, but not to the operands and the result."""

    @staticmethod
    def forward(ctx: Any, equation: str, inner: bool, *operands: Any) -> Any:
        ctx.equation, ctx.inner = equation, inner
        ctx.likes = tuple(map(Like.of, operands))
        # Each is saved only for the gradients of the others.
        wanted = ctx.needs_input_grad[2:]
        others = [sum(wanted) > wanted[number] for number in range(len(operands))]
        ctx.kept = any(others)
        if ctx.kept:  # else backward may run twice: nothing is saved
            kept = (x if o else None for x, o in zip(operands, others, strict=True))
            ctx.save_for_backward(*kept)
        return _run_contract(equation, inner, operands)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        inputs, output = split_equation(ctx.equation)
        operands = ctx.saved_tensors if ctx.kept else (None,) * len(inputs)
        grads: list[Any] = []
        for number, wanted in enumerate(ctx.needs_input_grad[2:]):
            # The product of the result's gradient with the other operands.
            letters = [output, *inputs[:number], *inputs[number + 1 :]]
            factors = [grad, *operands[:number], *operands[number + 1 :]]
            like = ctx.likes[number]
            made = spread(inputs[number], like, letters, factors, ctx.inner) if wanted else None
            grads.append(made)
        return None, None, *grads


_apply_contract = direct_apply(Contract)


def contracted(equation: str, *operands: Any, inner: bool = False) -> Any:
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return _apply_contract(equation, inner, *operands)
    return _run_contract(equation, inner, operands)


def _run_contract(equation: str, inner: bool, operands: Sequence[Any]) -> Any:
    narrow = _cpu_autocast_dtype(operands[0]) if inner and is_autocast() else None
    if narrow is None or operands[0].dtype == torch.float64:
        return run(contract, equation, *operands)
    return run(contract, equation, *(x.to(narrow) for x in operands)).to(operands[0].dtype)


def spread(
    wanted: str, like: Like, letters: list[str], factors: list[Any], inner: bool = False
) -> Any:
    """The product with the letters of `wanted`; letters that no factor has are expanded."""
    known = "".join(c for c in wanted if any(c in s for s in letters))
    first, *rest = factors
    factors = [first, *(f.conj_physical() if f.is_complex() else f for f in rest)]
    found = contracted(f"{','.join(letters)}->{known}", *factors, inner=inner)
    for place, letter in enumerate(wanted):
        if letter not in known:
            found = found.unsqueeze(place)
    found = found.expand(like.shape) if found.shape != like.shape else found
    return found.real if found.is_complex() and not like.is_complex else found


def einsum(equation: str, tensors: list[Any], *, path: Any = None) -> Any:
    if is_autocast():
        tensors = _as_autocast(equation, tensors, path)
    distributed = all(type(t) is DTensor for t in tensors)
    letters = as_contraction(equation, [t.shape for t in tensors]) if distributed else None
    if letters is None:
        return aten.einsum.default.decompose(equation, tensors, path=path)
    inputs, output = split_equation(letters)
    if len(inputs) == 1 and len(inputs[0]) == len(output):
        return tensors[0].permute([inputs[0].index(letter) for letter in output])  # a view
    if len(tensors) > 1 and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        view = unrecorded(_returns_view, equation, _small_shapes(tensors))
        inputs, tensors = _summed_first(inputs, output, tensors)
        result = contracted(f"{','.join(inputs)}->{output}", *tensors)
        return as_view(result) if view else result
    return contracted(letters, *tensors)


def _small_shapes(tensors: list[Any]) -> tuple[tuple[int, ...], ...]:
    """Small shapes for which torch's einsum takes the same path."""
    return tuple(tuple(min(n, 2) if type(n) is int else 2 for n in t.shape) for t in tensors)


@functools.lru_cache(maxsize=1024)
def _returns_view(equation: str, shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Whether one device returns a view of the matrix product that it makes inside."""
    small = [torch.zeros(shape) for shape in shapes]
    return aten.einsum.default(equation, small)._is_view()


def _summed_first(
    inputs: list[str], output: str, tensors: list[Any]
) -> tuple[list[str], list[Any]]:
    """The operands, summed over the dims that only one of them has, as torch does first.

    So backward saves the sums, as on one device, and the operands may be written to.
    """
    found, sums = [], []
    for number, (letters, x) in enumerate(zip(inputs, tensors, strict=True)):
        shared = output + "".join(inputs[:number] + inputs[number + 1 :])
        alone = [d for d, c in enumerate(letters) if c not in shared and x.shape[d] != 1]
        if alone and not x.is_floating_point() and not x.is_complex():
            alone = []  # a sum of integers is wider
        found.append("".join(c for d, c in enumerate(letters) if d not in alone))
        sums.append(x.sum(alone) if alone else x)
    return found, sums


def _as_autocast(equation: str, tensors: list[Any], path: Any) -> list[Any]:
    """The operands in the dtype that one device uses for products under autocast.

    On the CPU autocast applies to the matrix products of torch's decomposition, but not to
    elementwise ones. We ask torch itself, with tiny tensors.
    """
    dtype = _cpu_autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    wide = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    kinds = tuple(zip(_small_shapes(tensors), (t.dtype for t in tensors), strict=True))
    steps = None if path is None else tuple(path)
    narrow = unrecorded(_einsum_dtype, equation, kinds, steps, dtype)
    if narrow == wide:
        return tensors
    return [t.to(narrow) if t.is_floating_point() else t for t in tensors]


def _cpu_autocast_dtype(x: Any) -> torch.dtype | None:
    """The dtype of autocast if it is on for `x` on the CPU; GPUs cast before the op arrives."""
    on = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return torch.get_autocast_dtype("cpu") if on else None


@functools.lru_cache(maxsize=1024)
def _einsum_dtype(
    equation: str,
    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...],
    path: tuple[int, ...] | None,
    dtype: torch.dtype,
) -> torch.dtype:
    small = [torch.zeros(shape, dtype=kind) for shape, kind in kinds]
    with torch.autocast("cpu", dtype):
        return aten.einsum.default(equation, small, path=path).dtype


def bilinear(left: Any, right: Any, weight: Any, bias: Any = None) -> Any:
    left, weight, right = operands = all_distributed(aten.bilinear.default, [left, weight, right])
    letters = as_contraction("...i,oij,...j->...o", [x.shape for x in operands])
    empty = any(type(n) is int and n == 0 for x in operands for n in x.shape)
    if letters is None or empty or not left.dtype == right.dtype == weight.dtype:
        aten.bilinear.default(fake(left), fake(right), fake(weight))  # torch's checks
    assert letters is not None, "torch takes only sizes that fit"
    out = contracted(letters, *operands, inner=True)
    return as_view(out) if bias is None else out + bias


RULES: Table = table(
    ((contract,), Rule(contract_choices, "einsum")),
    ((product, aten.matmul.default), Rule(matmul_choices, "... m k, ... k n -> ... m n")),
)

KERNELS: tuple[tuple[str, Any], ...] = (("einsum", einsum), ("bilinear", bilinear))
