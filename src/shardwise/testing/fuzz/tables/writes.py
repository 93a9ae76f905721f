"""Writes: in place, to bases and views, through an index, `out=`, copies that keep aliases."""

from __future__ import annotations

import torch

from shardwise.testing.fuzz.hand import FLOATS, INTS, Draft, Hand, Row
from shardwise.testing.fuzz.tables.shape import ids, index_add_args, index_of

_UNARY = "sin_ cos_ tanh_ sigmoid_ neg_ abs_ relu_ zero_ square_ floor_"


def _float(t: torch.Tensor) -> bool:
    return t.is_floating_point()


def _ndim(t: torch.Tensor) -> bool:
    return t.is_floating_point() and t.dim() > 0


def _call(make: Row) -> Row:
    """A method call on something writable: `make` gives what follows its name."""

    def row(h: Hand) -> Draft:
        x = h.writable(_float)
        h.chosen = x
        return h.write(x, f"{x}.{make(h)}")

    return row


def _indexed(make: Row) -> Row:
    """An assignment to `x[...]`."""

    def row(h: Hand) -> Draft:
        x = h.writable(lambda t: t.dim() > 0 and (_float(t) or t.dtype in INTS))
        h.chosen = x
        return h.write(x, f"{x}[{index_of(h, x)}]{make(h)}")

    return row


def _value_at_index(h: Hand) -> Draft:
    """A tensor into `x[...]`: of its shape, or one that broadcasts to it."""
    x = h.writable(_ndim)
    index = index_of(h, x)
    taken = eval(f"x[{index}]", {"x": h[x]})
    value = h.new(taken.shape if h.flag() else (), h.dtype(FLOATS[:2]))
    return h.write(x, f"{x}[{index}] = {value}")


def _ids_at_index(h: Hand) -> Draft:
    x = h.writable(_ndim)
    index = ids(h, h[x].shape[0], (h.size(True),))
    return h.write(x, f"{x}[{index}] {h.pick(('=', '*='))} {h.number()}")


def _along(name: str, *more: str) -> Row:
    def row(h: Hand) -> Draft:
        x = h.writable(_ndim)
        dim = h.dim(x)
        shape = list(h[x].shape)
        shape[dim] = 2
        words = [str(dim), ids(h, h[x].shape[dim], tuple(shape) if "scatter" in name else (2,))]
        words += [str(h.number())]
        return h.write(x, f"{x}.{name}({', '.join((*words, *more))})")

    return row


def _reshaped(h: Hand) -> Draft:
    """The in-place views, which change a tensor's own shape."""
    x = h.writable(lambda t: t.dim() > 1)
    how = h.pick(("t_()", "transpose_(0, 1)", "unsqueeze_(0)", "squeeze_()", "swapaxes_(0, -1)"))
    return h.write(x, f"{x}.{how}")


def _out(h: Hand) -> Draft:
    """An op that writes to `out=` of the right shape."""
    x = h.tensor(FLOATS[:2], (1, 2))
    code = h.pick(
        (
            f"torch.sin({x}.detach(), out=",
            f"torch.add({x}.detach(), 0.5, out=",
            f"torch.cumsum({x}.detach(), 0, out=",
            f"torch.mul({x}.detach(), {h.like(x, exact=True)}.detach(), out=",
        )
    )
    shape, dtype = h[x].shape, h[x].dtype

    def fits(t: torch.Tensor) -> bool:
        return t.shape == shape and t.dtype == dtype and not t.requires_grad

    out = h.writable(fits) if h.names(fits) else h.new(shape, dtype, grad=False)
    return h.write(out, f"{code}{out})")


def _deepcopy(h: Hand) -> str:
    x = h.tensor(None, (1, 3), where=lambda t: t.is_leaf and not t.requires_grad)
    views = h.names(lambda t: t._is_view() and t.is_leaf and not t.requires_grad)
    return f"copy.deepcopy(({x}, {h.pick(views)}))" if views else f"copy.deepcopy({x})"


WRITES: tuple[Row, ...] = (
    *(_call(lambda h, name=name: f"{name}()") for name in _UNARY.split()),  # type: ignore[misc]
    _call(lambda h: f"add_({h.number()})"),
    _call(lambda h: f"mul_({h.number()})"),
    _call(lambda h: f"div_({h.pick((2.0, 0.5))})"),
    _call(lambda h: f"fill_({h.number()})"),
    _call(lambda h: "clamp_(-0.5, 0.75)"),
    _call(lambda h: f"add_({h.like(h.chosen, exact=True)}, alpha={h.number()})"),
    _call(lambda h: f"add_({h.like(h.chosen)})"),
    _call(lambda h: f"mul_({h.like(h.chosen)})"),
    _call(lambda h: f"copy_({h.like(h.chosen)})"),
    _call(lambda h: f"copy_({h.like(h.chosen, h.dtype(FLOATS))})"),
    _call(lambda h: f"masked_fill_({h.like(h.chosen, torch.bool)}, {h.number()})"),
    _call(lambda h: f"lerp_({h.like(h.chosen, exact=True)}, 0.25)"),
    _indexed(lambda h: f" = {h.number()}"),
    _indexed(lambda h: f" = {h.number()}"),
    _indexed(lambda h: f" += {h.pick((1, 2))}"),
    _indexed(lambda h: f" *= {h.pick((2, -1))}"),
    _indexed(lambda h: f".fill_({h.pick((1, 2))})"),
    _indexed(lambda h: ".zero_()"),
    _value_at_index,
    _value_at_index,
    _ids_at_index,
    lambda h: h.write((x := h.writable(_ndim)), f"{x}[{x} > 0.3] = {h.number()}"),
    lambda h: h.write((x := h.writable(_ndim)), f"{x}.index_add_({index_add_args(h, x)})"),
    _along("index_fill_"),
    _along("scatter_"),
    lambda h: h.write((x := h.writable(lambda t: t.dim() > 1)), f"{x}.t().mul_(2)"),
    lambda h: h.write((x := h.writable(_ndim)), f"{x}.view(-1)[0:2].mul_({h.number()})"),
    lambda h: h.write((x := h.writable(lambda t: t.dtype in INTS)), f"{x}.add_(1)"),
    _reshaped,
    _out,
    _deepcopy,
)
