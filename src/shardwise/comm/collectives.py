"""The only module that issues collectives: their cost, pending results, errors.

Each is a `torch.ops._c10d_functional` op on a tensor, in both worlds and under torch.compile, so
that CommDebugMode, compilers and LocalTensors see the same call. `start_all_to_all_into` is
the exception.

Note [Started and finished]
`start_x` starts a collective and does not wait; read its result after `finished`, or after
`awaited`, whose errors say more. `x` does both.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch.c10d import register_work
from shardwise._torch.dispatch import make_wrapper, no_torch_function
from shardwise._torch.frames import line_outside
from shardwise._torch.functions import tree_map_only
from shardwise.comm.watch import watch
from shardwise.core.mesh import Coordinate, Grid
from shardwise.core.sizes import lengths
from shardwise.core.untraced import without_autocast
from shardwise.core.world import current_world, post, posted
from shardwise.errors import CollectiveError, WorldError
from shardwise.simulation.collectives import (
    name_of_groups,
    name_of_new_groups,
    simulated_scatter,
)
from shardwise.simulation.ranks import (
    counts_per_rank,
    each_rank,
    is_per_rank,
    my_coordinate,
    one_part,
    per_rank,
    present,
    sized_copy,
)
from shardwise.simulation.roster import spans

_ops = torch.ops._c10d_functional
# `_op` skips the Python method around it, which takes a microsecond or two.
_all_reduce = _ops.all_reduce.default._op
_all_gather_into_tensor = _ops.all_gather_into_tensor.default._op
_all_gather_into_tensor_out = _ops.all_gather_into_tensor_out.default._op
_reduce_scatter_tensor = _ops.reduce_scatter_tensor.default._op
_all_to_all_single = _ops.all_to_all_single.default._op
_broadcast = _ops.broadcast.default._op
_broadcast_ = _ops.broadcast_.default._op


def group_name(grid: Grid, axis: int) -> str:
    """The name of the process group along `axis`, as collective ops take it."""
    if not grid.world.alive:
        # Checked also where the name is known: the next world reuses the names.
        raise WorldError(
            f"{grid!r} belongs to {grid.world}, which is not the current world: its group "
            "is gone or set aside. Tensors do not outlive their world: use them inside `with "
            "simulate(...):`, gather them before it ends, or load them from a checkpoint after."
        )
    name = grid.group_names[axis]
    if name is None:
        name = grid.group_names[axis] = _registered(name_of_groups(grid, axis), grid, axis)
    elif watch.on:
        # Meshes of the same ranks share a group: watchers see the name of the axis used last.
        grid.world.axis_names[name] = grid.axis_name(axis)
    return name


def _registered(name: str, grid: Grid, axis: int) -> str:
    grid.world.lines[name] = grid.lines(axis)
    grid.world.axis_names[name] = grid.axis_name(axis)
    return name


#: How many groups along an axis send gradients.
_GRADIENT_GROUPS = 2


def gradient_group(grid: Grid, axis: int, *, together: bool) -> str | None:
    """The name of a group along `axis` that sends only gradients; successive calls rotate.

    With `together`, all ranks along the axis call this, and make a group if needed. Otherwise
    nothing changes, and the first group is returned. See Note [Groups of gradients].
    """
    made = grid.gradient_groups[axis]
    if not together:
        return made[0] if made else None
    if len(made) < _GRADIENT_GROUPS:
        new = name_of_new_groups(grid, axis) if grid.shape[axis] > 1 else None
        if new is None:
            return None
        made.append(_registered(new, grid, axis))
    else:
        made.append(made.pop(0))
    return made[-1]


#: Dtypes that gloo does not reduce, and the dtype used instead; the same in both worlds.
REDUCED_AS: dict[torch.dtype, torch.dtype] = {
    torch.bool: torch.int32,  # wide enough for a sum over all ranks
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}

#: Dtypes that gloo or NCCL cannot send: `start_all_gather` and `start_all_to_all` return bytes.
MOVED_AS_BYTES = frozenset(
    {*REDUCED_AS, torch.uint64, torch.complex64, torch.complex128} - {torch.bool}
)


def viewed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that was sent as bytes, viewed as `dtype`. It may be empty on some ranks."""
    return x if x.dtype == dtype else per_rank(lambda part: _viewed(part, dtype), x)


