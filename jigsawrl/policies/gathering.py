"""A rollout of which only a tail is left, gathered on few of its workers: the next one starts on the others at once.

The next one has fewer workers then, for all of its rollout. So this is done only where it is foreseen to end all work
sooner, and where the memory holds the engines of all: those that were left stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jigsawrl.phases.turns import ROLLOUT, Order, PhasedJob
from jigsawrl.policies.ahead import bits, fit_together, score
from jigsawrl.policies.starts import start_on
from jigsawrl.policies.state import Action, Migrate, Start, State
from jigsawrl.policies.tails import gatherings, last_tails, moved_segments

GAIN = 1e-2
"""Part of the predicted time that it must save: how long a tail is, nobody knows."""


def gathered(
    state: State, jobs: Sequence[PhasedJob], starts: Sequence[PhasedJob], by: Sequence[Order]
) -> list[Action]:
    """A move, and the start that it makes room for; nothing where that is not better. `starts` start anyway; then
    all go on `by` the order after which they end first."""
    waiting = [job for job in jobs if job.since is not None and job.phase == ROLLOUT]
    if not waiting or not set(waiting).isdisjoint(starts) or not fit_together(state):
        return []

    def end(then: Sequence[PhasedJob]) -> float:
        return min(score(then, state.now, starts, order) for order in by)

    options = [
        (move, start)
        for move in _moves(state, jobs)
        for job in waiting
        if (start := _start_beside(state, jobs, move, job))
    ]
    if not options:
        return []
    ends, usual = [end(_after(state, jobs, move, start)) for move, start in options], end(jobs)
    best = min(ends)
    return list(options[ends.index(best)]) if best < usual - GAIN * (usual - state.now) else []


def _moves(state: State, jobs: Sequence[PhasedJob]) -> Iterator[Migrate]:
    """Of whole rollouts in their tails: onto one of their engines, a quarter of them, a half."""
    for job in jobs:
        tails = last_tails(state, state.pipelines[job.name].current)
        counts = sorted({1, len(tails) // 4, len(tails) // 2})
        yield from gatherings(state, tails, [lane.workers for lane in tails], counts)


def _start_beside(state: State, jobs: Sequence[PhasedJob], move: Migrate, job: PhasedJob) -> Start | None:
    """Its start on those of its workers that nobody has after the move; None if the move makes no room for it."""
    taken = bits(move.workers)
    for other in jobs:
        if other.name != move.pipeline:
            taken |= other.held
    phase = state.pipelines[job.name].current
    return start_on(state, phase, [worker for worker in phase.home if not taken >> worker & 1])


def _after(state: State, jobs: Sequence[PhasedJob], move: Migrate, start: Start) -> list[PhasedJob]:
    """The jobs when both are done."""
    pipeline = state.pipelines[start.pipeline]
    seconds = pipeline.outlook.rollout_seconds(len(start.places), pipeline.tp)
    tail = sum(segment.seconds for segment in moved_segments(state, move))
    found = []
    for job in jobs:
        if job.name == move.pipeline:
            job = replace(job, ends=state.now + tail, held=bits(move.workers))
        elif job.name == start.pipeline:
            job = job.copy()
            job.begin(state.now)
            job.ends, job.held = state.now + seconds, bits(start.workers)
        found.append(job)
    return found
