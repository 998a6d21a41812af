"""A rollout of which only a tail is left, gathered on few of its workers: the next one starts on the others at once.

The next one has fewer workers then, for all of its rollout. So this is done only where it is foreseen to end all work
sooner, and where the memory holds the engines of all: those that were left stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jigsawrl.policies.ahead import Course, Order, bits, fit_together, orders, score
from jigsawrl.policies.starts import start_on
from jigsawrl.policies.state import Action, Migrate, Start, State
from jigsawrl.policies.tails import last_tails
from jigsawrl.policies.trials import moved_segments

GAIN = 1e-2
"""Part of the predicted time that it must save: how long a tail is, nobody knows."""


def gathered(state: State, courses: Sequence[Course], starts: Sequence[Course], usual: Order) -> list[Action]:
    """A move, and the start that it makes room for; nothing where that is not better. `starts` start anyway."""
    waiting = [course for course in courses if course.left is None and course.phase == "rollout"]
    if not waiting or not set(waiting).isdisjoint(starts) or not fit_together(state):
        return []

    def end(then: Sequence[Course]) -> float:
        return min(score(then, state.now, starts, order) for order in (usual, *orders(courses)))

    options = [
        (move, start)
        for move in _moves(state, courses)
        for course in waiting
        if (start := _start_beside(state, courses, move, course))
    ]
    if not options:
        return []
    best: list[Action] = []
    soonest = end(courses)
    soonest -= GAIN * (soonest - state.now)
    for move, start in options:
        done = end(_after(state, courses, move, start))
        if done < soonest:
            best, soonest = [move, start], done
    return best


def _moves(state: State, courses: Sequence[Course]) -> Iterator[Migrate]:
    """Of whole rollouts in their tails: onto one of their engines, a quarter of them, a half."""
    for course in courses:
        pipeline = state.pipelines[course.name]
        tails = last_tails(state, pipeline)
        if not tails or len(tails) < len(pipeline.lanes):
            continue
        left = sum(state.survivors[lane.id].sequences for lane in tails)
        for count in sorted({1, len(tails) // 4, len(tails) // 2}):
            if 0 < count <= left and count < len(tails):
                places = tuple(lane.workers for lane in tails[:count])
                yield Migrate(course.name, tuple(lane.id for lane in tails), places)


def _start_beside(state: State, courses: Sequence[Course], move: Migrate, course: Course) -> Start | None:
    """Its start on those of its workers that nobody has after the move; None if the move makes no room for it."""
    taken = bits(move.workers)
    for other in courses:
        if other.name != move.pipeline:
            taken |= other.holds
    pipeline = state.pipelines[course.name]
    return start_on(state, pipeline, [worker for worker in pipeline.home if not taken >> worker & 1])


def _after(state: State, courses: Sequence[Course], move: Migrate, start: Start) -> list[Course]:
    """The courses when both are done."""
    pipeline = state.pipelines[start.pipeline]
    seconds = pipeline.outlook.rollout_seconds(len(start.places), pipeline.tp)
    tail = sum(segment.seconds for segment in moved_segments(state, move))
    found = []
    for course in courses:
        if course.name == move.pipeline:
            course = replace(course, left=tail, holds=bits(move.workers))
        elif course.name == start.pipeline:
            course = replace(course)
            course.begin(state.now)
            course.left, course.holds = seconds, bits(w for place in start.places for w in place)
        found.append(course)
    return found
