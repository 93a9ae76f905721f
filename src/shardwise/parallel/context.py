"""context_parallel: each rank has some positions of every sequence; attention sees all of them.

Note [A part of the sequence]
Code that works on each position by itself (layers, norms, most losses) needs no change: a part of
the sequence is like a part of the batch. So the axis is a data axis, along which gradients are
averaged, and the boundaries of styles count it as one. Only attention and positions differ: the
attention modules exchange keys and values, and the module gets the positions of its part.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.comm.agreement import agreeing
from shardwise.comm.watch import because
from shardwise.core.mesh import Coordinate, grid_of
from shardwise.core.untraced import breaks_graph
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError, UnsupportedError
from shardwise.ops.nn.attention import POSITIONS, attend_locally
from shardwise.ops.nn.context_attention import AxisGroup
from shardwise.parallel.style import named_axis, prepend_input_hook
from shardwise.plans import modules_at
from shardwise.simulation.ranks import on_plain_ranks, one_part, sized
from shardwise.training.contract import DataAxes, mesh_axes
from shardwise.training.data_parallel import data_parallel
from shardwise.training.reducer import declared_module

#: The inputs of Hugging Face's models that hold one entry for each position, and the dim.
_SEQUENCES = {"input_ids": 1, "inputs_embeds": 1, "position_ids": 1}
_POSITIONS = "position_ids"
#: The attributes of attention modules, and of a module that gets parts of sequences.
_DONE, _SPLITS = "_context_parallel", "_splits_sequences"
_METHODS = (None, "ring", "heads")


def context_parallel(
    module: nn.Module,
    device_mesh: DeviceMesh,
    attention: str | Sequence[str],
    *,
    axis: str = "cp",
    sequence_dims: Mapping[str, int] | None = None,
    positions: str | None = _POSITIONS,
    method: str | None = None,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Split every sequence over the ranks along `axis` of the mesh, in place; returns the module.

    `attention` has the paths, or patterns, of all modules that call
    `F.scaled_dot_product_attention`. There queries attend to the keys of all ranks, and with a
    causal mask the work is balanced. `method` is "ring" (keys and values pass from rank to rank),
    "heads" (an all-to-all gives each rank the whole sequence for some heads), or None for the one
    that sends less.

    The module is called with whole sequences, the same along the axis. It gets this rank's part of
    the inputs that `sequence_dims` names, `{name: dim}`: by default `input_ids`, `inputs_embeds`
    and `position_ids` along dim 1, or the only input of its forward. It also gets the positions of
    its part as the input `positions`, if its forward takes one and none are given. It returns this
    rank's part, and a loss computed from that is the rank's own: gradients are those of the mean of
    the ranks' losses, as with `data_parallel`, which also explains `src_data_rank`. Shift labels
    before splitting them.

    >>> import shardwise, torch
    >>> from torch.nn import functional as F
    >>> from shardwise.parallel import context_parallel
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, x):
    ...         heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    ...         out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    ...         return out.transpose(1, 2).flatten(2)
    >>> model, x = Attention(), torch.randn(1, 12, 8)
    >>> expected = model(x)
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    ...     model = context_parallel(model, mesh, "")
    ...     mine = model(x)
    >>> torch.testing.assert_close(mine.on_rank(1), expected[:, 6:])
    """
    group = AxisGroup(grid_of(device_mesh), named_axis(device_mesh, axis, "context_parallel"))
    with agreeing(grid_of(device_mesh[axis]), "context_parallel") as request:
        request.append(f"method={method}, src_data_rank={src_data_rank}")
        if method not in _METHODS:
            raise ArgumentError(
                f"context_parallel(method=...) is one of {_METHODS}, found {method!r}."
            )
        found = _attention_modules(module, attention)
        parts = _split_inputs(module, group, sequence_dims, positions)
    declare_data_axis(module, device_mesh[axis], src_data_rank)
    module.__dict__[_SPLITS] = axis
    if group.size > 1:
        prepend_input_hook(module, parts.take)
    for attending in found:
        attending.__dict__[_DONE] = axis
        if group.size > 1:
            # With the module as an argument, so that a copy of the module calls the copy.
            attending.forward = functools.partial(_attend, attending, group, method)
    return module


