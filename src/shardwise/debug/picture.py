"""Who holds which part of a tensor, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

#: Dark enough for white letters, on a light page and on a dark one.
COLOURS = ("#2f6fb4", "#2e8555", "#b1565b", "#7a5cb0", "#0f7f8c", "#a2671a", "#b04a8c", "#5c6670")
WIDTH, HEIGHT = 160.0, 88.0
_DEPTH = 10.0


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of a tensor, as (start, stop) per dim, and the ranks that hold it."""

    box: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]


def colour(*ranks: int) -> str:
    """That of a rank; what several hold is grey."""
    return COLOURS[ranks[0] % (len(COLOURS) - 1)] if len(ranks) == 1 else COLOURS[-1]


def ranks_text(ranks: Sequence[int]) -> str:
    """
    >>> ranks_text((3,)), ranks_text((0, 1, 2, 3)), ranks_text((0, 2))
    ('3', '0–3', '0, 2')
    """
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}–{ranks[-1]}"
    shown = [str(rank) for rank in ranks[:4]] + ["…"] * (len(ranks) > 4)
    return ", ".join(shown)


def parts_svg(shape: Sequence[int], parts: Iterable[HeldBox]) -> str:
    """A picture of the parts: rows downwards, columns to the right, leading dims as layers.

    Vectors are one row. Layers of a tensor of three dims or more lie behind each other.
    """
    blocks = list(parts)
    layers = sorted({block.box[:-2] for block in blocks}) if len(shape) > 2 else [()]
    shift = min(_DEPTH, WIDTH / 3 / max(1, len(layers)))
    width = WIDTH - shift * (len(layers) - 1)
    height = HEIGHT - shift * (len(layers) - 1)
    drawn = []
    for number, layer in reversed(list(enumerate(layers))):
        x, y = shift * number, shift * (len(layers) - 1 - number)
        for block in blocks:
            if len(shape) <= 2 or block.box[:-2] == layer:
                drawn.append(_rect(block, shape, x, y, width, height))
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(drawn)}</svg>'
    )


def _rect(
    block: HeldBox, shape: Sequence[int], x: float, y: float, width: float, height: float
) -> str:
    rows, columns = (0.0, 1.0), (0.0, 1.0)
    if len(shape) > 1:
        rows = _share(block.box[-2], shape[-2])
    if shape:
        columns = _share(block.box[-1], shape[-1])
    left, top = x + width * columns[0], y + height * rows[0]
    wide, high = width * (columns[1] - columns[0]), height * (rows[1] - rows[0])
    where = ", ".join(f"{start}:{stop}" for start, stop in block.box) or "all"
    label = ranks_text(block.ranks)
    text = ""
    if wide > 6 * len(label) and high > 10:
        text = (
            f'<text x="{left + wide / 2:.2f}" y="{top + high / 2 + 3.5:.2f}" fill="#fff" '
            f'font-size="10" font-family="sans-serif" text-anchor="middle">{label}</text>'
        )
    held = f"{'ranks' if len(block.ranks) > 1 else 'rank'} {label}"
    return (
        f'<g data-box="{where}" data-ranks="{" ".join(map(str, block.ranks))}">'
        f"<title>{escape(where)}: {held}</title>"
        f'<rect x="{left:.2f}" y="{top:.2f}" width="{wide:.2f}" height="{high:.2f}" '
        f'fill="{colour(*block.ranks)}" stroke="#fff" stroke-width="0.8"/>{text}</g>'
    )


def _share(span: tuple[int, int], size: int) -> tuple[float, float]:
    return (span[0] / size, span[1] / size) if size and math.isfinite(size) else (0.0, 1.0)
