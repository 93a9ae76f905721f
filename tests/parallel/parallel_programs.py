"""Programs that gloo processes run; plain functions, so that they can be sent to them."""

import pickle
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from parallel_models import MLP, Block, Mixture, TiedLM, sequence_plan, whole
from parity import assert_gradients
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise import Shard, distribute_tensor
from shardwise.core.mesh import grid_like
from shardwise.embedding import SGD, EmbeddingBagCollection, Table
from shardwise.errors import UnsupportedError, WorldError
from shardwise.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    check_plan,
    context_parallel,
    data_parallel,
    expert_parallel,
    loss_parallel,
    parallelize_module,
)

PLAN = {
    "attention.[qkv]": "colwise",
    "attention.o": "rowwise",
    "mlp.up": "colwise",
    "mlp.down": "rowwise",
}
#: All parameters are DTensors, and so is what passes between the layers.
PLAN_OF_ALL = PLAN | {"norm?": "replicate"}


def block_as_on_one_device(plan=PLAN):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 6, 8)
    expected = deepcopy(model)
    expected(x).pow(2).mean().backward()
    parallelize_module(model, shardwise.init_device_mesh("cpu", (4,)), plan)
    model(x).pow(2).mean().backward()
    assert_gradients(model, expected)


def block_split_along_the_sequence():
    """Six positions on four ranks."""
    block_as_on_one_device(sequence_plan())


def uneven_hidden_width():
    torch.manual_seed(0)
    model, x = MLP(hidden=10), torch.randn(5, 8)
    expected = deepcopy(model)
    expected(x).pow(2).mean().backward()
    mesh = shardwise.init_device_mesh("cpu", (4,))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model(x).pow(2).mean().backward()
    assert_gradients(model, expected)


def loss_by_classes():
    torch.manual_seed(0)
    logits, target = torch.randn(6, 10), torch.randint(10, (6,))
    alone = logits.clone().requires_grad_()
    expected = F.cross_entropy(alone, target, label_smoothing=0.1)
    expected.backward()
    mesh = shardwise.init_device_mesh("cpu", (4,))
    sharded = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(sharded, target, label_smoothing=0.1)
    loss.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(sharded.grad.full_tensor(), alone.grad)


def beside_ddp():
    torch.manual_seed(dist.get_rank())
    ours = MLP()
    theirs = DistributedDataParallel(deepcopy(ours))
    mesh = shardwise.init_device_mesh("cpu", (4,))
    data_parallel(ours, mesh, bucket_bytes=500)
    for _ in range(3):
        x = torch.randn(3, 8)
        for model in (ours, theirs):
            with model.no_sync():
                model(x).pow(2).mean().backward()
            model(2 * x).pow(2).mean().backward()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
            with torch.no_grad():
                for parameter in (mine, other):
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None


def uneven_use():
    """Each rank uses another layer, and one nobody does: no rank waits for another for ever."""
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(5))
    data_parallel(layers, shardwise.init_device_mesh("cpu", (4,)), bucket_bytes=80)
    layers[dist.get_rank()](torch.ones(2, 4)).sum().backward()
    assert [layer.bias.grad is not None for layer in layers] == [True] * 4 + [False]
    for layer in layers[:4]:
        torch.testing.assert_close(layer.bias.grad, torch.full((4,), 0.5))


class Halves(torch.nn.Module):
    """Two layers, of which an even rank uses both."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, rank):
        return self.first(x) if rank % 2 else self.last(self.first(x))


class UnevenModel(torch.nn.Module):
    """Rows of a table, then two modules that ranks use differently."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bags = EmbeddingBagCollection([Table("t", 16, 4)], optimizer=SGD(0.1), output="tensor")
        self.early, self.late = Halves(), Halves()

    def forward(self, rank):
        ids = torch.randint(16, (3, 2), generator=torch.Generator().manual_seed(rank))
        return self.late(self.early(self.bags({"t": ids}), rank), rank).pow(2).mean()


def uneven_use_beside_other_collectives(declared):
    """Gradients are sent at other moments on each rank, between exchanges of the table and of other
    modules of as many parameters."""
    rank, num = dist.get_rank(), dist.get_world_size()
    mesh = shardwise.init_device_mesh("cpu", (num,))
    alone, model = UnevenModel(), UnevenModel()
    model.bags.shard(mesh, "row_wise")
    for name in declared:
        data_parallel(model.get_submodule(name), mesh)
    for _ in range(3):
        model.zero_grad()
        model(rank).backward()
        with alone.bags.optimizer.hold():
            alone.zero_grad()
            for each in range(num):
                (alone(each) / num).backward()
        alone.bags.optimizer.step()
        for name, parameter in alone.named_parameters():
            mine = model.get_parameter(name)
            if parameter.grad is None:
                torch.testing.assert_close(mine.detach().full_tensor(), parameter.detach())
            else:
                torch.testing.assert_close(mine.grad, parameter.grad)


