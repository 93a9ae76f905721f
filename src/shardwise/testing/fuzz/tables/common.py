"""More of what users call: functions, shapes, factories, convolutions, modules, Python itself."""

from __future__ import annotations

import torch

from shardwise.testing.fuzz.hand import COMPLEX, FLOATS, WIDE, Draft, Hand, Row
from shardwise.testing.fuzz.tables.nn import reduction, tracked
from shardwise.testing.fuzz.tables.shape import ids

# -- functions -------------------------------------------------------------------------------

_ANYWHERE = "asinh sinh cosh erfc exp2 deg2rad sinc isinf isnan isposinf isreal"
_BOUNDED = "acos asin atanh erfinv tan logit"
_POSITIVE = "acosh log10 log1p log2 lgamma digamma"


def _anywhere(name: str) -> Row:
    return lambda h: f"torch.{name}({h.floats()})"


def _within(name: str) -> Row:
    inner = "{}.sigmoid() * 0.5 + 0.25" if name == "logit" else "{}.tanh() * 0.5"
    return lambda h: f"torch.{name}({inner.format(h.floats())})"


def _positive(name: str) -> Row:
    return lambda h: f"torch.{name}({h.floats()}.abs() + 1.25)"


FUNCTIONS: tuple[Row, ...] = (
    *map(_anywhere, _ANYWHERE.split()),
    *map(_within, _BOUNDED.split()),
    *map(_positive, _POSITIVE.split()),
    lambda h: f"torch.floor_divide({h.ints()}, 2)",
    lambda h: f"torch.float_power({h.floats()}, 2)",
    lambda h: f"torch.{h.pick(('gcd', 'lcm'))}({(x := h.ints())}, {h.like(x)})",
    lambda h: f"torch.{h.pick(('bitwise_left_shift', 'bitwise_right_shift'))}({h.ints()}, 1)",
    lambda h: f"{h.number()} / ({h.floats()}.abs() + 0.5)",
    lambda h: f"{h.pick((2, 0.5))} ** {h.floats()}",
    lambda h: f"torch.rsub({(x := h.inexact())}, {h.like(x)})",
    lambda h: f"torch.logaddexp2({(x := h.floats())}, {h.like(x)})",
    lambda h: f"torch.ldexp({h.floats()}, {h.pick((1, -1))} * torch.ones((), dtype=torch.int32))",
    lambda h: f"torch.frexp({h.tensor(WIDE)})",
    lambda h: f"{h.floats()}.clamp_{h.pick(('min(-0.5)', 'max(0.5)'))}",
    lambda h: f"{h.any()}.{h.pick(('cfloat', 'cdouble', 'short', 'bfloat16'))}()",
    lambda h: f"torch.view_as_complex({h.tensor(WIDE, (1, 3), where=_pairs)}.contiguous())",
    lambda h: f"torch.conj_physical({h.tensor(COMPLEX)})",
    lambda h: f"torch.addcdiv({(x := h.floats())}, {h.like(x)}, torch.ones_like({x}), value=0.5)",
    lambda h: f"torch.nan_to_num({h.floats()} / 0, 0.0, 1.0, -1.0)",
    lambda h: f"torch.where({(x := h.floats())} > 0.25, 1.0, {x})",
    lambda h: f"torch.where({h.floats()} > 0.25)",
    lambda h: f"torch.allclose({(x := h.floats())}, {h.same(x)})",
    lambda h: f"torch.nanquantile({(x := h.tensor(WIDE, (1, 4)))}, 0.6, dim={h.dim(x)})",
    lambda h: f"torch.unique_consecutive({h.ints(1, 1)})",
    lambda h: f"torch.corrcoef({h.tensor(WIDE, (2, 2), True, lambda t: t.shape[1] > 2)})",
    lambda h: f"torch.linalg.vector_norm({(x := h.floats(1))}, 2, dim={h.dim(x)}, keepdim=True)",
    lambda h: f"torch.linalg.svdvals({h.tensor(WIDE, (2, 2), True)})",
    lambda h: f"torch.linalg.matrix_exp({h.tensor(WIDE, (2, 3), where=_square)} * 0.25)",
    lambda h: f"torch.linalg.norm({h.tensor(WIDE, (2, 2), True)})",
)


def _pairs(t: torch.Tensor) -> bool:
    return t.shape[-1] == 2


def _square(t: torch.Tensor) -> bool:
    return t.shape[-1] == t.shape[-2] > 0


# -- shapes and factories --------------------------------------------------------------------

