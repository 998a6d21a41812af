"""Whose phase starts next where a worker belongs to one phase at a time.

A job goes through the phases of its steps one after the other: a rollout, a training, and again. Jobs that share
workers take turns, in one of three orders that a cluster plans with. `as-ready`: first come, first served; a short
job may go round several times while a long one goes once. `round-robin`: RollMux's meta-iteration; on every worker
each job has one rollout and one training in turn, and a worker idles rather than let a job overtake. `by-need`: the
job whose step is due first goes first, and a worker is kept free for a job that comes soon and cannot wait. The same
orders are rolled forward (`roll_forward`), simulated, and run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

ROLLOUT, TRAINING = 0, 1
"""The phases of a step, where it has these two."""
NEVER = float("-inf")
OrderName = Literal["as-ready", "round-robin", "by-need"]


@dataclass(slots=True, eq=False)
class PhasedJob:
    """A job on its way through its phases. Workers are bits, phases are counted from 0, times are of any clock."""

    name: str
    number: int
    """Its place among all jobs, by which ties are broken."""
    seconds: tuple[float, ...]
    """Predicted, of each phase of a step."""
    holds: tuple[float, ...]
    """Seconds for which each phase needs its workers: the tail of a rollout may go on without them."""
    workers: tuple[int, ...]
    """Workers of each phase, all of which it needs at once."""
    due: float = float("inf")
    """When the step that it is at should be done or, where `limit` is None, all of its steps."""
    limit: float | None = None
    """Seconds that each step may take."""
    steps: float = float("inf")
    """Left to make, with the one that it is at."""
    phase: int = ROLLOUT
    since: float | None = 0.0
    """Since when it waits for the workers of its phase; None while it does not."""
    ends: float | None = None
    """When its running phase is predicted to end; None while none runs."""
    held: int = 0
    """Workers that no other job may use now."""
    turns: list[float] = field(default_factory=lambda: [NEVER, NEVER])
    """When each of its phases last started, or the number of times that it did."""
    rests: tuple[float, ...] = field(init=False)
    """Predicted seconds from the beginning of each phase to the end of the step."""

    def __post_init__(self) -> None:
        self.rests = tuple([sum(self.seconds[phase:]) for phase in range(len(self.seconds))])

    def copy(self) -> PhasedJob:
        return replace(self, turns=list(self.turns))

    @property
    def needed(self) -> int:
        """Workers of the phase it is in."""
        return self.workers[self.phase]

    def left(self, now: float) -> float:
        """Predicted seconds to the end of its step, if it does not wait."""
        phase = self.phase
        if self.ends is None:
            return self.rests[phase]
        return self.ends - now + (self.rests[phase] - self.seconds[phase])

    def left_in_all(self, now: float) -> float:
        """Predicted seconds to the end of all its steps, if it never waits."""
        return self.left(now) + (self.steps - 1) * self.rests[0]

    def slack(self, now: float) -> float:
        """Seconds that it may wait in this step and be in time; with no limit to each step, the same in each."""
        if self.limit is not None:
            return self.due - now - self.left(now)
        return (self.due - now - self.left_in_all(now)) / self.steps

    def terms(self, now: float) -> tuple[float, float]:
        """When its step should be done, and the seconds that each one after it may take."""
        if self.limit is not None:
            return self.due, self.limit
        slack = self.slack(now)
        return now + self.left(now) + slack, self.rests[0] + slack

    def begin(self, now: float) -> None:
        phase = self.phase
        self.held, self.since, self.ends = self.workers[phase], None, now + self.seconds[phase]
        self.turns[phase] = now

    def end(self, now: float) -> None:
        """Moves the job on to its next phase, for which it waits. A step that ends late leaves less time to the next
        one, so that the job catches up; one that ends early does not make it wait."""
        self.held, self.since, self.ends, self.phase = 0, now, None, self.phase + 1
        if self.phase == len(self.seconds):
            self.phase = 0
            self.steps -= 1
            if self.limit is not None:
                self.due = min(self.due, now) + self.limit


@dataclass(frozen=True, slots=True)
class Order:
    """A rule that says which of the waiting jobs go first."""

    rank: Callable[[PhasedJob, float], float | tuple[float, ...]] | None
    """Those of the lowest rank at a time go first. None: in rounds, in which a worker idles rather than let a job
    start before another whose turn it is."""
    keeps_free: bool = False
    """Whether a worker idles rather than start what is in the way of a job that comes soon and cannot wait."""


AS_READY = Order(lambda job, now: (job.since or 0.0, job.number))
ROUND_ROBIN = Order(None)
BY_NEED = Order(lambda job, now: job.due if job.limit is not None else job.terms(now)[0], keeps_free=True)
ORDERS: dict[OrderName, Order] = {"as-ready": AS_READY, "round-robin": ROUND_ROBIN, "by-need": BY_NEED}


def starting(
    waiting: list[PhasedJob], jobs: Collection[PhasedJob], order: Order, now: float
) -> list[PhasedJob]:
    """The jobs whose phases start now, of those that wait; `jobs` are all that take turns with each other. No job
    takes a worker for which one before it waits."""
    taken, found, rank = 0, [], order.rank
    for job in jobs:
        taken |= job.held
    if rank is None:
        return _in_rounds(waiting, jobs, taken, now)
    if len(waiting) > 1:
        waiting.sort(key=lambda job: rank(job, now))
    for job in waiting:
        needed = job.workers[job.phase]
        if not taken & needed:
            if order.keeps_free and in_the_way(job, jobs, now):
                continue
            found.append(job)
        taken |= needed
    return found


def _in_rounds(
    waiting: list[PhasedJob], jobs: Collection[PhasedJob], taken: int, now: float
) -> list[PhasedJob]:
    """A worker idles until the job comes whose turn it is; but where all wait, they go as they are ready."""
    found = []
    for job in waiting:
        if not taken & job.needed and has_turn(job, jobs):
            found.append(job)
            taken |= job.needed
    return found if found or len(waiting) < len(jobs) else starting(waiting, jobs, AS_READY, now)


def has_turn(job: PhasedJob, jobs: Iterable[PhasedJob]) -> bool:
    """Whether, of all jobs that have this phase on its workers, it is the longest since this one had it."""
    phase, needed = job.phase, job.needed
    mine = job.turns[phase], job.number
    others = [other for other in jobs if other.workers[phase] & needed]
    return all(mine <= (other.turns[phase], other.number) for other in others)


def in_the_way(job: PhasedJob, jobs: Iterable[PhasedJob], now: float) -> bool:
    """Whether another job comes for its workers while its phase would run, cannot wait for the end of that, and would
    be later than this job would be if it let the other go first."""
    phase = job.phase
    needed, ends = job.workers[phase], now + job.holds[phase]
    for other in jobs:
        if other.ends is None:
            continue
        following = other.phase + 1 if other.phase + 1 < len(other.seconds) else 0
        if not other.workers[following] & needed:
            continue
        comes = other.ends if other.ends > now else now
        if comes >= ends:
            continue
        due, limit = (other.due, other.limit) if other.limit is not None else other.terms(now)
        if following == 0:
            due = min(due, comes) + limit
        late = due - other.rests[following] - ends
        if late < 0 and job.slack(now) - (comes - now) - other.holds[following] > late:
            return True
    return False
