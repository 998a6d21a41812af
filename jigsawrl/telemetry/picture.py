"""Timelines without a page: an SVG that stands alone, and lines for a terminal.

The SVG shows what the timeline of a page shows. In a terminal each worker has one line, in which a block is as high
as the share that is taken.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from jigsawrl.telemetry.axes import time_ticks
from jigsawrl.telemetry.bands import MOST_TICKS, TALL, Drawing, Strip, Track, drawing_of, paths
from jigsawrl.telemetry.cells import fill
from jigsawrl.telemetry.colours import hex_colour, hue_of
from jigsawrl.telemetry.columns import Columns, Indices
from jigsawrl.telemetry.palette import legend, style
from jigsawrl.telemetry.runlog import RunLog
from jigsawrl.telemetry.text import duration, printable

_WIDTH, _PLOT, _RIGHT = 1200, 940, 28
_LEFT = _WIDTH - _PLOT - _RIGHT
"""Room for the names of workers and pipelines."""
_TAG, _ENTRY, _PER_LINE = 120, 165, 7
"""Where names of pipelines begin, and how wide an entry of the legend is."""
_MOST_PIECES = 20_000
"""Some 30 bytes each."""
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:16px;font-weight:600}.dim{fill:#777}"
    ".page{fill:#fff}.idle{fill:#eee}.tick{stroke:#000;stroke-opacity:.22}.dot{fill:currentColor}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}.dim{fill:#888}.page{fill:#111}.idle{fill:#252525}"
    ".tick{stroke:#fff}}"
)
_BLOCKS = " ▁▂▃▄▅▆▇█"
_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def svg(timelines: Sequence[tuple[str, RunLog]]) -> str:
    """The timelines of these titles and runs, one below the other; a second is equally long in all of them."""
    every = [log.columns for _, log in timelines]
    longest = max(columns.seconds for columns in every) or 1.0
    height, charts = 0, []
    for (title, log), columns in zip(timelines, every, strict=True):
        heading = escape(printable(title, 120))
        chart, tall = _chart(heading, columns, log.arrivals, longest)
        size = f'y="{height}" width="{_WIDTH}" height="{tall}"'
        charts += [f'<svg {size} role="img"><title>{heading}</title>', *chart, "</svg>"]
        height += tall
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    colours = style(max(len(columns.pipelines) for columns in every))
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}{colours}</style>'
    page = f'<rect class="page" width="{_WIDTH}" height="{height}"/>'
    return "\n".join([opening, page, *charts, "</svg>"]) + "\n"


def _chart(
    heading: str, columns: Columns, arrivals: Mapping[str, float], longest: float
) -> tuple[list[str], int]:
    """What is drawn, and how high that is."""
    drawing, part = drawing_of(columns, arrivals, _PLOT, _MOST_PIECES), columns.seconds / longest
    drawn, top = _head(heading, drawing)
    y = top
    for name, note, tracks in drawing.bands:
        below = y + 34
        drawn += [_text(16, y + 12, printable(name, 15)), _text(16, y + 26, note, ' class="dim"')]
        for track, strips in tracks:
            high = drawing.bubble if track.pipeline is None else drawing.height
            drawn += _row(track, strips, columns.pipelines, y, high, f"{part * _PLOT:.1f}", drawing.cells)
            y += high + 2
        y = max(y + 6, below)
    for time, label in time_ticks(columns.seconds, max(2, round(MOST_TICKS * part))):
        x = round(_LEFT + time / longest * _PLOT)
        drawn.append(f'<path class="tick" d="M{x}.5 {top}V{y}"/>')
        drawn.append(_text(x, y + 14, label, ' text-anchor="middle"'))
    return drawn, y + 30


def _head(heading: str, drawing: Drawing) -> tuple[list[str], int]:
    """The title and what the colours mean, and how high that is."""
    drawn = [_text(16, 26, heading, ' class="title"')]
    shown = legend(drawing.names(bubbles=False), drawing.names(bubbles=True))
    for index, (css, label) in enumerate(shown):
        x, y = 16 + index % _PER_LINE * _ENTRY, 42 + index // _PER_LINE * 18
        drawn.append(f'<rect class="{css}" x="{x}" y="{y}" width="12" height="12"/>')
        drawn.append(_text(x + 18, y + 10, label))
    return drawn, 50 + -(-len(shown) // _PER_LINE) * 18


def _row(
    track: Track, strips: list[Strip], names: Sequence[str], y: int, high: int, wide: str, cells: int
) -> Iterator[str]:
    if track.pipeline is not None:
        place = f'cx="{_TAG + 4}" cy="{y + high / 2}" r="4"'
        yield f'<circle class="dot p{names.index(track.pipeline)}" {place}/>'
        yield _text(_TAG + 14, y + high // 2 + 4, escape(printable(track.pipeline, 14)))
    yield (
        f'<svg x="{_LEFT}" y="{y}" width="{wide}" height="{high}" viewBox="0 0 {cells} {TALL}" '
        'preserveAspectRatio="none" shape-rendering="crispEdges">'
    )
    if track.pipeline is not None:
        yield f'<rect class="idle" width="{cells}" height="{TALL}"/>'
    yield from paths(track, strips, cells)
    yield "</svg>"


def _text(x: int, y: int, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{more}>{text}</text>'


@dataclass(frozen=True, slots=True)
class Lines:
    """Prints with rich, as wide as the terminal. A block has the colour of the pipeline that takes most; without
    colours, and in ASCII, a letter stands for that pipeline."""

    columns: Columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self.columns
        letters = options.ascii_only or console.color_system is None or console.no_color
        gutter = len(f"worker {max(0, columns.workers - 1)}") + 1
        cells = max(1, options.max_width - gutter)
        for worker, rows in enumerate(columns.rows_of_workers()):
            line = Text(f"{f'worker {worker}':<{gutter}}", no_wrap=True, overflow="crop")
            yield line.append_text(_line(columns, rows, cells, letters))
        end = duration(columns.seconds)
        yield Text(f"{'':<{gutter}}0 s{end:>{max(1, cells - 3)}}", style="dim", no_wrap=True, overflow="crop")
        names = enumerate(columns.pipelines)
        yield Text("  ").join(
            _block(index, 8, letters).append(f" {printable(name)}", "") for index, name in names
        )


def _line(columns: Columns, rows: Indices, cells: int, letters: bool) -> Text:
    spans = columns.pipeline[rows], columns.t0[rows], columns.t1[rows], columns.share[rows]
    keys, taken = fill(*spans, columns.seconds, cells)
    if not keys.size:
        return Text(("." if letters else " ") * cells)
    most = keys[taken.argmax(axis=0)].tolist()
    eighths = [8 * height for height in taken.sum(axis=0).tolist()]
    return Text.assemble(
        *(
            _block(key, max(1, round(high)) if high else 0, letters)
            for key, high in zip(most, eighths, strict=True)
        )
    )


def _block(pipeline: int, eighths: int, letters: bool) -> Text:
    if letters:
        return Text("." if not eighths else _NAMES[pipeline] if pipeline < len(_NAMES) else "?")
    return Text(_BLOCKS[min(8, eighths)], style=hex_colour(0.72, 0.13, hue_of(pipeline)))
