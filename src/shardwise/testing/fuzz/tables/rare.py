"""What fewer programs do: algebra, spectra, images, losses of pairs, buffers, optimizers."""

from __future__ import annotations

import torch

from shardwise.testing.fuzz.hand import COMPLEX, WIDE, Draft, Hand, Row
from shardwise.testing.fuzz.tables.nn import non_leaf, reduction, scalar
from shardwise.testing.fuzz.tables.shape import along, has_floats, ids

_WIDE_OR_COMPLEX = (*WIDE, *COMPLEX)

# -- products and algebra --------------------------------------------------------------------


def _added(h: Hand) -> str:
    """A product of batches, or of vectors, that is added to something."""
    kind = h.pick(("baddbmm", "addbmm", "addmv", "addr"))
    if kind == "addr":
        x = h.tensor(_WIDE_OR_COMPLEX, (1, 1))
        y = h.new((h.size(),), h[x].dtype)
        first = h.new((h[x].shape[0], h[y].shape[0]), h[x].dtype)
        return f"torch.addr({first}, {x}, {y}, beta={h.number()})"
    if kind == "addmv":
        x = h.tensor(_WIDE_OR_COMPLEX, (2, 2))
        first, vector = (h.new((size,), h[x].dtype) for size in h[x].shape)
        return f"torch.addmv({first}, {x}, {vector}, alpha={h.number()})"
    x = h.tensor(_WIDE_OR_COMPLEX, (3, 3))
    batch, rows, inner = h[x].shape
    other = h.new((batch, inner, 2), h[x].dtype)
    shape = (rows, 2) if kind == "addbmm" else h.pick(((batch, rows, 2), (1, 1, 2)))
    return f"torch.{kind}({h.new(shape, h[x].dtype)}, {x}, {other}, beta={h.number()})"


def _algebra(h: Hand) -> str:
    x = h.tensor(WIDE, (2, 3), nonempty=True)
    size = h[x].shape[-2]
    square = f"{x} @ {x}.mT * 0.25 + torch.diag_embed(torch.ones_like({x}[..., 0]) * 2)"
    right = h.new((*h[x].shape[:-2], size, 2), h[x].dtype)
    return h.pick(
        (
            f"torch.linalg.inv({square})",
            f"torch.linalg.solve({square}, {right})",
            f"torch.linalg.cholesky({square})",
            f"torch.linalg.det({square}) * 0.05",
            f"torch.linalg.slogdet({square})",
            f"torch.linalg.solve_triangular({square}, {right}, upper=True)",
            f"torch.linalg.matrix_norm({x})",
            f"torch.linalg.matrix_power({x} @ {x}.mT * 0.1, 2)",
            f"torch.linalg.multi_dot([{x}.reshape(-1, {h[x].shape[-1]}), {x}.reshape(-1, "
            f"{h[x].shape[-1]}).T])",
        )
    )


def _spectrum(h: Hand) -> str:
    kind = h.pick(("fft", "ifft", "rfft", "irfft", "hfft", "fft2", "fftn", "fftshift"))
    x = h.tensor(WIDE if kind == "rfft" else _WIDE_OR_COMPLEX, (2, 3), nonempty=True)
    if kind in ("fft2", "fftn"):
        return f"torch.fft.{kind}({x})"
    return f"torch.fft.{kind}({x}, dim={h.dim(x, 2 if kind in ('irfft', 'hfft') else 1)})"


ALGEBRA: tuple[Row, ...] = (
    _added,
    _added,
    _algebra,
    _algebra,
    _algebra,
    _spectrum,
    _spectrum,
    lambda h: f"torch.vdot({(x := h.tensor(_WIDE_OR_COMPLEX, (1, 1)))}, {h.same(x)})",
    lambda h: f"torch.linalg.vecdot({(x := h.tensor(_WIDE_OR_COMPLEX, (1, 3)))}, {h.same(x)})",
    lambda h: f"torch.cov({h.tensor(WIDE, (2, 2), True, lambda t: t.shape[1] > 1)})",
    lambda h: f"{h.inexact(2)}.mH",
    lambda h: f"torch.std_mean({(x := h.floats(1))}, {h.dim(x, 2)})",
    lambda h: f"torch.nanmedian({(x := h.floats(1))}, {h.dim(x)})",
    lambda h: f"torch.linalg.vector_norm({(x := h.floats(1))}, float('inf'), {h.dim(x)})",
    lambda h: (
        f"torch.searchsorted(torch.sort({h.new((4,), grad=False)})[0], {h.tensor((h.main,))})"
    ),
    lambda h: f"torch.isin({(x := h.ints())}, {h.new((3,), h[x].dtype)})",
    lambda h: f"torch.gradient({(x := h.floats(1))}, dim={h.dim(x, 2)})[0]",
    lambda h: f"torch.trapezoid({(x := h.floats(1))}, dim={h.dim(x)})",
    lambda h: f"torch.msort({h.floats(1)})",
    lambda h: f"torch.bincount({h.ints(1, 1)}.abs(), minlength=3)",
    lambda h: f"{h.any(1)}.squeeze((0, -1))",
    lambda h: f"torch.ravel({h.any()})",
    lambda h: f"{(x := h.any(1))}.narrow_copy({(d := h.dim(x))}, 0, {h.between(0, h[x].shape[d])})",
    lambda h: f"{h.any()}.new_full({h.shape(0, 2)}, 2)",
    lambda h: f"torch.tensor_split({(x := h.any(1))}, [{h.between(0, 2)}], {h.dim(x, 0)})",
    lambda h: f"torch.unravel_index({h.new((3,), torch.int64, high=4)}, (2, 2))",
)

