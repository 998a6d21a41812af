"""How long the jobs of a group take for a step each, and so whether every one keeps its promise.

Round-robin: a round takes as long as the longest job alone (`cycle`), or as the busiest node is busy (`load`),
whichever is more, and everyone makes one step in it. A group with load below its cycle is unsaturated; then no other
cyclic schedule makes more use of both pools.

As ready: a job waits, whenever it asks, at most for one phase of every other job on those nodes, and for another
job's phases not more often than that job comes round, which is not faster than alone. So its step takes at most

    T = alone + sum over others j sharing a node of phase_j * min(1, T / alone_j)

The right side is concave in T, so that T keeps a limit if and only if the right side does so at the limit. That is
what it takes at most; what it likely takes is much less.

By need: the job whose step is due first goes first, and nodes are kept free for a job that cannot wait
(`phases.turns`). Plans that are not to hold surely go by what that is predicted to take, or by rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from jigsawrl.phases.roll_forward import roll_forward
from jigsawrl.phases.rounds import SLACK, Places, Turn, round_seconds
from jigsawrl.phases.turns import BY_NEED, ROLLOUT, OrderName, PhasedJob

STEPS = 8
"""Of the slowest job, that are predicted."""
SOON, SURELY_KEPT = 5, 0.95
"""After this many steps of every job, each within this part of what it may take, no job will be late."""
MOST_PHASES = 160
"""Predicted for all jobs together."""
UNEVEN = (0.15, 0.07)
"""Parts by which predicted rollouts and trainings vary: phases that always took as long would lock together."""
GOLDEN = 0.6180339887
"""Parts of the golden ratio spread evenly however many are taken."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An order, and the planned seconds of everyone's step."""

    order: OrderName
    seconds: tuple[float, ...]


def ready_seconds(turns: Sequence[Turn], places: Places, shared: bool) -> tuple[float, ...]:
    """The most that each one's step takes on the mean, first come, first served."""
    meets = _meetings(places)
    found = []
    for k in range(len(turns)):
        seconds = _longest(turns, meets, shared, k, float("inf"))
        for _ in range(100):  # from above, so that whatever is reached is a bound
            shorter = _longest(turns, meets, shared, k, seconds)
            if shorter >= seconds * (1 - SLACK):
                break
            seconds = shorter
        found.append(seconds)
    return tuple(found)


def jobs_of(turns: Sequence[Turn], places: Places, shared: bool, now: float) -> list[PhasedJob]:
    """The jobs as they stand when all of them begin a step now."""
    taken = [sum([1 << node for node in nodes]) for nodes in places]
    every = reduce(or_, taken)
    training = every if shared else 1 << every.bit_length()
    return [
        PhasedJob(
            each.name,
            number,
            (each.rollout, each.training),
            (each.hold, each.training),
            (nodes, training),
            now + each.limit,
            each.limit,
        )
        for number, (each, nodes) in enumerate(zip(turns, taken, strict=True))
    ]


def by_need_seconds(turns: Sequence[Turn], places: Places, shared: bool) -> tuple[float, ...]:
    """Of each one's step on the mean, by need; rolled forward until it is clear whether all keep up."""
    jobs = jobs_of(turns, places, shared, 0.0)
    longest = max([max(each.holds) for each in jobs])
    ended: list[list[float]] = [[] for _ in jobs]
    uneven = [k * (1 - GOLDEN) for k in range(len(jobs))]

    def stretch(job: PhasedJob) -> float:
        uneven[job.number] += GOLDEN
        return 1 + UNEVEN[job.phase] * (2 * (uneven[job.number] % 1.0) - 1)

    phases, look, now = 0, SOON, 0.0
    for now, jobs_ended, started in roll_forward(jobs, BY_NEED, float("inf"), stretch=stretch):
        for job in jobs_ended:
            if job.phase != ROLLOUT:
                continue
            ended[job.number].append(now)
            if len(ended[job.number]) == look == min([len(each) for each in ended]):
                means = tuple([_mean(each, now) for each in ended])
                kept = all(mean < SURELY_KEPT * each.limit for mean, each in zip(means, turns, strict=True))
                if kept or look == STEPS:
                    return means
                look += 1
            elif now - job.due > longest:  # further behind than a wait could make it
                phases = MOST_PHASES
        if phases >= MOST_PHASES:
            break
        phases += len(started)
    return tuple([_mean(each, now) for each in ended])


def _mean(ended: Sequence[float], now: float) -> float:
    """Without the first few, which depend on how it starts."""
    skip = min(len(ended) // 4, 4)
    if len(ended) - skip < 3:
        return now / max(len(ended), 0.1)
    return (ended[-1] - ended[skip]) / (len(ended) - 1 - skip)


def _longest(turns: Sequence[Turn], meets: Sequence[int], shared: bool, k: int, seconds: float) -> float:
    """The right side above for job k: its step, and its waits for the others in a step of so many seconds."""
    waits = [
        (other.training + other.hold if shared or meets[j] == meets[k] else other.training)
        * (1.0 if seconds >= other.step else seconds / other.step)
        for j, other in enumerate(turns)
        if j != k
    ]
    return turns[k].step + sum(waits)


def _meetings(places: Places) -> list[int]:
    """A number for each job, the same for those whose rollouts may wait for each other, be it through others."""
    label = list(range(len(places)))
    first: dict[int, int] = {}
    for k, nodes in enumerate(places):
        for node in nodes:
            mine, theirs = label[k], label[first.setdefault(node, k)]
            if mine != theirs:
                label = [theirs if each == mine else each for each in label]
    return label


def keeps(turns: Sequence[Turn], places: Places, shared: bool) -> bool:
    """Whether there is an order in which all keep their limits."""
    shortest = min([each.limit for each in turns])
    in_rounds = round_seconds(turns, places, shared) <= shortest * (1 + SLACK)
    return in_rounds or _ready(turns, places, shared)


def _ready(turns: Sequence[Turn], places: Places, shared: bool) -> bool:
    meets = _meetings(places)
    return all(
        _longest(turns, meets, shared, k, mine.limit) <= mine.limit * (1 + SLACK)
        for k, mine in enumerate(turns)
    )


def judged(turns: Sequence[Turn], places: Places, shared: bool) -> Verdict:
    """As ready where all keep their limits so, since it never idles; else in rounds if all keep their limits so.

    If neither is the case, the one in which the worst is least beyond its limit.
    """
    ready = Verdict("as-ready", ready_seconds(turns, places, shared))
    if len(turns) == 1 or _ready(turns, places, shared):
        return ready
    rounds = Verdict("round-robin", (round_seconds(turns, places, shared),) * len(turns))
    return min(rounds, ready, key=lambda verdict: lateness(turns, verdict))


def likely(turns: Sequence[Turn], places: Places, shared: bool) -> Verdict:
    """The order in which all likely keep their limits, and go on fastest if they do so in both."""
    rounds = Verdict("round-robin", (round_seconds(turns, places, shared),) * len(turns))
    by_need = Verdict("by-need", by_need_seconds(turns, places, shared))
    return min(
        by_need,
        rounds,
        key=lambda verdict: (
            max(1 + SLACK, lateness(turns, verdict)),
            -sum([turn.alone / s for turn, s in zip(turns, verdict.seconds, strict=True)]),
        ),
    )


def lateness(turns: Sequence[Turn], verdict: Verdict) -> float:
    """Of the worst: its planned seconds over its limit."""
    return max([s / t.limit for s, t in zip(verdict.seconds, turns, strict=True)])
