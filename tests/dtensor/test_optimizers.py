"""Every optimizer of torch steps sharded parameters as it steps them on one device."""

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from parity import whole
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise import DTensor, Replicate, Shard
from shardwise.debug import CommDebugMode
from shardwise.dtensor import optimizer_steps

pytestmark = pytest.mark.slow

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def dense_optimizers():
    found = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    del found["Optimizer"], found["SparseAdam"]
    return found


OPTIMIZERS = dense_optimizers()
ELEMENTWISE = sorted(kind.__name__ for kind in optimizer_steps.ELEMENTWISE)


def implementations(kind):
    """The ways in which torch can run a step on the CPU."""
    known = inspect.signature(kind).parameters
    ways = [{"foreach": False}, {"foreach": True}] if "foreach" in known else [{}]
    if "fused" in known:
        ways.append({"fused": True})
    return ways


CASES = [
    pytest.param(kind, way, id=" ".join([name, *way, str(*way.values())]).strip())
    for name, kind in sorted(OPTIMIZERS.items())
    for way in implementations(kind)
    if kind is not torch.optim.LBFGS  # needs a closure; see test_lbfgs
]
LINE = {"first": [S0], "second": [S1], "third": [Shard(0, (0, 3, 1, 1))], "whole": [R]}
SQUARE = {"first": [S0, S1], "second": [R, S1], "third": [S0, S0], "whole": [R, R]}


class Matrices(nn.Module):
    """Sizes that neither two nor four divides; `whole` and `plain` meet every example."""

    def __init__(self):
        super().__init__()
        for name, shape in {
            "first": (7, 5),
            "second": (3, 7),
            "third": (5, 3),
            "whole": (3, 5),
            "plain": (3, 3),
        }.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))

    def forward(self, x):
        deep = F.linear(F.linear(F.linear(x, self.first).tanh(), self.second), self.third)
        return (deep**2).mean() + (F.linear(x, self.whole) ** 2).mean()


def shard(model, mesh, plan):
    model = copy.deepcopy(model)
    for name, placements in plan.items():
        placed = shardwise.distribute_tensor(getattr(model, name).detach(), mesh, placements)
        model.register_parameter(name, nn.Parameter(placed))
    return model


def backward(model, x):
    model.zero_grad()
    loss = model(x)
    loss.backward()
    ((model.plain - 1) ** 2).sum().backward()
    return loss.detach()


def steps(model, x, make, num=4, *, closure=False):
    """The optimizer after some steps, and the collectives of the last one."""
    optimizer = make(model.parameters())
    counts = []
    for _ in range(num):
        if closure:
            optimizer.step(lambda: backward(model, x))
            continue
        backward(model, x)
        with CommDebugMode() as comm:
            optimizer.step()
        counts = [event.kind for event in comm.events]
    return optimizer, counts


def assert_same(found, expected, **tolerance):
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(whole(found), expected, **tolerance)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, **tolerance)
    else:
        number = whole(found).item() if isinstance(found, torch.Tensor) else found
        assert number == (pytest.approx(expected) if isinstance(expected, float) else expected)


def compare(mesh, plan, make, batch, *, closure=False, **tolerance):
    torch.manual_seed(3)
    model = Matrices()
    x = torch.randn(9, 5, dtype=torch.float64)
    sharded = shard(model, mesh, plan)
    alone, _ = steps(model, x, make, closure=closure)
    placed = shardwise.distribute_tensor(x, mesh, batch)
    found, counts = steps(sharded, placed, make, closure=closure)
    for (name, expected), parameter in zip(
        model.named_parameters(), sharded.parameters(), strict=True
    ):
        torch.testing.assert_close(whole(parameter), expected.detach(), **tolerance)
        assert found.state[parameter].keys() == alone.state[expected].keys(), name
        for key, value in alone.state[expected].items():
            assert_same(found.state[parameter][key], value, **tolerance)
    return sharded, found, counts


def lies_like_parameters(model, optimizer):
    for parameter in model.parameters():
        for name, value in optimizer.state[parameter].items():
            if name in optimizer_steps.NUMBERS or not isinstance(value, torch.Tensor):
                assert not isinstance(value, DTensor), name
            elif isinstance(parameter, DTensor):
                assert value.placements == parameter.placements, name
                assert value.shape == parameter.shape