SHAPES: tuple[Row, ...] = (
    lambda h: f"{h.any(2, 2)}.{h.pick(('T', 'H'))}",
    lambda h: f"torch.{h.pick(('dstack', 'column_stack'))}([{(x := h.any(1, 2))}, {h.same(x)}])",
    lambda h: f"torch.{h.pick(('fliplr', 'flipud'))}({h.any(2)})",
    lambda h: f"torch.{_halved(h)}",
    lambda h: f"{h.any()}.reshape_as({h.any(nonempty=True)})",
    lambda h: f"{(x := h.inexact(1))}.sum_to_size({_narrowed(h, x)})",
    lambda h: f"torch.argwhere({h.floats()} > 0.25)",
    lambda h: f"torch.combinations({h.tensor(WIDE, (1, 1))})",
    lambda h: f"torch.diagflat({h.inexact(1, 2)})",
    lambda h: f"torch.{h.pick(('alias', 't', 'diagonal'))}_copy({h.any(2, 2)})",
    lambda h: f"torch.permute_copy({h.any(2, 2)}, (1, 0))",
    lambda h: f"torch.unbind_copy({(x := h.any(1))}, {h.dim(x)})",
    lambda h: f"{h.any()}.new_{h.pick(('zeros', 'ones'))}({h.shape(0, 2)})",
    lambda h: f"{h.inexact()} * torch.tensor({h.number()})",
    lambda h: f"{(x := h.any(1))}.index_put(({_some_ids(h, x)},), {h.new((), h[x].dtype)})",
    lambda h: f"torch.put({(x := h.any(nonempty=True))}, {_flat_ids(h, x)}, {_one(h, x)})",
    lambda h: f"{(x := h.any(1))}[{_some_ids(h, x)}.tolist()]",
    lambda h: f"{(x := h.any(2))}[..., {_last_ids(h, x)}]",
    lambda h: f"{(x := h.any(2))}[{_some_ids(h, x)}, {_second_ids(h, x)}]",
    lambda h: f"{(x := h.any(1))}[{h.new(h[x].shape[:1], torch.bool)}]",
    lambda h: f"torch.index_reduce({(x := h.floats(1))}, {_reduced_into(h, x)})",
    lambda h: f"torch.as_strided_scatter({_flat(h)})",
    lambda h: f"torch.split_copy({(x := h.any(1))}, 1, {h.dim(x)})",
    lambda h: f"{h.any()}[None]",
    lambda h: f"{h.any(1)}[..., None]",
    lambda h: f"{h.any()}.expand(2, *{h.any(0, 2)}.shape)",
    lambda h: f"torch.nn.utils.rnn.pad_sequence([{(x := h.floats(1, 2))}, {_shorter(h, x)}])",
    lambda h: f"torch.nn.utils.parameters_to_vector([{(x := h.floats())}, {h.same(x)}])",
)


def _halved(h: Hand) -> str:
    kind, dim = h.pick((("hsplit", 1), ("vsplit", 0)))
    x = h.tensor(None, (2, 3), where=lambda t: t.shape[dim] % 2 == 0)
    return f"{kind}({x}, 2)"


def _narrowed(h: Hand, x: str) -> tuple[int, ...]:
    return tuple(1 if h.flag() else size for size in h[x].shape)


def _some_ids(h: Hand, x: str) -> str:
    return ids(h, h[x].shape[0], (2,))


def _second_ids(h: Hand, x: str) -> str:
    return ids(h, h[x].shape[1], (2,))


def _last_ids(h: Hand, x: str) -> str:
    return ids(h, h[x].shape[-1], (h.size(True),))


def _flat_ids(h: Hand, x: str) -> str:
    return ids(h, h[x].numel(), (1,))


def _one(h: Hand, x: str) -> str:
    return h.new((1,), h[x].dtype)


def _reduced_into(h: Hand, x: str) -> str:
    dim = h.dim(x)
    shape = h.resized(x, dim, 2)
    reduce = h.pick(("amax", "amin", "mean", "prod"))
    index = ids(h, h[x].shape[dim], (2,))
    include = h.flag()
    return f"{dim}, {index}, {h.new(shape, h[x].dtype)}, {reduce!r}, include_self={include}"


def _flat(h: Hand) -> str:
    x = h.tensor(WIDE, (1, 2), where=lambda t: t.is_contiguous() and t.numel() > 1)
    return f"{x}, {h.new((h[x].numel() // 2,), h[x].dtype)}, ({h[x].numel() // 2},), (2,)"


def _shorter(h: Hand, x: str) -> str:
    return h.new((max(h[x].shape[0] - 1, 1), *h[x].shape[1:]), h[x].dtype)


# -- layers ----------------------------------------------------------------------------------


