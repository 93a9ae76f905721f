"""Operands that are not DTensors: plain tensors (accepted or refused), lists and ints in an index.

0-dim tensors are accepted, also those of another mesh: a gradient norm is computed over parameters
of several meshes and scales every gradient.

Note [Tensors that torch makes]
A plain tensor may differ between ranks, so it is refused. Tensors that torch itself makes from
sizes, numbers and its default generator count as replicated: they are the same on every rank if the
generators are. Ops that always get such a tensor in one position are listed with that position.
Tensors made by a Python function of torch reach ops of all kinds; only the Python stack tells who
made them, and it is read only before an error would be raised. In compiled code torch decomposes
many ops in Python, and all of these functions are such makers.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise._torch.autograd import current_node, own_hook, swap_tensors
from shardwise._torch.frames import maker
from shardwise.comm.watch import because, watch
from shardwise.core.layout import Layout
from shardwise.core.mesh import Grid
from shardwise.core.sizes import statically_equal
from shardwise.core.untraced import untraced
from shardwise.dispatch.plan import Entry
from shardwise.dispatch.wrapped import Wrapped
from shardwise.dtensor import autograd
from shardwise.dtensor.snapshots import take_over
from shardwise.errors import MixedTensorsError, UnsupportedError
from shardwise.lookup.ids import has_values
from shardwise.random import compare_generators_once
from shardwise.simulation.ranks import is_per_rank, parts_of, plain_if_equal

aten = torch.ops.aten

#: Arguments, by position, that torch makes: the offsets of bags of equal length, the random samples
#: of fractional pooling, and the initial states of recurrent nets (their kernel checks that they
#: are torch's zeros).
_MADE_ARGUMENTS: dict[Any, int] = {
    aten.fractional_max_pool2d.default: 3,
    aten.fractional_max_pool3d.default: 3,
    aten.embedding_bag.default: 2,
    aten.embedding_bag.padding_idx: 2,
    aten._embedding_bag.default: 2,
    aten._embedding_bag_forward_only.default: 2,
    aten.lstm.input: 1,
    aten.gru.input: 1,
    aten.rnn_tanh.input: 1,
    aten.rnn_relu.input: 1,
    aten.lstm.data: 2,
    aten.gru.data: 2,
    aten.rnn_tanh.data: 2,
    aten.rnn_relu.data: 2,
}

#: Python functions of torch that mix tensors they make with their arguments, by module and name,
#: and whether these are random; see Note [Tensors that torch makes].
_MAKERS: dict[tuple[str, str], bool] = {
    ("torch._lowrank", "get_approximate_basis"): True,
    **{
        (f"torch.distributions.{module}", f"{name}.rsample"): True
        for module, name in (
            ("continuous_bernoulli", "ContinuousBernoulli"),
            ("generalized_pareto", "GeneralizedPareto"),
            ("lowrank_multivariate_normal", "LowRankMultivariateNormal"),
            ("multivariate_normal", "MultivariateNormal"),
            ("normal", "Normal"),
            ("relaxed_bernoulli", "LogitRelaxedBernoulli"),
            ("relaxed_categorical", "ExpRelaxedCategorical"),
            ("studentT", "StudentT"),
            ("uniform", "Uniform"),
        )
    },
    ("torch.distributions.multivariate_normal", "_precision_to_scale_tril"): False,
    ("torch.functional", "_unravel_index"): False,
    ("torch.masked._ops", "_std_var"): False,
    ("torch.nn.functional", "multi_head_attention_forward"): False,
    ("torch.nn.init", "sparse_"): True,
    ("torch.nn.modules.transformer", "_detect_is_causal_mask"): False,
    ("torch.nn.utils.rnn", "invert_permutation"): False,
    ("torch.nn.utils.prune", "RandomStructured.compute_mask.<locals>.make_mask"): True,
    ("torch.nn.utils.parametrizations", "_is_orthogonal"): False,
    ("torch.nn.utils.parametrizations", "_Orthogonal.forward"): False,
    ("torch.nn.utils.parametrizations", "_Orthogonal.right_inverse"): True,
}

#: The function of `Module.load_state_dict`, which gets whole values by its contract.
_LOADERS = {("torch.nn.modules.module", "Module._load_from_state_dict"): True}


def check_plain(op: Any, value: torch.Tensor, position: int | None = None) -> None:
    """Raise where a plain tensor with dims meets a DTensor and its layout is unknown.

    `position` is that of the argument, or None for a keyword.
    """
    if not value.dim() or watch.replicate_plain or autograd.in_formula():
        return
    if value.is_meta:
        return  # no values that could differ between ranks
    if _is_one_number(value):
        return
    if not value.numel() and current_node() is not None:
        return  # backward adds the empty zeros that cat's formula makes for skipped operands
    if position is not None and _MADE_ARGUMENTS.get(op) == position:
        return
    if op is aten.is_same_size.default:
        return  # compares global shapes, no values
    if _made_by_caller(value) or _is_loaded(op):
        return
    raise MixedTensorsError(
        f"{_op_name(op)} got mixed torch.Tensor and DTensor: a plain {type(value).__name__} of "
        f"shape {tuple(value.shape)} as {_named(op, position)}. Wrap it: DTensor.from_local(x, "
        "mesh, [Replicate()]) where each rank holds the same values, or distribute_tensor(x, mesh, "
        "placements) to lay it out; or put the call under `with "
        "shardwise.implicit_replication():`. (Numbers and 0-dim tensors need no wrapping. Fully "
        "sharded parameters are plain only while their module is called: call it, or see "
        "register_fsdp_forward_method.)"
        + (_PARAMETER if isinstance(value, nn.Parameter) else "")
        + (_LOSS if op in class_losses else "")
        + (_COMPILED if type(value).__name__ == "FunctionalTensor" else "")
    )


def _is_one_number(value: torch.Tensor) -> bool:
    """Whether all entries are one number in memory, or torch's zero without memory.

    In forward mode torch makes such zeros for operands that have no tangent.
    """
    return value._is_zerotensor() or (value.layout is torch.strided and not any(value.stride()))


def _is_loaded(op: Any) -> bool:
    """Whether `Module.load_state_dict` copies a whole value into a parameter."""
    found = maker(_LOADERS) if op is aten.copy_.default else None
    return found is not None and found[1]


def _made_by_caller(value: torch.Tensor) -> bool:
    """Whether one of torch's own functions made the plain `value`, the same on every rank."""
    found = maker(_MAKERS)
    if found is None:
        return False
    given, draws = list(_tensors(found[0])), found[1]
    # Plain arguments may differ between ranks, and so may what is made from them.
    if any(x.dim() and not isinstance(x, Wrapped) for x in given):
        return False
    if draws:
        grid = next(x for x in given if isinstance(x, Wrapped))._layout.grid
        device = value.device  # that of the default generator which drew `value`
        compare_generators_once(grid, device, None)
    return True


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    """The tensors among a function's arguments, also in lists and inside a distribution."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for item in given:
            yield from _tensors(item)
    elif isinstance(given, dict):
        yield from _tensors(list(given.values()))
    elif isinstance(given, torch.distributions.Distribution):
        yield from _tensors(list(vars(given).values()))


_PARAMETER = " Make the parameters of a module DTensors by distribute_module(module, mesh)."

#: In compiled code, plain tensors of the program and of the compiler cannot be told apart.
_COMPILED = (
    " In compiled code the plain tensor may also be one that torch.compile made: it mixes its own "
    "into the gradient of a tensor that requires grad and that the region writes to. Write to it "
    "outside torch.compile, or under torch.no_grad()."
)


#: Local functions that compute a loss over classes, and what users call; `ops` fills it.
class_losses: dict[Any, str] = {}
_LOSS = (
    " Where the classes of the logits are sharded, put the loss under `with "
    "shardwise.parallel.loss_parallel():`, which takes a plain target."
)


def _op_name(op: Any) -> str:
    """The name of an op, or of a function of ours that is planned like one."""
    return class_losses.get(op, op.__name__) if inspect.isfunction(op) else str(op)


def _named(op: Any, position: int | None) -> str:
    if position is None:
        return "a keyword argument"
    schema = getattr(op, "_schema", None)
    if schema is None or position >= len(schema.arguments):
        return f"argument {position}"
    return f"argument {position} ({schema.arguments[position].name})"


# -- tensors without dims --------------------------------------------------------------------
def numbers_as_plain(args: Sequence[Any]) -> list[Any] | None:
    """`args` with 0-dim tensors of other meshes as plain tensors; None when there are none.

    The mesh of the call is that of the first tensor with dims, or else of the first tensor.
    """
    tensors = [x for arg in args for x in as_list(arg) if _is_distributed(x)]
    if len({x._layout.grid for x in tensors}) < 2:
        return None
    home = next((x for x in tensors if x.dim()), tensors[0])._layout.grid
    foreign = [x for x in tensors if not x.dim() and x._layout.grid is not home]
    return _replaced(args, _whole(foreign)) if foreign else None


def run_as_plain(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> Any:
    """Run an op on plain tensors if all its DTensors are 0-dim; else raise `error`."""
    tensors = [x for arg in args for x in as_list(arg) if _is_distributed(x)]
    by_keyword = any(_is_distributed(x) for arg in kwargs.values() for x in as_list(arg))
    if by_keyword or any(x.dim() or x.requires_grad for x in tensors):
        raise error
    return op(*_replaced(args, _whole(tensors)), **kwargs)


def number_as_plain(number: Any) -> Any:
    """The value of a 0-dim tensor, the same on every rank."""
    return _whole([number])(number)


def _whole(numbers: Sequence[Any]) -> Callable[[Any], Any]:
    """A function that replaces each of `numbers` by its plain value, and leaves other values alone.

    Those of one mesh and dtype are reduced together.
    """
    alike: dict[tuple[Grid, torch.dtype], list[Any]] = defaultdict(list)
    for number in numbers:
        alike[number._layout.grid, number.dtype].append(number)
    values: dict[int, torch.Tensor] = {}
    for members in alike.values():
        if len(members) == 1:
            values[id(members[0])] = plain_if_equal(members[0].full_tensor())
        else:
            stacked: Any = torch.stack(members)
            plain = plain_if_equal(stacked.full_tensor())
            values.update(zip(map(id, members), plain.unbind(), strict=True))
    return lambda x: values.get(id(x), x)


def _replaced(args: Sequence[Any], replace: Callable[[Any], Any]) -> list[Any]:
    return [[replace(x) for x in a] if isinstance(a, (list, tuple)) else replace(a) for a in args]


def _is_distributed(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and hasattr(x, "_layout")


def as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


# -- gradients of plain tensors --------------------------------------------------------------
#
# torch's formulas give a DTensor gradient to a plain tensor that met a DTensor, and an optimizer
# could not add the two. Conversely, the formula of `cat` makes plain zeros for operands of shape
# (0,), which it skips. Hooks convert both.

#: The tensors that have the hook, by id.
_hooked: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def keep_gradient_plain(tensor: torch.Tensor) -> None:
    """Convert the gradient of `tensor`, which meets a DTensor, to a plain tensor.

    Traced tensors are left alone.
    """
    if not torch.is_grad_enabled() or _hooked.get(id(tensor)) is tensor:
        return
    if is_per_rank(tensor):
        tensor.register_hook(_as_local)
    elif type(tensor) is torch.Tensor or type(tensor) is nn.Parameter:
        tensor.register_hook(_as_plain)
    else:
        return
    _hooked[id(tensor)] = tensor


@own_hook
@untraced
def _as_plain(grad: Any) -> Any:
    return _as_local(grad, plain=True)


@own_hook
@untraced
def _as_local(grad: Any, plain: bool = False) -> Any:
    if not isinstance(grad, Wrapped):
        return None
    with because("the gradient of a plain tensor", implicit=False):
        whole = autograd.redistribute(grad, autograd.whole_layout(grad._layout))
    return autograd.to_local(whole, autograd.unexpanded(whole._layout), False, plain)


def wrap_gradients_of_skipped(kind: Any, op: Any, layouts: Sequence[Any], entry: Entry) -> None:
    """Let a planned `cat` wrap the plain gradients of the operands that it skips."""
    if op is not torch.ops.aten.cat.default:
        return
    one_dim = [(i, layout.shape[0]) for i, layout in enumerate(layouts[0]) if layout.ndim == 1]
    skipped = [i for i, size in one_dim if statically_equal(size, 0)]
    move = entry.move

    def hooked(operands: list[Any], args: Sequence[Any]) -> None:
        for x in [args[0][i] for i in skipped]:
            if torch.is_grad_enabled() and x.requires_grad and not x.is_leaf:  # a leaf has a hook
                layout = autograd.gradient_layout(x._layout)
                x.register_hook(functools.partial(autograd.to_leaf_layout, kind, layout))
        if move is not None:
            move(operands, args)

    if skipped:
        entry.move = hooked


# -- indices -------------------------------------------------------------------------------------
# torch makes plain tensors of lists in an index (`x[[0, 2]]`); here they become replicated
# DTensors. In a write (`x[2, 5] = 0`) an int becomes a slice of length 1: torch would select, and
# write to what may be a copy.


def holds_list(index: Any) -> bool:
    """Whether an index is or contains a list."""
    return list in map(type, index) if type(index) is tuple else type(index) is list


def with_tensors(x: Any, index: Any) -> Any:
    """The index with a replicated tensor in place of each list of numbers.

    A list is the same on all ranks, which run one program. A list of lists as the whole index is
    left alone: torch is about to change its meaning.
    """
    if isinstance(index, tuple):
        return tuple(_tensor(x, item) if _is_numbers(item) else item for item in index)
    return _tensor(x, index) if all(type(i) in (int, bool) for i in index) else index


def without_ints(x: Any, index: Any, value: Any) -> tuple[Any, Any]:
    """The index and value of a write such as `x[2] = v`, as `x[2:3] = v[None]`.

    Unchanged where the index holds several tensors, where torch will raise, and where the size of
    an indexed dim is symbolic: there a slice may be a copy too. One number can also be written at
    an index that is a tensor.
    """
    items = index if isinstance(index, tuple) else (index,)
    if int not in map(type, items):
        return index, value
    is_tensor = isinstance(value, torch.Tensor)
    one = value.dim() == 0 if is_tensor else isinstance(value, (int, float, complex))
    num_tensors = sum(isinstance(item, torch.Tensor) for item in items)
    if one and num_tensors:
        return tuple(_beside_tensors(x, item) for item in items), value
    steps = [reach for item in items if (reach := _dims_of_item(item)) is not None]
    missing = x.dim() - sum(consumed for consumed, _ in steps)
    if missing < 0 or len(steps) < len(items) or num_tensors > 1:
        return index, value
    found: list[Any] = []
    #: For each dim of the target, whether it comes from an int.
    from_int: list[bool] = []
    at = 0
    for item, (consumed, produced) in zip(items, steps, strict=True):
        if type(item) is int:
            item = _without_int(x, at, item, one)
            if item is None:
                return index, value
            from_int.append(True)
        else:
            from_int += [False] * (missing if item is Ellipsis else produced)
        found.append(item)
        at += missing if item is Ellipsis else consumed
    from_int += [False] * (x.dim() - at)
    if is_tensor and one:
        value = value.to(x.dtype)  # index_put does not cast as copy does
    elif is_tensor:
        for after, single in enumerate(reversed(from_int)):
            if single and value.dim() >= after:
                value = value.unsqueeze(value.dim() - after)
        if _same_memory(x, tuple(found), value):
            value = value.clone()
    return tuple(found), value


def _beside_tensors(x: Any, item: Any) -> Any:
    """An item of an index that holds tensors, on the device of `x`."""
    if type(item) is int:
        return _tensor(x, [item])
    return item.to(x.device) if isinstance(item, torch.Tensor) else item


def _without_int(x: Any, dim: int, item: int, one: bool) -> Any:
    """An int as a slice, which is a view where `select` would copy; None where it stays.

    To write one number, as a tensor where a slice would be a copy too: several axes shard the dim,
    or its size is symbolic.
    """
    size = x.shape[dim]
    symbolic = type(size) is not int
    if (symbolic and not one) or not -size <= item < size:
        return None
    if one and (symbolic or sum(p.is_shard(dim) for p in x.placements) > 1):
        return _tensor(x, [item])
    return slice(item, item + 1 or None)


def _same_memory(x: Any, index: tuple[Any, ...], value: Any) -> bool:
    """Whether `value` is the memory that it is written to, as in `x[1, :2] += 1`.

    Its strides along dims of size 1 may differ, which torch takes for partial overlap.
    """
    if type(value) is not type(x):
        return False
    here, there = (parts_of(t._local) for t in (x, value))
    if type(here[0]) is not torch.Tensor or type(there[0]) is not torch.Tensor:
        return False  # traced tensors have no memory
    memory = {part.untyped_storage().data_ptr() for part in here if part.numel()}
    if memory.isdisjoint(part.untyped_storage().data_ptr() for part in there):
        return False
    target = x[index]._local
    pairs = zip(parts_of(target), there, strict=False)
    return all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in pairs)


def _dims_of_item(item: Any) -> tuple[int, int] | None:
    """How many dims an item of an index consumes and produces; None if unknown."""
    if item is None:
        return 0, 1
    if item is Ellipsis:
        return 0, 0
    if isinstance(item, torch.Tensor):
        return (item.dim(), 1) if item.dtype in (torch.bool, torch.uint8) else (1, item.dim())
    return (1, 1) if type(item) in (int, slice) else None


def _is_numbers(item: Any) -> bool:
    return isinstance(item, list) and all(type(i) in (int, bool) or _is_numbers(i) for i in item)


def _tensor(x: Any, numbers: list[Any]) -> Any:
    plain = torch.tensor(numbers)
    return x.new_tensor(numbers, dtype=plain.dtype if plain.numel() else torch.long)


# -- methods that replace a tensor by a view of itself (`t_`, `unsqueeze_`) -------------------
#
# After a write, torch's autograd replays the views of a tensor with their arguments. On a plain
# tensor it uses strides; on a wrapper it calls `view(base, ...)`, which is a different view once
# the base has other dims. So the base must stay as it is: the caller's tensor becomes a view, and
# the base lives on under a name that only the views know. A tensor without views is changed in
# place: as a view it would save more of a later write for backward.
#
# These are methods, not kernels: only a Python name can come to mean another tensor. torch's C++
# (`quantile`, the rules of `vmap`) keeps using the tensor that it passed.


def in_place_view(name: str) -> Callable[..., Any]:
    """The method of this name, e.g. `t_`; the view op is the name without the underscore."""
    turn, view_of = getattr(torch.Tensor, name), getattr(torch.Tensor, name[:-1])

    def method(x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not has_values(x._local):
            return turn(x, *args, **kwargs)
        if x.is_leaf and x.requires_grad:
            return _change_leaf(turn, x, *args, **kwargs)
        if x._use_count() == 1 and not x._is_view():
            return turn(x, *args, **kwargs)  # there is no view of it
        if x.retains_grad:  # torch's hook knows the tensor that the name no longer means
            raise UnsupportedError(
                f"{name}() would change {x._layout}, which retains its gradient, while views of it "
                f"or results saved by autograd are in use. Call retain_grad() after it, or use "
                f"{name[:-1]}()."
            )
        # A no-op, for torch's checks and its version counter.
        torch.Tensor.transpose_(x, 0, 0)
        with torch.enable_grad():
            view = view_of(x, *args, **kwargs)
        if view._layout.snapshot and not x._layout.snapshot:
            return turn(x, *args, **kwargs)  # raises the right error
        _become_view(x, view)
        return x

    method.__name__ = name
    method.__doc__ = turn.__doc__
    return method


def _become_view(x: Any, view: Any) -> None:
    """Let `x` be a view of itself; what it was lives on as the base of that view and others."""
    swap_tensors(x, view)
    base = type(x)._wrap(view._local, view._layout)
    take_over(base, x)
    take_over(x, view)
    take_over(view, base)


def retain_grad(x: Any) -> None:
    """As for any tensor.

    A linear layer with a bias returns a view on one device. `retain_grad` alone shows it, after a
    write to another view, so only then does `x` become one.
    """
    operands = None if torch.compiler.is_compiling() else getattr(x.grad_fn, "biased", None)
    if operands is not None and not x._is_view() and _is_view_of_product(*operands):
        with torch.enable_grad():
            _become_view(x, x.view(x.shape))
        _retain_earlier(x)
    torch.Tensor.retain_grad(x)


def _retain_earlier(x: Any) -> None:
    """Have `x.grad` include what comes from uses of `x` before it became a view.

    They send it to the base, which gets all gradients of `x`; once the base is written to, also
    others. The hooks live as long as the graph, so they must not keep `x` alive.
    """
    ref, version = weakref.ref(x), x._base._version
    before: list[Any] = []  # `x.grad`, until torch has added the gradient of the view

    def note(_: Any) -> None:
        before[:] = [getattr(ref(), "grad", None)]

    def retain(whole: Any) -> None:
        x = ref()
        if x is None or x._base._version != version:
            return
        earlier = before.pop() if before else x.grad
        x.grad = whole if earlier is None else earlier + whole

    x._base.register_hook(retain)
    x.register_hook(note)


def _is_view_of_product(layout: Layout, of_bias: Layout) -> bool:
    """Whether one device returns a view of a matrix product, as torch itself reports."""
    x, bias = (torch.empty_strided(it.shape, it.stride, device="meta") for it in (layout, of_bias))
    weight = torch.empty(of_bias.shape[0], layout.shape[-1], device="meta", requires_grad=True)
    return torch.nn.functional.linear(x, weight, bias)._is_view()


def _change_leaf(turn: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Change a leaf, which stays one and must have no views; its gradient hook is renewed."""
    if not torch.is_grad_enabled() and x._use_count() > 1:
        raise UnsupportedError(
            f"{turn.__name__}() would change a leaf that requires grad, {x._layout}, while views "
            "of it or results saved by autograd are still in use. Call it before they are made or "
            f"after they are gone, or use {turn.__name__[:-1]}()."
        )
    turn(x, *args, **kwargs)
    hook = x.__dict__.pop("_hooked", None)
    if hook is not None:
        hook.remove()
        x.requires_grad_()
    return x