def options(kind):
    """What makes a step do more than its least."""
    known = inspect.signature(kind).parameters
    wanted = {"weight_decay": 0.1, "momentum": 0.5, "nesterov": True, "amsgrad": True, "lr": 0.05}
    return {name: value for name, value in wanted.items() if name in known}


#: Muon orthogonalises in bfloat16, so another order of sums shows in its third digit.
LOOSE = {"Muon": {"rtol": 2e-2, "atol": 2e-2}}


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_on_one_axis(mesh, kind, way):
    model, optimizer, counts = compare(
        mesh, LINE, lambda p: kind(p, **options(kind), **way), [S0], **LOOSE.get(kind.__name__, {})
    )
    if kind in optimizer_steps.ELEMENTWISE:
        lies_like_parameters(model, optimizer)
        # Only `whole` is replicated: its gradient is the one that is reduced, once.
        assert counts == ["all_reduce"]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_on_two_axes(square, kind, way):
    model, optimizer, counts = compare(
        square,
        SQUARE,
        lambda p: kind(p, **options(kind), **way),
        [S0, R],
        **LOOSE.get(kind.__name__, {}),
    )
    if kind in optimizer_steps.ELEMENTWISE:
        lies_like_parameters(model, optimizer)
        # The gradients of `second` and `whole` are sums over axis 0, and travel together.
        assert counts == ["all_reduce"]


@pytest.mark.parametrize("kind", ELEMENTWISE)
@pytest.mark.parametrize("foreach", [False, True])
def test_with_a_closure(mesh, kind, foreach):
    kind = getattr(torch.optim, kind)
    compare(mesh, LINE, lambda p: kind(p, **options(kind), foreach=foreach), [S0], closure=True)


def watched(kind, **given):
    """A fused optimizer that someone else's hook looks at, so that it steps through DTensors."""

    def make(parameters):
        optimizer = kind(parameters, **options(kind), fused=True, **given)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    return make


FUSED = [torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD]


@pytest.mark.parametrize("kind", FUSED)
def test_fused_steps_through_dtensors(square, kind):
    _, _, counts = compare(square, SQUARE, watched(kind), [S0, R])
    assert counts == ["all_reduce"]


