"""The timeline as a picture: an SVG that stands alone, and the same coarsely for a terminal.

A band for each worker; what runs on it in the hue of its pipeline and the lightness of its kind, as high as the share
it takes, stacked where several run side by side. Time is cut into cells one pixel wide: longer spans begin and end
with one, and of shorter ones each cell shows the mean. Cells grow until the file is small enough.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

import numpy as np
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.text import Text

from jigsawrl.telemetry.axes import time_ticks
from jigsawrl.telemetry.cells import fill, rectangles
from jigsawrl.telemetry.colours import hex_colour, hue_of
from jigsawrl.telemetry.columns import Columns, Floats, Indices, to_columns
from jigsawrl.telemetry.events import SUBSTAGES, Substage
from jigsawrl.telemetry.text import duration
from jigsawrl.telemetry.timeline import OVERHEADS, Span

_WIDTH = 1200
_LEFT, _RIGHT = 84, 28
_PLOT = _WIDTH - _LEFT - _RIGHT
_ROW = 20
_SWATCH = 24
_MOST_BYTES = 900_000
_MOST_TICKS = 10
_MAX_NAME = 32

_LIGHTNESS: dict[Substage, float] = {
    "prefill": 0.66,
    "decode": 0.76,
    "tail": 0.87,
    "logprob": 0.57,
    "grad": 0.47,
    "optim": 0.38,
    "sync": 0.60,
    "swap": 0.76,
}
"""On white; on black it is the other way round, so that a tail, which leaves room, stands out least on either."""

_DARK = 1.26
"""A lightness on white and the one on black add up to this."""

_Colour = tuple[int, Substage]
"""The number of a pipeline and a kind."""

_BLOCKS = " ▁▂▃▄▅▆▇█"
_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def svg(spans: Iterable[Span], workers: int, title: str) -> str:
    """A Gantt chart 1200 pixels wide, light or dark as its reader prefers, of less than 1 MB."""
    columns = to_columns(spans, workers)
    cell = 1
    while (paths := _paths(columns, cell)) is None:
        cell *= 2
    return "\n".join(_document(columns, paths, title)) + "\n"


def bars(spans: Iterable[Span], workers: int, width: int) -> ConsoleRenderable:
    """The same in lines of at most `width` characters: the block is as high as the share that is taken, its colour
    is that of whoever takes most. Without colours, and in ASCII, a letter stands for that pipeline."""
    return _Bars(to_columns(spans, workers), width)


def _fill(columns: Columns, rows: Indices, cells: int) -> tuple[Indices, Floats]:
    """Which (pipeline, kind) run on a worker, as pipeline * len(SUBSTAGES) + kind, and their mean shares."""
    key = columns.pipeline[rows] * len(SUBSTAGES) + columns.kind[rows]
    return fill(key, columns.t0[rows], columns.t1[rows], columns.share[rows], columns.seconds, cells)


def _paths(columns: Columns, cell: int) -> dict[_Colour, str] | None:
    """For each colour the outlines of all that has it; none where they are too long and larger cells could help."""
    cells = -(-_PLOT // cell)
    size = 0
    outlines: dict[_Colour, list[str]] = {}
    height = _band(columns.workers)
    for worker, rows in enumerate(columns.rows_of_workers()):
        keys, taken = _fill(columns, rows, cells)
        tops = np.round(2 * (height - 2) * np.cumsum(taken, axis=0)) / 2
        floor = (worker + 1) * height - 1
        below = np.zeros(cells)
        for key, top in zip(keys.tolist(), tops, strict=True):
            pipeline, kind = divmod(key, len(SUBSTAGES))
            outline = "".join(rectangles(below, top, floor, cell, _PLOT))
            outlines.setdefault((pipeline, SUBSTAGES[kind]), []).append(outline)
            size += len(outline)
            below = top
        if size > _MOST_BYTES and cells > 1:
            return None
    return {colour: "".join(parts) for colour, parts in sorted(outlines.items())}


def _band(workers: int) -> int:
    """The height of a worker's band in pixels."""
    return min(48, max(16, 640 // max(1, workers)))


def _class(colour: _Colour) -> str:
    pipeline, kind = colour
    return f"p{pipeline}-{kind}"


def _rgb(pipeline: int, kind: Substage, lightness: float) -> str:
    """The hue is the pipeline's; syncs and swaps are nearly grey."""
    return hex_colour(lightness, 0.02 if kind in OVERHEADS else 0.13, hue_of(pipeline))


def _style(colours: Iterable[_Colour]) -> str:
    used = sorted(set(colours))
    light = "".join(f".{_class((p, k))}{{fill:{_rgb(p, k, _LIGHTNESS[k])}}}" for p, k in used)
    dark = "".join(f".{_class((p, k))}{{fill:{_rgb(p, k, _DARK - _LIGHTNESS[k])}}}" for p, k in used)
    return (
        "text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:16px;font-weight:600}.dim{fill:#777}"
        f".page{{fill:#fff}}.idle{{fill:#eee}}.tick{{stroke:#000;stroke-opacity:.22}}{light}"
        "@media(prefers-color-scheme:dark){text{fill:#ccc}.dim{fill:#888}"
        f".page{{fill:#111}}.idle{{fill:#252525}}.tick{{stroke:#fff}}{dark}}}"
    )


def _document(columns: Columns, paths: dict[_Colour, str], title: str) -> Iterator[str]:
    entries = _legend_entries(columns)
    legend, legend_height = _legend(entries, len(columns.pipelines))
    colours = [*paths, *(colour for stripes, _ in entries for colour in stripes)]
    band = _band(columns.workers)
    top = 40 + legend_height
    height = top + columns.workers * band + 2 * _ROW
    heading = escape(printable(title, 120))
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img"><title>{heading}</title>'
    )
    yield f"<style>{_style(colours)}</style>"
    yield f'<rect class="page" width="{_WIDTH}" height="{height}"/>'
    yield f'<text class="title" x="16" y="26">{heading}</text>'
    yield f'<text class="dim" x="{_WIDTH - _RIGHT}" y="26" text-anchor="end">height: share of the worker</text>'
    yield f'<g transform="translate(16 40)">{legend}</g>'
    yield f'<g transform="translate({_LEFT} {top})">'
    yield from _bands(columns.workers, band)
    for (pipeline, kind), path in paths.items():
        what = f"{escape(printable(columns.pipelines[pipeline]))}: {kind}"
        yield f'<path class="{_class((pipeline, kind))}" d="{path}"><title>{what}</title></path>'
    yield from _axis(columns.seconds, columns.workers * band)
    yield "</g></svg>"


def _bands(workers: int, band: int) -> Iterator[str]:
    for worker in range(workers):
        y = worker * band
        yield (
            f'<rect class="idle" y="{y + 1}" width="{_PLOT}" height="{band - 2}"/>'
            f'<text x="-8" y="{y + band / 2 + 4:g}" text-anchor="end">worker {worker}</text>'
        )


_Entry = tuple[list[_Colour], str]
"""Something in the legend: its colours side by side, none for what is idle, and its name."""


def _legend_entries(columns: Columns) -> list[_Entry]:
    """The pipelines, each in the colour of its decoding, then the kinds, in the hues of the first pipelines."""
    pipelines: list[_Entry] = [
        ([(index, "decode")], printable(name)) for index, name in enumerate(columns.pipelines)
    ]
    hues = range(min(4, len(pipelines)))
    kinds: list[_Entry] = [([(hue, kind) for hue in hues], kind) for kind in _LIGHTNESS]
    return [*pipelines, *kinds, ([], "idle")] if pipelines else []


def _legend(entries: list[_Entry], pipelines: int) -> tuple[str, int]:
    """Patches of colour with what they stand for, in rows, and their height; the kinds begin a row of their own."""
    parts: list[str] = []
    x = y = 0
    for index, (colours, label) in enumerate(entries):
        wide = _SWATCH + 22 + _text_width(label)
        if x and (index == pipelines or x + wide > _WIDTH - 32):
            x, y = 0, y + _ROW
        parts += _swatch([_class(colour) for colour in colours] or ["idle"], x, y + 2)
        parts.append(f'<text x="{x + _SWATCH + 6}" y="{y + 12}">{escape(label)}</text>')
        x += wide
    return "".join(parts), y + _ROW + 8 if entries else 0


def _swatch(classes: list[str], x: int, y: int) -> Iterator[str]:
    wide = _SWATCH // len(classes)
    for index, name in enumerate(classes):
        yield f'<rect class="{name}" x="{x + index * wide}" y="{y}" width="{wide}" height="12"/>'


def _text_width(text: str) -> int:
    """About how many pixels a label takes, rather too many: nobody knows the reader's font."""
    return sum(
        12 if letter in "mwMW@%" or letter > "\u024f" else 9 if letter.isupper() else 7 for letter in text
    )


def _axis(seconds: float, y: int) -> Iterator[str]:
    """Ticks go through all bands: what happens at the same time on distant workers is seen to."""
    for time, label in time_ticks(seconds, _MOST_TICKS):
        x = time / seconds * _PLOT
        yield (
            f'<path class="tick" d="M{round(x)}.5 0v{y + 5}"/>'
            f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{label}</text>'
        )


def printable(name: str, most: int = _MAX_NAME) -> str:
    """What XML and a terminal can show, not too long."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in name)
    return shown if len(shown) <= most else shown[: most - 3] + "..."


@dataclass(frozen=True, slots=True)
class _Bars:
    columns: Columns
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self.columns
        letters = options.ascii_only or console.color_system is None or console.no_color
        gutter = len(f"worker {max(0, columns.workers - 1)}") + 1
        cells = max(1, min(self.width, options.max_width) - gutter)
        for worker, rows in enumerate(columns.rows_of_workers()):
            line = Text(f"{f'worker {worker}':<{gutter}}", no_wrap=True, overflow="crop")
            yield line.append_text(_line(columns, rows, cells, letters))
        end = duration(columns.seconds)
        yield Text(f"{'':<{gutter}}0 s{end:>{max(1, cells - 3)}}", style="dim", no_wrap=True, overflow="crop")
        yield Text("  ").join(_entries(columns, letters))


def _line(columns: Columns, rows: Indices, cells: int, letters: bool) -> Text:
    keys, taken = _fill(columns, rows, cells)
    text = Text()
    if not keys.size:
        return text.append(("." if letters else " ") * cells)
    most = keys[taken.argmax(axis=0)].tolist()
    for key, height in zip(most, taken.sum(axis=0).tolist(), strict=True):
        pipeline, kind = divmod(key, len(SUBSTAGES))
        if letters:
            text.append(_letter(pipeline) if height > 0 else ".")
        else:
            level = min(8, max(1, round(8 * height))) if height > 0 else 0
            text.append(_BLOCKS[level], style=_terminal_colour(pipeline, SUBSTAGES[kind]))
    return text


def _letter(pipeline: int) -> str:
    return _NAMES[pipeline] if pipeline < len(_NAMES) else "?"


def _terminal_colour(pipeline: int, kind: Substage) -> str:
    """Between light and dark: nobody knows what a terminal's background is."""
    return _rgb(pipeline, kind, 0.42 + 0.42 * _LIGHTNESS[kind])


def _entries(columns: Columns, letters: bool) -> Iterator[Text]:
    for pipeline, name in enumerate(columns.pipelines):
        colour = "" if letters else _terminal_colour(pipeline, "decode")
        patch = _letter(pipeline) if letters else "█"
        yield Text.assemble((patch, colour), " ", printable(name))
