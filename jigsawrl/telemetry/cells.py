"""Time in equal cells, so that a drawing of many spans stays small.

Spans of a cell or more begin and end with one; of shorter ones each cell shows the mean.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from jigsawrl.telemetry.columns import Floats, Indices


def fill(
    key: Indices, t0: Floats, t1: Floats, share: Floats, seconds: float, cells: int
) -> tuple[Indices, Floats]:
    """The distinct keys, and the mean share of each in each of `cells` equal parts of the time from 0 to `seconds`.

    Where they ask for more than there is, all get proportionally less.
    """
    keys, local = np.unique(key, return_inverse=True)
    whole = seconds if seconds > 0 else np.inf
    begin, end = t0 / whole * cells, np.minimum(t1 / whole * cells, cells)
    wide = end - begin >= 1
    begin, end = (np.where(wide, np.floor(edge + 0.5), edge) for edge in (begin, end))

    def passed(weights: Floats, edge: Floats) -> Floats:
        """For each key the weights of the edges at or before each cell's left border."""
        place = local * (cells + 1) + np.ceil(edge).astype(np.int64)
        found = np.bincount(place, weights, len(keys) * (cells + 1))
        return np.cumsum(found.reshape(len(keys), cells + 1), axis=1)

    # Up to the border x, a span has filled share * (x - begin) once begun and share * (end - begin) once ended.
    running = passed(share, begin) - passed(share, end)
    offset = passed(share * begin, begin) - passed(share * end, end)
    filled = np.diff(running * np.arange(cells + 1) - offset, axis=1)
    filled[filled < 1e-6] = 0.0
    return keys, filled / np.maximum(1.0, filled.sum(axis=0))


def rectangles(below: Floats, top: Floats, floor: float, cell: int, width: int) -> Iterator[str]:
    """The strip between two heights over `floor` as an SVG path, with one rectangle for cells that are alike.

    A cell is `cell` wide, and the last one less where the whole would be wider than `width`.
    """
    edges = _edges(below, top)
    tall = (top - below)[edges[:-1]].tolist()
    upper = (floor - top)[edges[:-1]].tolist()
    sides = np.minimum(cell * edges, width).tolist()
    for (left, right), y, height in zip(pairwise(sides), upper, tall, strict=True):
        if height > 0:
            yield f"M{left} {y:g}h{right - left}v{height:g}h{left - right}z"


def pieces(below: Floats, top: Floats) -> int:
    """How many rectangles that are."""
    return int(np.count_nonzero((top > below)[_edges(below, top)[:-1]]))


def _edges(below: Floats, top: Floats) -> Indices:
    changed = (np.diff(below) != 0) | (np.diff(top) != 0)
    return np.concatenate([[0], np.flatnonzero(changed) + 1, [len(top)]])
