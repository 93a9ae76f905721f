"""Random short programs of views, writes and reads, run side by side with one device."""

import copy
import random

import torch

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.dtensor.snapshots import may_write

SHAPES = [(4,), (5,), (4, 3), (2, 6), (3, 1), (2, 2, 3)]


def mesh_of(shape):
    names = ("a", "b")[: len(shape)]
    return shardwise.init_device_mesh("cpu", shape, mesh_dim_names=names)


def whole(tensor):
    """The values that every rank has of a tensor; a copy."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    tensor = tensor.agreed() if isinstance(tensor, shardwise.LocalTensor) else tensor
    return tensor.clone()


class Pair:
    """A tensor of one device and the DTensor that should hold the same."""

    def __init__(self, alone, placed):
        self.alone, self.placed = alone, placed

    def both(self, fn):
        """`fn` of both; None where one device refuses it."""
        try:
            alone = fn(self.alone)
        except (RuntimeError, IndexError):
            return None
        return Pair(alone, fn(self.placed))

    def compare(self, what):
        torch.testing.assert_close(
            whole(self.placed), whole(self.alone), msg=lambda m: f"{what}: {m}"
        )


def run(seed, mesh):
    """Run the program of a seed; what it did, in words. Raises where the two differ."""
    draw = random.Random(seed)
    program = Program(draw, mesh)
    program.start()
    for _ in range(draw.randint(3, 9)):
        draw.choice([program.view, program.view, program.write, program.write, program.read])()
    program.finish()
    return program.done


def run_all(first, stop, mesh_shape):
    """Run the programs of these seeds, and say what they did; one mesh serves all."""
    mesh = mesh_of(mesh_shape)
    return [run(seed, mesh) for seed in range(first, stop)]


class Program:
    def __init__(self, draw, mesh):
        self.draw, self.mesh, self.done = draw, mesh, []
        self.with_grad = draw.random() < 0.6
        self.leaves, self.live, self.losses = [], [], []

    def start(self):
        for _ in range(self.draw.randint(1, 2)):
            shape = self.draw.choice(SHAPES)
            numbers = [self.draw.randint(-3, 3) for _ in range(torch.Size(shape).numel())]
            alone = torch.tensor(numbers, dtype=torch.float64).view(shape)
            placed = self._placed(alone)
            if self.with_grad:
                alone.requires_grad_()
                placed.requires_grad_()
            leaf = Pair(alone, placed)
            self.leaves.append(leaf)
            self.live.append(leaf.both(lambda t: t * 2) if self.with_grad else leaf)
            self.done.append(f"a tensor of {shape} as {self.live[-1].placed.placements}")

    def _placed(self, alone):
        placements = [
            self.draw.choice([Replicate(), *(Shard(d) for d in range(alone.dim()))])
            for _ in range(self.mesh.ndim)
        ]
        placed = shardwise.distribute_tensor(alone.clone(), self.mesh, placements)
        if not self.with_grad and self.draw.random() < 0.2:
            kind = self.draw.choice(["max", "sum"])
            at = self.draw.randrange(self.mesh.ndim)
            if placements[at].is_replicate():
                placements[at] = Partial(kind)
                placed = placed.redistribute(placements=placements)
        return placed

    # -- views -------------------------------------------------------------------------------

    def view(self):
        pair = self.draw.choice(self.live)
        name, fn = self.draw.choice(VIEWS)
        chosen = self.draw.random()
        found = pair.both(lambda t: fn(t, chosen))
        if found is not None and found.alone is not pair.alone:
            self.done.append(f"{name}({chosen:.2f}) of #{self.live.index(pair)}")
            self.live.append(found)

    # -- writes ------------------------------------------------------------------------------

    def write(self):
        pair = self.draw.choice(self.live)
        name, fn = self.draw.choice(WRITES)
        if pair.placed._layout.snapshot and (name in TURNS or not may_write(pair.placed)):
            if name not in TURNS:
                _check_refused(pair.placed)
            return
        chosen, others = self.draw.random(), [p for p in self.live if _fits(p, pair)]
        other = self.draw.choice(others) if others else None

        def both(side):
            # A clone: torch leaves open what a write from memory that overlaps does.
            value = getattr(other, side).clone() if other is not None else None
            return fn(getattr(pair, side), chosen, value)

        try:
            both("alone")
        except (RuntimeError, IndexError):
            return
        self.done.append(
            f"{name}({chosen:.2f}) to #{self.live.index(pair)}"
            + (f" from #{self.live.index(other)}" if other is not None else "")
        )
        both("placed")

    # -- reads -------------------------------------------------------------------------------

    def read(self):
        pair = self.draw.choice(self.live)
        self.done.append(f"read #{self.live.index(pair)}")
        kind = self.draw.randrange(4)
        if kind == 0:
            pair.compare(self.done)
        elif kind == 1:
            found = pair.both(lambda t: (t * t).sum())
            if found is not None:
                found.compare(self.done)
        elif kind == 2 and not self.with_grad:
            self.done.append("and all of them, copied")
            together = [(p.alone, p.placed) for p in self.live]
            self.live = [Pair(*each) for each in copy.deepcopy(together)]
        elif self.with_grad:
            self.losses.append(pair.both(lambda t: t.sum()))

    def finish(self):
        for number, pair in enumerate(self.live):
            pair.compare([*self.done, f"#{number} in the end"])
        if not self.with_grad:
            return
        squares = [pair.both(lambda t: (t * t).sum()) for pair in self.live]
        total = Pair(0, 0)
        for each in filter(None, [*self.losses, *squares]):
            total = Pair(total.alone + each.alone, total.placed + each.placed)
        if not total.alone.requires_grad:
            return
        try:
            total.alone.backward()
        except RuntimeError:
            return
        total.placed.backward()
        for leaf in self.leaves:
            if leaf.alone.grad is None:
                assert leaf.placed.grad is None, self.done
            else:
                Pair(leaf.alone.grad, leaf.placed.grad).compare([*self.done, "a gradient"])


def _fits(other, pair):
    return other is not pair and other.alone.shape == pair.alone.shape


def _check_refused(snapshot):
    try:
        with torch.no_grad():
            snapshot.add_(1)
    except NotImplementedError:
        return
    raise AssertionError("a write to a copy was not refused")


def _at(t, chosen, dim=0):
    return int(chosen * t.shape[dim])


def _dim(t, chosen):
    return int(chosen * t.dim())


VIEWS = [
    ("select", lambda t, c: t.select(_dim(t, c), 0)),
    ("index", lambda t, c: t[_at(t, c)]),
    ("slice", lambda t, c: t[_at(t, c) :]),
    ("last dim", lambda t, c: t[..., : _at(t, c, -1) + 1]),
    ("flatten", lambda t, c: t.view(-1)),
    ("reshape", lambda t, c: t.reshape(-1, 2) if t.numel() % 2 == 0 else t.reshape(1, -1)),
    ("transpose", lambda t, c: t.transpose(0, -1)),
    ("unbind", lambda t, c: t.unbind()[_at(t, c)]),
    ("split", lambda t, c: t.split(2)[0]),
    ("chunk", lambda t, c: t.chunk(2, -1)[-1]),
    ("diagonal", lambda t, c: t.diagonal()),
    ("unfold", lambda t, c: t.unfold(0, 2, 2)),
    ("unsqueeze", lambda t, c: t.unsqueeze(_dim(t, c))),
    ("squeeze", lambda t, c: t.squeeze()),
    ("expand", lambda t, c: t.unsqueeze(0).expand(2, *t.shape)),
    ("detach", lambda t, c: t.detach()),
    ("einsum", lambda t, c: torch.einsum("...ij->...ji", t)),
    ("data", lambda t, c: t.data),
]


def _set_first(t, c, other):
    t[_at(t, c)] = 5 * c


def _foreach(t, c, other):
    with torch.no_grad():
        torch._foreach_add_([t], [t.clone()])


def _without_grad(t, c, other):
    with torch.no_grad():
        t.fill_(c)


WRITES = [
    ("add_", lambda t, c, other: t.add_(c)),
    ("mul_", lambda t, c, other: t.mul_(1 + c)),
    ("copy_", lambda t, c, other: t.copy_(other if other is not None else t + 1)),
    ("add_ a tensor", lambda t, c, other: t.add_(other if other is not None else 2)),
    ("set an entry", _set_first),
    ("mul_ data", lambda t, c, other: t.data.mul_(2)),
    ("fill_ without grad", _without_grad),
    ("foreach", _foreach),
    ("transpose_", lambda t, c, other: t.transpose_(0, -1)),
    ("unsqueeze_", lambda t, c, other: t.unsqueeze_(_dim(t, c))),
]
#: Those that change no value.
TURNS = ("transpose_", "unsqueeze_")
