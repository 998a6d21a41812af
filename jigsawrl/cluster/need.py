"""Who goes next inside a group whose jobs may be slowed down by so much each: whoever must be done first.

Every step of a job has a time by which it should be done: what a step may take after the last one was, or should have
been, whichever is earlier. So a job that has fallen behind catches up, and one that was early is not made to wait for
it. Whose step must be done first goes first. Looking ahead, a node is rather left free than given to a phase that
would be in the way of somebody who comes soon and cannot wait, if who is held back can.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

ROLLOUT, TRAINING = 0, 1
STEPS = 8
"""Of the job that is slowest, that are foreseen."""
SOON, SURELY_KEPT = 5, 0.95
"""After so many steps of everyone with so much of what they may take, nobody will be late."""
MOST_PHASES = 160
"""That are foreseen for all jobs together."""
UNEVEN = (0.15, 0.07)
"""Phases vary by so much when they are foreseen: those that always took as long would lock into each other."""
GOLDEN = 0.6180339887
"""Parts of the golden ratio spread evenly however many are taken."""


@dataclass(slots=True, eq=False)
class Runner:
    """A job in its group, phase by phase. Nodes are bits; times are of any clock."""

    name: str
    nodes: tuple[int, int]
    """Of its rollouts and of its trainings."""
    seconds: tuple[float, float]
    """That its phases are planned to take."""
    holds: tuple[float, float]
    """For which they need their nodes: a rollout's tail goes on without."""
    limit: float
    """Seconds that a step may take."""
    due: float
    """When its step should be done."""
    phase: int = ROLLOUT
    ends: float | None = None
    """When its phase is expected to end; None while it waits."""
    held: int = 0
    """Nodes that are its alone now."""
    step: float = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.seconds[ROLLOUT] + self.seconds[TRAINING]

    def begin(self, now: float) -> None:
        self.held, self.ends = self.nodes[self.phase], now + self.seconds[self.phase]

    def end(self, now: float) -> None:
        """On to its next phase, for which it waits."""
        self.held, self.ends = 0, None
        if self.phase == TRAINING:
            self.due = min(self.due, now) + self.limit
        self.phase = 1 - self.phase


def starting(waiting: list[Runner], busy: Sequence[Runner], now: float) -> list[Runner]:
    """Whose phases start now, of those that wait; the others are busy."""
    taken = 0
    for each in busy:
        taken |= each.held
    if len(waiting) > 1:
        waiting.sort(key=_due)
    starts = []
    for each in waiting:
        nodes = each.nodes[each.phase]
        if not taken & nodes:
            if busy and in_the_way(each, busy, now):
                continue
            starts.append(each)
        taken |= nodes  # nobody overtakes on the nodes that it waits for
    return starts


def _due(runner: Runner) -> float:
    return runner.due


def in_the_way(runner: Runner, busy: Sequence[Runner], now: float) -> bool:
    """Whether someone comes while this phase would run, cannot wait for its end, and is later then than this one
    would be if it let the other go first."""
    phase = runner.phase
    nodes, seconds = runner.nodes[phase], runner.holds[phase]
    work = runner.step if phase == ROLLOUT else runner.seconds[TRAINING]
    spare = runner.due - now - work
    for other in busy:
        after = 1 - other.phase
        if not other.nodes[after] & nodes or other.ends is None:
            continue
        comes = max(now, other.ends)
        wait = now + seconds - comes
        if wait <= 0:
            continue
        if after == ROLLOUT:
            late = min(other.due, comes) + other.limit - other.step
        else:
            late = other.due - other.seconds[TRAINING]
        late -= comes + wait
        if late < 0 and spare - (comes - now) - other.holds[after] > late:
            return True
    return False


def foreseen(runners: Sequence[Runner]) -> list[float]:
    """Seconds of everyone's step on the mean, if all start together now; followed until it is clear who keeps up."""
    longest = max([max(each.holds) for each in runners])
    number = {each.name: k for k, each in enumerate(runners)}
    ended: list[list[float]] = [[] for _ in runners]
    uneven = [k * (1 - GOLDEN) for k in range(len(runners))]
    waiting, busy = list(runners), list[Runner]()
    ends: list[tuple[float, int, int, bool]] = []
    now, phases, look = 0.0, 0, SOON
    while phases < MOST_PHASES:
        for each in starting(waiting, busy, now) if waiting else ():
            waiting.remove(each)
            busy.append(each)
            k, phase = number[each.name], each.phase
            each.begin(now)
            phases += 1
            uneven[k] += GOLDEN
            factor = 1 + UNEVEN[phase] * (2 * (uneven[k] % 1.0) - 1)
            if each.holds[phase] < each.seconds[phase]:
                heapq.heappush(ends, (now + factor * each.holds[phase], phases, k, False))
            heapq.heappush(ends, (now + factor * each.seconds[phase], phases, k, True))
        now, _, k, whole = heapq.heappop(ends)
        mine = runners[k]
        if not whole:
            mine.held = 0
            continue
        if mine.phase == TRAINING:
            ended[k].append(now)
            if len(ended[k]) == look == min([len(each) for each in ended]):
                means = [_mean(each, now) for each in ended]
                kept = all(mean < SURELY_KEPT * each.limit for mean, each in zip(means, runners, strict=True))
                if kept or look == STEPS:
                    return means
                look += 1
            elif now - mine.due > mine.limit + longest:
                break  # further behind than a wait could make it
        mine.end(now)
        busy.remove(mine)
        waiting.append(mine)
    return [_mean(each, now) for each in ended]


def _mean(ended: Sequence[float], now: float) -> float:
    """Without the first few, which depend on how it starts."""
    skip = min(len(ended) // 4, 4)
    if len(ended) - skip < 3:
        return now / max(len(ended), 0.1)
    return (ended[-1] - ended[skip]) / (len(ended) - 1 - skip)