def _split_inputs(
    module: nn.Module,
    group: AxisGroup,
    sequence_dims: Mapping[str, int] | None,
    positions: str | None,
) -> _SplitInputs:
    """The object that splits the inputs of a module; nothing is changed yet."""
    for path, inner in module.named_modules():
        if _SPLITS in inner.__dict__:
            raise LayoutError(
                f"context_parallel: {f'module {path!r}' if path else 'the module'} splits its "
                "inputs already, and a second time would split the parts. Name all attention "
                "modules in one call."
            )
    signature = inspect.signature(module.forward).parameters
    dims = dict(sequence_dims) if sequence_dims is not None else _sequences_in(signature)
    takes = f"context_parallel: forward of {type(module).__name__} takes {', '.join(signature)}"
    missing = [name for name in dims if name not in signature]
    if missing or not dims:
        raise ArgumentError(
            f"{takes}; sequence_dims names {', '.join(missing) or 'none of them'}. Name the inputs "
            "to split along the sequence: sequence_dims={'input_ids': 1}."
        )
    if positions not in (None, _POSITIONS, *signature):
        raise ArgumentError(
            f"{takes}, and no {positions!r}. Name the input for positions, or None if there is "
            "none."
        )
    known = positions if positions in signature else None
    return _SplitInputs(group, tuple(signature), dims, known)


def _sequences_in(signature: Mapping[str, inspect.Parameter]) -> dict[str, int]:
    """The default inputs to split: those with one entry per position, and the dim."""
    found = {name: dim for name, dim in _SEQUENCES.items() if name in signature}
    if not found and len(signature) == 1:
        ((name, only),) = signature.items()
        found = {name: 1} if only.kind is only.POSITIONAL_OR_KEYWORD else {}
    return found


