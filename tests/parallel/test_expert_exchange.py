"""Experts on ranks that each have tokens of their own."""

import copy
import pickle

import expert_programs as programs
import pytest
import torch
from parallel_models import Experts, Mixture
from parity import whole

import shardwise
from shardwise import LocalTensor
from shardwise.debug import CommDebugMode
from shardwise.errors import ArgumentError, LayoutError, UnsupportedError
from shardwise.parallel import expert_parallel

MESHES = [((4,), ("ep",)), ((2, 2), ("dp", "ep")), ((2, 2), ("ep", "tp")), ((2, 2), ("ep", "dp"))]


@pytest.mark.parametrize("num_experts", [8, 6, 3])
@pytest.mark.parametrize(("sizes", "names"), MESHES, ids=str)
def test_trains_as_on_one_device(sizes, names, num_experts):
    """8 experts divide by four ranks, 6 do not, 3 leave a rank with none."""
    with shardwise.simulate(4):
        programs.train(sizes, names, num_experts)


@pytest.mark.processes
@pytest.mark.parametrize(("sizes", "names"), MESHES[:3], ids=str)
def test_in_processes(processes, sizes, names):
    processes(programs.train, sizes, names)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="backward of torch's topk takes no sizes that differ by rank"
)
def test_some_ranks_have_more_tokens():
    with shardwise.simulate(4):
        programs.other_numbers_of_tokens()


@pytest.mark.processes
def test_some_processes_have_more_tokens(processes):
    processes(programs.other_numbers_of_tokens)


@pytest.fixture
def mesh():
    with shardwise.simulate(2):
        yield shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))


def per_rank(*parts):
    return LocalTensor.per_rank(lambda rank: parts[rank])


def test_other_numbers_of_tokens(mesh):
    """Also none, and all tokens at experts of one rank."""
    experts = Experts(4)
    tokens = [torch.randn(5, 8), torch.randn(0, 8)]
    chosen = [torch.zeros(5, 1, dtype=torch.long), torch.zeros(0, 1, dtype=torch.long)]
    weights = [torch.rand(5, 1), torch.rand(0, 1)]
    alone = copy.deepcopy(experts)
    expected = alone(tokens[0], chosen[0], weights[0])
    (expected.sum() / 2).backward()
    expert_parallel(experts, mesh, "")
    given = per_rank(*tokens).requires_grad_()
    found = experts(given, per_rank(*chosen), per_rank(*weights))
    found.sum().backward()
    torch.testing.assert_close(found.on_rank(0), expected)
    assert found.on_rank(1).shape == (0, 8)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(whole(experts.get_parameter(name).grad), parameter.grad)


def test_capacity(mesh):
    """Each expert takes the first tokens of each rank, up to its capacity."""
    experts, tokens = Experts(4), torch.randn(8, 8)
    chosen, weights = torch.tensor([[0, 1]] * 6 + [[0, 2]] * 2), torch.rand(8, 2)
    # ceil(1.5 * 4 tokens * 2 experts of each / 4 experts) = 3
    kept = weights.clone()
    kept[3, :2] = 0  # the fourth of rank 0, of both experts
    kept[7, 0] = 0  # the fourth of rank 1 at expert 0
    expected = experts(tokens, chosen, kept)
    expert_parallel(experts, mesh, "", capacity_factor=1.5)
    found = experts(*(per_rank(*x.chunk(2)) for x in (tokens, chosen, weights)))
    torch.testing.assert_close(torch.cat([found.on_rank(0), found.on_rank(1)]), expected)


@pytest.mark.parametrize("capacity_factor", [None, 10.0])
@pytest.mark.parametrize("none", [-1, 4])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_places_without_an_expert(mesh, none, capacity_factor, dtype):
    """A number that no expert has gives nothing; nothing is sent for it."""
    experts, tokens, weights = Experts(4), torch.randn(8, 8), torch.rand(8, 2)
    chosen = torch.randint(4, (8, 2), dtype=dtype)
    chosen[1, 0] = chosen[6, 1] = none
    real = chosen != none
    expected = experts(tokens, chosen.where(real, 0), weights * real)
    expert_parallel(experts, mesh, "", capacity_factor=capacity_factor)
    found = experts(*(per_rank(*x.chunk(2)) for x in (tokens, chosen, weights)))
    torch.testing.assert_close(torch.cat([found.on_rank(0), found.on_rank(1)]), expected)


def test_what_is_sent(mesh):
    """Each pair of a token and an expert once there and once back, forward and backward."""
    experts = expert_parallel(Experts(4), mesh, "")
    tokens, weights = torch.randn(6, 8), torch.rand(6, 2)
    chosen = torch.tensor([[0, 3]]).expand(6, 2)
    with CommDebugMode() as comm:
        out = experts(per_rank(tokens, tokens).requires_grad_(), chosen, weights)
    pairs = 12 * 8 * 4
    assert {event.kind for event in comm.events} == {"all_to_all_single"}
    assert [event.num_bytes for event in comm.events] == [2 * 8, pairs, 12 * 4, 12 * 8, pairs]
    with CommDebugMode() as comm:
        out.sum().backward()
    sent = [e.num_bytes for e in comm.events if e.kind == "all_to_all_single"]
    assert sorted(sent) == [pairs, pairs]


def test_copies(mesh):
    model, x = expert_parallel(Mixture(), mesh, "experts"), torch.randn(4, 8)
    expected = model(per_rank(x, x)).agreed()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(per_rank(x, x)).agreed(), expected)
        with torch.no_grad():
            other.experts.down.zero_()
    torch.testing.assert_close(model(per_rank(x, x)).agreed(), expected)


def test_bad_use(mesh):
    model = Mixture()
    with pytest.raises(ArgumentError, match="no axis 'dp', only ep"):
        expert_parallel(model, mesh, "experts", axis="dp")
    with pytest.raises(LayoutError, match="did you mean 'experts'"):
        expert_parallel(model, mesh, "expert")
    with pytest.raises(UnsupportedError, match="without stacked experts"):
        expert_parallel(model, mesh, "router")
    for factor in (0, float("inf"), float("nan")):
        with pytest.raises(ArgumentError, match="positive"):
            expert_parallel(model, mesh, "experts", capacity_factor=factor)
    assert not any(isinstance(p, shardwise.DTensor) for p in model.parameters())
    expert_parallel(model, mesh, "experts")
    with pytest.raises(LayoutError, match="parallel already"):
        expert_parallel(model, mesh, "experts")
    placed = shardwise.ones(4, 8, device_mesh=mesh, placements=[shardwise.Shard(0)])
    with pytest.raises(UnsupportedError, match="own tokens as plain tensors"):
        model.experts(placed, torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1))
    tensor_axis = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(ArgumentError, match='the style "experts"'):
        expert_parallel(Mixture(), tensor_axis, "experts", axis="tp")
