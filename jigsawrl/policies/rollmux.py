"""RollMux inside one group: phases take turns, one rollout and one training at a time.

Where workers are in two pools for good, every pipeline has its turn in each, in a fixed cyclic order: one rollout and
one training of each are a meta-iteration. As long as the group is not saturated, no other cyclic order makes more use
of both pools; a pool then rather waits than lets someone overtake. Where it is saturated, whoever has waited longest
goes next, so that the pool that is short never waits. Both are best, or nearly, where phases always take as long and
go on for ever. Where durations vary, work comes to an end, or pipelines have promises, another start may be foreseen
to end all of it sooner or nobody late (`ahead`), or none: a worker is kept free for who comes soon and cannot wait.
Then that is done, but who has waited for as long as everyone else's step goes first.

As the paper has it, tails move to a few workers and the next rollout starts on the rest of them, where that is
foreseen to be better (`gathering`).

Where all workers may run both phases they are two pools too, or one where that is better (few workers, or phases so
unequal that one pool would idle). A worker never runs two things side by side. Tails stay where they are: moving them
helped some of the mixes tried and slowed others, and was a little slower on the mean.
"""

from __future__ import annotations

from jigsawrl.cluster.rounds import Turn, unsaturated
from jigsawrl.policies.ahead import (
    LONGEST_WAIT,
    ROUND_ROBIN,
    Course,
    Order,
    courses_of,
    orders,
    score,
    starting,
)
from jigsawrl.policies.gathering import gathered
from jigsawrl.policies.starts import start_on
from jigsawrl.policies.state import Action, Event, Phase, Pipeline, Place, State

PHASES: tuple[Phase, Phase] = ("training", "rollout")
GAIN = 1e-2
"""Part of the predicted time that another start than the usual one must save: predictions err, and who is short then
waits for who is long."""
FEW = 8
"""Pipelines for which one looks ahead, at a few milliseconds a time; groups are seldom larger than five."""


class RollMux:
    name = "rollmux"

    def decide(self, state: State, events: list[Event]) -> list[Action]:
        unfinished = state.unfinished()
        if not unfinished:
            return []
        if all(pipeline.apart for pipeline in unfinished):
            return permits(state, unfinished)
        alive = tuple(worker for worker, lives in enumerate(state.alive) if lives)
        training, rollout = best_pools(unfinished, alive, state.device_bytes)
        actions: list[Action] = []
        taken = {worker for worker, lanes in enumerate(state.lanes.on_worker) if lanes}
        for phase, pool in zip(PHASES, (training, rollout), strict=True):
            waiting = [p for p in state.ready() if p.phase == phase]
            if not waiting:
                continue
            home = waiting[0].home  # some workers only, where it has fewer ranks
            where = [worker for worker in pool if worker in home] or home
            if not taken.isdisjoint(where):
                continue
            start = start_on(state, waiting[0], where)
            if start is not None:
                actions.append(start)
                taken |= {worker for place in start.places for worker in place}
        return actions


def permits(state: State, pipelines: list[Pipeline]) -> list[Action]:
    """Who may start in pools of their own, one pipeline at a time on each worker."""
    courses = courses_of(state, pipelines)
    usual = ROUND_ROBIN if in_rounds(pipelines) else LONGEST_WAIT
    goes = chosen(courses, state.now, usual)
    homes = [(state.pipelines[course.name], state.pipelines[course.name].home) for course in goes]
    starts = [start for pipeline, home in homes if (start := start_on(state, pipeline, home))]
    return [*starts, *(gathered(state, courses, goes, usual) if len(courses) <= FEW else ())]


def chosen(courses: list[Course], now: float, usual: Order) -> tuple[Course, ...]:
    """Whose phases start. The usual order's, unless after others all is foreseen to be done sooner, or in time."""
    if any(starves(course, courses, now) for course in courses):
        return starting(courses, LONGEST_WAIT, now)
    best = starting(courses, usual, now)
    others = orders(courses) if len(courses) <= FEW else ()
    options = {starting(courses, order, now): None for order in others}
    if not options.keys() - {best}:
        return best
    soonest = score(courses, now, best, usual)
    margin = GAIN * (soonest - now)
    for first in options:
        for order in others:
            end = score(courses, now, first, order)
            if end < soonest - margin:
                best, soonest = first, end
    return best


def starves(course: Course, courses: list[Course], now: float) -> bool:
    """Whether it has waited for as long as everyone else needs for a step."""
    others = sum(other.step_seconds for other in courses if other is not course)
    return course.left is None and now - course.since > others > 0


def in_rounds(pipelines: list[Pipeline]) -> bool:
    """Whether round-robin is known to be best, by what phases are foreseen to take: the group is not saturated."""
    there = [pipeline for pipeline in pipelines if pipeline.rollout_home]
    turns = []
    for pipeline in there:
        rollout, training = pipeline.rollout_seconds(), pipeline.training_seconds()
        turns.append(Turn(pipeline.name, rollout, rollout, training, 0.0, rollout + training, float("inf")))
    return not turns or unsaturated(turns, [pipeline.rollout_home for pipeline in there], shared=False)


def best_pools(pipelines: list[Pipeline], workers: Place, device_bytes: float) -> tuple[Place, Place]:
    """Training and rollout pools in which all steps are predicted to end first; one pool if that is best.

    In a cycle every pipeline makes one step; what one has left when another is done it makes alone, on all workers.
    """
    tp = max(p.tp for p in pipelines)
    steps = [p.steps - p.step + 1 for p in pipelines]
    alone = [p.outlook.solo_seconds(len(workers)) for p in pipelines]
    best = sum(n * each for n, each in zip(steps, alone, strict=True))
    after = sum((n - min(steps)) * each for n, each in zip(steps, alone, strict=True))
    chosen = workers, workers
    for size in range(tp, len(workers), tp):
        if any(
            p.outlook.memory_trained(p.tp, len(workers) - size).training_apart > device_bytes
            for p in pipelines
        ):
            continue
        rollout = [p.outlook.rollout_seconds(size // p.tp, p.tp) for p in pipelines]
        training = [p.outlook.training_seconds(len(workers) - size) for p in pipelines]
        cycle = max(*map(sum, zip(rollout, training, strict=True)), sum(rollout), sum(training))
        if min(steps) * cycle + after < best:
            best, chosen = min(steps) * cycle + after, (workers[size:], workers[:size])
    return chosen