def _viewed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if type(x.numel()) is int and x.numel() == 0:  # its strides need not be those of the dtype
        return x.new_empty((*x.shape[:-1], x.shape[-1] // dtype.itemsize), dtype=dtype)
    return x.view(dtype)


#: Wait for a collective that was started; its result. See Note [Started and finished].
finished: Callable[[torch.Tensor], torch.Tensor] = _ops.wait_tensor.default._op


def _alone(x: torch.Tensor) -> torch.Tensor:
    """The result of a collective along an axis of one rank: its own tensor, in new memory."""
    return x.clone(memory_format=torch.contiguous_format)


def awaited(x: torch.Tensor) -> torch.Tensor:
    """As `finished`; where it fails, the error says what each rank did."""
    try:
        return finished(x)
    except RuntimeError as error:
        if is_lost(error):
            raise lost(error, f"a collective of {x.dtype} of shape {list(x.shape)}") from error
        raise


def start_all_reduce(
    x: torch.Tensor, reduce_op: str, grid: Grid, axis: int, group: str | None = None
) -> torch.Tensor:
    """Start `all_reduce`, in this group along the axis if it is named."""
    if x.dtype in REDUCED_AS:
        x = x.to(REDUCED_AS[x.dtype])
    if grid.shape[axis] == 1:
        return _alone(x)
    own = group_name(grid, axis)  # raises where the world has ended
    return _all_reduce(x.contiguous(), reduce_op, group or own)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, dense. Strides may differ between ranks."""
    return per_rank(_as_bytes, x)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    if type(x.numel()) is int and x.numel() == 0:
        shape = (*x.shape[:-1], x.shape[-1] * x.dtype.itemsize) if x.dim() else (0,)
        return x.new_empty(shape, dtype=torch.uint8)
    x = x.contiguous()
    if x.dim() and x.stride(-1) != 1:  # a last dim of size 1 may have any stride
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.uint8)


def start_all_gather(x: torch.Tensor, grid: Grid, axis: int) -> torch.Tensor:
    if x.dtype in MOVED_AS_BYTES:
        x = as_bytes(x)
    if grid.shape[axis] == 1:
        return _alone(x)
    return _all_gather_into_tensor(x.contiguous(), grid.shape[axis], group_name(grid, axis))


def start_all_gather_into(out: torch.Tensor, x: torch.Tensor, grid: Grid, axis: int) -> None:
    """Start `all_gather` of flat tensors to the memory of `out`; wait with `finished(out)`."""
    parts = grid.shape[axis]
    if x.is_cpu and not is_per_rank(x) and x.nbytes >= LONG:
        # gloo would gather into its own memory, and copy all of it from there.
        start_uneven_all_gather(out, x, lambda _: [x.numel()] * parts, grid, axis)
        return
    if x.dtype in MOVED_AS_BYTES:
        x, out = as_bytes(x), as_bytes(out)
    _all_gather_into_tensor_out(x, parts, group_name(grid, axis), out=out)


#: From this many bytes per rank on, a copy costs more than further calls.
LONG = 1 << 16
#: The lengths that the ranks along an axis hold, given the coordinate of one of them.
Lengths = Callable[[Coordinate], list[int]]


def start_uneven_all_gather(
    out: torch.Tensor, x: torch.Tensor, lengths: Lengths, grid: Grid, axis: int
) -> None:
    """Start to gather flat tensors of these lengths into `out`, in the order of ranks.

    Wait with `finished(out)`. Backends gather equal tensors, or else copy. So each rank's tensor is
    broadcast into its place, which copies only this rank's. Watchers see an all-gather of the
    longest.
    """
    if x.dtype in MOVED_AS_BYTES:
        width = x.dtype.itemsize
        x, out, elements = as_bytes(x), as_bytes(out), lengths
        lengths = lambda place: [width * n for n in elements(place)]  # noqa: E731
    name, place = group_name(grid, axis), grid.coordinates[present(grid)[0]]
    longest = one_part(out)[: max(lengths(place))]
    with watch.reported("all_gather_into_tensor", longest, name):
        if is_per_rank(x):
            _all_gather_into_tensor_out(x, grid.shape[axis], name, out=out)
            return
        held = out.split(lengths(place))
        held[place[axis]].copy_(x)
        for source, part in enumerate(held):
            if part.numel():
                _broadcast_(part, source, name)


def start_reduce_scatter(x: torch.Tensor, reduce_op: str, grid: Grid, axis: int) -> torch.Tensor:
    if x.dtype in REDUCED_AS:
        x = x.to(REDUCED_AS[x.dtype])
    if grid.shape[axis] == 1:
        return _alone(x)
    name = group_name(grid, axis)
    return _reduce_scatter_tensor(x.contiguous(), reduce_op, grid.shape[axis], name)


def sends_terms(x: torch.Tensor, dtype: torch.dtype, grid: Grid, axis: int) -> bool:
    """Whether `start_scattered_sum` of a tensor like `x` sends terms, and adds them itself.

    gloo reduces everything on all ranks and keeps a chunk of it. Sending each rank the terms of its
    chunk takes half the bytes and CPU time, and adds them in the order of the simulated world. The
    input must then have the rank's own chunk last, so that the rest can be sent without a copy.
    """
    is_term = x.is_cpu and not is_per_rank(x) and dtype not in MOVED_AS_BYTES
    return is_term and grid.shape[axis] > 1


def start_scattered_sum(
    x: torch.Tensor, grid: Grid, axis: int, unused: Callable[[torch.Tensor], None]
) -> Callable[[], torch.Tensor]:
    """Start `reduce_scatter` of a sum over dim 0's entries; call what is returned for the result.

    Entries are in the order of ranks, or as `sends_terms` says. `unused` is called with a tensor on
    the CPU that has been sent and may be written to.
    """
    if not sends_terms(x, x.dtype, grid, axis):
        started = start_reduce_scatter(x, "sum", grid, axis)
        return lambda: awaited(started).to(x.dtype)
    name, mine = group_name(grid, axis), my_coordinate(grid)[axis]
    splits = [int(k != mine) for k in range(grid.shape[axis])]
    with watch.reported("reduce_scatter_tensor", x, name):
        started = _all_to_all_single(x[:-1], splits, splits, name)

    def add() -> torch.Tensor:
        terms = list(awaited(started).unbind())
        terms.insert(mine, x[-1])
        first, second, *others = terms
        total = started[0].add_(x[-1]) if not others else first + second
        for term in others:
            total += term
        unused(x)
        return total

    return add


def start_uneven_scattered_sum(
    lengths: Lengths,
    x: torch.Tensor,
    grid: Grid,
    axis: int,
    unused: Callable[[torch.Tensor], None],
) -> Callable[[], torch.Tensor]:
    """Like `start_scattered_sum`, of a flat tensor with these lengths for the ranks, in rank order.

    Backends scatter equal chunks only: each rank sends the others their terms, and adds its own.
    """

    def own(place: Coordinate) -> list[int]:
        return [lengths(place)[place[axis]]] * grid.shape[axis]

    name = group_name(grid, axis)
    with watch.reported("reduce_scatter_tensor", x, name):
        received, sent = counts_per_rank(grid, own), counts_per_rank(grid, lengths)
        started = _all_to_all_single(x, received, sent, name)

    def total(_: Coordinate, arrived: torch.Tensor) -> torch.Tensor:
        first, *others = arrived.unflatten(0, (grid.shape[axis], -1)).unbind()
        result = first.clone()
        for term in others:
            result += term
        return result

    def add() -> torch.Tensor:
        result = each_rank(grid, total, awaited(started), axes=())
        if x.is_cpu and not is_per_rank(x):
            unused(x)
        return result

    return add


def start_all_to_all(x: torch.Tensor, grid: Grid, axis: int) -> torch.Tensor:
    if x.dtype in MOVED_AS_BYTES:
        x = as_bytes(x)
    if grid.shape[axis] == 1:
        return _alone(x)
    splits = [1] * grid.shape[axis]
    return _all_to_all_single(x.contiguous(), splits, splits, group_name(grid, axis))


def all_reduce(x: torch.Tensor, reduce_op: str, grid: Grid, axis: int) -> torch.Tensor:
    return awaited(start_all_reduce(x, reduce_op, grid, axis)).to(x.dtype)


def all_gather(x: torch.Tensor, grid: Grid, axis: int) -> torch.Tensor:
    """The ranks' tensors, all of one shape, concatenated along dim 0 in the order of the axis."""
    return viewed(awaited(start_all_gather(x, grid, axis)), x.dtype)


def reduce_scatter(x: torch.Tensor, reduce_op: str, grid: Grid, axis: int) -> torch.Tensor:
    """Each rank's chunk of dim 0 of the reduction; all of one size."""
    return awaited(start_reduce_scatter(x, reduce_op, grid, axis)).to(x.dtype)


def all_to_all(x: torch.Tensor, grid: Grid, axis: int) -> torch.Tensor:
    """Send entry i of dim 0 to coordinate i; stack what arrives in the order of the axis."""
    return viewed(awaited(start_all_to_all(x, grid, axis)), x.dtype)


def all_to_all_uneven(
    x: torch.Tensor, num_sent: list[Any], num_received: list[Any], grid: Grid, axis: int
) -> torch.Tensor:
    """Send `num_sent[i]` entries of dim 0 to coordinate i; concatenate what arrives.

    In a simulated world a count that differs between ranks is a RankInt.
    """
    return awaited(start_all_to_all_uneven(x, num_sent, num_received, grid, axis))


def start_all_to_all_uneven(
    x: torch.Tensor, num_sent: list[Any], num_received: list[Any], grid: Grid, axis: int
) -> torch.Tensor:
    """Start `all_to_all_uneven`; see Note [Started and finished]."""
    if grid.shape[axis] == 1:
        return _alone(x)
    name = group_name(grid, axis)
    return _all_to_all_single(x.contiguous(), num_received, num_sent, name)


def start_all_to_all_into(
    out: torch.Tensor,
    x: torch.Tensor,
    num_sent: list[int],
    num_received: list[int],
    grid: Grid,
    axis: int,
) -> torch.Tensor:
    """As `start_all_to_all_uneven` of a process, to the memory of `out`, which it returns.

    torch has no functional op for that; watchers see the one that there is.
    """
    if register_work is None or grid.shape[axis] == 1:
        return start_all_to_all_uneven(x, num_sent, num_received, grid, axis)
    name, group = group_name(grid, axis), grid.mesh.get_group(axis)
    with watch.reported("all_to_all_single", x, name):
        work = dist.all_to_all_single(
            out, x.contiguous(), num_received, num_sent, group, async_op=True
        )
    register_work(out, work)
    return out


def broadcast(x: torch.Tensor, source: int, grid: Grid, axis: int) -> torch.Tensor:
    """The tensor of coordinate `source`, on all coordinates."""
    if grid.shape[axis] == 1:
        return _alone(x)
    sent = x.contiguous()
    if x.dtype in MOVED_AS_BYTES:
        sent = sent.unsqueeze(-1).view(torch.uint8)  # no sizes: simulated ranks may differ in them
    arrived = awaited(_broadcast(sent, source, group_name(grid, axis)))
    return arrived if sent.dtype == x.dtype else arrived.view(x.dtype).squeeze(-1)


@without_autocast
def scatter(
    x: torch.Tensor, dim: int, sizes: tuple[int, ...] | None, source: int, grid: Grid, axis: int
) -> torch.Tensor:
    """Each coordinate's shard along `dim` of the tensor that coordinate `source` holds.

    No coordinate receives more than its shard. c10d scatters equal sizes only, so this is an
    all-to-all in which one rank sends; watchers see a scatter of the longest shard.
    """
    if grid.shape[axis] == 1:
        return _alone(x)
    name = group_name(grid, axis)
    here = one_part(x)
    longest = max(
        here.split(lengths(here.shape[dim], grid.shape[axis], sizes), dim), key=torch.Tensor.numel
    )
    with watch.reported("scatter_", longest, name):
        if is_per_rank(x):
            return simulated_scatter(x, dim, sizes, source, name)
        mine = my_coordinate(grid)[axis]
        shards = x.split(lengths(x.shape[dim], grid.shape[axis], sizes), dim)
        return _send_shards(shards, source, mine, name)


def _send_shards(shards: Sequence[torch.Tensor], source: int, mine: int, name: str) -> torch.Tensor:
    """The shard of coordinate `mine`; sent as bytes, since backends do not take every dtype."""
    like, nothing = shards[mine], [0] * len(shards)
    received = list(nothing)
    received[source] = like.numel() * like.element_size()
    if mine == source:
        flat = torch.cat([shard.reshape(-1) for shard in shards]).view(torch.uint8)
        sent = [shard.numel() * shard.element_size() for shard in shards]
    else:
        flat, sent = torch.empty(0, dtype=torch.uint8, device=like.device), nothing
    arrived = awaited(_all_to_all_single(flat, received, sent, name))
    return arrived.view(like.dtype).view(like.shape)


# -- lost ----------------------------------------------------------------------------------------
# What each rank was doing when a collective failed.
#
# A rank whose collective fails writes to the store what it did, waits a moment for the others, and
# reads what they wrote. So the error of each rank says what the others did instead. A launched rank
# also writes that it has returned.


#: How long a rank waits for the others to say what they did; they time out at about the same time.
GRACE_S = 2.0
#: Each says more about what this rank does; see debug.journal.
describers: list[Callable[[], str]] = []
#: Each raises where it knows better why the ranks have lost each other; see debug.journal.
explainers: list[Callable[[], None]] = []


def is_lost(error: Exception) -> bool:
    """Whether an error comes from a backend: a rank is gone, or does not arrive."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def doing_now(what: str) -> str:
    """What this rank does, for which op, and at which line of the program."""
    cause, line = watch.cause, line_outside()
    words = [what]
    words += [f"for {cause.op}"] if cause is not None else []
    words += [f"at {line}"] if line is not None else []
    return ", ".join([" ".join(words), *(describe() for describe in describers)])


def what_ranks_did(mine: str) -> str:
    """A sentence that says what each rank did, as far as the ranks answer in time."""
    world = current_world()
    if len(world.present) == world.size:
        return ""
    post(f"was in {mine}"[:4000])
    for explain in explainers:
        explain()
    said = posted(world.size, GRACE_S)
    ranks: dict[str, list[int]] = {}
    for rank in range(world.size):
        ranks.setdefault(said.get(rank, ""), []).append(rank)
    silent = ranks.pop("", [])
    parts = [_sentence(having, text) for text, having in ranks.items()]
    if silent:
        text = "said nothing: still computing, waiting elsewhere, or ended"
        parts.append(_sentence(silent, text))
    return f"What the ranks did: {'; '.join(parts)}."


def _sentence(ranks: list[int], text: str) -> str:
    """
    >>> _sentence([1], "was in all_reduce"), _sentence([0, 2], "was in all_reduce")
    ('rank 1 was in all_reduce', 'ranks 0, 2 were in all_reduce')
    """
    if len(ranks) == 1:
        return f"rank {spans(ranks)} {text}"
    return f"ranks {spans(ranks)} {re.sub('^was ', 'were ', text)}"


def lost(error: Exception, what: str) -> CollectiveError:
    """The error of a rank whose collective failed; `what` names the collective."""
    mine = doing_now(what)
    return CollectiveError(
        f"{mine} failed on rank {dist.get_rank()}: {error} {what_ranks_did(mine)} The ranks are "
        "out of step: end all processes, and start again from a checkpoint."
    )


# -- pending results -----------------------------------------------------------------------------
# The first op on it waits for the collective and finishes the rest; then the DTensor that holds it
# gets the result itself. A Pending that no DTensor holds, such as the plain result of a parallel
# module, passes every op on to the result. A simulated world has none, since its collectives are
# synchronous, and neither has compiled code, where the compiler decides when to wait.


Run = Callable[[torch.Tensor], torch.Tensor]


class Pending(torch.Tensor):
    """The result of `finish(started)`, computed when it is first needed."""

    __slots__ = ("_finish", "_holder", "_result", "_started")
    _started: torch.Tensor
    _finish: Run
    _result: torch.Tensor | None
    _holder: weakref.ref[Any] | None

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, started: torch.Tensor, finish: Run, like: torch.Tensor) -> Pending:
        """`like` has the shape, strides and dtype of the result; see `finished_like`."""
        self = make_wrapper(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=started.device
        )
        self._started, self._finish = started, finish
        self._result = self._holder = None
        return self

    def held_by(self, holder: Any) -> None:
        """`holder._local` is this tensor, and is replaced by the result."""
        self._holder = weakref.ref(holder)

    def share(self) -> Pending:
        """Another Pending of the same result; outside autograd."""
        return Pending(self, _detached_result, self)

    def result(self) -> torch.Tensor:
        """The result; waits for it the first time."""
        if self._result is None:
            self._result = self._finish(self._started)
            # Frees the memory that they hold.
            del self._started, self._finish
            holder = self._holder() if self._holder is not None else None
            if holder is not None and holder._local is self:
                holder._local = self._result
        return self._result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs or list in map(type, args):
            args, kwargs = tree_map_only(Pending, Pending.result, (args, kwargs or {}))
            return func(*args, **kwargs)
        return func(*[arg.result() if type(arg) is Pending else arg for arg in args])

    # -- torch.compile -----------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        self.result()
        return ["_result"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _: None, *__: Any) -> Pending:
        result = inner["_result"]
        made = Pending(result, _itself, result)
        made.result()
        return made

    def __coerce_same_metadata_as_tangent__(
        self, context: Any, expected_type: type | None = None
    ) -> torch.Tensor:
        """The gradient of an output of compiled code, which is plain."""
        return self.result()

    # -- reading memory without an op ---------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        return self.detach().numpy(force=force)

    def tolist(self) -> Any:
        return self.detach().tolist()

    def data_ptr(self) -> int:
        return self.result().data_ptr()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.detach().__dlpack__(*args, **kwargs)

    def apply_(self, callable: Callable[[Any], Any]) -> torch.Tensor:
        return self.result().apply_(callable)

    def share_memory_(self) -> torch.Tensor:
        return self.result().share_memory_()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._result is not None:
            return repr(self._result)
        return f"Pending(shape={tuple(self.shape)}, dtype={self.dtype})"


def finished_like(started: torch.Tensor, finish: Run) -> torch.Tensor:
    """`finish(started)` on the meta device: its sizes can be read without waiting."""
    return finish(torch.empty_like(started, device="meta"))


def _itself(result: torch.Tensor) -> torch.Tensor:
    return result


def _detached_result(other: torch.Tensor) -> torch.Tensor:
    assert isinstance(other, Pending), "only a Pending is shared"
    return other.result().detach()


def alias_for_outside(local: torch.Tensor) -> torch.Tensor:
    """An alias of a DTensor's local tensor for use outside it; a pending one stays pending."""
    return local.share() if type(local) is Pending else sized_copy(local, True)


# -- cost ----------------------------------------------------------------------------------------
# The constants are fixed, not measured: ranks that decided differently would hang.


LATENCY_S = 20e-6
BYTES_PER_S = 10e9

#: The fraction of the tensor that each of n ranks sends: of the larger of input and output.
_TRAFFIC = {
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


def collective_s(kind: str, num_ranks: int, num_bytes: float) -> float:
    """Seconds for a collective whose larger side holds `num_bytes` on each rank.

    >>> collective_s("all_reduce", 4, 1e9) > collective_s("reduce_scatter", 4, 1e9)
    True
    """
    return LATENCY_S + _TRAFFIC[kind](num_ranks) * num_bytes / BYTES_PER_S


def exchange_s(num_bytes: float) -> float:
    """Seconds for an exchange in which no rank sends or receives more than `num_bytes`."""
    return LATENCY_S + num_bytes / BYTES_PER_S


def local_s(num_bytes: float) -> float:
    """Seconds for a step without communication, a copy on the device, so that fewer steps win."""
    return 1e-6 + num_bytes / (50 * BYTES_PER_S)


def show_bytes(num: float) -> str:
    """
    >>> show_bytes(1234), show_bytes(80e9), show_bytes(999_999)
    ('1.23 kB', '80 GB', '1 MB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num >= 0.9995 * size:
            return f"{num / size:.3g} {unit}"
    return f"{num:.0f} B"