def _transposed(h: Hand) -> str:
    x = h.tensor(WIDE, (3, 4), nonempty=True)
    ndim = h[x].dim() - 2
    groups = h.pick((1, h[x].shape[1]))
    weight = h.new((h[x].shape[1], 2, *(2,) * ndim), h[x].dtype)
    options = f"stride={h.between(1, 2)}, groups={groups}"
    return f"F.conv_transpose{ndim}d({x}, {weight}, {options})"


def _conv3d(h: Hand) -> str:
    x = h.tensor(WIDE, (4, 4), nonempty=True)
    weight = h.new((2, h[x].shape[0], 1, 1, 1), h[x].dtype)
    return f"F.conv3d({x}[None], {weight}, {h.new((2,), h[x].dtype)})"


def _bags(h: Hand) -> str:
    """Bags by offsets, weighted bags, and padding."""
    table = h.tensor(FLOATS, (2, 2), nonempty=True)
    rows = h[table].shape[0]
    kind = h.between(0, 4)
    if kind == 0:
        index = h.new((5,), torch.int64, high=rows)
        return f"F.embedding_bag({index}, {table}, {index}.new_tensor([0, 2, 2]))"
    index = h.new((2, 3), torch.int64, high=rows)
    if kind == 1:
        weights = h.new((2, 3), h[table].dtype)
        return f"F.embedding_bag({index}, {table}, mode='sum', per_sample_weights={weights})"
    padding = f"padding_idx={h.between(0, rows - 1)}"
    if kind == 2:
        return f"F.embedding_bag({index}, {table}, mode={h.pick(('sum', 'mean'))!r}, {padding})"
    if kind == 3:
        return f"F.embedding({index}, {table}, {padding}, scale_grad_by_freq={h.flag()})"
    return f"F.embedding({index}, {table}, {padding})"


def _attention(h: Hand) -> str:
    """With a mask: of bools, or added; with a scale; with more queries than keys."""
    x = h.tensor(WIDE, (3, 4), nonempty=True)
    *batch, length, width = h[x].shape
    keys = h.size(True)
    key, value = (h.new((*batch, keys, width), h[x].dtype) for _ in range(2))
    mask = h.pick(
        (
            f", attn_mask={h.new((length, keys), h[x].dtype)}",
            f", attn_mask={h.new((length, keys), h[x].dtype, grad=False)} > -1.5",
            ", scale=0.5",
            "",
        )
    )
    return f"F.scaled_dot_product_attention({x}, {key}, {value}{mask})"


def _heads(h: Hand) -> str:
    x = h.tensor(WIDE, (3, 3), nonempty=True, where=lambda t: t.shape[-1] in (2, 4))
    width, dtype = h[x].shape[-1], h[x].dtype
    weights = [h.new((3 * width, width), dtype), h.new((3 * width,), dtype)]
    out = [h.new((width, width), dtype), h.new((width,), dtype)]
    first = f"{x}, {x}, {x}, {width}, 2, {', '.join(weights)}, None, None, False, 0.0"
    return f"F.multi_head_attention_forward({first}, {', '.join(out)}, need_weights=False)[0]"


def _recurrent(h: Hand) -> str:
    x = h.tensor(WIDE, (2, 2), nonempty=True)
    rows, width = h[x].shape
    kind, gates = h.pick((("gru_cell", 3), ("rnn_tanh_cell", 1), ("lstm_cell", 4)))
    dtype, size = h[x].dtype, 2
    state = h.new((rows, size), dtype)
    shapes = ((gates * size, width), (gates * size, size), (gates * size,), (gates * size,))
    weights = ", ".join(h.new(shape, dtype) for shape in shapes)
    states = f"({state}, {h.new((rows, size), dtype)})" if kind == "lstm_cell" else state
    return f"torch.{kind}({x}, {states}, {weights})"


def _classes(h: Hand) -> str:
    """Losses of classes with weights, with several positions, with several labels."""
    x = h.tensor(WIDE, (2, 3), nonempty=True)
    rows, classes, *rest = h[x].shape
    target = h.new((rows, *rest), torch.int64, high=classes)
    weight = h.new((classes,), h[x].dtype, grad=False)
    averaged = reduction(h)
    if h.chance(0.3) and not rest:
        return f"F.multilabel_margin_loss({x}, torch.zeros_like({x}).long() - 1, {averaged})"
    kind = h.pick(("cross_entropy", "nll_loss"))
    return f"F.{kind}({x}, {target}, {weight}.abs() + 0.5, {averaged})"


