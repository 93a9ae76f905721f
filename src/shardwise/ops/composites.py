"""Composite ops of torch that make plain tensors inside.

These tensors are the same on every rank, so they count as replicated; see Note [Above autograd].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwise._torch.dispatch import OpOverload, ops_with_kernel
from shardwise._torch.functions import tree_leaves
from shardwise.comm.watch import implicit_replication
from shardwise.core.layout import dense_stride, make_layout
from shardwise.core.untraced import SkipsNone
from shardwise.dispatch.infer import faked
from shardwise.dispatch.local_call import restrided
from shardwise.dispatch.variants import run_by_keyword
from shardwise.dispatch.wrapped import SOURCE
from shardwise.dtensor.operands import check_plain
from shardwise.dtensor.snapshots import add_source
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import UnsupportedError
from shardwise.lookup.ids import has_values, id_range, sharded_axes
from shardwise.ops.operands import all_distributed
from shardwise.simulation.ranks import plain_if_equal

aten = torch.ops.aten

_MAKE_TENSORS = (
    aten.quantile.default,
    aten.quantile.scalar,
    aten.nanquantile.default,
    aten.nanquantile.scalar,
    aten.combinations.default,
    aten.linalg_matrix_power.default,
    aten.linalg_matrix_rank.default,
    aten.linalg_matrix_rank.atol_rtol_float,
    aten.linalg_matrix_rank.atol_rtol_tensor,
    aten.linalg_matrix_rank.tol_tensor,
    aten._scaled_dot_product_attention_math.default,
    aten.istft.default,
)


def _decomposed(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
            check_plain(op, leaf)
    with implicit_replication():
        return op.decompose(*args, **kwargs)


def tensor_split(x: Any, where: Any, dim: int = 0) -> Any:
    """The indices are read from a tensor, which is replicated first."""
    if isinstance(where, DTensor):
        where = where.detach().full_tensor().tolist()  # type: ignore[attr-defined]
    else:
        check_plain(aten.tensor_split.tensor_indices_or_sections, where)
        where = where.tolist()
    return torch.tensor_split(x, where, dim)


def narrow(x: Any, dim: int, start: Any, length: Any) -> Any:
    """`start` is read from a tensor, which is replicated first.

    A traced graph reads no values: it selects the entries by index, and returns a copy, which must
    not be written to.
    """
    inexact = start.is_floating_point() or start.is_complex()
    if start.dim() or inexact or start.dtype is torch.bool:
        raise RuntimeError(
            "start must be an 0-dim integral Tensor, found one of shape "
            f"{tuple(start.shape)} and {start.dtype}."
        )
    (fake,), _ = faked([x._layout], {})
    fake.narrow(dim, 0, length)  # torch's checks of the others
    if has_values(getattr(start, "_local", start)):
        return x.narrow(dim, int(start), length)
    first = torch.where(start < 0, start + x.shape[dim], start)
    with implicit_replication():
        places = first + torch.arange(length, device=x.device)
        return _snapshot(x, lambda whole: whole.index_select(dim, places))


def broadcast_tensors(tensors: Any) -> Any:
    """Each tensor expanded to the common shape; plain 0-dim tensors become replicated."""
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    # As on one device, a tensor of that shape is returned itself, not a view of it.
    return [
        x if x.shape == shape else x.expand(shape)
        for x in all_distributed(aten.broadcast_tensors.default, tensors)
    ]


def pad_sequence(
    sequences: Any,
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Any:
    """Sequences of different lengths in one tensor, each padded to the longest."""
    fake, _ = faked([[x._layout for x in sequences]], {})
    aten.pad_sequence.default(fake[0], batch_first, padding_value, padding_side)  # torch's checks
    longest = max(x.shape[0] for x in sequences)
    padded = []
    for x in sequences:
        missing = longest - x.shape[0]
        where = (0, missing) if padding_side == "right" else (missing, 0)
        no_others = (0, 0) * (x.dim() - 1)
        padded.append(torch.constant_pad_nd(x, (*no_others, *where), padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


def one_hot(x: Any, num_classes: int = -1) -> Any:
    """A one at the class of each entry; classes are checked on every rank as on one device."""
    if x.dtype is not torch.int64:
        raise RuntimeError(f"one_hot is only applicable to an index of int64, found {x.dtype}.")
    if x.numel() == 0 and num_classes <= 0:
        raise RuntimeError("one_hot cannot tell the number of classes from an empty tensor.")
    layout = x._layout.reduced()
    x = x.redistribute(placements=layout.placements, order=layout.order)
    if num_classes == -1 or (has_values(x._local) and not x.is_cuda and not x.is_meta):
        found = id_range(x._local, layout, sharded_axes(layout))
        negative_low, high = plain_if_equal(found).tolist()
        if negative_low > 0 or (num_classes != -1 and num_classes <= high):
            raise RuntimeError(
                "Class values must be non-negative and smaller than num_classes; they run from "
                f"{-negative_low} to {high}, and num_classes is {num_classes}."
            )
        num_classes = num_classes if num_classes != -1 else high + 1
    x = x.contiguous()  # strides as on one device
    with implicit_replication():
        return (x.unsqueeze(-1) == torch.arange(num_classes, device=x.device)).long()


def vander(x: Any, N: int | None = None, increasing: bool = False) -> Any:
    """The powers of each entry, the highest first unless `increasing`."""
    (fake,), _ = faked([x._layout], {})
    like = aten.vander.default(fake, N, increasing)  # torch's checks
    if like.shape[1] < 2:  # linalg.vander takes two or more
        return torch.ones_like(x, dtype=like.dtype).unsqueeze(-1)[:, : like.shape[1]]
    powers = torch.linalg.vander(x, N=N)
    return powers if increasing else powers.flip(-1)


def fill_diagonal_(x: Any, fill_value: Any, wrap: bool = False) -> Any:
    """Write to the diagonal with a mask; torch would write by strides."""
    (fake,), _ = faked([x._layout], {})
    fake.fill_diagonal_(fill_value, wrap)  # torch's checks
    if x.dim() != 2 or (wrap and x.shape[0] > x.shape[1] + 1):
        raise UnsupportedError(
            f"aten.fill_diagonal_.default does not have a sharding strategy registered for "
            f"{x.dim()} dims with wrap={wrap}: {x._layout!r}. Use masked_fill_()."
        )
    return x.masked_fill_(torch.ones_like(x, dtype=torch.bool).tril().triu(), fill_value)


def stft(
    x: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:
    """The spectrum of each window of a signal; windows by `unfold`, where torch uses strides."""
    options = (normalized, onesided, return_complex, align_to_window)
    fake, _ = faked([t if t is None else t._layout for t in (x, window)], {})
    aten.stft.default(fake[0], n_fft, hop_length, win_length, fake[1], *options)
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    if window is None and width < n_fft:
        window = torch.ones_like(x.flatten()[:1]).expand(width)
    if window is not None and width < n_fft:
        left = (n_fft - width) // 2
        window = torch.constant_pad_nd(window, (left, n_fft - width - left))
    windows = x.unfold(-1, n_fft, hop)
    if window is not None:
        windows = windows * window
    whole = x.is_complex() or (window is not None and window.is_complex())
    two_sided = whole if onesided is None else not onesided
    transform = torch.fft.fft if two_sided else torch.fft.rfft
    # In place, as torch does: the result is no view.
    spectrum = transform(windows, norm="ortho" if normalized else None).transpose_(-1, -2)
    return spectrum if return_complex else torch.view_as_real(spectrum)


def as_strided(x: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """The entries that as_strided reads, as a copy that must not be written to."""

    def pick(whole: Any) -> Any:
        return _picked(whole, size, stride, storage_offset, tuple(stride))

    picked = _snapshot(x, pick)
    picked.__dict__[SOURCE][0].send_gradient_to(x)
    return picked


def _snapshot(x: Any, pick: Callable[[Any], Any]) -> Any:
    """A copy in place of a view: it follows `x`, and a write to it raises."""
    picked = pick(x)
    lo = picked._layout
    picked._layout = make_layout(
        lo.grid, lo.placements, lo.shape, lo.stride, lo.dtype, lo.order, snapshot=True
    )
    add_source(picked, x, pick).use_counter_of(x.detach())
    return picked


def as_strided_copy(x: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """The entries at these positions of the memory that the tensor would have on one device."""
    return _picked(x, size, stride, storage_offset, None)


def _picked(x: Any, size: Any, stride: Any, offset: int | None, steps: Any) -> Any:
    """`as_strided_copy`; with `steps`, the result says that these are its strides."""
    layout = x._layout
    order = layout.memory_order or tuple(range(x.dim()))
    if layout.stride != dense_stride(layout.shape, order):
        raise UnsupportedError(
            f"aten.as_strided.default does not have a sharding strategy registered for a view with "
            f"gaps or repeats: {layout!r} has the strides {tuple(layout.stride)}, and what lies "
            "between its entries is not known. Call contiguous() first, or index the tensor."
        )
    (fake,), _ = faked([layout], {})
    aten.as_strided.default(fake, size, stride, offset)  # torch says what does not fit
    places = torch.arange(x.numel()).as_strided(size, stride, offset or 0).contiguous()
    with implicit_replication():
        return Picked.apply(x.permute(order).reshape(-1), places.to(x.device), steps)


class Picked(SkipsNone):
    """Entries of a flat tensor by index. Ordinary indexing would save the index, and backward
    could not run twice, as that of a view can."""

    @staticmethod
    def forward(ctx: Any, x: Any, places: torch.Tensor, steps: Any) -> Any:
        ctx.places, ctx.length = places, x.shape[0]
        taken = x[places]
        if steps is None:
            return taken
        # What follows depends on strides: `contiguous()` of a view with gaps is a copy.
        lo = taken._layout
        layout = make_layout(lo.grid, lo.placements, lo.shape, steps, lo.dtype, lo.order)
        return DTensor._wrap(restrided(lambda: taken._local, [layout])(), layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        with implicit_replication():
            return PutBack.apply(grad, ctx.places, ctx.length), None, None


class PutBack(SkipsNone):
    """The gradient of `Picked`: an entry that was read several times gets the sum."""

    @staticmethod
    def forward(ctx: Any, grad: Any, places: torch.Tensor, length: int) -> Any:
        ctx.places = places
        return torch.index_put(grad.new_zeros(length), (places,), grad, accumulate=True)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        with implicit_replication():
            return Picked.apply(grad, ctx.places, None), None, None


def adaptive_avg_pool(num_dims: int, x: Any, output_size: Any) -> Any:
    """The mean of each window; for channels-last input torch would set strides."""
    pool = getattr(aten, f"adaptive_avg_pool{num_dims}d").default
    (fake,), _ = faked([x._layout], {})
    pool(fake, output_size)  # torch's checks
    if all(size == 1 for size in output_size):
        return x.mean([-1 - d for d in range(num_dims)], keepdim=True)
    return getattr(aten, f"_adaptive_avg_pool{num_dims}d").default(x, output_size)


def _into_out(name: str, *args: Any, **kwargs: Any) -> Any:
    """A composite op with `out=`: torch would write to memory that a DTensor does not have."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload)
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{op}: functions with out=... arguments don't support automatic differentiation, but "
            "one of the arguments requires grad."
        )
    return run_by_keyword(op, args, kwargs, DTensor.__torch_dispatch__)


