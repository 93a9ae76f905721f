"""FlatBuffer: parameters of one dtype in one buffer: sharded, gathered, reduced.

See Note [Words of fully sharded modules]. The gathered buffer, `whole`, keeps its storage object
for life: between uses the storage is empty, and after the next gather, tensors that autograd saved
are valid again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.layout import contiguous_stride
from shardwise.core.mesh import Coordinate, Grid, grid_like
from shardwise.core.untraced import without_autocast
from shardwise.dtensor.autograd import with_dtype
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError
from shardwise.simulation.ranks import each_rank, localize, one_part, parts_of, roster_of, sized
from shardwise.training.fully_sharded.members import Member, is_little, lengths_of, rows_of

#: Flags of a rank in a row of gradients, beside one for each member.
NUM_FLAGS = 2
#: The lengths of all chunks, by the coordinate of a rank.
Lengths = Callable[[Coordinate], list[int]]


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """Rows along `dim` of a parameter; `at` is their offset in the chunk, in elements."""

    number: int
    chunk: int
    first: int
    num_rows: int
    at: int
    shape: tuple[int, ...]
    dim: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _with_rows(shape: tuple[int, ...], dim: int, num_rows: int) -> tuple[int, ...]:
    return (*shape[:dim], num_rows, *shape[dim + 1 :])


class FlatBuffer:
    """Members with their offsets, cut along one axis of a mesh into chunks with these `ends`.

    A parameter whose local shapes differ between ranks is alone in its buffer, and is split as
    `torch.chunk` does: there the ends differ too.
    """

    def __init__(
        self,
        grid: Grid,
        axis: int,
        members: list[Member],
        offsets: list[int],
        ends: tuple[int, ...] | None,
    ) -> None:
        self.grid, self.axis = grid, axis
        self.members, self.offsets = members, offsets
        self._ends = ends
        self.shard: torch.Tensor | None = None
        self.whole: torch.Tensor | None = None
        #: What `reshard_after_forward` with a number of ranks keeps, and their axis.
        self.kept: tuple[torch.Tensor, Grid, int] | None = None
        self._pieces: dict[Any, list[FlatPiece]] = {}
        self._ranks = {place: rank for rank, place in grid.coordinates.items()}
        #: A coordinate for each set of shapes: coordinates may be many, the sets are few.
        self._places = list({self._shapes_key(place): place for place in self._ranks}.values())
        #: Whether chunks have unequal lengths; see Note [Flat buffers].
        self.uneven = any(len(set(lengths_of(self.ends(p)))) > 1 for p in self._places)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has its own parameters, which become views of a new shard when they are used.
        return {**self.__dict__, "shard": None, "whole": None, "kept": None}

    @property
    def parts(self) -> int:
        return self.grid.shape[self.axis]

    @property
    def dtype(self) -> torch.dtype:
        return self.members[0].layout.dtype

    # -- geometry ----------------------------------------------------------------------------

    def shapes(self, place: Coordinate) -> list[tuple[int, ...]]:
        return [member.whole_shape(self._ranks[place]) for member in self.members]

    def _shapes_key(self, place: Coordinate) -> tuple[tuple[int, ...], ...] | None:
        """Equal for coordinates whose chunks and pieces are alike."""
        return None if self._ends is not None else tuple(self.shapes(place))

    def ends(self, place: Coordinate) -> tuple[int, ...]:
        """Where chunks end in the gathered buffer of the rank at this coordinate."""
        if self._ends is not None:
            return self._ends
        (shape,), parts = self.shapes(place), self.parts
        num_rows, row = rows_of(shape, self.members[0].dim)
        each = -(-num_rows // parts)
        if is_little((each * parts - num_rows) * row, num_rows * row):
            return tuple(max(1, each * row) * chunk for chunk in range(1, parts + 1))
        return tuple(min(each * chunk, num_rows) * row for chunk in range(1, parts + 1))

    def pieces(self, place: Coordinate) -> list[FlatPiece]:
        """The pieces of all members in all chunks, as the shards lie."""
        key = self._shapes_key(place)
        if key not in self._pieces:
            self._pieces[key] = self._all_pieces(place)
        return self._pieces[key]

    def _all_pieces(self, place: Coordinate) -> list[FlatPiece]:
        found, bounds = [], list(itertools.pairwise((0, *self.ends(place))))
        for number, shape in enumerate(self.shapes(place)):
            dim = self.members[number].dim
            num_rows, row = rows_of(shape, dim)
            start, first = self.offsets[number], 0
            for chunk, (low, high) in enumerate(bounds):
                at = max(start, low)
                held = max(0, min(start + num_rows * row, high) - at) // row
                if held:
                    here = _with_rows(shape, dim, held)
                    found.append(FlatPiece(number, chunk, first, held, at - low, here, dim))
                    first += held
        return found

    def mine(self, place: Coordinate) -> list[FlatPiece | None]:
        """For each member, its piece in the chunk of this coordinate."""
        held: list[FlatPiece | None] = [None] * len(self.members)
        for piece in self.pieces(place):
            if piece.chunk == place[self.axis]:
                held[piece.number] = piece
        return held

    # -- shards ------------------------------------------------------------------------------

    def cut(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Make the shards of whole tensors, and return each member's shard."""
        self._fill([localize(self.grid, tensor) for tensor in tensors], _rows)
        return self.shards()

    def _fill(
        self,
        tensors: Sequence[torch.Tensor],
        take: Callable[[torch.Tensor, FlatPiece], torch.Tensor],
        pinned: bool = False,
    ) -> None:
        """Make a new shard; `take` gives a piece of a member's tensor."""

        def fill(place: Coordinate, *here: torch.Tensor) -> torch.Tensor:
            length = lengths_of(self.ends(place))[place[self.axis]]
            # An empty shard has memory too, which says whose views the parameters are.
            shard = here[0].new_zeros(max(1, length), pin_memory=pinned)[:length]
            for piece, tensor in zip(self.mine(place), here, strict=True):
                if piece is not None:
                    _view(shard, piece).copy_(take(tensor, piece))
            return shard

        self.shard, self.whole = each_rank(self.grid, fill, *tensors, axes=(self.axis,)), None

    def shards(self) -> list[torch.Tensor]:
        """Each member's view of the shard."""

        def views(place: Coordinate, shard: torch.Tensor) -> list[torch.Tensor]:
            return [
                self._view(shard, place, number, piece)
                for number, piece in enumerate(self.mine(place))
            ]

        shard: Any = self.shard
        return list(each_rank(self.grid, views, shard, axes=()))

    def _view(
        self, flat: torch.Tensor, place: Coordinate, number: int, piece: FlatPiece | None
    ) -> torch.Tensor:
        """The part of a member in a chunk: the piece, or an empty tensor."""
        if piece is not None:
            return _view(flat, piece)
        return flat[:0].view(_with_rows(self.shapes(place)[number], self.members[number].dim, 0))

    def collect(self, *, pin: bool = False) -> None:
        """Make the parameters views of one shard again, if something else replaced them.

        After a copy, a conversion or `to_empty`, each has separate memory.
        """
        locals_: list[Any] = [member.parameter._local for member in self.members]  # type: ignore[attr-defined]
        if self.shard is not None:
            here = one_part(self.shard).untyped_storage().data_ptr()
            if all(one_part(x).untyped_storage().data_ptr() == here for x in locals_):
                return
        kinds = {(x.dtype, x.device) for x in map(one_part, locals_)}
        if len(kinds) > 1:
            raise LayoutError(
                f"The parameters {[member.name for member in self.members]} were gathered together "
                f"and now have several dtypes or devices: {sorted(map(str, kinds))}. Convert the "
                "whole module, or before fully_shard."
            )

        with torch.no_grad(), torch.inference_mode(False):
            pinned = pin and torch.accelerator.is_available()
            self._fill(locals_, lambda local, piece: local, pinned)
            for member, local in zip(self.members, self.shards(), strict=True):
                parameter: Any = member.parameter
                parameter._local, member.layout = local, parameter._layout

    # -- gathering ---------------------------------------------------------------------------

    @without_autocast
    def start_gather(self, dtype: torch.dtype | None, device: torch.device | None) -> None:
        shard = self.shard
        assert shard is not None, "collect() comes first"
        if one_part(shard).is_meta and self.grid.world.has_values:
            raise LayoutError(
                f"The parameters {[member.name for member in self.members]} are on the meta "
                "device. Materialise them first: module.to_empty(device=...), then initialise or "
                "load their values."
            )
        if self.kept is not None:
            sent, near, axis = self.kept
            self.kept = None
            self._gather_again(sent, near, axis)
            return
        if dtype is not None and (statistics := self.members[0].statistics) is not None:
            dtype = statistics.dtype
        dtype = dtype if dtype is not None and self.dtype.is_floating_point else None
        with torch.no_grad(), torch.inference_mode(False), because("fully_shard", implicit=False):
            if self.parts == 1:
                self._hold(shard, dtype, device)
                return
            sent = shard.to(device=device, dtype=dtype) if (device or dtype) else shard
            fits = self.whole is not None and one_part(self.whole).dtype == one_part(sent).dtype
            if self.uneven:
                self._gather_unevenly(sent.detach(), anew=not fits)
            elif not fits:
                self.whole = collectives.start_all_gather(sent.detach(), self.grid, self.axis)
                if one_part(self.whole).dtype != one_part(sent).dtype:
                    self.whole = collectives.viewed(self.whole, one_part(sent).dtype)
            else:
                self._gather_again(sent, self.grid, self.axis)

    def _gather_unevenly(self, sent: torch.Tensor, *, anew: bool) -> None:
        like, others = one_part(sent), [a for a in range(self.grid.num_axes) if a != self.axis]

        def memory(place: Coordinate) -> torch.Tensor:
            # A multiple of ranks, for `_chunk_of`.
            return like.new_empty(-(-self.ends(place)[-1] // self.parts) * self.parts)

        def filled(place: Coordinate, whole: torch.Tensor) -> torch.Tensor:
            return whole[: self.ends(place)[-1]]

        if anew:
            self.whole = each_rank(self.grid, memory, axes=others)
        whole: Any = self.whole
        _refill(whole)
        out = each_rank(self.grid, filled, whole, axes=others)
        collectives.start_uneven_all_gather(
            out, sent, lambda place: lengths_of(self.ends(place)), self.grid, self.axis
        )

    def _gather_again(self, sent: torch.Tensor, grid: Grid, axis: int) -> None:
        whole: Any = self.whole
        with torch.no_grad(), torch.inference_mode(False), because("fully_shard", implicit=False):
            _refill(whole)
            collectives.start_all_gather_into(whole, sent.detach(), grid, axis)

    def _hold(
        self, shard: torch.Tensor, dtype: torch.dtype | None, device: torch.device | None
    ) -> None:
        """On an axis of one rank, hold the shard itself, or a converted copy: nothing is sent."""
        if not (device or dtype):
            self.whole = shard
        elif self.whole is None or self.whole is shard:
            self.whole = shard.to(device=device, dtype=dtype)
        else:
            _refill(self.whole)
            for part, value in zip(parts_of(self.whole), parts_of(shard), strict=True):
                part.copy_(value)

    def finish_gather(self) -> None:
        assert self.whole is not None, "start_gather() comes first"
        with torch.no_grad():
            if self.parts > 1:
                collectives.awaited(self.whole)

    def release(self, num_ranks: int | None = None) -> None:
        """Free the gathered buffer; with `num_ranks`, keep this rank's chunk of that many."""
        if self.whole is None or self.whole is self.shard:
            return
        if num_ranks is not None and self.kept is None:
            with torch.no_grad():
                self.kept = self._chunk_of(num_ranks)
        for part in parts_of(self.whole):
            part.untyped_storage().resize_(0)

    def _chunk_of(self, num_ranks: int) -> tuple[torch.Tensor, Grid, int]:
        """One of `num_ranks` chunks of the gathered buffer, and the axis of those ranks."""
        grid, axis = self.grid, self.axis
        shape = (*grid.shape[:axis], self.parts // num_ranks, num_ranks, *grid.shape[axis + 1 :])
        device_type, _, ranks, _ = grid.identity
        near = grid_like(device_type, shape, ranks, None)

        def chunk(place: Coordinate, whole: torch.Tensor) -> torch.Tensor:
            return whole.chunk(num_ranks)[place[axis + 1]].clone()

        whole: Any = self.whole
        return each_rank(near, chunk, whole, axes=(axis + 1,)), near, axis + 1

    def shares_memory(self, x: Any) -> bool:
        """Whether a tensor is a view of the gathered buffer."""
        if self.whole is None:
            return False
        mine = {_address(part) for part in parts_of(self.whole)}
        plain = [part for part in parts_of(x) if type(part) in (torch.Tensor, nn.Parameter)]
        return any(_address(part) in mine for part in plain)

    def tensors(self) -> list[torch.Tensor]:
        """The gathered parameters: new tensors without history that share the buffer's memory."""

        def aliases(place: Coordinate, whole: torch.Tensor) -> list[torch.Tensor]:
            # Not views: each has its own version counter, and the buffer's is of no interest.
            storage = whole.untyped_storage()
            return [
                whole.new_empty(0).set_(storage, offset, shape, _stride(shape, member.dim))
                for member, offset, shape in zip(
                    self.members, self.offsets, self.shapes(place), strict=True
                )
            ]

        whole: Any = self.whole
        found = each_rank(self.grid, aliases, whole, axes=())
        return [_outside(member, x) for member, x in zip(self.members, found, strict=True)]

    # -- gradients ---------------------------------------------------------------------------

    def gradient_pieces(
        self, place: Coordinate, numbers: tuple[int, ...]
    ) -> tuple[list[FlatPiece], list[int]]:
        """The pieces of these members, close together in each chunk, and the lengths of chunks."""
        key = (numbers, self._shapes_key(place))
        found: Any = self._pieces.get(key)
        if found is None:
            ends = [0] * self.parts
            pieces = []
            for piece in self.pieces(place):
                if piece.number in numbers:
                    at, ends[piece.chunk] = ends[piece.chunk], ends[piece.chunk] + piece.numel
                    pieces.append(replace(piece, at=at))
            found = self._pieces[key] = pieces, ends  # type: ignore[assignment]
        return found

    def row_lengths(self, numbers: tuple[int, ...], dtype: torch.dtype) -> Lengths | None:
        """The lengths of chunks in a row of gradients, if equal lengths would need much padding.

        With frozen parameters that can happen although the buffer's chunks have equal lengths.
        """
        sums = [self.gradient_pieces(place, numbers)[1] for place in self._places]
        if dtype in collectives.REDUCED_AS or all(
            is_little(self.parts * max(held) - sum(held), sum(held)) for held in sums
        ):
            return None

        def lengths(place: Coordinate) -> list[int]:
            width = 2 if dtype.is_complex else 1
            held = self.gradient_pieces(place, numbers)[1]
            return [width * (length + len(numbers) + NUM_FLAGS) for length in held]

        return lengths

    def gradient_row(
        self,
        grads: dict[int, torch.Tensor | None],
        scales: Sequence[float],
        dtype: torch.dtype,
        lengths: Lengths | None,
        new_row: Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor],
        changed: bool,
    ) -> torch.Tensor:
        """The gradients of members, by number, times their scales, laid out for a reduce-scatter.

        A chunk has the pieces, for each member a flag, whether there is a gradient, and two more;
        see Note [Frozen on one rank]. Chunks are rows of a matrix, or with `lengths` of their own
        one after another.
        """
        numbers = tuple(grads)
        held = {n: localize(self.grid, grad) for n, grad in grads.items() if grad is not None}
        # This rank may have used none of them: then zeros are sent.
        tensors = list(held.values()) or [localize(self.grid, self.whole)]  # type: ignore[arg-type]
        like, sent_as = tensors[0], dtype.to_real()
        own_last = collectives.sends_terms(like, sent_as, self.grid, self.axis)
        flags = [*(float(n in held) for n in numbers), float(changed), float(not changed)]
        scale_of = dict(zip(numbers, scales, strict=True))

        def fill(place: Coordinate, *here: torch.Tensor) -> torch.Tensor:
            given = dict(zip(held, here, strict=False))
            pieces, sizes = self.gradient_pieces(place, numbers)
            device = here[0].device
            flag_row = torch.tensor(flags, dtype=dtype, device=device)
            if lengths is None:
                row = new_row((self.parts, max(sizes) + len(flags)), dtype, device)
                chunks = list(row.unbind())
                row[:, max(sizes) :] = flag_row
                if own_last:
                    chunks.insert(place[self.axis], chunks.pop())
            else:
                row = new_row((sum(sizes) + self.parts * len(flags),), dtype, device)
                chunks = list(row.split([size + len(flags) for size in sizes]))
                for chunk, size in zip(chunks, sizes, strict=True):
                    chunk[size:] = flag_row
            for piece in pieces:
                target = _view(chunks[piece.chunk], piece)
                if piece.number in given:
                    grad = given[piece.number]
                    rows = _rows(grad.to_dense() if grad.is_sparse else grad, piece)
                    _copy_scaled(target, rows, scale_of[piece.number])
                else:
                    target.zero_()
            return torch.view_as_real(row).flatten(row.dim() - 1) if dtype.is_complex else row

        return each_rank(self.grid, fill, *tensors, axes=())

    def as_gradients(
        self, grads: dict[int, torch.Tensor | None], scales: Sequence[float], device: Any
    ) -> tuple[list[Any], list[bool]]:
        """On an axis of one rank: the gradients as they are, and whether there is one."""
        found: list[Any] = []
        for grad, scale in zip(grads.values(), scales, strict=True):
            if grad is not None:
                grad = localize(self.grid, grad.to_dense() if grad.is_sparse else grad)
                grad = grad.to(device=device, dtype=self.dtype)
                grad = grad * scale if scale != 1 else grad
            found.append(grad)
        return found, [grad is not None for grad in found]

    def gradients(
        self, row: torch.Tensor, numbers: tuple[int, ...], device: Any
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Each member's shard of the reduced gradients, and the flags, two more than members."""

        def split(place: Coordinate, here: torch.Tensor) -> list[torch.Tensor]:
            here = here.flatten()
            if self.dtype.is_complex:
                here = torch.view_as_complex(here.view(-1, 2))
            flags = here[here.numel() - len(numbers) - NUM_FLAGS :].real
            here = here.to(device=device, dtype=self.dtype)
            pieces, _ = self.gradient_pieces(place, numbers)
            mine = {piece.number: piece for piece in pieces if piece.chunk == place[self.axis]}
            return [*(self._view(here, place, n, mine.get(n)) for n in numbers), flags]

        *found, flags = each_rank(self.grid, split, row, axes=())
        return found, flags


def _address(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; without values, that of its storage."""
    storage = tensor.untyped_storage()
    return storage._cdata if tensor.is_meta else storage.data_ptr()


def _refill(whole: torch.Tensor) -> None:
    """Give a buffer that was released its memory again."""
    for part in parts_of(whole):
        part.untyped_storage().resize_(part.numel() * part.element_size())


def _view(flat: torch.Tensor, piece: FlatPiece) -> torch.Tensor:
    here = flat[piece.at : piece.at + piece.numel]
    if piece.dim == 0:
        return here.view(piece.shape)
    return here.as_strided(piece.shape, _stride(piece.shape, piece.dim))


def _stride(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """The strides of contiguous memory with `dim` outermost."""
    row, *rest = contiguous_stride((shape[dim], *shape[:dim], *shape[dim + 1 :]))
    return (*rest[:dim], row, *rest[dim:])


def _copy_scaled(target: torch.Tensor, rows: torch.Tensor, scale: float) -> None:
    if scale != 1 and rows.dtype == target.dtype:
        torch.mul(rows, scale, out=target)
        return
    target.copy_(rows)
    if scale != 1:
        target.mul_(scale)


def _rows(tensor: torch.Tensor, piece: FlatPiece) -> torch.Tensor:
    return tensor.narrow(piece.dim, piece.first, piece.num_rows)


def _outside(member: Member, local: torch.Tensor) -> torch.Tensor:
    """A gathered parameter as its module uses it."""
    if member.whole is not None:
        return DTensor._wrap(local, with_dtype(member.whole, one_part(local).dtype))
    roster = roster_of(local)
    # One tensor for all ranks is a plain tensor, as it was before.
    return one_part(local) if roster is None or roster.num_parts == 1 else sized(local)
