"""torch's dispatcher: wrapper subclasses, keys, modes, kernels, and ops as objects."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch.compat import NEWEST, VERSION, Names, Probe
from shardwise._torch.functions import tree_leaves

_names = Names()
_NO_DTENSOR = "no DTensor can be made"
_NO_AUTOCAST = "local tensors cannot be kept from torch.autocast"
_NO_MODES = "what DTensors compute internally cannot be kept from modes such as CommDebugMode"

#: Makes a tensor without memory, whose ops go to its `__torch_dispatch__`.
make_wrapper: Any = _names.find("torch.Tensor._make_wrapper_subclass", _NO_DTENSOR)
#: As a class's `__torch_function__`: opts the class out of that protocol, at no cost.
no_torch_function: Any = _names.find("torch._C._disabled_torch_function_impl", _NO_DTENSOR)
#: Contexts in which a protocol is off: `__torch_dispatch__` of subclasses, `__torch_function__` of
#: subclasses and modes, that of subclasses alone.
undispatched: Any = _names.find(
    "torch._C._DisableTorchDispatch", "ops that change the shape of a DTensor in place fail"
)
without_torch_function: Any = _names.find(
    "torch._C.DisableTorchFunction", "DTensors with uneven shards cannot be exported"
)
without_subclass_functions: Any = _names.find(
    "torch._C.DisableTorchFunctionSubclass", "functions on ShardedTensors fail"
)
is_function_mode_enabled: Callable[[], bool] = _names.find(
    "torch._C._is_torch_function_mode_enabled", "torch.export of DTensors fails"
)
#: Whether an op, by name, has a kernel at all; whether it has one for a dispatch key, by name.
has_kernel: Callable[[str], bool] = _names.find(
    "torch._C._dispatch_has_kernel", "`shardwise rules` cannot say which ops are decomposed"
)
has_kernel_for_key: Callable[[str, str], bool] = _names.find(
    "torch._C._dispatch_has_kernel_for_dispatch_key", "calls of DTensors cannot be planned"
)
#: The names of all ops with a kernel for a dispatch key, by name.
ops_with_kernel: Callable[[str], list[str]] = _names.find(
    "torch._C._dispatch_get_registrations_for_dispatch_key",
    "composite ops with out= do not take DTensors",
    instead=lambda key: [],
)

# -- keys ------------------------------------------------------------------------------------

#: The keys of a DTensor besides those of its device: the third private backend's, and those of
#: autocast, which torch would not give to a tensor of that backend.
ABOVE_AUTOGRAD: Any = _names.make(
    "DispatchKeySet DispatchKey",
    "torch._C",
    _NO_DTENSOR,
    lambda keys, key: keys(key.AutogradPrivateUse3).add(key.AutocastCPU).add(key.AutocastCUDA),
)
NO_KEYS: Any = _names.make(
    "DispatchKeySet DispatchKey", "torch._C", _NO_DTENSOR, lambda keys, key: keys(key.Undefined)
)
#: A context in which autocast is off; expensive, so check `is_autocast` first.
autocast_off: Callable[[], Any] = _names.make(
    "DispatchKeySet DispatchKey _ExcludeDispatchKeyGuard",
    "torch._C",
    _NO_AUTOCAST,
    lambda keys, key, exclude: functools.partial(
        exclude, keys(key.AutocastCPU).add(key.AutocastCUDA)
    ),
)


#: The keys of torch's own autograd, by type of device, and of what is below it but for
#: ADInplaceOrView, which only matters to views.
_OWN_AUTOGRAD: Any = _names.make(
    "DispatchKeySet DispatchKey",
    "torch._C",
    _NO_DTENSOR,
    lambda keys, key: {
        "cpu": keys(key.AutogradCPU).add(key.Python).add(key.CPU),
        "cuda": keys(key.AutogradCUDA).add(key.Python).add(key.CUDA),
    },
)


def with_own_autograd(op: OpOverload, device: str) -> Callable[..., Any]:
    """`op` as torch differentiates or decomposes it, past kernels for `ABOVE_AUTOGRAD`."""
    return functools.partial(op.redispatch, _OWN_AUTOGRAD[device])


#: The first key of a tensor subclass, above autograd; ops that torch would decompose pass it whole.
_FIRST: Any = _names.make(
    "DispatchKey",
    "torch._C",
    "recurrent layers on LocalTensors fail",
    lambda key: key.PythonTLSSnapshot,
)


def run_instead(library: Any, op: Any, kernel: Callable[..., Any]) -> None:
    """Where a tensor subclass is an argument, run `kernel(op, *args)`; `op` is torch's own."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(op.redispatch, keys.remove(_FIRST))
        if torch.is_inference_mode_enabled() and not VERSION.startswith(NEWEST):
            own = functools.partial(_call_next, op)
        return kernel(own, *args, **kwargs)

    library.impl(op.name(), run, "PythonTLSSnapshot", with_keyset=True)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _call_next(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch calls next in inference mode; older versions need what the first key keeps."""
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, torch.Tensor) and type(x) not in _PLAIN:
            return type(x).__torch_dispatch__(op, (type(x),), args, kwargs)
    return op.decompose(*args, **kwargs)  # plain tensors in a mode, which sees the steps


_NO_CHUNKS = "linear_cross_entropy in chunks has no gradients for tensors per rank"
_LOSS = "torch.nn.modules.linear_cross_entropy._linear_cross_entropy_batch_chunked"
_chunked_losses = tuple(
    _names.later(f"{_LOSS}{kind}", _NO_CHUNKS, instead=None) for kind in ("", "_no_reduction")
)


def chunked_losses() -> list[Any]:
    """The ops of `linear_cross_entropy` in chunks, which torch has from 2.13 on."""
    found = [look_up() for look_up in _chunked_losses]
    return [op._opoverload for op in found if op is not None]


def _autocast_enabled() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


#: Whether autocast is on for any device.
is_autocast: Callable[[], bool] = _names.find(
    "torch._C._is_any_autocast_enabled", "each op takes longer", instead=_autocast_enabled
)

_NO_AUTOGRAD = "sharded modules and collections cannot run in compiled code"
_keys: Any = _names.find("torch._C.DispatchKey", _NO_DTENSOR)
_excluded: Any = _names.find("torch._C._dispatch_tls_local_exclude_set", _NO_AUTOGRAD)
_included: Any = _names.find("torch._C._dispatch_tls_local_include_set", _NO_AUTOGRAD)
_with_keys: Any = _names.find("torch._C._ForceDispatchKeyGuard", _NO_AUTOGRAD)


@contextlib.contextmanager
def with_autograd(enabled: bool) -> Iterator[None]:
    """Autograd as in eager code: compiled code runs below it."""
    excluded = _excluded()
    for key in (
        _keys.ADInplaceOrView,
        _keys.AutogradFunctionality,
        _keys.AutogradOther,
        _keys.AutogradNestedTensor,
    ):
        excluded = excluded.remove(key)
    with _with_keys(_included(), excluded), torch.set_grad_enabled(enabled):
        yield


# -- modes -----------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import (
        return_and_correct_aliasing as return_and_correct_aliasing,
    )
else:
    TorchDispatchMode = _names.find(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "CommDebugMode is missing, and local ops take longer",
    )
    return_and_correct_aliasing = _names.find(
        "torch.utils._python_dispatch.return_and_correct_aliasing",
        "views of DTensors cannot enter compiled code",
    )

#: A context that hides ops from all modes.
outside_modes: Any = _names.find("torch.utils._python_dispatch._disable_current_modes", _NO_MODES)
#: The active modes.
active_modes: Callable[[], list[Any]] = _names.find(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "activation checkpointing is not recognised in compiled code",
)
_NO_CHECKPOINTS = "selective activation checkpointing around fully sharded modules fails"
_checkpoint_modes: Any = _names.make(
    "_CachingTorchDispatchMode _CachedTorchDispatchMode",
    "torch.utils.checkpoint",
    _NO_CHECKPOINTS,
    lambda *modes: modes,
    instead=(),
)
_push_mode, _pop_mode = (
    _names.find(f"torch.utils._python_dispatch.{name}", _NO_CHECKPOINTS)
    for name in ("_push_mode", "_pop_mode")
)


@contextlib.contextmanager
def outside_checkpoints() -> Iterator[None]:
    """Selective activation checkpointing does not see what runs: backward will not repeat it."""
    # Modes that belong to torch, such as that of fake tensors, are in separate slots.
    modes = [mode for mode in active_modes() if getattr(mode, "_mode_key", None) is None]
    others = [mode for mode in modes if not isinstance(mode, _checkpoint_modes)]
    if len(modes) == len(others):
        yield
        return
    _set_modes(modes, others)
    try:
        yield
    finally:
        _set_modes(others, modes)


def _set_modes(before: list[Any], after: list[Any]) -> None:
    for _ in before:
        _pop_mode()
    for mode in after:
        _push_mode(mode)


def probe() -> Probe:
    return _names.probe(
        lambda: _dispatches() and _is_known(), "ops on DTensors are not recognised, or not planned"
    )


def _dispatches() -> bool:
    seen = []

    class Wrapper(torch.Tensor):
        __torch_function__ = no_torch_function

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append((func, is_autocast()))
            return torch.empty(2)

    plain = (None, None, torch.float32, torch.strided, torch.device("cpu"), False, False)
    x = make_wrapper(Wrapper, (2,), (1,), *plain, None, False, False, ABOVE_AUTOGRAD)
    with outside_modes(), torch.autocast("cpu"), autocast_off(), with_autograd(True):
        torch.neg(x)
    kernels = has_kernel("aten::mm") and has_kernel_for_key("aten::mm", "AutocastCPU")
    return kernels and [func for func, _ in seen] == [torch.ops.aten.neg.default]


# -- schema --------------------------------------------------------------------------------------
# Ops as objects: their types, decompositions, and faster bindings.


_NO_PLANS = "calls of DTensors cannot be planned"

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch._prims_common import is_contiguous_or_false as is_contiguous_or_false
    from torch._prims_common import suggest_memory_format as suggest_memory_format
else:
    OpOverload = _names.find("torch._ops.OpOverload", _NO_PLANS)
    OpOverloadPacket = _names.find("torch._ops.OpOverloadPacket", "register_rule() fails")
    is_contiguous_or_false = _names.find(
        "torch._prims_common.is_contiguous_or_false", "DTensors with symbolic sizes fail"
    )
    suggest_memory_format = _names.find(
        "torch._prims_common.suggest_memory_format", "convolutions of DTensors fail"
    )

#: Torch's Python decompositions, by op; takes most of a second to import.
decompositions: Callable[[], dict[Any, Callable[..., Any]]] = _names.later(
    "torch._decomp.decomposition_table", "ops without a rule that torch could decompose fail"
)

_SLOWER = "local ops take longer"
#: Where torch keeps the Python bindings of ops, by the name of the op.
BINDINGS = tuple(
    home
    for name in ("_VariableFunctions", "_nn", "TensorBase")
    if (home := _names.find(f"torch._C.{name}", _SLOWER, instead=None)) is not None
)

_meta_key: Any = _names.make("DispatchKey", "torch._C", _NO_PLANS, lambda key: key.Meta)


def has_python_meta(op: OpOverload) -> bool:
    """Whether torch infers the op's shapes in Python, which imports its compiler."""
    return _meta_key in op.py_kernels


def is_composite(op: OpOverload) -> bool:
    """Whether torch implements an op by other ops, below Python."""
    return has_kernel_for_key(op.name(), "CompositeImplicitAutograd")


def _is_known() -> bool:
    mm, linear, x = torch.ops.aten.mm.default, torch.ops.aten.linear.default, torch.empty(2, 3)
    kinds = isinstance(mm, OpOverload) and isinstance(torch.ops.aten.mm, OpOverloadPacket)
    composite = is_composite(linear) and not is_composite(mm)
    formats = is_contiguous_or_false(x) and suggest_memory_format(x) is torch.contiguous_format
    quick = any(hasattr(home, "mm") for home in BINDINGS)
    return (
        kinds and composite and formats and quick and torch.ops.aten.t.default in decompositions()
    )