def copies_on_one_rank():
    """One rank copies the module and evaluates the copy, and the others do not wait for it."""
    rank, num = dist.get_rank(), dist.get_world_size()
    mesh = shardwise.init_device_mesh("cpu", (num,))
    model = data_parallel(torch.nn.Linear(4, 4), mesh)
    for _ in range(3):
        if not rank:
            copied = pickle.loads(pickle.dumps(deepcopy(model)))
            with torch.no_grad():
                copied(torch.ones(2, 4))
        later = data_parallel(torch.nn.Linear(4, 4), mesh)
        for each in (model, later):
            each.zero_grad()
            each(torch.full((2, 4), float(rank))).sum().backward()
            torch.testing.assert_close(each.weight.grad, torch.full((4, 4), 2 * (num - 1) / 2))


def tensor_and_data_axes(whole_mesh):
    """The module on the tensor axis alone, as with torch, or on the whole mesh."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), MLP())
    x = torch.randn(4, 8)
    expected = deepcopy(model)
    expected(x).pow(2).mean().backward()
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
    parallelize_module(model, mesh if whole_mesh else mesh["tp"], plan)
    data_parallel(model, mesh["dp"])
    model(x.chunk(2)[mesh.get_local_rank("dp")]).pow(2).mean().backward()
    assert_gradients(model, expected)


def hugging_face_steps(model, ids, num=5):
    """AdamW steps, and what was seen in each: loss, logits and every gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for _ in range(num):
        result = model(input_ids=ids, labels=ids)
        optimizer.zero_grad()
        result.loss.backward()
        grads = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
        history.append({"loss": whole(result.loss), "logits": whole(result.logits), **grads})
        optimizer.step()
    return history


def hugging_face(make, num_ranks):
    """A model made from a config: five AdamW steps and generated tokens, as on one device.

    A world of more ranks than `num_ranks` does it several times over.
    """
    torch.manual_seed(0)
    model, plan = make()
    ids = torch.randint(1, 61, (2, 10))
    reference = deepcopy(model)
    shape = (dist.get_world_size() // num_ranks, num_ranks)
    mesh = shardwise.init_device_mesh("cpu", shape, mesh_dim_names=("copies", "tp"))["tp"]
    report = check_plan(model, plan, mesh)
    assert not report.mistakes
    assert not report.doubts
    parallelize_module(model, mesh, plan, strict=True)
    found, expected = (hugging_face_steps(each, ids) for each in (model, reference))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    tokens = [whole(each.eval().generate(ids, **options)) for each in (model, reference)]
    assert torch.equal(*tokens)


def modules_from_files(folder):
    """Each rank has its own file. A mesh of some ranks is found again, and never made alone."""
    torch.manual_seed(0)
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = data_parallel(parallelize_module(Block(), mesh["tp"], PLAN), mesh["dp"])
    file = f"{folder}/{dist.get_rank()}.pt"
    torch.save(model, file)
    loaded = torch.load(file, weights_only=False)
    x = torch.full((2, 6, 8), mesh.get_local_rank("dp") + 1.0)
    for each in (model, loaded, deepcopy(model)):
        each.zero_grad()
        each(x).pow(2).mean().backward()
        assert_gradients(each, model)
    with pytest.raises(WorldError, match="Make it on all ranks first"):
        grid_like("cpu", (3,), (0, 1, 2), None)


def experts_as_on_one_device():
    """Also where a rank's experts are chosen by no token: no rank waits for another for ever."""
    torch.manual_seed(0)
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    for num_experts, num_tokens in ((6, 10), (8, 1)):
        model, x = Mixture(num_experts), torch.randn(num_tokens, 8, requires_grad=True)
        expected = deepcopy(model)
        expected(x).pow(2).mean().backward()
        wanted, x.grad = x.grad, None
        parallelize_module(model, mesh, {"experts": "experts"})
        model(x).pow(2).mean().backward()
        assert_gradients(model, expected)
        torch.testing.assert_close(x.grad, wanted)


def penalized(model, x):
    """Backward of a loss and of a penalty on the gradient of its input, which is returned."""
    x = x.detach().clone().requires_grad_()
    loss = model(x).pow(2).mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + 5 * grad.pow(2).sum()).backward()
    return grad.detach()