@pytest.mark.parametrize("kind", FUSED)
def test_a_gradient_scaler_skips_a_fused_step_through_dtensors(mesh, kind):
    def run(model, x):
        optimizer = watched(kind)(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for factor in (1.0, float("inf"), 3.0):
            optimizer.zero_grad()
            scaler.scale(model(x) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    torch.manual_seed(3)
    model = Matrices()
    sharded = shard(model, mesh, LINE)
    x = torch.randn(9, 5, dtype=torch.float64)
    assert run(sharded, shardwise.distribute_tensor(x, mesh, [S0])) == run(model, x)
    for name, expected in model.named_parameters():
        found = sharded.get_parameter(name)
        torch.testing.assert_close(whole(found), expected.detach())
        if expected.grad is not None:  # the kernel takes the scale out of it
            torch.testing.assert_close(whole(found.grad), expected.grad)


def fused_sgd(parameter, gradient, momentum):
    numbers = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.5, "dampening": 0.0}
    flags = {"nesterov": True, "maximize": False, "is_first_step": False}
    scale = torch.tensor(4.0)
    torch._fused_sgd_([parameter], [gradient], [momentum], **numbers, **flags, grad_scale=scale)


def test_a_fused_step_brings_what_lies_elsewhere(square):
    """And writes it back: momentum sharded otherwise, a Partial gradient, rows with gaps."""
    values = [torch.randn(5, 6) for _ in range(3)]
    places = [[R, S0], [shardwise.Partial(), R], [S1, S0]]
    tensors = [
        shardwise.distribute_tensor(value, square, place)
        for value, place in zip(values, places, strict=True)
    ]
    gaps = DTensor.from_local(torch.zeros(10, 6)[::2], square, [R, R]).copy_(tensors[2])
    versions = [tensor._version for tensor in tensors]
    with CommDebugMode() as comm:
        fused_sgd(*tensors)
    assert {event.kind for event in comm.events} == {"all_reduce", "all_gather_into_tensor"}
    fused_sgd(gaps, tensors[1], tensors[2])
    alone = [value.clone() for value in values]
    other = values[2].clone()
    fused_sgd(*alone)
    fused_sgd(other, alone[1], alone[2])
    for found, expected in zip([*tensors, gaps], [*alone, other], strict=True):
        torch.testing.assert_close(whole(found), expected)
    assert all(t._version > before for t, before in zip(tensors, versions, strict=True))
    assert [t.placements for t in tensors] == [tuple(place) for place in places]


def test_a_fused_step_refuses_what_does_not_belong_together(mesh):
    one = shardwise.distribute_tensor(torch.zeros(4, 4), mesh, [S0])
    with pytest.raises(shardwise.errors.MixedTensorsError, match="grads is plain"):
        fused_sgd(one, torch.zeros(4, 4), one.clone())
    with pytest.raises(shardwise.errors.LayoutError, match="same shape"):
        fused_sgd(one, shardwise.distribute_tensor(torch.zeros(2, 4), mesh, [S0]), one.clone())
    partial = DTensor.from_local(torch.ones(4, 4), mesh, [shardwise.Partial()])
    with shardwise.explicit_redistribution(), pytest.raises(shardwise.errors.RedistributionError):
        fused_sgd(one, partial, one.clone())


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs(mesh, line_search):
    def make(parameters):
        return torch.optim.LBFGS(parameters, lr=0.3, max_iter=3, line_search_fn=line_search)

    compare(mesh, LINE | {"plain": [R]}, make, [S0], closure=True)


# -- what surrounds a step -------------------------------------------------------------------


def adam(parameters, **options):
    return torch.optim.Adam(parameters, lr=0.05, **options)


def trained(mesh, num=2, **options):
    """A sharded model and its optimizer after some steps, and the batch."""
    torch.manual_seed(3)
    model = shard(Matrices(), mesh, LINE)
    x = shardwise.distribute_tensor(torch.randn(9, 5, dtype=torch.float64), mesh, [S0])
    optimizer, _ = steps(model, x, lambda p: adam(p, **options), num)
    return model, optimizer, x


def values(model):
    return [whole(p).clone() for p in model.parameters()]


def test_state_goes_through_a_state_dict(mesh):
    model, optimizer, x = trained(mesh)
    other = copy.deepcopy(model)
    restored = adam(other.parameters())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    lies_like_parameters(other, restored)
    for each, its in ((model, optimizer), (other, restored)):
        backward(each, x)
        its.step()
    for one, two in zip(values(model), values(other), strict=True):
        assert torch.equal(one, two)


def test_state_that_is_written_to_counts(mesh):
    """In the next step: a tensor of the state, a number of it, and one that is put in its place."""
    (model, optimizer, x), (alone, other, y) = trained(mesh), on_one_device()
    for each, its in ((model, optimizer), (alone, other)):
        states = [its.state[p] for p in each.parameters()]
        states[0]["exp_avg"].zero_()
        states[1]["step"].fill_(7)
        states[2]["exp_avg"] = torch.zeros_like(states[2]["exp_avg"])
    backward(model, x)
    backward(alone, y)
    optimizer.step()
    other.step()
    torch.testing.assert_close(values(model), values(alone))


def on_one_device(num=2, **options):
    torch.manual_seed(3)
    model = Matrices()
    x = torch.randn(9, 5, dtype=torch.float64)
    optimizer, _ = steps(model, x, lambda p: adam(p, **options), num)
    return model, optimizer, x


def test_a_parameter_without_gradient_is_left_alone(mesh):
    model, optimizer, x = trained(mesh)
    before = values(model)
    backward(model, x)
    model.second.grad = None
    optimizer.step()
    after = dict(zip([n for n, _ in model.named_parameters()], values(model), strict=True))
    assert torch.equal(after["second"], before[1])
    assert not torch.equal(after["first"], before[0])
    assert optimizer.state[model.second]["step"] == 2
    backward(model, x)
    optimizer.step()
    assert optimizer.state[model.second]["step"] == 3


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_see_the_optimizer_itself(mesh, when):
    model, optimizer, x = trained(mesh)
    seen = []

    def look(who, args, kwargs):
        seen.append((who is optimizer, args[0] is optimizer, len(who.state[model.first])))

    getattr(optimizer, f"register_step_{when}_hook")(look)
    backward(model, x)
    optimizer.step()
    assert seen == [(True, True, 3)]
    alone, other, y = on_one_device()
    backward(alone, y)
    other.step()
    torch.testing.assert_close(values(model), values(alone))


def test_backward_after_a_step_notices_the_write(mesh):
    """As on one device: what the graph saved has changed."""
    model, optimizer, x = trained(mesh)
    loss = model(x)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_strictness_asks_for_the_reduction(mesh):
    model, optimizer, x = trained(mesh)
    backward(model, x)
    with shardwise.explicit_redistribution():
        with pytest.raises(shardwise.errors.RedistributionError):
            optimizer.step()
        shardwise.reduce_gradients(model.parameters())
        with CommDebugMode() as comm:
            optimizer.step()
    assert comm.get_total_counts() == 0


def test_gradients_are_released(mesh):
    model, _, _ = trained(mesh)
    assert all(part.grad is None for part in model.first._local._parts)


def test_scheduler_and_several_groups(mesh):
    def run(model, x):
        optimizer = torch.optim.SGD(
            [
                {"params": [model.first, model.plain], "lr": 0.2},
                {"params": [model.second, model.third, model.whole], "momentum": 0.3},
            ],
            lr=0.1,
        )
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3),
            ],
            [2],
        )
        for _ in range(5):
            backward(model, x)
            optimizer.step()
            scheduler.step()
        return [group["lr"] for group in optimizer.param_groups]

    torch.manual_seed(3)
    model = Matrices()
    sharded = shard(model, mesh, LINE)
    x = torch.randn(9, 5, dtype=torch.float64)
    assert run(model, x) == run(sharded, shardwise.distribute_tensor(x, mesh, [S0]))
    torch.testing.assert_close(values(sharded), values(model))


