"""Line and scatter charts, as wide as there is room: SVG that is stretched, and text beside it that is not."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

_SIZE = 1000
_SHOWN_DOTS = 40
"""A curve of more points has dots only where the pointer is."""

Ticks = list[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Point:
    """A place in a chart, and what is said where the pointer is on it."""

    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour, in their order."""

    css: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high`, with what is written along it."""

    label: str
    low: float
    high: float
    ticks: Ticks
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        low, high = (math.log(end) if self.log else end for end in (self.low, self.high))
        return ((math.log(value) if self.log else value) - low) / (high - low) if high > low else 0.5


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most so many points, each the mean of an equal part of them."""
    parts = min(most, len(points))
    cuts = [round(index * len(points) / parts) for index in range(parts + 1)] if parts else []
    return [
        (math.fsum(x for x, _ in points[a:b]) / (b - a), math.fsum(y for _, y in points[a:b]) / (b - a))
        for a, b in pairwise(cuts)
    ]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value with its neighbours, `window` of them on either side, fewer towards the ends."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    reach = [min(window, index, len(values) - 1 - index) for index in range(len(values))]
    return [(sums[i + r + 1] - sums[i - r]) / (2 * r + 1) for i, r in enumerate(reach)]


def span_of(values: Sequence[float]) -> tuple[float, float]:
    """The least and the most, with room around them."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 0.5
    return low - room, high + room


def curves(name: str, x: Axis, y: Axis, series: Sequence[Series]) -> Iterator[str]:
    """Lines: each faint as it is and bold as it goes, where it is long enough to go anywhere."""
    yield from _open(name, x, y)
    for one in series:
        window = len(one.points) // 25
        if window:
            yield f'<path class="raw {one.css}" d="{_line(one.points, x, y)}"/>'
            means = smoothed([point.y for point in one.points], window)
            calm = [Point(point.x, mean, "") for point, mean in zip(one.points, means, strict=True)]
            yield f'<path class="line {one.css}" d="{_line(calm, x, y)}"/>'
        else:
            yield f'<path class="line {one.css}" d="{_line(one.points, x, y)}"/>'
    for one in series:
        shown = "dot" if len(one.points) <= _SHOWN_DOTS else "dot hidden"
        yield from _dots(one, shown, x, y)
    yield from _close(x, y)


def scatter(name: str, x: Axis, y: Axis, series: Sequence[Series]) -> Iterator[str]:
    """Dots, and the line on which both axes are equal."""
    yield from _open(name, x, y)
    ends = [Point(end, end, "") for end in (max(x.low, y.low), min(x.high, y.high))]
    yield f'<path class="equal" d="{_line(ends, x, y)}"/>'
    for one in series:
        yield from _dots(one, "dot loose", x, y)
    yield from _close(x, y)


def bounded(value: float) -> str:
    """For an HTML attribute: no more digits than pixels need."""
    return f"{value:.1f}".removesuffix(".0")


def _open(name: str, x: Axis, y: Axis) -> Iterator[str]:
    yield (
        f'<figure class="chart"><figcaption>{escape(name)}</figcaption><div class="plot">'
        f'<svg viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(f"{name}: {y.label} over {x.label}", quote=True)}">'
    )
    for value, _ in y.ticks:
        yield f'<path class="grid" d="M0 {bounded(_SIZE * (1 - y.place(value)))}h{_SIZE}"/>'


def _close(x: Axis, y: Axis) -> Iterator[str]:
    yield "</svg>"
    for value, label in y.ticks:
        yield f'<span class="y" style="top:{bounded(100 * (1 - y.place(value)))}%">{label}</span>'
    for value, label in x.ticks:
        yield f'<span class="x" style="left:{bounded(100 * x.place(value))}%">{label}</span>'
    yield f'</div><p class="axes">{escape(y.label)} over {escape(x.label)}</p></figure>'


def _line(points: Sequence[Point], x: Axis, y: Axis) -> str:
    places = (_place(point, x, y) for point in points)
    return "M" + "L".join(places) if points else ""


def _place(point: Point, x: Axis, y: Axis) -> str:
    return f"{bounded(_SIZE * x.place(point.x))} {bounded(_SIZE * (1 - y.place(point.y)))}"


def _dots(series: Series, css: str, x: Axis, y: Axis) -> Iterator[str]:
    """A line of no length with round ends is round however the drawing is stretched."""
    yield f'<g class="{series.css}">'
    for point in series.points:
        title = f"<title>{escape(point.title)}</title>" if point.title else ""
        yield f'<path class="{css}" d="M{_place(point, x, y)}h0">{title}</path>'
    yield "</g>"
