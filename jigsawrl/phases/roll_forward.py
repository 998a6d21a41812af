"""Where an order of turns leads: the one loop over phases on workers that each belong to one phase at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from jigsawrl.phases.turns import Order, PhasedJob, starting

TOGETHER_S = 1e-9
"""Phases that end within this many seconds end at once: sums of the same durations differ by rounding."""
Moment = tuple[float, list[PhasedJob], list[PhasedJob]]
"""A time, the jobs of which a phase ended then, and those of which the next one started."""


def roll_forward(
    jobs: Sequence[PhasedJob],
    order: Order,
    until: float,
    now: float = 0.0,
    first: Iterable[PhasedJob] | None = None,
    stretch: Callable[[PhasedJob], float] = lambda job: 1.0,
) -> Iterator[Moment]:
    """Plays jobs on to a time, or until all their steps are made; tells each moment at which phases start or end.

    The jobs change on the way: pass copies. `first` start now, whatever the order says. A phase takes `stretch`
    times as long as predicted, which is not known before it ends. Running phases end when they are predicted to.
    """
    going, waiting = list(jobs), [job for job in jobs if job.since is not None]
    count = len(going)
    ends = [(job.ends, number, job, True) for number, job in enumerate(going) if job.ends is not None]
    heapify(ends)
    starts = list(first) if first is not None else starting(waiting, going, order, now)
    ended: list[PhasedJob] = []
    while True:
        for job in starts:
            waiting.remove(job)
            job.begin(now)
            phase, count = job.phase, count + 2
            seconds, hold = job.seconds[phase], job.holds[phase]
            factor = stretch(job)
            heappush(ends, (now + factor * seconds, count + 1, job, True))
            if hold < seconds:
                heappush(ends, (now + factor * hold, count, job, False))
        yield now, ended, starts
        ended, starts = [], []
        while not ended and not starts:
            if not ends or ends[0][0] > until:
                return
            now = ends[0][0]
            while ends and ends[0][0] <= now + TOGETHER_S:
                _, _, job, whole = heappop(ends)
                if not whole:
                    job.held = 0
                    continue
                job.end(now)
                ended.append(job)
                if job.steps:
                    waiting.append(job)
                else:
                    going.remove(job)
            starts = starting(waiting, going, order, now) if waiting else []
