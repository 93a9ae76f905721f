"""Ops on lists of tensors give what the op for one tensor gives, whatever the layouts in a list."""

import math

import pytest
import torch
from parity import whole

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.core.placements import NormPartial
from shardwise.debug import CommDebugMode
from shardwise.dtensor.foreach import single_form

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SHAPES = [(7, 5), (3, 7), (5, 3), (3, 5), (1, 3), (3, 3)]
LISTS = {
    "sharded": [[S0], [S1], [S0], [Shard(1, (0, 3, 1, 1))], [S0], [S1]],
    "mixed": [[S0], [R], None, [S1], [R], [S0]],
    "one is Partial": [[S0], [R], [Partial()], [S1], [R], [S0]],
}
aten = torch.ops.aten
OPS = [
    getattr(packet, name)
    for packet in (getattr(aten, name) for name in dir(torch) if name.startswith("_foreach_"))
    for name in packet.overloads()
    if not name.endswith("out")
]


def numbers(seed):
    torch.manual_seed(seed)
    return [torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1 for shape in SHAPES]


def laid(mesh, plan, tensors):
    return [
        t
        if placements is None
        else shardwise.distribute_tensor(t, mesh, [R] * mesh.ndim).redistribute(
            placements=placements
        )
        for t, placements in zip(tensors, plan, strict=True)
    ]


def arguments(op, lay):
    """The op's arguments: lists of tensors laid out by `lay`, of numbers, and numbers."""
    given = []
    for position, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if kind == "List[Tensor]":
            given.append(lay(numbers(position)))
        elif kind == "List[number]":
            given.append([0.1 * (i + 1) for i in range(len(SHAPES))])
        elif kind == "number" and not argument.kwarg_only:
            given.append(0.5)
        elif kind == "Tensor":
            given.append(torch.tensor(0.5, dtype=torch.float64))
    return given


def is_tested(op):
    form = single_form(op)
    names = ("_foreach_mm", "_foreach_copy")  # other shapes; no autograd
    return (
        form is not None
        and isinstance(arguments(op, list)[0], list)
        and not (op._schema.name.endswith(names))
    )


def test_each_op_has_a_form_for_one_tensor():
    """But a sum of powers, and those that take a tensor of one number for each."""
    missing = {str(op).removeprefix("aten._foreach_") for op in OPS if single_form(op) is None}
    assert missing <= {
        "powsum.Scalar",
        *(f"{name}.Tensor" for name in ("addcmul", "addcmul_", "addcdiv", "addcdiv_")),
    }


@pytest.mark.parametrize("plan", LISTS)
@pytest.mark.parametrize("op", list(filter(is_tested, OPS)), ids=str)
def test_every_op(mesh, op, plan):
    alone = arguments(op, list)
    sharded = arguments(op, lambda tensors: laid(mesh, LISTS[plan], tensors))
    expected, found = op(*alone), op(*sharded)
    if op._schema.is_mutable:
        expected, found = alone[0], sharded[0]
        assert [x._version for x in found] == [1] * len(SHAPES)
        placed = [list(x.placements) if isinstance(x, DTensor) else None for x in found]
        assert placed == LISTS[plan]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(one), other)


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, math.inf, 0.0])
def test_norms_follow_their_order(mesh, order):
    """Twice: the second call runs the plan of the first, for this order and no other."""
    xs = numbers(0)
    for other in (2.0, order, order):
        found = torch._foreach_norm(laid(mesh, LISTS["mixed"], xs), other)
        for one, x in zip(found, xs, strict=True):
            torch.testing.assert_close(whole(one), torch.linalg.vector_norm(x, other))


def test_a_norm_of_another_dtype(mesh):
    xs = [x.float() for x in numbers(0)]
    found = torch._foreach_norm(laid(mesh, LISTS["mixed"], xs), 2.0, torch.float64)
    for one, x in zip(found, torch._foreach_norm(xs, 2.0, torch.float64), strict=True):
        torch.testing.assert_close(whole(one), x)


def test_norms_of_shards_send_nothing(mesh):
    placed = laid(mesh, [[S0], [S1], [R]] * 2, numbers(0))
    with CommDebugMode() as comm:
        found = torch._foreach_norm(placed, 2.0)
    assert comm.get_total_counts() == 0
    assert [x.placements for x in found] == [
        (NormPartial(norm_type=2.0),),
        (NormPartial(norm_type=2.0),),
        (R,),
    ] * 2


def test_a_number_of_another_mesh(square):
    """Read once for all tensors that are not on its mesh, the plain one too."""
    line = shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("line",))
    xs = numbers(0)
    here = laid(square, [[S0, S1], [R, S0], [S1, R]], xs[:3])
    there = laid(line, [[S0], [S1]], xs[3:5])
    factor = DTensor.from_local(torch.tensor(0.5, dtype=torch.float64), line, [Partial()])
    every = [*here, *there, xs[5].clone()]
    with CommDebugMode() as comm:
        torch._foreach_mul_(every, factor)
    assert {event.axis for event in comm.events} == {"line"}
    for one, x in zip(every, xs, strict=True):
        torch.testing.assert_close(whole(one), x * 2)
    assert [x._version for x in every] == [1] * 6


def test_a_tensor_twice_and_its_view(mesh):
    x, y = laid(mesh, [[S0]] * 2, [torch.ones(8, 2), torch.ones(8, 2)])
    torch._foreach_add_([x, y, x, y[:, 1:]], 1.0)
    assert whole(x).tolist() == [[3.0, 3.0]] * 8
    assert whole(y).tolist() == [[2.0, 3.0]] * 8


def test_whole_numbers(mesh):
    xs = [torch.arange(6), torch.arange(4)]
    placed = laid(mesh, [[S0], [R]], xs)
    for found, expected in zip(torch._foreach_add(placed, 2), xs, strict=True):
        assert whole(found).tolist() == (expected + 2).tolist()
    for found, expected in zip(torch._foreach_add(placed, 0.5), xs, strict=True):
        torch.testing.assert_close(whole(found), expected + 0.5)


def test_gradients_of_lists(mesh):
    xs = numbers(0)
    alone = [x.clone().requires_grad_() for x in xs]
    sharded = [x.requires_grad_() for x in laid(mesh, LISTS["sharded"], xs)]
    for leaves in (alone, sharded):
        norms = torch._foreach_norm(torch._foreach_mul(leaves, 2.0), 2.0)
        torch.stack(norms).sum().backward()
    for one, other in zip(sharded, alone, strict=True):
        torch.testing.assert_close(whole(one.grad), other.grad)


def test_lists_of_other_lengths_are_refused_as_on_one_device(mesh):
    xs = numbers(0)
    with pytest.raises(RuntimeError) as expected:
        torch._foreach_add(xs, xs[:2])
    with pytest.raises(RuntimeError) as found:
        torch._foreach_add(laid(mesh, LISTS["sharded"], xs), laid(mesh, [[S0]] * 2, xs[:2]))
    assert str(found.value) == str(expected.value)


def test_shapes_that_do_not_fit_are_refused(mesh):
    xs = laid(mesh, [[S0]] * 2, numbers(0)[:2])
    with pytest.raises(RuntimeError, match="broadcast"):
        torch._foreach_add(xs, xs[::-1])
