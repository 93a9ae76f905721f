"""A view that needed communication is a copy, and reads what one device's view would read."""

import copy
import gc
import weakref

import pytest
import torch
from parity import lay, through_file, whole
from view_programs import run_all

import shardwise
from shardwise import DTensor, LocalTensor, Partial, Replicate, Shard, UnsupportedError
from shardwise.debug import CommDebugMode

VIEWS = {
    "select": lambda t: t[1],
    "unbind": lambda t: t.unbind()[2],
    "reshape": lambda t: t.reshape(2, -1),
    "view": lambda t: t.view(6, 2),
    "flatten": lambda t: t.flatten()[1:],
    "diagonal": lambda t: t.view(6, 2).diagonal(),
    "unfold": lambda t: t.unfold(0, 2, 1),
    "as_strided": lambda t: t.as_strided((3,), (2,), 1),
    "view of as_strided": lambda t: t.as_strided((3,), (2,), 1)[1:],
    "view of a view": lambda t: t[1].view(3, 1).t(),
    "detached": lambda t: t[1].detach(),
    "data": lambda t: t[1].data,
}
WRITES = {
    "the tensor": lambda t: t.add_(1),
    "a view": lambda t: t[2:].mul_(3),
    "a view of a view": lambda t: t.t()[0:2].t().zero_(),
    "an entry": lambda t: t.__setitem__((1, 0), 9.0),
    "its data": lambda t: t.data.add_(1),
    "a view of its data": lambda t: t.data[1:].copy_(t[1:] * 2),
    "what is detached": lambda t: t.detach().add_(1),
    "a list": lambda t: torch._foreach_mul_([t], 2.0),
    "an op that is copied back": lambda t: t.cumsum_(0),
    "from another": lambda t: t.copy_(t.flip(0)),
}


def numbers():
    return torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_write_is_read_in_a_view_that_was_taken_before(mesh, view, write):
    alone, placed = numbers(), lay(numbers(), mesh, Shard(0))
    expected, found = VIEWS[view](alone), VIEWS[view](placed)
    for _ in range(2):
        WRITES[write](alone)
        WRITES[write](placed)
        torch.testing.assert_close(whole(found * 2), expected * 2)
        torch.testing.assert_close(whole(found), expected)


@pytest.mark.parametrize("fn", ["numpy", "tolist", "item", "to_local", "redistribute", "repr"])
def test_however_it_is_read(mesh, fn):
    x = lay(torch.zeros(4), mesh, Shard(0))
    first = x[0]
    x.add_(7)
    if fn == "redistribute":
        assert whole(first.redistribute(placements=[Partial()])) == 7
    elif fn == "to_local":
        assert first.to_local().agreed() == 7
    elif fn == "repr":
        assert "7." in repr(first)
    else:
        assert getattr(first, fn)() == 7


def test_only_a_write_makes_it_communicate_again(mesh):
    x, other = lay(numbers(), mesh, Shard(0)), lay(numbers(), mesh, Shard(0))
    row = x[1]
    with CommDebugMode() as comm:
        row + 1
        other.add_(1)
        row * 2
    assert comm.get_total_counts() == 0
    x.add_(1)
    with CommDebugMode() as comm:
        row + 1
        row + 1
    assert comm.get_total_counts() == 1
    (event,) = comm.events
    assert event.implicit
    assert "select" in event.op


def test_several_results_of_one_view_are_current_together(mesh):
    x = lay(numbers(), mesh, Shard(0))
    rows = x.unbind()
    x.add_(1)
    for row, expected in zip(rows, (numbers() + 1).unbind(), strict=True):
        torch.testing.assert_close(whole(row), expected)


def test_strict_mode_forbids_what_it_would_send(mesh):
    x = lay(numbers(), mesh, Shard(0))
    row = x[1]
    with shardwise.explicit_redistribution():
        row + 1
        x.add_(1)
        with pytest.raises(RuntimeError, match="select"):
            row + 1
    torch.testing.assert_close(whole(row), numbers()[1] + 1)


def test_gradients_are_those_of_one_device(mesh):
    def loss(leaf):
        x = leaf * 2
        row, rest = x[1], x.view(2, 6)
        before = (row * 3).sum()
        x.mul_(3)
        return before + (row * rest[0, :3]).sum()

    alone, placed = numbers().requires_grad_(), lay(numbers(), mesh, Shard(0)).requires_grad_()
    loss(alone).backward()
    loss(placed).backward()
    torch.testing.assert_close(whole(placed.grad), alone.grad)