def _module(h: Hand) -> str:
    """A module of torch, with whatever weights one device's generator gives it."""
    x = h.tensor(WIDE, (2, 3), nonempty=True)
    width = h[x].shape[-1]
    return h.pick(
        (
            f"torch.nn.Softmax(-1)({x})",
            f"torch.nn.Flatten()({x})",
            f"torch.nn.Identity()({x})",
            f"torch.nn.LayerNorm({width}, elementwise_affine=False)({x})",
            f"torch.nn.RMSNorm({width}, elementwise_affine=False)({x})",
            f"torch.nn.Dropout(0.5)({x})",
            f"torch.nn.Sequential(torch.nn.GELU(), torch.nn.Tanh())({x})",
            f"torch.nn.CosineSimilarity(-1, eps=0.5)({x}, {h.same(x)})",
            f"torch.nn.SmoothL1Loss()({x}, {h.same(x)})",
        )
    )


COMMON_LAYERS: tuple[Row, ...] = (
    _transposed,
    _transposed,
    _conv3d,
    _bags,
    _bags,
    _attention,
    _attention,
    _heads,
    _recurrent,
    _classes,
    _classes,
    _module,
    lambda h: f"F.adaptive_max_pool2d({h.tensor(WIDE, (3, 4), True)}, 1)",
    lambda h: f"F.pixel_shuffle({h.tensor(WIDE, (3, 4), True)}, 1)",
    lambda h: f"F.dropout2d({h.tensor(WIDE, (4, 4), True)}, 0.5)",
    lambda h: f"F.feature_alpha_dropout({h.tensor(WIDE, (3, 4), True)}, 0.5, training=True)",
    lambda h: f"F.pdist({h.tensor(WIDE, (2, 2), True)})",
    lambda h: f"F.hardtanh({h.floats()}, -0.5, 0.75)",
    lambda h: f"F.gelu({h.floats()}, approximate='tanh')",
    lambda h: f"F.softplus({h.floats()}, 2.0, 1.5)",
    lambda h: f"F.fold({(x := h.tensor(WIDE, (2, 3), True))}, (1, {h[x].shape[-1]}), 1)",
    lambda h: f"F.max_pool2d({h.tensor(WIDE, (3, 4), True)}, 1, return_indices=True)",
)

# -- Python ----------------------------------------------------------------------------------


def _class(body: str, backward: str) -> str:
    """A function with a backward of its own, as an expression."""
    forward = f"staticmethod(lambda ctx, x: (ctx.save_for_backward(x), {body})[1])"
    derivative = f"staticmethod(lambda ctx, g: {backward})"
    return (
        f"type('Own', (torch.autograd.Function,), {{'forward': {forward}, "
        f"'backward': {derivative}}}).apply"
    )


def _own_function(h: Hand) -> str:
    body, backward = h.pick(
        (
            ("x * x", "2 * g * ctx.saved_tensors[0]"),
            ("x.sin()", "g * ctx.saved_tensors[0].cos()"),
            ("x.clone()", "g.clone()"),
            ("x.sum()", "g.expand(ctx.saved_tensors[0].shape)"),
        )
    )
    return f"{_class(body, backward)}({h.floats()})"


def _branch(h: Hand) -> Draft:
    """A branch that a value decides."""
    x = h.writable(lambda t: t.is_floating_point() and t.numel() > 0)
    code = f"if bool(({x}.detach() > 0.25).any()): {x}.mul_({h.number()})"
    if h[x].requires_grad and h[x].is_leaf:
        code = f"if bool(({x}.detach() > 0.25).any()): {x}.data.mul_({h.number()})"
    return Draft(code, statement=True)


PYTHON: tuple[Row, ...] = (
    lambda h: f"sum(row for row in {h.inexact(1, nonempty=True)})",
    lambda h: f"torch.stack([row * 2 for row in {h.inexact(1, nonempty=True)}])",
    lambda h: f"torch.cat(list({h.any(2, nonempty=True)}))",
    lambda h: f"float({h.floats()}.sum())",
    lambda h: f"len({h.any(1)})",
    lambda h: f"bool(({h.floats()} > 0.25).all())",
    lambda h: f"[n * 2 for n in {h.ints(1, 1)}.tolist()][0]",
    lambda h: f"torch.tensor({h.ints(1, 1)}.tolist()).sum().item()",
    lambda h: f"abs({h.floats()})",
    lambda h: f"-{h.inexact()}",
    lambda h: f"+{h.inexact()} * 2",
    lambda h: f"{h.floats()} // 0.75",
    lambda h: f"{h.ints()} << 1",
    lambda h: f"1 - {h.inexact()}",
    lambda h: f"2 / ({h.floats()}.abs() + 1)",
    lambda h: f"copy.copy({h.any()}) * 1",
    lambda h: f"{h.any()}.to({h.any()})",
    _own_function,
    _own_function,
    _branch,
    lambda h: Draft(f"{h.pick(h.names(tracked))}.detach() * 2", before="with torch.no_grad(): "),
    lambda h: Draft(f"{h.floats()}.sin()", before="with torch.inference_mode(False): "),
)
