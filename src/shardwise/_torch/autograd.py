"""The state of autograd: which node runs, in which backward pass, under which transform."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from shardwise._torch.compat import Names, Probe
from shardwise._torch.dispatch import OpOverload, make_wrapper, with_own_autograd
from shardwise._torch.functions import tree_iter

_names = Names()

#: The node that runs on this thread; None outside backward.
current_node: Callable[[], Any] = _names.find(
    "torch._C._current_autograd_node",
    "torch's backward formulas that make plain tensors raise MixedTensorsError",
    instead=lambda: None,
)
#: The number that the next node of this thread gets.
next_node_number: Callable[[], int] = _names.find(
    "torch.autograd._get_sequence_nr",
    "collectives of backward are not assigned to modules",
    instead=lambda: 0,
)
#: The number of the backward pass that this thread runs; -1 outside of one.
current_backward: Callable[[], int] = _names.find(
    "torch._C._current_graph_task_id", "data_parallel() and fully_shard() fail in backward"
)
_engine: Any = _names.find(
    "torch.autograd.Variable._execution_engine",
    "data_parallel() and fully_shard() fail in backward",
)
#: Swaps two tensors in place, for everyone who holds them.
swap_tensors: Callable[[torch.Tensor, torch.Tensor], None] = _names.find(
    "torch._C._swap_tensor_impl", "t_() and its kin fail on DTensors"
)
#: Counts a write to each of a tuple of plain tensors.
count_versions: Callable[[Any], None] = _names.find(
    "torch._C._increment_version",
    "writes to memory that to_local() lent take longer",
    instead=torch.autograd.graph.increment_version,
)
_NO_TRANSFORMS = "tensors of torch.func are not recognised"
#: Whether a tensor is batched by the older vmap that autograd uses.
is_legacy_batch: Callable[[Any], bool] = _names.find(
    "torch._C._functorch.is_legacy_batchedtensor", _NO_TRANSFORMS, instead=lambda x: False
)
#: Whether a tensor belongs to a transform of torch.func.
is_transformed: Callable[[Any], bool] = _names.find(
    "torch._C._functorch.is_functorch_wrapped_tensor", _NO_TRANSFORMS, instead=lambda x: False
)
#: The innermost transform of torch.func that runs, or None.
current_transform: Callable[[], Any] = _names.find(
    "torch._C._functorch.peek_interpreter_stack", _NO_TRANSFORMS, instead=lambda: None
)
_outside_transforms: Callable[[], Any] = _names.find(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "DTensors cannot be made inside of torch.func's transforms",
    instead=contextlib.nullcontext,
)


#: torch's forward mode, which counts its levels from -1.
_forward: Any = _names.make(
    "_current_level",
    "torch.autograd.forward_ad",
    "tangents of DTensors get lost in forward mode",
    lambda level: torch.autograd.forward_ad,
    instead=types.SimpleNamespace(_current_level=-1),
)


def have_tangents(values: Iterable[Any]) -> bool:
    """Whether a tensor has a tangent, as in `torch.autograd.forward_ad.dual_level()`."""
    return _forward._current_level >= 0 and any(
        isinstance(x, torch.Tensor) and _forward.unpack_dual(x).tangent is not None for x in values
    )


def unless_forward_mode(op: OpOverload, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, which knows of no tangents; for operands that have some, torch's own formulas."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if _forward._current_level >= 0 and have_tangents(tree_iter((args, kwargs))):
            values = tree_iter((args, kwargs))
            device = next(x.device.type for x in values if isinstance(x, torch.Tensor))
            return with_own_autograd(op, device)(*args, **kwargs)
        return kernel(*args, **kwargs)

    return run


def outside_transforms(make: Callable[..., Any], *args: Any) -> Any:
    """`make(*args)` run outside torch.func's transforms; it depends on no tensor of theirs."""
    with _outside_transforms():
        return make(*args)


class VersionSource(torch.Tensor):
    """A tensor without values, whose version counter others can share."""

    __slots__ = ("_given",)

    @staticmethod
    def make() -> VersionSource:
        made = make_wrapper(VersionSource, (), dtype=torch.float32)
        assert isinstance(made, VersionSource), "what torch made is what was asked for"
        return made

    def share(self, tensor: torch.Tensor) -> bool:
        """Let `tensor`, of a class with dispatch, have this version counter; whether it has."""
        self._given: torch.Tensor | None = tensor
        with torch.no_grad():
            torch.ops.aten.alias(self)  # to autograd, what dispatch returns is a view of this
        self._given = None
        before = tensor._version
        torch.autograd.graph.increment_version(self)
        return tensor._version > before

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return args[0]._given


def has_siblings(x: torch.Tensor) -> bool:
    """Whether `x` is one of several results of a torch op: it may get no gradient in backward."""
    if isinstance(x.grad_fn, torch.autograd.function.BackwardCFunction):
        return False
    return len(getattr(x.grad_fn, "_input_metadata", ())) > 1


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return current_backward() != -1


def after_backward(fn: Callable[[], None]) -> None:
    """Run `fn` when the backward pass that runs now has ended."""
    _engine.queue_callback(fn)


_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def own_hook(fn: _Hook) -> _Hook:
    """Mark a function as one that this package registers as a hook."""
    fn.__dict__["_own_hook"] = True
    return fn


def users_hooks(tensor: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """The hooks that a user registered: on the gradient, and after its accumulation."""
    later = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return _of_users(getattr(tensor, "_backward_hooks", None)), _of_users(later)


def is_watched_later(tensor: torch.Tensor) -> bool:
    """Whether a user's hook runs after accumulation, beside one of this package."""
    hooks: Any = tensor._post_accumulate_grad_hooks
    return len(hooks) > 1 and bool(_of_users(hooks))


def _of_users(hooks: dict[int, Any] | None) -> list[Any]:
    every = hooks.values() if hooks else ()
    return [hook for hook in every if not hasattr(getattr(hook, "func", hook), "_own_hook")]


def probe() -> Probe:
    return _names.probe(_tells, "gradients are not reduced where backward ends")


def _tells() -> bool:
    seen: list[Any] = []

    def hook(grad: torch.Tensor) -> None:
        seen.append((in_backward(), current_node() is not None))
        after_backward(lambda: seen.append("end"))

    with torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        before = next_node_number()
        y = x * 2
        y.register_hook(hook)
        y.sum().backward()
    plain = not is_legacy_batch(x) and not is_transformed(x) and current_transform() is None
    counted = next_node_number() >= before + 2 and not in_backward() and current_node() is None
    return plain and counted and seen == [(True, True), "end"]