def kernels() -> Iterator[tuple[str, Any]]:
    """The kernels of these ops, by name."""
    for op in _MAKE_TENSORS:
        yield _name(op), functools.partial(_decomposed, op)
    for num_dims in (2, 3):
        yield f"adaptive_avg_pool{num_dims}d", functools.partial(adaptive_avg_pool, num_dims)
    for kernel in (stft, broadcast_tensors, pad_sequence, one_hot, vander, fill_diagonal_):
        yield kernel.__name__, kernel
    yield "as_strided", as_strided
    yield "as_strided_copy", as_strided_copy
    yield "narrow.Tensor", narrow
    yield "tensor_split.tensor_indices_or_sections", tensor_split


def kernels_with_out() -> Iterator[tuple[str, Any]]:
    """The kernels of the forms with `out=`, by name."""
    for name in _composite_out_forms():
        yield name, functools.partial(_into_out, name)


#: Forms for `out=` whose names do not say so.
_OTHER_OUT_FORMS = (
    "divide.out_mode",
    "linalg_eigh.eigvals",
    "linalg_matrix_rank.out_tol_tensor",
    "linalg_pinv.out_rcond_tensor",
    "linalg_svd.U",
    "qr.Q",
    "svd.U",
)


def _composite_out_forms() -> list[str]:
    """The composite ops with `out=`, but for those that make tensors without values."""
    registered = ops_with_kernel("CompositeImplicitAutograd")
    names = [n.removeprefix("aten::") for n in registered if n.startswith("aten::")]
    found = [n for n in names if "." in n and n.endswith((".out", "_out"))]
    return [n for n in (*found, *_OTHER_OUT_FORMS) if not n.startswith("empty.")]


def _name(op: OpOverload) -> str:
    name, overload = op._schema.name.partition("::")[2], op._schema.overload_name
    return f"{name}.{overload}" if overload else name