# -- layers ----------------------------------------------------------------------------------


def _image(h: Hand) -> str:
    return h.tensor(WIDE, (4, 4), nonempty=True)


def _sampled(h: Hand) -> str:
    x = _image(h)
    batch = h[x].shape[0]
    theta = h.new((batch, 2, 3), h[x].dtype)
    grid = f"F.affine_grid({theta}, ({batch}, 1, 2, 2), align_corners={h.flag()})"
    if h.chance(0.4):
        return grid
    return f"F.grid_sample({x}, {grid}, align_corners={h.flag()}, padding_mode='border')"


def _enlarged(h: Hand) -> str:
    ndim = h.pick((3, 4))
    x = h.tensor(WIDE, (ndim, ndim), nonempty=True)
    mode = h.pick(("linear",) if ndim == 3 else ("bilinear", "bicubic", "nearest", "area"))
    corners = f", align_corners={h.flag()}" if "linear" in mode or "cubic" in mode else ""
    return f"F.interpolate({x}, scale_factor=2, mode={mode!r}{corners})"


def _running(h: Hand) -> str:
    """Batch norm with buffers, which it writes to in training and reads after it."""
    x = h.tensor(WIDE, (2, 3), nonempty=True)
    shape = (h[x].shape[1],)
    mean, var = (h.new(shape, h[x].dtype, grad=False) for _ in range(2))
    if h.chance(0.3):
        return f"F.batch_norm({x}, {mean}, {var}.abs() + 0.5, training=False)"
    return f"F.batch_norm({x}, {mean}, {var}, training=True, momentum=0.25, eps=0.1)"


def _pairs(h: Hand) -> str:
    """A loss of two or three tensors of one shape."""
    x = h.tensor(WIDE, (2, 2), nonempty=True)
    y, z = h.same(x), h.same(x)
    signs = f"torch.ones_like({x}[:, 0]) * {h.pick((1, -1))}"
    how = reduction(h)
    return h.pick(
        (
            f"F.triplet_margin_loss({x}, {y}, {z}, eps=0.25, {how})",
            f"F.cosine_embedding_loss({x}, {y}, {signs}, {how})",
            f"F.margin_ranking_loss({x}[:, 0], {y}[:, 0], {signs}, {how})",
            f"F.gaussian_nll_loss({x}, {y}, {z}.abs() + 0.5, {how})",
            f"F.poisson_nll_loss({x}, {y}.abs(), {how})",
            f"F.hinge_embedding_loss({x}, torch.ones_like({x}), {how})",
            f"F.multi_margin_loss({x}, {_classes(h, x)}, {how})",
            f"F.pairwise_distance({x}, {y}, eps=0.25)",
        )
    )


def _classes(h: Hand, x: str) -> str:
    return h.new(h[x].shape[:1], torch.int64, high=h[x].shape[1])


RARE_LAYERS: tuple[Row, ...] = (
    _sampled,
    _sampled,
    _enlarged,
    _enlarged,
    _running,
    _running,
    _pairs,
    _pairs,
    _pairs,
    lambda h: f"F.unfold({_image(h)}, 1, padding=1)",
    lambda h: f"F.pad({h.tensor(WIDE, (3, 3), True)}, (0, 0), mode='reflect')",
    lambda h: f"F.pad({_image(h)}, (1, 0, 0, 1), mode='replicate')",
    lambda h: f"F.adaptive_max_pool1d({h.floats(2, 3, nonempty=True)}, 1)",
    lambda h: f"F.avg_pool2d({_image(h)}, 1, 2)",
    lambda h: f"F.adaptive_avg_pool2d({_image(h)}, 1)",
    lambda h: f"F.local_response_norm({h.tensor(WIDE, (3, 4), True)}, 2)",
    lambda h: f"F.channel_shuffle({_image(h)}, 1)",
)

# -- writes ----------------------------------------------------------------------------------


