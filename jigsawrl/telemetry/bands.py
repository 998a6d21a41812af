"""The timeline of pages and pictures: a band for each worker, with a track for each pipeline and its bubbles below.

A track is as high as a whole worker; what runs is as high as its share. Workers on which the same runs, as on those
of one engine, are one band. Tracks are stretched to the width there is, so all text stands beside them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import NamedTuple

import numpy as np

from jigsawrl.telemetry.axes import time_ticks
from jigsawrl.telemetry.cells import fill, pieces, rectangles
from jigsawrl.telemetry.columns import Columns, Floats, Indices, Intervals, groups
from jigsawrl.telemetry.events import SUBSTAGES
from jigsawrl.telemetry.palette import css_name
from jigsawrl.telemetry.report import CAUSES, worker_times
from jigsawrl.telemetry.text import clock, printable
from jigsawrl.telemetry.timeline import WAITS

TALL = 1000
"""Height of a track in its own units; on the screen it is what the style says."""

_LEVEL = 25
"""Heights are multiples of this, and so are eighths and tenths of a worker."""
_MOST_CELLS = 8192
_MOST_WORK = 4_000_000
_MOST_PIECES = 120_000
"""Some 30 bytes each."""
_LEAST_SEEN = 0.2
"""What of a track is filled where anything runs at all."""
MOST_TICKS = 10
_READABLE = 12
"""Pixels from which on a track has room for a name beside it."""
_PIXELS = 760
"""About as high as the whole may become before its tracks get thinner."""


Mark = tuple[float, str, str]
"""Something that happened: when, a CSS class and a title."""


@dataclass(frozen=True, slots=True)
class Band:
    """Workers that did the same. `rows` are the spans on any one of them."""

    workers: tuple[int, ...]
    rows: Indices

    @property
    def name(self) -> str:
        return f"worker{'s' if len(self.workers) > 1 else ''} {ranges(self.workers)}"


def bands_of(columns: Columns) -> list[Band]:
    """Every worker in one band, in the order of their first workers."""
    alike: dict[bytes, tuple[list[int], Indices]] = {}
    for worker, rows in enumerate(columns.rows_of_workers()):
        alike.setdefault(rows.tobytes(), ([], rows))[0].append(worker)
    return [Band(tuple(workers), rows) for workers, rows in alike.values()]


def ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers as 0–3, 6, 8–9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in runs)


class Strip(NamedTuple):
    """Something on a track, between two heights in each cell."""

    name: str
    below: Floats
    top: Floats


@dataclass(frozen=True, slots=True)
class Track:
    """One row of the drawing: intervals with keys, each the index of a CSS class and a name."""

    pipeline: str | None
    """None: bubbles."""
    key: Indices
    t0: Floats
    t1: Floats
    share: Floats
    names: tuple[str, ...]
    css: str

    @property
    def who(self) -> str:
        return "bubble" if self.pipeline is None else self.pipeline

    def strips(self, seconds: float, cells: int) -> list[Strip]:
        """What has a name, one upon the other. What is there is seen, however little it is."""
        keys, taken = fill(self.key, self.t0, self.t1, self.share, seconds, cells)
        whole = taken.sum(axis=0)
        taken *= np.maximum(1.0, _LEAST_SEEN / np.where(whole > 0, whole, 1.0))
        tops = np.round(TALL / _LEVEL * np.cumsum(taken, axis=0)) * _LEVEL
        floors = np.concatenate([np.zeros((1, cells)), tops])[: len(tops)]
        return [
            Strip(self.names[key], *edges) for key, *edges in zip(keys.tolist(), floors, tops, strict=True)
        ]


class Drawing(NamedTuple):
    """Bands of tracks: the name of each band, a note, and its tracks with what is on them, in this many cells."""

    bands: list[tuple[str, str, list[tuple[Track, list[Strip]]]]]
    cells: int
    height: int
    """Pixels of a pipeline's track."""

    @property
    def bubble(self) -> int:
        """Pixels of a track of bubbles."""
        return max(4, self.height // 3)

    def names(self, bubbles: bool) -> set[str]:
        """What is drawn on the tracks of bubbles, or on the others."""
        own = [one for _, _, tracks in self.bands for one in tracks if bubbles is (one[0].pipeline is None)]
        return {strip.name for _, strips in own for strip in strips}


def drawing_of(columns: Columns, arrivals: Mapping[str, float], most_cells: int, most_pieces: int) -> Drawing:
    """The finest one that has at most so many cells and pieces."""
    times = worker_times(columns, arrivals)
    tracks: list[tuple[str, str, list[Track]]] = []
    for band in bands_of(columns):
        bubbles = times[band.workers[0]]
        busy = _share(bubbles["busy"], columns.seconds)
        own = [*_pipeline_tracks(columns, band.rows), _bubble_track({c: bubbles[c] for c in CAUSES})]
        tracks.append((band.name, f"{busy:.0%} busy", own))
    waiting = replace(columns, share=np.ones_like(columns.share))
    if waits := list(_pipeline_tracks(waiting, np.flatnonzero(np.isin(columns.kind, _WAIT_KINDS)))):
        tracks.append(("off the workers", "tools, rewards", waits))
    every = [track for _, _, own in tracks for track in own]
    cells, drawn = _drawn(every, columns.seconds, most_cells, most_pieces)
    left = iter(drawn)
    bands = [(name, note, [(track, next(left)) for track in own]) for name, note, own in tracks]
    return Drawing(bands, cells, min(22, max(8, _PIXELS // max(1, len(every)))))


def timeline(
    columns: Columns,
    arrivals: Mapping[str, float],
    colours: Mapping[str, int],
    marks: Iterable[Mark],
    name: str = "timeline",
    part: float = 1.0,
) -> Iterator[str]:
    """HTML. `colours` numbers the pipelines.

    Several on one page have a name each, and the part of the width that makes a second the same length in all.
    """
    drawing = drawing_of(columns, arrivals, _MOST_CELLS, _MOST_PIECES)
    css = "timeline" if drawing.height >= _READABLE else "timeline thin"
    yield (
        f'<div class="{css}" id="{name}" data-seconds="{columns.seconds:.6f}" data-cells="{drawing.cells}" '
        f'data-tall="{TALL}" style="--track:{drawing.height}px;--bubble:{drawing.bubble}px;--part:{part:.4f}">'
    )
    yield from _axis(columns, marks, max(2, round(MOST_TICKS * part)))
    for name, note, tracks in drawing.bands:
        yield f'<div class="band"><div class="who"><b>{name}</b> <small>{note}</small></div><div class="tracks">'
        for track, strips in tracks:
            yield from _row(track, strips, colours, drawing.cells)
        yield "</div></div>"
    yield "</div>"


_WAIT_KINDS = [SUBSTAGES.index(kind) for kind in sorted(WAITS)]


def _share(intervals: Intervals, seconds: float) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum()) / seconds if seconds > 0 else 0.0


def _pipeline_tracks(columns: Columns, rows: Indices) -> Iterator[Track]:
    for pipeline, places in enumerate(groups(columns.pipeline[rows], len(columns.pipelines))):
        own = rows[places]
        if own.size:
            yield Track(
                columns.pipelines[pipeline],
                columns.kind[own],
                columns.t0[own],
                columns.t1[own],
                columns.share[own],
                SUBSTAGES,
                "k",
            )


def _bubble_track(bubbles: Mapping[str, Intervals]) -> Track:
    key = np.concatenate([np.full(len(found), index) for index, found in enumerate(bubbles.values())])
    every = np.concatenate(list(bubbles.values()))
    return Track(
        None, key.astype(np.int64), every[:, 0], every[:, 1], np.ones(len(every)), tuple(bubbles), "c"
    )


def _drawn(
    tracks: list[Track], seconds: float, cells: int, most_pieces: int
) -> tuple[int, list[list[Strip]]]:
    """The finest cells with which the whole is small enough, and what is in them."""
    while cells > 256 and cells * len(tracks) > _MOST_WORK:
        cells //= 2
    while True:
        drawn = [track.strips(seconds, cells) for track in tracks]
        if cells <= 16 or sum(pieces(*strip[1:]) for own in drawn for strip in own) <= most_pieces:
            return cells, drawn
        cells //= 2


def _axis(columns: Columns, marks: Iterable[Mark], most: int) -> Iterator[str]:
    seconds = columns.seconds
    yield '<div class="band axis"><div class="who"></div><div class="tracks"><div class="ticks">'
    for time, label in time_ticks(seconds, most):
        yield f'<span class="tick" style="left:{100 * time / seconds:.3f}%">{label}</span>'
    yield '</div><div class="marks">'
    for t, css, title in marks:
        where = 100 * min(1.0, max(0.0, t / seconds)) if seconds > 0 else 0.0
        words = escape(f"{clock(t)} {title}", quote=True)
        yield f'<i class="mark {css}" data-t="{t:.3f}" style="left:{where:.3f}%" title="{words}"></i>'
    yield "</div></div></div>"


def _row(track: Track, strips: list[Strip], colours: Mapping[str, int], cells: int) -> Iterator[str]:
    who = escape(track.who, quote=True)
    label, kind = "<span></span>", "bubble"
    if track.pipeline is not None:
        colour = colours[track.pipeline]
        label = f'<span class="tag" title="{who}"><i class="chip p{colour}"></i><span>{who}</span></span>'
        kind = f"track of{colour}"
    yield (
        f'<div class="row {kind}" data-who="{who}">{label}'
        f'<svg viewBox="0 0 {cells} {TALL}" preserveAspectRatio="none">'
    )
    yield from paths(track, strips, cells)
    yield "</svg></div>"


def paths(track: Track, strips: list[Strip], cells: int) -> Iterator[str]:
    """SVG: the strips, each with a class for its colour and a title."""
    for name, below, top in strips:
        if path := "".join(rectangles(below, top, TALL, 1, cells)):
            css, title = f"{track.css}-{css_name(name)}", f"{escape(printable(track.who))}: {name}"
            yield f'<path class="{css}" data-kind="{name}" d="{path}"><title>{title}</title></path>'
