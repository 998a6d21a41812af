"""Spans as numpy columns, and sets of moments as sorted intervals: what the report and the picture compute with."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from jigsawrl.telemetry.events import SUBSTAGES
from jigsawrl.telemetry.timeline import WAITS, Span

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

Intervals = Floats
"""Rows [from, to): sorted, disjoint, none empty."""

KIND = {substage: index for index, substage in enumerate(SUBSTAGES)}
NEVER: Intervals = np.empty((0, 2))


@dataclass(frozen=True, slots=True)
class Columns:
    """All spans, times counted from `start`. `kind` indexes SUBSTAGES, `pipeline` indexes the sorted names.

    The pair (`row[i]`, `worker[i]`) says that a span occupies a worker; waits for tools and rewards occupy none.
    """

    start: float
    seconds: float
    workers: int
    pipelines: tuple[str, ...]
    t0: Floats
    t1: Floats
    kind: Indices
    pipeline: Indices
    share: Floats
    row: Indices
    worker: Indices

    def rows_of_workers(self) -> list[Indices]:
        """For each worker the rows of the spans that occupy it."""
        return [self.row[places] for places in groups(self.worker, self.workers)]

    def when(self, rows: Indices) -> Intervals:
        """The times in which at least one of these spans runs."""
        return union(self.t0[rows], self.t1[rows])


def to_columns(
    spans: Iterable[Span], workers: int, *, start: float | None = None, end: float | None = None
) -> Columns:
    """A run may begin before its first span and end after its last, never the other way round."""
    spans = list(spans)
    t0 = np.array([span.t0 for span in spans], dtype=np.float64)
    t1 = np.array([span.t1 for span in spans], dtype=np.float64)
    begins = [*([float(t0.min())] if spans else []), *([] if start is None else [start])]
    ends = [*([float(t1.max())] if spans else []), *([] if end is None else [end])]
    begin = min(begins, default=0.0)
    names = tuple(sorted({span.pipeline for span in spans}))
    number = {name: index for index, name in enumerate(names)}
    occupying = [index for index, span in enumerate(spans) if span.substage not in WAITS]
    places = [spans[index].workers for index in occupying]
    worker = np.array(list(chain.from_iterable(places)), dtype=np.int64)
    if worker.size and not 0 <= worker.min() <= worker.max() < workers:
        raise ValueError(f"spans name workers {worker.min()} to {worker.max()}, and there are {workers}")
    return Columns(
        start=begin,
        seconds=max(0.0, max(ends, default=begin) - begin),
        workers=workers,
        pipelines=names,
        t0=t0 - begin,
        t1=t1 - begin,
        kind=np.array([KIND[span.substage] for span in spans], dtype=np.int64),
        pipeline=np.array([number[span.pipeline] for span in spans], dtype=np.int64),
        share=np.array([span.share for span in spans], dtype=np.float64),
        row=np.repeat(
            np.array(occupying, dtype=np.int64), np.array([len(place) for place in places], dtype=np.int64)
        ),
        worker=worker,
    )


def groups(keys: Indices, count: int) -> list[Indices]:
    """For each key from 0 to `count` the places where it stands."""
    order = np.argsort(keys, kind="stable")
    bounds = np.searchsorted(keys[order], np.arange(count + 1))
    return [order[a:b] for a, b in pairwise(bounds)]


def union(t0: Floats, t1: Floats) -> Intervals:
    """The moments that lie in at least one of these intervals."""
    if not t0.size:
        return NEVER
    order = np.argsort(t0, kind="stable")
    begins, ends = t0[order], np.maximum.accumulate(t1[order])
    gap = begins[1:] > ends[:-1]
    found = np.stack([begins[np.append(True, gap)], ends[np.append(gap, True)]], axis=1)
    return found[found[:, 1] > found[:, 0]]


def join(*sets: Intervals) -> Intervals:
    """The moments in at least one of the sets."""
    every = np.concatenate(sets) if sets else NEVER
    return union(every[:, 0], every[:, 1])


def without(whole: Intervals, part: Intervals) -> Intervals:
    """The moments of `whole` that are not in `part`, of which every moment is in `whole`.

    An edge of either set is then an edge of the rest, and an edge of both appears twice and is none.
    """
    edges = np.sort(np.concatenate([whole.ravel(), part.ravel()])).reshape(-1, 2)
    return join(edges[edges[:, 1] > edges[:, 0]])


def length(intervals: Intervals) -> float:
    """Seconds."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())
