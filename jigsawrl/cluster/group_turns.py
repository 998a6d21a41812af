"""Whose turn it is inside a group at work, while its jobs come and go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from jigsawrl.phases.turns import AS_READY, ROLLOUT, TRAINING, Order, PhasedJob, starting


@dataclass(slots=True)
class GroupTurns:
    """The jobs of one group. Turns are counted, so that a job that joins has the next one of the round."""

    order: Order = AS_READY
    jobs: dict[str, PhasedJob] = field(default_factory=dict)
    arrivals: count[int] = field(default_factory=count)
    """Numbers for jobs in the order in which they began to wait: several may do so at the same time."""

    def seat(self, order: Order, jobs: Iterable[PhasedJob], now: float) -> None:
        """Takes these jobs: those that run or wait go on doing so, a new one waits for its rollout, others are gone.

        However often this is called with the same order, whose turn it is does not change, nor when a step is due.
        """
        before, self.jobs = self.jobs, {job.name: job for job in jobs}
        same, self.order = order is self.order, order
        stay = self.jobs.keys() & before.keys()
        latest = max([before[name].turns[TRAINING] for name in stay if same], default=0.0)
        for name, job in self.jobs.items():
            job.turns = [latest, latest]
            if name in stay:
                _go_on(job, before[name], same, now)
            else:
                job.since = next(self.arrivals)

    def end(self, name: str, now: float) -> None:
        """The job's phase has ended, and it waits for the next one."""
        job = self.jobs[name]
        job.end(now)
        job.since = next(self.arrivals)

    def start(self, now: float) -> list[PhasedJob]:
        """Begins the phases whose turn it is."""
        waiting = [job for job in self.jobs.values() if job.since is not None]
        waiting.sort(key=lambda job: job.since or 0.0)
        found = starting(waiting, self.jobs.values(), self.order, now)
        for job in found:
            turn = job.turns[job.phase] + 1
            job.begin(now)
            job.turns[job.phase] = turn
        return found


def _go_on(job: PhasedJob, before: PhasedJob, same: bool, now: float) -> None:
    """Goes on as it was before; under another order its phase and its step count from now."""
    job.phase, job.since = before.phase, before.since
    if before.ends is not None:
        job.ends = before.ends if same else now + job.seconds[job.phase]
        job.held = job.needed if before.held else 0
    if same:
        job.turns, job.due = before.turns, before.due
    else:  # its rollout of this round has begun
        job.turns = [float((job.phase == ROLLOUT) == (job.ends is not None)), 0.0]
