"""Private functions of torch: on tensors, modules, nested arguments and symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch.compat import Names, Probe

_names = Names()

neg_view: Callable[[torch.Tensor], torch.Tensor] = _names.find(
    "torch._neg_view", "tensors with the negative bit cannot be shards"
)
#: Which attention kernel torch would choose, as a number.
fused_sdp_choice: Callable[..., int] = _names.find(
    "torch._fused_sdp_choice", "causal attention on DTensors fails"
)
#: Asserts a condition on the GPU without synchronising.
assert_async: Callable[[torch.Tensor, str], None] = _names.find(
    "torch._assert_async", "ids on a GPU cannot be checked"
)
embedding_bag: Callable[..., Any] = _names.find(
    "torch._embedding_bag", "bags with mode='max' fail in sharded modules"
)
#: Ops on lists of tensors, in place.
foreach_mul: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = _names.find(
    "torch._foreach_mul_", "collections with mean pooling fail"
)
foreach_add: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = _names.find(
    "torch._foreach_add_", "collections do not give gradients of weights of ids"
)
#: All values of some tensors in one new tensor of one dim.
flat: Callable[[list[torch.Tensor]], torch.Tensor] = _names.find(
    "torch._utils._flatten_dense_tensors",
    "data_parallel() takes longer",
    instead=lambda tensors: torch.cat([tensor.reshape(-1) for tensor in tensors]),
)
#: The types of tensors that torch's functions on many tensors give to foreach ops.
_foreach_types: Any = _names.find(
    "torch.utils._foreach_utils._foreach_supported_types",
    "clipping the gradients of many DTensors takes longer",
    instead=None,
)
#: Parses the arguments of `Tensor.to`.
parse_to: Callable[..., Any] = _names.find("torch._C._nn._parse_to", "ShardedTensor.to() fails")
_pre_hooks: Any = _names.find(
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "optimizer steps on DTensors take longer",
    instead=None,
)
_post_hooks: Any = _names.find(
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "optimizer steps on DTensors take longer",
    instead=None,
)
_TensorPair: Any = _names.find(
    "torch.testing._comparison.TensorLikePair",
    "assert_close of a whole tensor of a simulated world with a Parameter fails",
    instead=None,
)


def compare_by(plain: Callable[[Any], Any]) -> None:
    """Let `torch.testing.assert_close`, which compares types, compare `plain(x)` for each x."""
    if _TensorPair is None:
        return
    process = _TensorPair._process_inputs

    def processed(self: Any, actual: Any, expected: Any, **options: Any) -> Any:
        return process(self, plain(actual), plain(expected), **options)

    _TensorPair._process_inputs = processed


def allow_in_foreach(kind: type[torch.Tensor]) -> None:
    """Let functions such as `clip_grad_norm_` call foreach ops on tensors of this type."""
    if _foreach_types is not None and kind not in _foreach_types:
        _foreach_types.append(kind)


def others_watch_steps(optimizer: Any) -> bool:
    """Whether step hooks besides our one global hook, before and after, would run."""
    if _pre_hooks is None or _post_hooks is None:
        return True
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or len(_pre_hooks) > 1
        or len(_post_hooks) > 1
    )


def probe() -> Probe:
    return _names.probe(
        lambda: _functions_work() and _trees_work() and _symbols_work(),
        "some functions on DTensors and sharded modules fail, or symbolic sizes are wrong",
    )


def _functions_work() -> bool:
    x, starts = torch.ones(3, 2), torch.tensor([0, 2])
    assert_async(torch.tensor(True), "")
    bags = embedding_bag(x, torch.tensor([0, 1, 2]), starts, mode=2)
    row = flat([x.t(), torch.ones(1)])
    heads = torch.ones(1, 1, 2, 4)
    chosen = int(
        fused_sdp_choice(heads, heads, heads, None, 0.0, True, scale=None, enable_gqa=False)
    )
    listed = _foreach_types is None or torch.Tensor in _foreach_types
    device, dtype, *_ = parse_to("cpu", torch.float64)
    parsed = device == torch.device("cpu") and dtype is torch.float64
    return (
        neg_view(x).is_neg()
        and bags[0].shape == (2, 2)
        and len(bags) == 4
        and chosen >= -1
        and listed
        and row.shape == (7,)
        and parsed
    )


# -- pytree --------------------------------------------------------------------------------------
# torch's pytree functions, for nested arguments.


if TYPE_CHECKING:
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_iter as tree_iter
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_unflatten as tree_unflatten
else:
    _WITHOUT = "ops that take or return lists of tensors cannot be planned"
    tree_flatten = _names.find("torch.utils._pytree.tree_flatten", _WITHOUT)
    tree_iter = _names.find("torch.utils._pytree.tree_iter", _WITHOUT)
    tree_leaves = _names.find("torch.utils._pytree.tree_leaves", _WITHOUT)
    tree_map = _names.find("torch.utils._pytree.tree_map", _WITHOUT)
    tree_map_only = _names.find("torch.utils._pytree.tree_map_only", _WITHOUT)
    tree_unflatten = _names.find("torch.utils._pytree.tree_unflatten", _WITHOUT)


def _trees_work() -> bool:
    nested = [1, (2, {"a": 3})]
    leaves, spec = tree_flatten(nested)
    doubled = tree_map_only(int, lambda x: 2 * x, nested)
    same = tree_unflatten(leaves, spec) == tree_map(lambda x: x, nested) == nested
    return same and list(tree_iter(doubled)) == tree_leaves(doubled) == [2, 4, 6]


# -- symbolic sizes, and fake tensors ------------------------------------------------------------


#: The fake mode of the given tensors, or the active one, or None.
detect_fake_mode: Callable[..., Any] = _names.find(
    "torch._guards.detect_fake_mode", "DTensors with symbolic sizes cannot be traced"
)
#: Asserts a fact about a symbol that the compiler may rely on.
check_size: Callable[[Any], None] = _names.find(
    "torch._check", "rows of a table cannot be picked in compiled code"
)
_NO_FORMULAS = "sizes computed from symbols cannot be written into a graph"
_sympy_interp: Callable[[], Any] = _names.later(
    "torch.utils._sympy.interp.sympy_interp", _NO_FORMULAS
)
_reference: Callable[[], Any] = _names.later(
    "torch.utils._sympy.reference.PythonReferenceAnalysis", _NO_FORMULAS
)


def compute(expression: Any, symbols: dict[Any, Any]) -> Any:
    """A sympy expression of a size, evaluated with `symbols`."""
    return _sympy_interp()(_reference(), symbols, expression)


def share_symbols(sizes: Iterable[Any]) -> None:
    """Give sizes that the compiler found equal one symbol.

    Inductor names a size that is an input by its own symbol, and reads it by the one that replaced
    it: that of the tensor's `.grad`, say.
    """
    for size in sizes:
        node = getattr(size, "node", None)
        if node is not None and node.expr.is_Symbol:
            node._expr = node.expr


def _symbols_work() -> bool:
    import sympy  # type: ignore[import-untyped]

    check_size(torch.empty(2).numel() == 2)
    n = sympy.Symbol("n", integer=True)
    return detect_fake_mode() is None and compute(2 * n + 1, {n: 3}) == 7
