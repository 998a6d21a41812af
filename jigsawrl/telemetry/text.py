"""Figures as people read them."""

import math
from collections.abc import Sequence
from itertools import pairwise

_BLOCKS = "▁▂▃▄▅▆▇█"


def number(value: float) -> str:
    """The digits that matter, whatever the size: 0.0031, 0.842, 12.3, 4,812, 3.1e-07, nan."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size >= 1e7 or 0 < size < 5e-4:
        return f"{value:.1e}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.3f}" if size >= 0.1 or size == 0 else f"{value:.4f}"


def duration(seconds: float) -> str:
    """0.42 s, 9.1 s, 1 min 32 s, 2 h 03 min."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def clock(seconds: float) -> str:
    """0:07, 1:32, 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def counted(count: int, noun: str) -> str:
    """1 step, 1,024 steps."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def printable(name: str, most: int = 32) -> str:
    """What XML and a terminal can show, not too long."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in name)
    return shown if len(shown) <= most else shown[: most - 3] + "..."


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of the values from their lowest to their highest, each character the mean of an equal part of them.

    Values that are not finite are left out; a course without height is a low line.
    """
    finite = [value for value in values if math.isfinite(value)]
    parts = min(width, len(finite))
    cuts = [round(i * len(finite) / parts) for i in range(parts + 1)] if parts else [0]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    if high - low < 1e-9 * max(1.0, abs(high), abs(low)):
        return _BLOCKS[0] * len(means)
    return "".join(_BLOCKS[round((mean - low) / (high - low) * (len(_BLOCKS) - 1))] for mean in means)
