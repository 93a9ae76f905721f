"""visualize_sharding: which ranks hold which shard of a tensor, as text, in colour, as SVG."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from shardwise.core.layout import Layout
from shardwise.core.placements import Partial
from shardwise.debug.explain import layout_text
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError

if TYPE_CHECKING:
    from rich.table import Table


#: `(start, stop)` along one dim.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of a tensor and the ranks that hold it."""

    box: tuple[Span, ...]
    ranks: tuple[int, ...]


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool | None = None) -> None:
    """Print which ranks hold which shard of a tensor: a cell per shard, with its ranks.

    One- and two-dimensional tensors are drawn as one grid, others as a grid for each slice of the
    leading dims. Ranks that hold the same shard share its cell. With `use_rich`, the default on a
    terminal, each rank has a colour. A notebook gets a `ShardingPicture`. Of several processes, the
    one at the origin of the mesh prints.

    >>> import shardwise
    >>> from shardwise.debug import visualize_sharding
    >>> with shardwise.simulate(4):
    ...     mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ...     placements = [shardwise.Replicate(), shardwise.Shard(0)]
    ...     x = shardwise.zeros(5, 4, device_mesh=mesh, placements=placements)
    ...     visualize_sharding(x, use_rich=False)
    5x4 [R, S(0)], torch.float32 on mesh (dp=2, tp=2)
         |    0:4
    -----+-----------
     0:3 | ranks 0, 2
     3:5 | ranks 1, 3
    """
    if not isinstance(dtensor, DTensor):
        raise ArgumentError(
            f"visualize_sharding() shows a DTensor, found {type(dtensor).__name__}: a plain tensor "
            "is whole on its device."
        )
    layout = dtensor._layout
    grid = layout.grid
    if grid.ranks[0] not in grid.world.present:
        return
    if use_rich is None and _in_notebook():
        from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

        display(ShardingPicture(dtensor, header))
        return
    if sys.stdout.isatty() if use_rich is None else use_rich:
        _print_rich(layout, header)
    else:
        print("\n".join(_lines(layout, header)))


class ShardingPicture:
    """Which ranks hold which shard of a tensor: SVG in a notebook, text when printed.

    >>> import shardwise
    >>> from shardwise.debug import ShardingPicture
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     x = shardwise.zeros(4, 2, device_mesh=mesh, placements=[shardwise.Shard(0)])
    ...     picture = ShardingPicture(x)
    >>> picture._repr_svg_().count("<rect")
    2
    """

    def __init__(self, tensor: DTensor, header: str = "") -> None:
        self._layout = tensor._layout
        self._header = header

    def __str__(self) -> str:
        return "\n".join(_lines(self._layout, self._header))

    __repr__ = __str__

    def _repr_svg_(self) -> str:
        shards = holder_map(self._layout)
        return shards_svg(self._layout.shape, [HeldBox(*each) for each in shards.holders.items()])

    def _repr_html_(self) -> str:
        lines = [self._header] * bool(self._header) + [_title(self._layout)]
        lines += _remarks(self._layout, holder_map(self._layout))
        text = "<br>".join(map(escape, lines))
        return f'<div style="max-width:20rem"><small>{text}</small>{self._repr_svg_()}</div>'


@dataclass(frozen=True, slots=True)
class HolderMap:
    """The shards of a tensor: the ranges of each dim, the ranks of each box, ranks with nothing."""

    spans: tuple[tuple[Span, ...], ...]
    holders: dict[tuple[Span, ...], tuple[int, ...]]
    idle: tuple[int, ...]