def gradient_penalties():
    """Whole and split along the sequence, experts that no token chose, and a data axis."""
    torch.manual_seed(0)
    mesh = shardwise.init_device_mesh("cpu", (4,))
    square = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    experts = {"experts": "experts", "router": "replicate"}
    cases = [(Block(), (2, 6, 8), plan) for plan in (PLAN, PLAN_OF_ALL, sequence_plan())]
    cases += [(Mixture(6), (10, 8), experts), (Mixture(8), (1, 8), experts)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for model, shape, plan in cases:
            parallel, x = deepcopy(model), torch.randn(shape)
            model.zero_grad()
            wanted = penalized(model, x)
            parallelize_module(parallel, mesh, plan)
            torch.testing.assert_close(penalized(parallel, x), wanted)
            assert_gradients(parallel, model)
        model, batches = Block(), torch.randn(2, 2, 6, 8)
        parallel = deepcopy(model)
        wanted = [penalized(model, batch) for batch in batches]
        for parameter in model.parameters():
            parameter.grad /= 2
        parallelize_module(parallel, square, PLAN)
        data_parallel(parallel, square["dp"])
        row = square.get_local_rank("dp")
        torch.testing.assert_close(penalized(parallel, batches[row]), wanted[row])
        assert_gradients(parallel, model)


def numeric_second_derivatives():
    torch.manual_seed(0)
    mesh = shardwise.init_device_mesh("cpu", (4,))
    plan = {"up": "colwise", "down": "rowwise"}
    model = parallelize_module(MLP(3, 5).double(), mesh, plan)
    x, back = torch.randn(2, 2, 3).double().requires_grad_()
    assert torch.autograd.gradgradcheck(model, (x,), (back,))
    found = torch.autograd.functional.hessian(lambda x: model(x).pow(2).sum(), x.detach())
    torch.testing.assert_close(found, found.permute(2, 3, 0, 1))
    assert found.abs().max() > 0.01


class Biased(TiedLM):
    """The head's bias belongs to the model as well, which adds it itself where it is told to."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 11)
        self.head.weight, self.bias = self.embed.weight, self.head.bias


class AddsBias(Biased):
    def forward(self, ids):
        return super().forward(ids) + self.bias


def tied_parameters(folder):
    """Tied in one call, in two and from outside; the checkpoint is one device's."""
    torch.manual_seed(0)
    mesh = shardwise.init_device_mesh("cpu", (4,))
    ids, fresh = torch.randint(11, (3, 5)), Biased()
    calls = [
        [("", {"embed": "embedding_rowwise"})],
        [("", {"embed": "embedding_rowwise"}), ("", {"head": "colwise_rep"})],
        [("head", "colwise_rep"), ("embed", "embedding_rowwise")],
    ]
    for number, each in enumerate(calls):
        model, expected = deepcopy(fresh), deepcopy(fresh)
        for path, plan in each:
            parallelize_module(model.get_submodule(path), mesh, plan)
        assert model.bias is model.head.bias
        assert model.head.weight is model.embed.weight
        for trained in (model, expected):
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            trained(ids).pow(2).mean().backward()
            optimizer.step()
        assert_gradients(model, expected)
        file = f"{folder}/{number}-{dist.get_rank()}.pt"
        torch.save({name: whole(value) for name, value in model.state_dict().items()}, file)
        restored = Biased()
        restored.load_state_dict(torch.load(file))
        torch.testing.assert_close(restored(ids), expected(ids))
    model = AddsBias()
    with pytest.raises(UnsupportedError, match="AddsBias uses it as a plain tensor"):
        parallelize_module(model, mesh, {"head": "colwise_rep"})
    assert not any(isinstance(p, shardwise.DTensor) for p in model.parameters())


def mistake_on_one_rank(door):
    """The error of a front door that rank 1 calls wrongly."""
    mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    wrong = dist.get_rank() == 1
    calls = {
        "data_parallel": lambda: data_parallel(MLP(), mesh, src_data_rank=2 if wrong else 0),
        "expert_parallel": lambda: expert_parallel(
            Mixture(), mesh, "nowhere" if wrong else "experts", axis="dp"
        ),
        "context_parallel": lambda: context_parallel(
            MLP(), mesh, "middle" if wrong else "up", axis="dp"
        ),
    }
    with pytest.raises(shardwise.LayoutError) as error:
        calls[door]()
    return str(error.value)
