"""What the processes of the checkpoint tests run."""

import time
import warnings

import torch
import torch.distributed as dist
from programs import error_of
from torch import nn

import shardwise
from shardwise import Replicate, Shard
from shardwise.checkpoint import Checkpoints, load, save, save_async, saving
from shardwise.checkpoint.index import read_index
from shardwise.checkpoint.loading import Matching
from shardwise.checkpoint.read import Reader

SHAPES = {"rows": (11, 6), "columns": (5, 9), "table": (8, 3), "both": (7, 10), "same": (4,)}


def wholes():
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def laid_out(values, mesh_shape=(2, 2)):
    mesh = shardwise.init_device_mesh("cpu", mesh_shape)
    last = len(mesh_shape) - 1
    placements = {
        "rows": [Shard(0)] * len(mesh_shape),
        "columns": [*[Replicate()] * last, Shard(1)],
        "table": [Shard(0, (8, *[0] * (mesh_shape[0] - 1))), *[Replicate()] * last],
        "both": [Shard(0), Shard(1)][: last + 1],
        "same": [Replicate()] * len(mesh_shape),
    }
    return {
        n: shardwise.distribute_tensor(v, mesh, placements[n], src_data_rank=None)
        for n, v in values.items()
    }


def save_here(path):
    save({"x": laid_out(wholes()), "plain": torch.arange(4), "step": 7}, path)


def load_here(path, mesh_shape=(4,)):
    """Whether all is as it was saved, and how many bytes of tensors this rank read."""
    state = laid_out({n: torch.zeros(s) for n, s in SHAPES.items()}, mesh_shape)
    plain = torch.zeros(4, dtype=torch.int64)
    found = load({"x": state, "plain": plain, "step": 0}, path)
    right = found["step"] == 7 and plain.tolist() == [0, 1, 2, 3]
    return right and all(torch.equal(state[n].full_tensor(), v) for n, v in wholes().items())


def bytes_read(path):
    """How many bytes a rank reads that wants a quarter of a tensor of 64 MB, twice over."""
    mesh = shardwise.init_device_mesh("cpu", (4,))
    save({"x": shardwise.ones(4096, 4096, device_mesh=mesh, placements=[Shard(0)])}, path)
    target = shardwise.zeros(4096, 4096, device_mesh=mesh, placements=[Shard(0)])
    matching = Matching(True)
    matching.index = read_index(path)
    matching.match_all({"x": target})
    from shardwise.checkpoint.crew import current_crew

    with Reader(matching.index) as reader:
        requests = matching.requests(current_crew(), matching.targets)
        reader.check(requests)
        reader.fill(requests)
        return reader.num_bytes