def _accumulated(h: Hand) -> Draft:
    x = h.writable(has_floats)
    dim, size = along(h, x)
    shape = h.resized(x, dim, 2)
    index, source = ids(h, size, tuple(shape)), h.new(shape, h[x].dtype)
    one = ids(h, size, (2,))
    reduce = h.pick(("amax", "amin", "mean", "prod"))
    code = h.pick(
        (
            f"scatter_add_({dim}, {index}, {source})",
            f"scatter_reduce_({dim}, {index}, {source}, {reduce!r})",
            f"index_reduce_({dim}, {one}, {source}, {reduce!r})",
            f"index_put_(({one},), {h.new((), h[x].dtype)}, accumulate=True)",
            f"masked_scatter_({x} > 0.3, {h.same(x)})",
            f"put_({one}, {h.new((2,), h[x].dtype)}, accumulate=True)",
        )
    )
    return h.write(x, f"{x}.{code}")


def _more_in_place(h: Hand) -> Draft:
    x = h.writable(has_floats)
    other = h.same(x)
    code = h.pick(
        (
            f"addcmul_({other}, {h.same(x)}, value={h.number()})",
            f"sub_({other})",
            f"pow_({h.pick((1, 2))})",
            f"cumsum_({h.dim(x)})",
            f"clamp_(max={other})",
            "tril_()" if h[x].dim() > 1 else "neg_()",
            f"div_({other}.abs() + 0.5)",
            f"atan2_({other})",
            f"data.mul_({h.number()})",
        )
    )
    return h.write(x, f"{x}.{code}")


def _of_parts(h: Hand) -> Draft:
    """A write through the real or imaginary part."""
    x = h.writable(lambda t: t.is_complex())
    return h.write(x, f"{x}.{h.pick(('real', 'imag'))}.mul_({h.number()})")


def _foreach(h: Hand) -> Draft:
    x, y = h.writable(has_floats), h.writable(has_floats)
    return Draft(
        f"with torch.no_grad(): torch._foreach_{h.pick(('mul_', 'add_'))}([{x}, {y}], 0.5)",
        statement=True,
    )


# -- training --------------------------------------------------------------------------------


def _with_gradient(t: torch.Tensor) -> bool:
    return t.is_leaf and t.requires_grad and t.grad is not None and t.is_floating_point()


def _trained(h: Hand) -> tuple[str, str]:
    """Some leaves that may be written to, and text of a backward pass that reaches them."""

    def fits(t: torch.Tensor) -> bool:
        return t.is_leaf and t.requires_grad and has_floats(t)

    leaves = sorted({h.writable(fits) for _ in range(2)})
    loss = " + ".join(f"w.weighted({leaf}.sin())" for leaf in leaves)
    return ", ".join(leaves), f"({loss}).backward(); "


def _stepped(h: Hand) -> Draft:
    """A step of an optimizer."""
    leaves, backward = _trained(h)
    kind = h.pick(
        (
            f"SGD([{leaves}], lr=0.25)",
            f"SGD([{leaves}], lr=0.25, momentum=0.5, weight_decay=0.25)",
            f"AdamW([{leaves}], lr=0.25, eps=1.0)",
            f"AdamW([{leaves}], lr=0.25, eps=1.0, foreach=False)",
            f"Adagrad([{leaves}], lr=0.25, eps=1.0)",
            f"RMSprop([{leaves}], lr=0.25, eps=1.0)",
        )
    )
    return Draft(f"{backward}torch.optim.{kind}.step()", statement=True)


def _clipped(h: Hand) -> Draft:
    leaves, backward = _trained(h)
    how = h.pick((f"norm_([{leaves}], 0.5)", f"value_([{leaves}], 0.25)"))
    return Draft(f"{backward}torch.nn.utils.clip_grad_{how}", statement=True)


def _cast_backward(h: Hand) -> Draft:
    """Backward while autocast is on."""
    x = h.pick(h.names(non_leaf))
    code = f"{scalar(h, x)}.backward(retain_graph=True)"
    return Draft(code, before='with torch.autocast("cpu", torch.bfloat16): ', statement=True)


def _several(h: Hand) -> Draft:
    """Backward from two at once."""
    results = h.names(non_leaf)
    losses = ", ".join(scalar(h, h.pick(results)) for _ in range(2))
    return Draft(f"torch.autograd.backward([{losses}], retain_graph=True)", statement=True)


def _into(h: Hand) -> Draft:
    """Backward into some leaves alone."""
    results = h.names(non_leaf)
    leaf = h.pick(h.names(lambda t: t.requires_grad and t.is_leaf))
    loss = scalar(h, h.pick(results))
    return Draft(f"{loss}.backward(retain_graph=True, inputs=[{leaf}])", statement=True)


RARE_STEPS: tuple[Row, ...] = (
    _accumulated,
    _accumulated,
    _more_in_place,
    _more_in_place,
    _of_parts,
    _foreach,
    _stepped,
    _stepped,
    _clipped,
    _cast_backward,
    _several,
    _into,
    lambda h: Draft(f"{h.pick(h.names(_with_gradient))}.grad.mul_(0.5)", statement=True),
    lambda h: Draft(f"{h.pick(h.names(_with_gradient))}.grad = None", statement=True),
)