def test_backward_still_notices_that_it_needs_what_was_written_to(mesh):
    x = lay(numbers(), mesh, Shard(0)).requires_grad_() * 1
    row = x[1]
    square = (row * row).sum()
    x.add_(1)
    assert whole(row)[0] == 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_it_follows_the_steps_of_an_optimizer(mesh, options):
    weight = torch.nn.Parameter(lay(numbers(), mesh, Shard(0)))
    row = weight.detach()[1]
    optimizer = torch.optim.AdamW([weight], lr=0.1, **options)
    for _ in range(2):
        weight.square().sum().backward()
        optimizer.step()
        torch.testing.assert_close(whole(row), whole(weight)[1])


def test_in_inference_mode(mesh):
    with torch.inference_mode():
        x = lay(numbers(), mesh, Shard(0))
        row = x[1]
        x.add_(1)
        torch.testing.assert_close(whole(row), numbers()[1] + 1)


def test_a_tensor_that_gets_other_data_leaves_its_views_behind(mesh):
    x = lay(numbers(), mesh, Shard(0))
    row, before = x[1], x.data
    x.data = lay(-numbers(), mesh, Shard(0))
    x.add_(1)
    torch.testing.assert_close(whole(row), numbers()[1])
    before.add_(1)
    torch.testing.assert_close(whole(row), numbers()[1] + 1)


def test_copies_follow_copies(mesh):
    x = lay(numbers(), mesh, Shard(0))
    other, part, row = copy.deepcopy([x, x[1:3], x[1]])
    other.add_(1)
    torch.testing.assert_close(whole(part), numbers()[1:3] + 1)
    torch.testing.assert_close(whole(row), numbers()[1] + 1)
    part.zero_()
    torch.testing.assert_close(whole(row), torch.zeros(3))
    torch.testing.assert_close(whole(x), numbers())
    row.add_(1)
    torch.testing.assert_close(whole(other)[1], torch.ones(3))
    torch.testing.assert_close(whole(x), numbers())


def test_what_is_saved_is_what_it_holds(mesh):
    x = lay(numbers(), mesh, Shard(0))
    row = x[1]
    x.add_(1)
    loaded = through_file(row)
    torch.testing.assert_close(whole(loaded), numbers()[1] + 1)
    loaded.add_(1)


def test_it_keeps_memory_alive_and_no_history(mesh):
    leaf = lay(numbers(), mesh, Shard(0)).requires_grad_()
    x = leaf * 2
    gone = []
    x.register_hook(gone.append)
    weakref.finalize(x, gone.append, "x")
    row = x.detach()[1]
    del x
    gc.collect()
    assert gone == ["x"]
    torch.testing.assert_close(whole(row), numbers()[1] * 2)


@pytest.mark.parametrize("reduce_op", ["max", "min", "product"])
def test_views_of_any_partial_are_views(mesh, reduce_op):
    parts = LocalTensor.per_rank(lambda rank: torch.arange(4.0).view(2, 2) + rank)
    x = DTensor.from_local(parts, mesh, [Partial(reduce_op)])
    with CommDebugMode() as comm:
        views = [x.detach(), x.t(), x[0], x.view(-1), x[:, 1:], x.unsqueeze(0).squeeze(0)]
    assert comm.get_total_counts() == 0
    x.clamp_(max=2.5)
    alone = whole(x)
    expected = [alone, alone.t(), alone[0], alone.view(-1), alone[:, 1:], alone]
    for view, values in zip(views, expected, strict=True):
        assert view.placements == (Partial(reduce_op),)
        torch.testing.assert_close(whole(view), values)


def test_a_reduction_is_not_remembered_past_a_write_to_the_data(mesh):
    x = DTensor.from_local(LocalTensor.per_rank(lambda rank: torch.ones(())), mesh, [Partial()])
    assert whole(x.square()) == 16
    x.data.mul_(2)
    assert whole(x.square()) == 64


def test_a_compiled_region_reads_what_was_written(mesh):
    x = lay(numbers(), mesh, Shard(0))
    row = x[1]
    compiled = torch.compile(lambda t: t * 2, backend="aot_eager")
    torch.testing.assert_close(whole(compiled(row)), numbers()[1] * 2)
    x.add_(1)
    torch.testing.assert_close(whole(compiled(row)), (numbers()[1] + 1) * 2)