def holder_map(layout: Layout) -> HolderMap:
    """Which rank holds what. Dims are split independently, so boxes are products of ranges."""
    holders: dict[tuple[Span, ...], list[int]] = {}
    idle = []
    for rank, coordinate in layout.grid.coordinates.items():
        box = layout.box(coordinate)
        if 0 in box.sizes and 0 not in layout.shape:
            idle.append(rank)
            continue
        holders.setdefault(box.spans, []).append(rank)
    spans = tuple(tuple(sorted(set(along))) for along in zip(*holders, strict=True))
    return HolderMap(spans, {b: tuple(sorted(r)) for b, r in holders.items()}, tuple(sorted(idle)))


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this; then IPython is imported."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and hasattr(shell, "kernel")


def _title(layout: Layout) -> str:
    return f"{layout_text(layout)}, {layout.dtype} on {layout.grid!r}"


def _remarks(layout: Layout, shards: HolderMap) -> Iterator[str]:
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            name = layout.grid.axis_name(axis)
            yield f"Along axis {name!r} ranks hold terms of a {placement.reduce_op}, not values."
    if shards.idle:
        yield f"{_holders(shards.idle).capitalize()} hold{'s' * (len(shards.idle) == 1)} nothing."


@dataclass(frozen=True, slots=True)
class _Grid:
    """One two-dimensional picture: the slice it shows, its row and column heads, its cells."""

    title: str
    rows: list[str]
    columns: list[str]
    cells: list[list[tuple[int, ...]]]


def _grids(shards: HolderMap) -> Iterator[_Grid]:
    """A grid for each box of the leading dims; a missing row or column dim has one entry."""
    rows: Sequence[tuple[Span, ...]] = [()]
    columns: Sequence[tuple[Span, ...]] = [()]
    if shards.spans:
        columns = [(span,) for span in shards.spans[-1]]
    if len(shards.spans) > 1:
        rows = [(span,) for span in shards.spans[-2]]
    for block in itertools.product(*shards.spans[:-2]):
        yield _Grid(
            f"[{', '.join([*map(_span, block), ':, :'])}]" if block else "",
            [_span(*row) for row in rows],
            [_span(*column) for column in columns],
            [[shards.holders[(*block, *row, *column)] for column in columns] for row in rows],
        )


def _span(span: Span | None = None) -> str:
    return "" if span is None else f"{span[0]}:{span[1]}"


def _holders(ranks: Sequence[int]) -> str:
    """
    >>> _holders([3]), _holders([0, 1]), _holders(range(64))
    ('rank 3', 'ranks 0, 1', 'ranks 0, 1, 2, ... 63')
    """
    shown = [*map(str, ranks[:3]), f"... {ranks[-1]}"] if len(ranks) > 8 else map(str, ranks)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(shown)}"


# -- as text ---------------------------------------------------------------------------------


def _lines(layout: Layout, header: str) -> Iterator[str]:
    shards = holder_map(layout)
    if header:
        yield header
    yield _title(layout)
    for grid in _grids(shards):
        if grid.title:
            yield grid.title
        yield from _plain_grid(grid)
    yield from _remarks(layout, shards)


def _plain_grid(grid: _Grid) -> Iterator[str]:
    texts = [[_holders(ranks) for ranks in row] for row in grid.cells]
    head = max(map(len, grid.rows))
    widths = [
        max(len(name), *(len(row[i]) for row in texts)) for i, name in enumerate(grid.columns)
    ]

    def line(name: str, cells: Sequence[str]) -> str:
        padded = [f"{cell:^{width}}" for cell, width in zip(cells, widths, strict=True)]
        return " | ".join([f" {name:>{head}}", *padded]).rstrip()

    yield line("", grid.columns)
    yield "-+-".join(["-" * (head + 1), *("-" * width for width in widths)])
    for name, row in zip(grid.rows, texts, strict=True):
        yield line(name, row)


# -- in colour -------------------------------------------------------------------------------

_COLOURS = (
    "dark_blue",
    "dark_green",
    "dark_red",
    "purple4",
    "dark_cyan",
    "orange4",
    "deep_pink4",
    "grey37",
)