def declare_data_axis(module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Average gradients along the only axis of `mesh`, unless that is done already."""
    declared = declared_module(module)
    if declared is None or DataAxes(mesh_axes(mesh), True) not in declared.data_axes:
        data_parallel(module, mesh, src_data_rank=src_data_rank)


def _attention_modules(module: nn.Module, attention: str | Sequence[str]) -> list[nn.Module]:
    found = modules_at(module, attention, "context_parallel")
    for path, match in found:
        if _DONE in match.__dict__ or "forward" in match.__dict__:
            raise LayoutError(
                f"context_parallel: module {path!r} has another forward already, that of "
                "context_parallel or of a style. Name the attention modules themselves, once."
            )
    return [match for _, match in found]


@dataclass(frozen=True, slots=True)
class _SplitInputs:
    """Gives a module this rank's part of its inputs; see Note [A part of the sequence]."""

    group: AxisGroup
    names: tuple[str, ...]
    dims: dict[str, int]
    positions: str | None

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        split = {name: given[name] for name in self.dims if given.get(name) is not None}
        sizes = {name: self._size(name, one_part(x).shape) for name, x in split.items()}
        length = max(sizes.values(), default=0)
        self._check(sizes, length)
        here = {name: self._part(x, self.dims[name]) for name, x in split.items()}
        if self.positions is not None and given.get(self.positions) is None:
            here[self.positions] = self._numbered(next(iter(split.values())), length)
        changed = [here.pop(name, x) for name, x in zip(self.names, args, strict=False)]
        return tuple(changed), {**kwargs, **here}

    breaks_graph(take, "context_parallel splits inputs outside of the graph")

    def _size(self, name: str, shape: torch.Size) -> int:
        dim = self.dims[name]
        if not -len(shape) <= dim < len(shape):
            raise LayoutError(
                f"context_parallel: sequence_dims splits {name!r} along dim {dim}, and it has "
                f"shape {tuple(shape)}."
            )
        return shape[dim]

    def _check(self, sizes: dict[str, int], length: int) -> None:
        num = self.group.size
        if not sizes:
            raise ArgumentError(
                "context_parallel: the module was called without any of the inputs that are split "
                f"along the sequence, {', '.join(self.dims)}."
            )
        if any(size != length for size in sizes.values()) or length % num or length < 2 * num:
            raise LayoutError(
                f"context_parallel: {num} ranks along axis {self.group.name!r} split sequences of "
                f"one length that is a multiple of {num}, and at least {2 * num}; found {sizes}. "
                "Pad them."
            )

    def _part(self, x: Any, dim: int) -> Any:
        if isinstance(x, DTensor):
            raise UnsupportedError(
                "context_parallel splits plain inputs, found a DTensor. DTensors that are sharded "
                "along the sequence need no context_parallel: attention exchanges their keys."
            )

        def part(coordinate: Coordinate, x: torch.Tensor) -> torch.Tensor:
            return x.chunk(self.group.size, dim)[coordinate[self.group.axis]]

        return on_plain_ranks(self.group.grid, part, x)

    def _numbered(self, like: torch.Tensor, length: int) -> Any:
        size = length // self.group.size

        def numbered(me: int, like: torch.Tensor) -> torch.Tensor:
            return torch.arange(me * size, (me + 1) * size, device=like.device).unsqueeze(0)

        return sized(self.group.map(numbered, like))


def _attend(
    module: nn.Module, group: AxisGroup, method: str | None, *args: Any, **kwargs: Any
) -> Any:
    with _OverSequence(group, method):
        return type(module).forward(module, *args, **kwargs)


breaks_graph(_attend, "context_parallel exchanges keys outside of the graph")


class _OverSequence(TorchFunctionMode):
    """Handles `F.scaled_dot_product_attention` of this rank's positions."""

    def __init__(self, group: AxisGroup, method: str | None) -> None:
        super().__init__()
        self.group, self.method = group, method

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(self.group, self.method, *args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    group: AxisGroup,
    method: str | None,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    layout = query._layout if isinstance(query, DTensor) else None
    if layout is not None and layout.grid is group.grid:
        placement = layout.placements[group.axis]
        if placement.is_shard(POSITIONS) or placement.is_replicate():  # it knows its sequence
            operands = (query, key, value, attn_mask, dropout_p, is_causal)
            return F.scaled_dot_product_attention(*operands, scale=scale, enable_gqa=enable_gqa)
    q, k, v = (_autocast(_local(x)) for x in (query, key, value))
    shapes = [tuple(one_part(x).shape) for x in (q, k, v)]
    _check_call(group, shapes, attn_mask, dropout_p, enable_gqa)
    if not q.dtype == k.dtype == v.dtype:
        raise ArgumentError(
            "context_parallel: queries, keys and values have one dtype, found "
            f"{q.dtype}, {k.dtype} and {v.dtype}."
        )
    sizes = [(shape[POSITIONS],) * group.size for shape in shapes[:2]]
    mask = None if attn_mask is None else _local(attn_mask)
    with because("scaled_dot_product_attention", implicit=False):
        out = attend_locally(group, sizes, q, k, v, mask, is_causal, scale, method)
    if layout is None:
        return out
    shape = (*query.shape[:-1], value.shape[-1])
    return DTensor.from_local(out, query.device_mesh, query.placements, shape=shape)


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that autocast would give it for attention; autocast does not run here."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def _local(x: Any) -> Any:
    return x.to_local(grad_placements=x.placements) if isinstance(x, DTensor) else x


def _check_call(
    group: AxisGroup,
    shapes: Sequence[tuple[int, ...]],
    mask: Any,
    dropout_p: float,
    enable_gqa: bool,
) -> None:
    query, key, value = shapes
    if any(len(shape) != 4 for shape in shapes):
        raise UnsupportedError(
            "context_parallel: attention takes (batch, heads, positions, width), found shapes "
            f"{', '.join(map(str, shapes))}."
        )
    if query[2] != key[2] or key[2] != value[2]:
        raise UnsupportedError(
            f"context_parallel: this rank has {query[2]} queries and {key[2]} keys. It is for "
            "training, with as many of both: turn caches off (use_cache=False), and leave cross "
            "attention out of `attention`."
        )
    if query[1] % key[1] or (query[1] != key[1] and not enable_gqa):
        raise LayoutError(
            f"context_parallel: {query[1]} query heads and {key[1]} key heads do not fit; repeat "
            "the key heads, or pass enable_gqa=True where the first is a multiple of the second."
        )
    if dropout_p:
        raise UnsupportedError(
            f"context_parallel: attention with dropout_p={dropout_p} is not supported: which "
            "weights are dropped would depend on the ranks. Set it to 0."
        )
    whole = key[2] * group.size
    found = None if mask is None else tuple(one_part(mask).shape)
    if found is not None and (len(found) < 2 or found[-1] != whole or found[-2] not in (1, whole)):
        raise LayoutError(
            f"context_parallel: the mask has shape {found}, but must cover the whole sequence of "
            f"{whole} positions, not this rank's {key[2]}. Leave it out where it is causal "
            "(is_causal=True), or make it from whole sequences."
        )
    if mask is not None and mask.requires_grad:
        raise UnsupportedError("context_parallel has no gradient for a mask: detach() it.")