def test_inside_a_compiled_region(mesh):
    def fn(x):
        row = x[1]
        x.add_(1)
        return row * 2

    x = lay(numbers(), mesh, Shard(0))
    found = torch.compile(fn, backend="aot_eager")(x)
    torch.testing.assert_close(whole(found), (numbers()[1] + 1) * 2)
    torch.testing.assert_close(whole(x), numbers() + 1)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("start", range(0, 120, 30))
def test_random_programs_read_what_one_device_reads(mesh_shape, start):
    with shardwise.simulate(4):
        run_all(start, start + 30, mesh_shape)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=repr)
def test_the_gradient_of_as_strided_does_not_miss_a_write(mesh, placement):
    leaf = shardwise.distribute_tensor(torch.arange(6.0), mesh, [placement]).requires_grad_()
    weight = lay(torch.ones(2, 3), mesh, Replicate())
    x = leaf * 1
    y = x.as_strided((3,), (1,), 1)
    z = y.view(3, 1)
    x.mul_(2)
    for view in (y, z):
        with pytest.raises(UnsupportedError, match="as_strided\\(\\) again after the write"):
            view.sum()
    for read in (DTensor.full_tensor, lambda view: torch.nn.functional.linear(view, weight)):
        with pytest.raises(UnsupportedError, match="as_strided\\(\\) again after the write"):
            read(y)
    with torch.no_grad():
        assert whole(y).tolist() == [2.0, 4.0, 6.0]
    x.as_strided((3,), (1,), 1).sum().backward()
    assert whole(leaf.grad).tolist() == [0.0, 2.0, 2.0, 2.0, 0.0, 0.0]


STRIDED = {
    "gaps": ((3,), (2,), 1),
    "repeats": ((2, 2), (1, 1), 0),
    "expanded": ((2, 3), (0, 1), 2),
    "turned": ((2, 3), (1, 2), 0),
    "turned with gaps": ((2, 2), (1, 3), 0),
    "dense": ((3, 2), (2, 1), 0),
    "one entry": ((1, 1), (7, 3), 5),
    "no entries": ((0, 2), (2, 1), 0),
}


@pytest.mark.parametrize("view", STRIDED)
@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()], ids=repr)
def test_what_is_made_of_a_strided_view_copies_where_one_device_does(mesh, view, placement):
    def run(x):
        strided = x.as_strided(*STRIDED[view])
        made = [strided, strided.contiguous(), strided.reshape(-1), strided.clone()]
        strides = [each.stride() for each in made]
        x.add_(10)
        return strides, made

    strides, made = run(torch.arange(6.0))
    placed = lay(torch.arange(6.0), mesh, Replicate()).redistribute(placements=[placement])
    found_strides, found = run(placed)
    assert found_strides == strides
    for one, expected in zip(found, made, strict=True):
        torch.testing.assert_close(whole(one), expected)


def test_a_step_without_history_leaves_as_strided_as_it_is(mesh):
    leaf = shardwise.distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]).requires_grad_()
    y = leaf.as_strided((3,), (1,), 1)
    with torch.no_grad():
        leaf.mul_(2)
    y.square().sum().backward()
    assert whole(leaf.grad).tolist() == [0.0, 4.0, 8.0, 12.0, 0.0, 0.0]


FOREACH = {
    "one view twice": lambda x: torch._foreach_mul_([x.flatten()] * 2, 0.5),
    "views of one tensor": lambda x: torch._foreach_mul_([x[0], x[:2, 1]], 0.5),
    "views of all of it": lambda x: torch._foreach_add_([x.flatten(), x.view(2, 4)], 1.0),
    "a view, then its base": lambda x: torch._foreach_add_([x[0], x], [x[0], x]),
    "no op in place": lambda x: torch._foreach_maximum_([x[0], x[:, 0]], [x[1], x[:, 1]]),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=repr)
@pytest.mark.parametrize("name", FOREACH)
def test_a_foreach_op_writes_to_views_one_after_another(mesh, name, placement):
    plain = torch.arange(8.0).view(4, 2)
    x = lay(plain, mesh, placement)
    for tensor in (plain, x):
        FOREACH[name](tensor)
    assert torch.equal(whole(x), plain)
