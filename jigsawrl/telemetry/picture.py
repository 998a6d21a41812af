"""The timeline as a picture: an SVG that stands alone, and the same coarsely for a terminal.

A band for each worker; what runs on it in the hue of its pipeline and the lightness of its kind, as high as the share
it takes, stacked where several run side by side. Time is cut into cells one pixel wide: longer spans begin and end
with one, and of shorter ones each cell shows the mean. Cells grow until the file is small enough.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.text import Text

from jigsawrl.telemetry.columns import Columns, Floats, Indices, to_columns
from jigsawrl.telemetry.events import SUBSTAGES, Substage
from jigsawrl.telemetry.text import clock, duration
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
    """Which (pipeline, kind) run on a worker, as pipeline * len(SUBSTAGES) + kind, and the mean share of each in each
    of `cells` equal parts of the time. Where they ask for more than there is, all get proportionally less."""
    keys, local = np.unique(columns.pipeline[rows] * len(SUBSTAGES) + columns.kind[rows], return_inverse=True)
    scale = cells / columns.seconds if columns.seconds > 0 else 0.0
    begin, end = columns.t0[rows] * scale, np.minimum(columns.t1[rows] * scale, cells)
    wide = end - begin >= 1
    begin, end = (np.where(wide, np.floor(edge + 0.5), edge) for edge in (begin, end))
    share = columns.share[rows]

    def passed(weights: Floats, edge: Floats) -> Floats:
        """For each key the weights of the edges at or before each cell's left border."""
        place = local * (cells + 1) + np.ceil(edge).astype(np.int64)
        found = np.bincount(place, weights, len(keys) * (cells + 1))
        return np.cumsum(found.reshape(len(keys), cells + 1), axis=1)

    # Up to the border x, a span has filled share * (x - begin) once begun and share * (end - begin) once ended.
    running = passed(share, begin) - passed(share, end)
    offset = passed(share * begin, begin) - passed(share * end, end)
    fill = np.diff(running * np.arange(cells + 1) - offset, axis=1)
    fill[fill < 1e-6] = 0.0
    return keys, fill / np.maximum(1.0, fill.sum(axis=0))


def _paths(columns: Columns, cell: int) -> dict[_Colour, str] | None:
    """For each colour the outlines of all that has it; none where they are too long and larger cells could help."""
    cells = -(-_PLOT // cell)
    size = 0
    outlines: dict[_Colour, list[str]] = {}
    height = _band(columns.workers)
    for worker, rows in enumerate(columns.rows_of_workers()):
        keys, fill = _fill(columns, rows, cells)
        tops = np.round(2 * (height - 2) * np.cumsum(fill, axis=0)) / 2
        floor = (worker + 1) * height - 1
        below = np.zeros(cells)
        for key, top in zip(keys.tolist(), tops, strict=True):
            pipeline, kind = divmod(key, len(SUBSTAGES))
            outline = "".join(_rectangles(below, top, floor, cell))
            outlines.setdefault((pipeline, SUBSTAGES[kind]), []).append(outline)
            size += len(outline)
            below = top
        if size > _MOST_BYTES and cells > 1:
            return None
    return {colour: "".join(parts) for colour, parts in sorted(outlines.items())}


def _rectangles(below: Floats, top: Floats, floor: int, cell: int) -> Iterator[str]:
    """The strip between two heights over `floor`, with one rectangle for cells that are alike."""
    changed = (np.diff(below) != 0) | (np.diff(top) != 0)
    edges = [0, *(np.flatnonzero(changed) + 1).tolist(), len(top)]
    for a, b in pairwise(edges):
        tall = top[a] - below[a]
        if tall > 0:
            left, right = cell * a, min(cell * b, _PLOT)
            yield f"M{left} {floor - top[a]:g}h{right - left}v{tall:g}h{left - right}z"


def _band(workers: int) -> int:
    """The height of a worker's band in pixels."""
    return min(48, max(16, 640 // max(1, workers)))


def _class(colour: _Colour) -> str:
    pipeline, kind = colour
    return f"p{pipeline}-{kind}"


def _rgb(pipeline: int, kind: Substage, lightness: float) -> str:
    """Hues a golden angle apart: neighbours differ however many there are. Syncs and swaps are nearly grey."""
    hue = math.radians(255 + 137.508 * pipeline)
    chroma = 0.02 if kind in OVERHEADS else 0.13
    return "#" + "".join(f"{part:02x}" for part in _from_oklab(lightness, chroma, hue))


def _from_oklab(lightness: float, chroma: float, hue: float) -> Iterator[int]:
    """Red, green and blue of a colour in Oklab, where equal lightness looks equally light in every hue.

    A colour that no screen can show is greyed until one can.
    """
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    l3 = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    m3 = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    s3 = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * l3 - 3.3077115913 * m3 + 0.2309699292 * s3,
        -1.2684380046 * l3 + 2.6097574011 * m3 - 0.3413193965 * s3,
        -0.0041960863 * l3 - 0.7034186147 * m3 + 1.7076147010 * s3,
    )
    if chroma > 0.001 and not -0.001 <= min(linear) <= max(linear) <= 1.001:
        return _from_oklab(lightness, 0.95 * chroma, hue)
    return (_gamma(min(1.0, max(0.0, part))) for part in linear)


def _gamma(linear: float) -> int:
    """The byte that sRGB has for a part of the light."""
    return round(255 * (12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055))


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
    heading = escape(_printable(title, 120))
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
        what = f"{escape(_printable(columns.pipelines[pipeline]))}: {kind}"
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
        ([(index, "decode")], _printable(name)) for index, name in enumerate(columns.pipelines)
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
    step = _tick(seconds / _MOST_TICKS)
    for index in range(int(seconds / step) + 1 if seconds > 0 else 0):
        x = index * step / seconds * _PLOT
        label = clock(index * step) if step >= 60 else f"{round(index * step, 6):g} s"
        yield (
            f'<path class="tick" d="M{round(x)}.5 0v{y + 5}"/>'
            f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{label}</text>'
        )


def _tick(least: float) -> float:
    """The smallest round time that is at least this long."""
    short = (digit * 10.0**power for power in range(-6, 2) for digit in (1, 2, 5) if digit * 10**power < 60)
    long = (60.0 * minutes for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440))
    days = 86400.0 * -(-least // 86400.0)
    return next((step for step in (*short, *long) if step >= least), days)


def _printable(name: str, most: int = _MAX_NAME) -> str:
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
    keys, fill = _fill(columns, rows, cells)
    text = Text()
    if not keys.size:
        return text.append(("." if letters else " ") * cells)
    most = keys[fill.argmax(axis=0)].tolist()
    for key, taken in zip(most, fill.sum(axis=0).tolist(), strict=True):
        pipeline, kind = divmod(key, len(SUBSTAGES))
        if letters:
            text.append(_letter(pipeline) if taken > 0 else ".")
        else:
            level = min(8, max(1, round(8 * taken))) if taken > 0 else 0
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
        yield Text.assemble((patch, colour), " ", _printable(name))
