"""The clock of a run, which stands still while the run is down."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from jigsawrl.telemetry.columns import Intervals, join, union, without
from jigsawrl.telemetry.runlog import Outage
from jigsawrl.telemetry.timeline import Span

_LEAST_OUTAGE = 0.01
"""Seconds; shorter ones are gaps between sub-stages."""


class RunClock:
    """Makes times of the run from times of its log."""

    def __init__(self, down: Intervals) -> None:
        self.begins: list[float] = down[:, 0].tolist()
        self.lengths: list[float] = (down[:, 1] - down[:, 0]).tolist()
        self.before = [0.0, *accumulate(self.lengths)]

    def at(self, t: float) -> float:
        last = bisect_right(self.begins, t) - 1
        if last < 0:
            return t
        return t - self.before[last] - min(t - self.begins[last], self.lengths[last])

    @property
    def outages(self) -> list[Outage]:
        return [Outage(self.at(t), seconds) for t, seconds in zip(self.begins, self.lengths, strict=True)]


def outages_of(down: Sequence[tuple[float, float]], spans: Sequence[Span]) -> Intervals:
    """The times before a resume in which nothing of any pipeline ran."""
    ran = union(np.array([span.t0 for span in spans]), np.array([span.t1 for span in spans]))
    idle = without(join(ran, np.array(down)), ran)
    return idle[idle[:, 1] - idle[:, 0] > _LEAST_OUTAGE]