def _print_rich(layout: Layout, header: str) -> None:
    from rich.console import Console
    from rich.text import Text  # placements in brackets would be taken for markup

    console = Console()
    shards = holder_map(layout)
    if header:
        console.print(Text(header, style="bold"))
    console.print(Text(_title(layout)))
    for grid in _grids(shards):
        console.print(_coloured_grid(grid))
    for remark in _remarks(layout, shards):
        console.print(Text(remark))


def _coloured_grid(grid: _Grid) -> Table:
    from rich.table import Table
    from rich.text import Text

    title = Text(grid.title) if grid.title else None
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("", justify="right")
    for name in grid.columns:
        table.add_column(name, justify="center")
    for name, row in zip(grid.rows, grid.cells, strict=True):
        cells: list[Any] = [
            Text(_holders(ranks), style=f"white on {_COLOURS[ranks[0] % len(_COLOURS)]}")
            for ranks in row
        ]
        table.add_row(name, *cells)
    return table


# -- as SVG ----------------------------------------------------------------------------------

#: Dark enough for white letters, on a light page and on a dark one.
COLOURS = ("#2f6fb4", "#2e8555", "#b1565b", "#7a5cb0", "#0f7f8c", "#a2671a", "#b04a8c", "#5c6670")
WIDTH, HEIGHT = 160.0, 88.0
_DEPTH = 10.0


def colour(*ranks: int) -> str:
    """The colour of a rank; grey for several ranks."""
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


def shards_svg(shape: Sequence[int], shards: Iterable[HeldBox]) -> str:
    """A picture of the shards: rows downwards, columns to the right, leading dims as layers.

    Vectors are one row. Layers of a tensor of three dims or more are drawn behind each other.
    """
    boxes = list(shards)
    layers = sorted({shard.box[:-2] for shard in boxes})
    shift = min(_DEPTH, WIDTH / 3 / max(1, len(layers)))
    width = WIDTH - shift * (len(layers) - 1)
    height = HEIGHT - shift * (len(layers) - 1)
    drawn = []
    for number, layer in reversed(list(enumerate(layers))):
        x, y = shift * number, shift * (len(layers) - 1 - number)
        inside = (shard for shard in boxes if shard.box[:-2] == layer)
        drawn += [_rect(shard, shape, x, y, width, height) for shard in inside]
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(drawn)}</svg>'
    )


def _rect(
    shard: HeldBox, shape: Sequence[int], x: float, y: float, width: float, height: float
) -> str:
    rows = _fraction(shard.box[-2], shape[-2]) if len(shape) > 1 else (0.0, 1.0)
    columns = _fraction(shard.box[-1], shape[-1]) if shape else (0.0, 1.0)
    left, top = x + width * columns[0], y + height * rows[0]
    wide, high = width * (columns[1] - columns[0]), height * (rows[1] - rows[0])
    where = ", ".join(f"{start}:{stop}" for start, stop in shard.box) or "all"
    label = ranks_text(shard.ranks)
    text = ""
    if wide > 6 * len(label) and high > 10:
        text = (
            f'<text x="{left + wide / 2:.2f}" y="{top + high / 2 + 3.5:.2f}" fill="#fff" '
            f'font-size="10" font-family="sans-serif" text-anchor="middle">{label}</text>'
        )
    holders = f"{'ranks' if len(shard.ranks) > 1 else 'rank'} {label}"
    return (
        f'<g data-box="{where}" data-ranks="{" ".join(map(str, shard.ranks))}">'
        f"<title>{escape(where)}: {holders}</title>"
        f'<rect x="{left:.2f}" y="{top:.2f}" width="{wide:.2f}" height="{high:.2f}" '
        f'fill="{colour(*shard.ranks)}" stroke="#fff" stroke-width="0.8"/>{text}</g>'
    )


def _fraction(span: Span, size: int) -> tuple[float, float]:
    return (span[0] / size, span[1] / size) if size else (0.0, 1.0)