def test_parameters_on_two_meshes(square):
    line = shardwise.init_device_mesh("cpu", (4,))
    wide = torch.randn(5, 4, dtype=torch.float64)
    here = nn.Parameter(shardwise.distribute_tensor(wide, square, [S0, S1]))
    there = nn.Parameter(shardwise.distribute_tensor(wide, line, [S0]))
    alone = nn.Parameter(wide.clone())
    for parameters in ([here, there], [alone]):
        optimizer = adam(parameters, foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            for parameter in parameters:
                (parameter**2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(whole(here), alone.detach())
    torch.testing.assert_close(whole(there), alone.detach())


@pytest.fixture(params=["simulated", "real"])
def two_ranks(request):
    if request.param == "simulated":
        with shardwise.simulate(2):
            yield shardwise.init_device_mesh("cpu", (2,))
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield shardwise.init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_backward_refuses_what_a_step_changed_in_a_parameter_that_was_handed_out(
    two_ranks, kind, way
):
    if kind not in optimizer_steps.ELEMENTWISE:
        pytest.skip("its ops are planned")
    local = DTensor.from_local(torch.randn(4, 4), two_ranks, [S0])
    parameter = nn.Parameter(local)
    optimizer = kind([parameter], lr=0.1, **way)
    for _ in range(2):  # the first makes state, the second finds all as it was
        factor = torch.ones((), requires_grad=True)
        kept = (parameter.to_local() * factor).sum()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
            kept.backward()


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adam], ids=lambda kind: kind.__name__
)
def test_parameters_in_one_memory(mesh, kind):
    """Each has a gradient and state of its own."""

    def stepped(x):
        alias = x.detach().requires_grad_()
        optimizer = kind([x, alias], lr=0.25, weight_decay=0.25)
        for _ in range(3):
            (x.sin().sum() + alias.cos().sum()).backward()
            optimizer.step()
        return x

    plain = torch.randn(5, dtype=torch.float64)
    for placements in ([S0], [R]):
        made = shardwise.distribute_tensor(plain.clone(), mesh, placements).requires_grad_()
        torch.testing.assert_close(whole(stepped(made)), stepped(plain.clone().requires_grad_()))