def save_what_differs(path):
    return error_of(save, {"step": dist.get_rank() // 3}, path)


def save_shapes_that_differ(path):
    return error_of(save, {"x": torch.ones(2 + dist.get_rank() // 3)}, path)


def save_what_one_rank_cannot(path):
    value = (lambda: 1) if dist.get_rank() == 2 else 1
    return error_of(save, {"x": value}, path)


def load_damaged(path, number):
    """Rank 3 alone needs the bytes that are damaged."""
    mesh = shardwise.init_device_mesh("cpu", (4,))
    target = shardwise.zeros(4096, 64, device_mesh=mesh, placements=[Shard(0)])
    error = error_of(load, {"x": target}, path)
    return error, target.to_local().abs().sum().item()


def save_four_parts(path):
    mesh = shardwise.init_device_mesh("cpu", (4,))
    save({"x": shardwise.ones(4096, 64, device_mesh=mesh, placements=[Shard(0)])}, path)


def save_twice_in_the_background(folder):
    mesh = shardwise.init_device_mesh("cpu", (4,))
    x = shardwise.ones(1000, 8, device_mesh=mesh, placements=[Shard(0)])
    series = Checkpoints(folder, keep=2)
    for step in (1, 2, 3):
        series.save_async(step, {"x": x, "step": step}, copy_bytes=4000)
        x.add_(1)
        # Collectives of the training go on while a save exchanges what it needs.
        total = torch.ones(1)
        dist.all_reduce(total)
    saving = save_async({"x": x}, f"{folder}/last")
    saving.result()
    found = series.load({"x": x, "step": 0})
    return found["step"], x.full_tensor().unique().tolist(), series.steps()


def stages(path):
    """Each rank has a layer of its own."""
    rank = dist.get_rank()
    layer = nn.Linear(3, 3)
    nn.init.constant_(layer.weight, rank)
    save({"layers": {rank: layer}, "step": 1}, path)
    new = nn.Linear(3, 3)
    load({"layers": {rank: new}, "step": 0}, path)
    return new.weight.unique().tolist()


def save_to_different_places(folder):
    return error_of(save, {"x": torch.ones(2)}, f"{folder}/{dist.get_rank() // 3}")


def save_different_steps(folder):
    return error_of(Checkpoints(folder).save, 10 + dist.get_rank() // 3, {"x": torch.ones(2)})


class Refusing:
    """On one rank, an object that takes half of its state and then fails."""

    def __init__(self):
        self.table = torch.zeros(3)

    def state_dict(self):
        return {"table": self.table}

    def load_state_dict(self, state):
        self.table.copy_(state["table"])
        if dist.get_rank() == 2:
            raise KeyError("mode")


def load_what_one_rank_refuses(path):
    mesh = shardwise.init_device_mesh("cpu", (4,))
    x = shardwise.ones(8, device_mesh=mesh, placements=[Shard(0)])
    saved = Refusing()
    saved.table += 1
    save({"x": x, "object": saved}, path)
    state = {"x": shardwise.zeros(8, device_mesh=mesh, placements=[Shard(0)]), "object": Refusing()}
    error = error_of(load, state, path)
    return error, state["x"].to_local().tolist(), state["object"].table.tolist()


def load_into_optimizers_that_differ(path):
    """Rank 1 has put another parameter into its optimizer."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    save({"layer": layer, "optimizer": optimizer}, path)
    new = nn.Linear(2, 2)
    nn.init.zeros_(new.weight)
    groups = [*new.parameters(), *[nn.Parameter(torch.ones(1))] * (dist.get_rank() == 1)]
    state = {"layer": new, "optimizer": torch.optim.SGD(groups, lr=1.0)}
    return error_of(load, state, path), new.weight.any().item()


def stages_with_optimizers(path):
    """Each rank trains a layer of its own: one optimizer in the checkpoint, by names."""
    rank = dist.get_rank()

    def make():
        layer = nn.Linear(3, 3, bias=False)
        return {"layers": {rank: layer}, "optimizer": torch.optim.Adam(layer.parameters(), lr=0.1)}

    state = make()
    (weight,) = state["layers"][rank].parameters()
    weight.grad = torch.full_like(weight, float(rank + 1))
    state["optimizer"].step()
    save(state, path)
    new = make()
    load(new, path)
    (other,) = new["layers"][rank].parameters()
    old, found = state["optimizer"].state[weight], new["optimizer"].state[other]
    return torch.equal(old["exp_avg"], found["exp_avg"]) and torch.equal(weight, other)


def load_past_a_damaged_one(folder):
    """The latest is damaged in a part that one rank alone would read."""
    mesh = shardwise.init_device_mesh("cpu", (4,))
    series = Checkpoints(folder)
    for step in (1, 2):
        x = shardwise.full((64,), float(step), device_mesh=mesh, placements=[Shard(0)])
        series.save(step, {"x": x, "step": step})
    if dist.get_rank() == 0:
        (file,) = series.path(2).glob("model-00003-*")
        data = bytearray(file.read_bytes())
        data[-2] ^= 8
        file.write_bytes(data)
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = series.load_latest({"x": x, "step": 0}, fallback=True)
    return found["step"], x.to_local().unique().tolist(), [str(w.message) for w in caught]


def end_during_a_save(path, seconds, fails):
    """The function returns while a save goes on."""

    def slow(file, data, write=saving.write_synced):
        time.sleep(seconds)
        if fails:
            raise OSError(28, "No space left on device")
        write(file, data)

    saving.write_synced = slow
    save_async({"x": torch.ones(2)}, path)
    return dist.get_rank()


def save_for_ever(folder):
    """Until it is killed; keeps two, and every second save goes on in the background."""
    series = Checkpoints(folder, keep=2)
    step = (series.latest() or 0) + 1
    while True:
        state = {"x": torch.full((200_000,), float(step)), "step": step}
        (series.save_async if step % 2 else series.save)(step, state)
        step += 1


def through_torch(path):
    """Save by torch.distributed.checkpoint in one layout, load in another."""
    from shardwise import interop

    state = laid_out(wholes())
    interop.save_torch_checkpoint(state, path)
    new = laid_out({n: torch.zeros(s) for n, s in SHAPES.items()}, (4,))
    interop.load_torch_checkpoint(new, path, trusted=True)
    return all(torch.equal(new[n].full_tensor(), v) for n, v in wholes().items())


def to_torch_and_back():
    """Values, memory and placements after a round trip, both ways and in both orders."""
    from torch.distributed import tensor as theirs

    from shardwise import interop

    whole = torch.arange(16 * 6.0).view(16, 6)
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = shardwise.distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    rows = shardwise.distribute_tensor(whole, mesh, [Replicate(), Replicate()])
    cases = [ours, rows, rows.redistribute(placements=[Shard(0), Shard(0)])]
    cases.append(rows.redistribute(placements=[Shard(0), Shard(0)], order=(1, 0)))
    for one in cases:
        other = interop.to_torch(one)
        assert torch.equal(other.full_tensor(), whole), one
        assert other.to_local().data_ptr() == one.to_local().data_ptr()
        back = interop.from_torch(other)
        assert back._layout is one._layout
        assert back.to_local().data_ptr() == one.to_local().data_ptr()
    term = shardwise.DTensor.from_local(torch.ones(2), mesh, [shardwise.Partial(), Replicate()])
    assert interop.to_torch(term).full_tensor().tolist() == [2, 2]
    torchs = theirs.distribute_tensor(whole, mesh, [theirs.Shard(1), theirs.Replicate()])
    assert torch.equal(interop.from_torch(torchs).full_tensor(), whole)
    explicit = shardwise.distribute_tensor(whole, mesh, [Shard(0, (15, 1)), Replicate()])
    return error_of(interop.to_torch, explicit)


def from_fsdp2():
    """A model under FSDP2 and tensor parallelism: its state dict as ours, and back."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from shardwise import interop

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    ours = interop.state_dict_from_torch(model.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(ours[name].full_tensor(), value), name
    with torch.no_grad():
        for value in ours.values():
            value.mul_(2)
    model.load_state_dict(interop.state_dict_to_torch(ours))
    return [
        torch.equal(value.full_tensor(), 2 * plain.state_dict()[name])
        for name, value in model.state_dict().items()
    ]
