"""DTensor: a global tensor, sharded over a mesh by its layout.

Note [The hot path]
`DTensor.__torch_dispatch__` is the whole of a cache hit: a key from the op, the layouts and the
static arguments; one dictionary lookup; the local op; one wrapper. It does no planning, no shape
inference and no search. Keep it short: every op pays for every line.

Note [Above autograd]
Besides the keys of its device, a DTensor carries one more dispatch key: that of torch's third
private backend, which has no tensors itself. Ops whose backward needs the layout of a table or
weight have kernels for that key (`KERNELS` in `ops`); all others fall through to torch's autograd
at no cost. A `__torch_function__` on the class would cost every call.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.autograd import (
    count_versions,
    current_transform,
    has_siblings,
    is_legacy_batch,
    is_transformed,
    outside_transforms,
)
from shardwise._torch.dispatch import ABOVE_AUTOGRAD, make_wrapper, no_torch_function, undispatched
from shardwise.comm.collectives import Pending
from shardwise.core.encode import encode_mesh, encode_placements
from shardwise.core.layout import Layout, normalize, replicated_layout
from shardwise.core.mesh import current_mesh, grid_of
from shardwise.core.placements import REPLICATE, Placement, short
from shardwise.core.sizes import length_of, recorded, unrecorded
from shardwise.core.untraced import breaks_graph, untraced
from shardwise.dispatch.plan import Entry, entries
from shardwise.dispatch.variants import TensorByKeyword, run_by_keyword
from shardwise.dispatch.wrapped import SOURCE, Wrapped, count_on_lent, lend
from shardwise.dtensor import autograd, compile, conversion, snapshots
from shardwise.dtensor.autograd import (
    current_to_local,
    default_layouts,
    from_local_layouts,
)
from shardwise.dtensor.compile import (
    FlatContext,
    define,
    flattened,
    is_exported,
    plain_parts,
    stable_hash,
)
from shardwise.dtensor.conversion import (
    as_numpy,
    packed,
    redistribute_as,
    refuse_memory,
    unpacked,
    whole_values,
)
from shardwise.dtensor.operands import (
    holds_list,
    in_place_view,
    retain_grad,
    run_as_plain,
    with_tensors,
    without_ints,
)
from shardwise.dtensor.plan_call import FALSE, TRUE, Miss, add_argument
from shardwise.errors import ArgumentError, LayoutError, LeafError, MixedTensorsError
from shardwise.simulation.ranks import ALIKE, LENT, held_like, localize, sized_copy, unsized

_ops: Any = torch.ops.shardwise
_strided = torch.strided
_item = torch.Tensor.__getitem__
_matmul: Any = torch.Tensor.__matmul__
_mm: Any = torch.mm
_data: Any = torch.Tensor.data
_requires_grad: Any = torch.Tensor.requires_grad
_Size = torch.Size
_Tensor = torch.Tensor
#: The plan cache of the hot path; debug.explain replaces it by one that records hits.
_entries: dict[Any, Entry] = entries


class DTensor(Wrapped):
    """A global tensor; this process holds the shard that its layout describes.

    Made by `distribute_tensor`, `DTensor.from_local`, the factories, and by ops on DTensors.
    """

    __slots__ = ()

    __torch_function__ = no_torch_function

    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise ArgumentError(
            f"{cls.__name__}(...) does not make one: use distribute_tensor(x, mesh, placements) "
            "for a tensor that every rank has, DTensor.from_local(local, mesh, placements) for "
            "shards, or a factory such as shardwise.zeros."
        )

    @staticmethod
    def _wrap(local: torch.Tensor, layout: Layout, requires_grad: bool = False) -> DTensor:
        """A DTensor of this local tensor and layout, unchecked."""
        if type(local) is not _Tensor:
            local = unsized(local)
        if layout.symbolic:
            layout = layout.with_sizes(recorded(layout.shape), recorded(layout.stride))
            return unrecorded(DTensor._build, local, layout, requires_grad)
        return DTensor._build(local, layout, requires_grad)

    @staticmethod
    def wrap(local: torch.Tensor, layout: Layout, requires_grad: bool = False) -> DTensor:
        """Deprecated: it checks nothing. Use `from_local`; the next release removes this."""
        warnings.warn(
            "DTensor.wrap() checks nothing and will be removed: use DTensor.from_local().",
            DeprecationWarning,
            stacklevel=2,
        )
        return DTensor._wrap(local, layout, requires_grad)

    @staticmethod
    def _build(local: torch.Tensor, layout: Layout, requires_grad: bool) -> DTensor:
        out = make_wrapper(
            DTensor,
            layout.shape,
            layout.wrapper_stride,
            None,
            None,
            layout.dtype,
            _strided,
            local.device,
            False,
            requires_grad,
            None,
            False,
            False,
            ABOVE_AUTOGRAD,
        )
        out._local = local
        out._layout = layout
        return out

    @staticmethod
    def _wrap_view(local: torch.Tensor, layout: Layout) -> DTensor:
        if layout.symbolic or type(local) is not _Tensor:
            out = DTensor._wrap(local, layout)
            return out.view_as(out)  # type: ignore[return-value]
        # As above, without a plan.
        base = DTensor._build(local, layout, False)
        guard = undispatched()
        try:
            view = base.as_subclass(DTensor)
        finally:
            del guard
        view._local = local
        view._layout = layout
        return view

    @classmethod
    @untraced
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        preferred: Layout | None = None,
    ) -> Any:
        # By id: an OpOverload hashes in Python. Its entry keeps it alive, so no id comes twice.
        key: list[Any] = [id(func), preferred]
        operands: list[Any] = []
        try:
            for arg in args:
                if type(arg) is DTensor:
                    key.append(arg._layout)
                    operands.append(arg._local)
                    continue
                kind = type(arg)
                if kind is int or arg is None:
                    key.append(arg)
                    operands.append(arg)
                elif kind is float:
                    key.append(float)  # as add_argument does, here and below
                    operands.append(arg)
                elif kind is bool:
                    key.append(TRUE if arg else FALSE)
                    operands.append(arg)
                else:
                    add_argument(func, arg, key, operands)
            if kwargs:
                for name, value in kwargs.items():
                    key.append(name)
                    add_argument(func, value, key, None)
        except TensorByKeyword:
            return run_by_keyword(func, args, kwargs or {}, DTensor.__torch_dispatch__)
        except MixedTensorsError as error:
            return run_as_plain(func, args, kwargs or {}, error)
        try:
            entry = _entries.get(tuple(key))
        except TypeError:  # a symbolic int has no hash
            entry = None
        if entry is None:
            miss = Miss(DTensor, func, args, kwargs or {}, key, operands, preferred)
            return miss.plan_and_run()
        entry.hits += 1
        if entry.move is not None:
            entry.move(operands, args)
        local = entry.call(*operands, **kwargs) if kwargs else entry.call(*operands)
        layout = entry.out
        if layout is None:
            grid = entry.writes
            if grid is None:
                return entry.finish(local, args, DTensor._wrap)  # type: ignore[misc]
            grid.num_writes += 1
            if grid.lends:  # as `note_write`
                target = operands[0]
                if getattr(target, LENT, None) is ALIKE:
                    count_versions((target,))
                else:
                    count_on_lent(args[0])
            return args[0]
        out = make_wrapper(
            DTensor,
            layout.shape,
            layout.wrapper_stride,
            None,
            None,
            layout.dtype,
            _strided,
            local.device,
            False,
            False,
            None,
            False,
            False,
            ABOVE_AUTOGRAD,
        )
        out._local = local
        out._layout = layout
        return out

    @breaks_graph
    def requires_grad_(self, mode: bool = True) -> DTensor:
        """As for any tensor; the gradient of a leaf has the leaf's layout, or is Partial."""
        super().requires_grad_(mode)
        if mode and "_hooked" not in self.__dict__:
            layout = autograd.gradient_layout(self._layout)
            hook = functools.partial(autograd.to_leaf_layout, DTensor, layout)
            self.__dict__["_hooked"] = super().register_hook(hook)
        return self

    def register_hook(self, hook: Any) -> Any:
        """As for any tensor. What a leaf's hook returns is moved to the leaf's layout."""
        if self.is_leaf:
            hook = functools.partial(_call_on_leaf, hook, weakref.ref(self))
        elif not has_siblings(self):
            hook = functools.partial(_call_with_gradient, hook)
        return super().register_hook(hook)

    @untraced
    def _get_data(self) -> Any:
        """`x.data`: the same memory, with a separate version counter."""
        found = _data.__get__(self)
        if isinstance(found, DTensor):
            snapshots.count_separately(found, self)
        return found

    @breaks_graph
    def _set_data(self, value: Any) -> None:
        """`x.data = value`: this tensor gets the memory and the layout of `value`."""
        if not isinstance(value, DTensor):
            raise MixedTensorsError(
                f"The data of a DTensor is a DTensor, found a {type(value).__name__}. Wrap it: "
                "distribute_tensor(x, mesh, placements)."
            )
        _data.__set__(self, value)  # the wrapper's own shape and dtype
        snapshots.share_memory(self, value)
        hook = self.__dict__.pop("_hooked", None)
        if hook is not None:  # it is for the old layout
            hook.remove()
            self.requires_grad_(self.requires_grad)

    @breaks_graph
    def _set_requires_grad(self, mode: bool) -> None:
        self.requires_grad_(mode)

    data = property(_get_data, _set_data)
    requires_grad = property(_requires_grad.__get__, _set_requires_grad)

    # -- views in place ----------------------------------------------------------------------

    retain_grad = retain_grad
    t_ = in_place_view("t_")
    transpose_ = in_place_view("transpose_")
    swapaxes_ = in_place_view("swapaxes_")
    swapdims_ = in_place_view("swapdims_")
    squeeze_ = in_place_view("squeeze_")
    unsqueeze_ = in_place_view("unsqueeze_")

    # -- properties --------------------------------------------------------------------------

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._layout.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._layout.grid.mesh

    def is_pinned(self, device: Any = None) -> bool:
        return self._local.is_pinned(device)

    def new_tensor(
        self,
        data: Any,
        dtype: torch.dtype | None = None,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> DTensor:
        """`data` as a tensor of this dtype and device, replicated over the mesh."""
        if current_transform() is not None:
            return outside_transforms(
                self.new_tensor, data, dtype, device, requires_grad, pin_memory
            )
        plain = torch.tensor(
            data,
            dtype=dtype or self.dtype,
            device=device if device is not None else self.device,
            pin_memory=pin_memory,
        )
        grid = self._layout.grid
        made = DTensor._wrap(localize(grid, plain), replicated_layout(grid, plain))
        return made.requires_grad_(requires_grad)

    def new(self, *args: Any, device: Any = None) -> Any:
        """As torch's: an empty tensor of these sizes, or one that holds the given list."""
        if len(args) == 1 and isinstance(args[0], (list, tuple)) and type(args[0]) is not _Size:
            return self.new_tensor(args[0], device=device)
        return self.new_empty(*(args or (0,)), device=device)

    __len__ = length_of

    def __getitem__(self, index: Any) -> Any:
        return _item(self, with_tensors(self, index) if holds_list(index) else index)

    def __setitem__(self, index: Any, value: Any) -> None:
        index = with_tensors(self, index) if holds_list(index) else index
        super().__setitem__(*without_ints(self, index, value))

    def __matmul__(self, other: Any) -> Any:
        # A product of two matrices needs no kernel above autograd.
        if type(other) is DTensor and len(self._layout.shape) == len(other._layout.shape) == 2:
            return _mm(self, other)
        return _matmul(self, other)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        layout = self._layout
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"DTensor(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"placements={short(layout.placements)}{layout.other_order()} on {layout.grid!r}"
            f"{grad},\n"
            f"local={snapshots.current(self)!r})"
        )

    def __format__(self, spec: str) -> str:
        """As any tensor's: a 0-dim tensor is formatted as a number, `f"{loss:.3f}"`."""
        return (
            format(self.item(), spec) if self.dim() == 0 and spec else object.__format__(self, spec)
        )

    # -- values for Python and numpy ---------------------------------------------------------

    def tolist(self) -> Any:
        """The whole tensor as nested lists, on every rank."""
        return whole_values(self, "tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the whole tensor as a numpy array, on every rank."""
        return as_numpy(self, force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError(
                "np.asarray(x, copy=False) of a DTensor: the array would be a copy of the whole "
                "tensor. Leave copy out, or pass x.to_local(), whose memory this rank holds."
            )
        found = self.numpy()
        return found if dtype is None else found.astype(dtype, copy=False)

    def apply_(self, callable: Any) -> NoReturn:  # torch would end the process
        refuse_memory("apply_")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse_memory("__dlpack__")

    def share_memory_(self) -> DTensor:
        """Move the local tensor to shared memory."""
        self._local.share_memory_()
        return self

    # -- conversions -------------------------------------------------------------------------

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
        async_op: bool = False,
    ) -> DTensor:
        """The global tensor whose shard is `local_tensor` on every rank.

        Without `shape`, shards are assumed to have equal shapes: uneven shards need `shape`.
        Nothing is communicated, unless `run_check` compares the ranks. With `async_op`, the first
        op that reads the gradient waits for its collectives.
        """
        mesh = device_mesh if device_mesh is not None else current_mesh()
        # The compiler places waits itself, so async_op is ignored.
        if is_dynamo_compiling() or (is_exporting() and is_exported()):
            if run_check:
                conversion.refuse_traced_check()
            placed, grads = encode_placements(placements), encode_placements(grad_placements)
            return _ops.from_local(local_tensor, encode_mesh(mesh), placed, shape, stride, grads)
        grid = grid_of(mesh)
        if type(local_tensor) is not _Tensor or local_tensor.layout is not _strided:
            conversion.check_plain_part(local_tensor, "from_local(local_tensor, ...)")
        local = localize(grid, local_tensor)
        if grid.outside:
            layout = conversion.global_layout(local_tensor, grid, placements, shape, stride)
            if torch.is_grad_enabled() and local_tensor.requires_grad:
                return autograd.FromOutside.apply(local_tensor, layout, DTensor)
            return DTensor._wrap(local, layout)
        if run_check:
            conversion.check_all_ranks(local, grid, placements, shape, stride)
        layout = conversion.local_layout(local, grid, placements, shape, stride)
        if grad_placements is not None:
            grad_placements = normalize(grad_placements, layout.shape, grid)
        autograd.refuse_tangent(local_tensor, "from_local()")
        if is_transformed(local_tensor):
            autograd.refuse_transformed(local_tensor, "from_local()")
        if not (is_grad_enabled() and local_tensor.requires_grad):
            return DTensor._wrap(sized_copy(local, False), layout)
        if current_transform() is not None or is_legacy_batch(local_tensor):
            autograd.refuse_transformed(local_tensor, "from_local()")
        given = default_layouts.get(layout)
        if given is None or grad_placements is not None or async_op:
            grad_layout = None
            if grad_placements is not None:
                grad_layout = layout.with_placements(grad_placements)
            given = from_local_layouts(layout, grad_layout, DTensor, async_op)
            if grad_layout is None and not async_op and not layout.symbolic:
                default_layouts[layout] = given
        return autograd.from_local(local_tensor, given, local is local_tensor)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's shard, differentiable.

        `grad_placements` are the placements of the local gradient; by default those of the
        tensor, with Replicate for Partial.
        """
        if is_exporting() and is_exported():
            return _ops.to_local(self, encode_placements(grad_placements))
        layout = self._layout
        autograd.refuse_tangent(self, "to_local()")
        if layout.snapshot:
            snapshots.current(self)
        if grad_placements is not None:
            grad_placements = normalize(grad_placements, layout.shape, layout.grid)
        if not (self.requires_grad and is_grad_enabled()):
            return lend(self)
        if grad_placements is None:
            return current_to_local(self, None)
        return current_to_local(self, autograd.unexpanded(layout).with_placements(grad_placements))

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        order: Sequence[int] | None = None,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same global tensor in other placements, differentiable.

        `order` lists mesh axes that shard the same dim from the outermost split to the innermost;
        by default the first axis is outermost, whatever the order was. If nothing changes, the
        tensor itself is returned. With `async_op`, the first op that reads the result waits for the
        last collective, here and in backward.

        With `forward_dtype` the tensor is cast before it is sent, and the result has that dtype.
        The gradient is sent in `backward_dtype`, by default the tensor's own, and returned in the
        tensor's own.
        """
        layout = self._layout
        if device_mesh is not None and grid_of(device_mesh) is not layout.grid:
            raise LayoutError(
                f"redistribute() moves within one mesh; the tensor is on {layout.grid!r}, asked "
                f"for {grid_of(device_mesh)!r}. Go through full_tensor() and distribute_tensor()."
            )
        if placements is None:
            raise ArgumentError("redistribute() needs placements, one per mesh axis.")
        if is_exporting() and is_exported():
            placed = encode_placements(placements)
            return _ops.redistribute(self, placed, order, forward_dtype, backward_dtype)
        target = autograd.placed(layout, placements, order)
        if forward_dtype is None and backward_dtype is None:
            return autograd.redistribute(self, target, async_op)
        return redistribute_as(self, target, forward_dtype, backward_dtype, async_op)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank."""
        if is_exported():
            whole = self.redistribute(placements=[REPLICATE] * len(self.placements))
        else:
            whole = autograd.redistribute(self, autograd.whole_layout(self._layout))
        return whole.to_local(grad_placements=grad_placements)

    # -- torch.compile -----------------------------------------------------------------------

    @untraced
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        local = self._local
        if self._layout.snapshot:
            snapshots.current(self)
        elif type(local) is _Tensor:
            # Guards call this twice for each input of each call.
            parts = plain_parts.get(self._layout)
            if parts is not None:
                return parts
        elif type(local) is Pending:
            self._local = local.result()
        return flattened(self)

    @staticmethod
    @untraced
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: FlatContext, outer_size: Any, outer_stride: Any
    ) -> DTensor:
        # Called once per gradient of compiled code; `_wrap` is inlined.
        try:
            layout = context.known.get((outer_size, outer_stride))
        except TypeError:  # a symbolic int has no hash
            layout = None
        if layout is None or context.roster is not None:
            made = DTensor._wrap(*context.restored(inner, outer_size, outer_stride))
            compile.remember(made)
            return made
        local = inner["_local"]
        out = make_wrapper(
            DTensor,
            outer_size,
            outer_stride,
            None,
            None,
            context.dtype,
            _strided,
            local.device,
            False,
            False,
            None,
            False,
            False,
            ABOVE_AUTOGRAD,
        )
        out._local = local
        out._layout = layout
        return out

    @untraced
    def _view_func_unsafe(
        self, new_base: torch.Tensor, symint_visitor_fn: Any = None, tensor_visitor_fn: Any = None
    ) -> torch.Tensor:
        """This view, replayed on `new_base`; called where a view enters a compiled region."""
        # Subclasses have views of other kinds.
        if tensor_visitor_fn is None or {type(self), type(new_base)} != {DTensor}:
            return super()._view_func_unsafe(new_base, symint_visitor_fn, tensor_visitor_fn)
        return compile.replayed(self, new_base, tensor_visitor_fn, DTensor._wrap)

    @untraced
    def __coerce_tangent_metadata__(self) -> DTensor:
        """As a gradient it is never Partial; see Note [Gradients are global]."""
        return autograd.redistribute(self, autograd.gradient_layout(self._layout))

    @untraced
    def __coerce_same_metadata_as_tangent__(
        self, context: Any, expected_type: type | None = None
    ) -> DTensor:
        if not isinstance(context, FlatContext):
            return context.as_tangent(self)  # a subclass with a context of its own
        layout = self._layout.with_placements(context.placements, context.order)
        moved = autograd.redistribute(self, layout)
        held = held_like(moved._local, context.roster)
        return moved if held is moved._local else DTensor._wrap(held, layout)

    @staticmethod
    @untraced
    def _plain_tangent(x: torch.Tensor, context: Any) -> DTensor:
        """The gradient of an output that was not used; see `_torch.dynamo`."""
        grid = (context if isinstance(context, FlatContext) else context.flat).grid
        made = DTensor._wrap(localize(grid, x), replicated_layout(grid, x))
        return made.__coerce_same_metadata_as_tangent__(context)

    def _stable_hash_for_caching(self) -> str:
        """The key of this tensor, and of this package's code, in torch's compile caches."""
        return stable_hash(self._local, self._layout, self.requires_grad)

    # -- torch.distributed.checkpoint --------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return conversion.write_items(fqn, self, self._chunks())

    def __create_chunk_list__(self) -> list[Any]:
        return conversion.chunk_list(self._chunks())

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return conversion.chunk_memory(self._chunks(), index)

    def _chunks(self) -> list[conversion.Chunk]:
        return conversion.local_chunks(snapshots.current(self).detach(), self._layout)

    # -- copies ------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise LeafError(
                "Only leaf tensors can be deep-copied (as with torch.Tensor): detach() it first."
            )
        copied = self._deep_copied(memo)
        copied.__dict__.update(copy.deepcopy(_lasting(self.__dict__), memo))
        copied.requires_grad_(self.requires_grad)
        if self.grad is not None and not isinstance(self, torch.nn.Parameter):  # as torch does
            copied.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied

    _deep_copied = snapshots.deep_copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = packed(snapshots.current(self).detach(), self._layout)
        return _unpickle, (*state, self.requires_grad, _lasting(self.__dict__))


define(
    "from_local(Tensor local, str mesh, int[]? placements, SymInt[]? shape, SymInt[]? stride, "
    "int[]? grad_placements) -> Tensor",
    lambda local, mesh, **options: DTensor.from_local(local, mesh, **options),
)
define(
    "redistribute(Tensor x, int[] placements, int[]? order, ScalarType? forward_dtype, "
    "ScalarType? backward_dtype) -> Tensor",
    lambda x, **options: x.redistribute(**options),
)
define(
    "to_local(Tensor x, int[]? grad_placements) -> Tensor",
    lambda x, grad_placements: x.to_local(grad_placements=grad_placements),
)


@untraced
def _call_with_gradient(hook: Any, grad: Any) -> Any:
    """A function with several inputs gives None to those that nothing used, and torch passes it
    on to hooks; on one device they would not be called."""
    return None if grad is None else hook(grad)


def _call_on_leaf(hook: Any, leaf: weakref.ref[DTensor], grad: Any) -> Any:
    found = _call_with_gradient(hook, grad)
    owner = leaf() if type(found) is DTensor else None
    if owner is None:
        return found
    moved = autograd.to_leaf_layout(DTensor, autograd.gradient_layout(owner._layout), found)
    return found if moved is None else moved


def _lasting(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that a copy keeps: no hooks, no cached values."""
    passing = ("_hooked", "_reduced", SOURCE)
    return {k: v for k, v in attributes.items() if k not in passing}


def _unpickle(
    local: Any, mesh: Any, layout: Any, requires_grad: bool, attributes: dict[str, Any]
) -> DTensor:
    restored = DTensor._wrap(*unpacked(local, mesh, layout))
    restored.__dict__.update(attributes)
    return restored.requires_grad_(requires_grad)


def run(op: Any, *args: Any, preferred: Layout | None = None) -> Any:
    """Run an op below autograd; `preferred` is the preferred layout of its output.

    The output may stay Partial where `preferred` is replicated.
    """
    return DTensor.__torch_dispatch__(op, None, args, None, preferred)
