"""RollMux inside one group: phases take turns, one rollout and one training at a time.

Where workers are in two pools for good, every pipeline has its turn in each, in a fixed cyclic order: one rollout and
one training of each are a meta-iteration. As long as the group is not saturated, no other cyclic order makes more use
of both pools; a pool then rather waits than lets someone overtake. Where it is saturated, whoever has waited longest
goes next, so that the pool that is short never waits. Both are best, or nearly, where phases always take as long and
go on for ever. Where durations vary, work comes to an end, or pipelines have promises, another start may be foreseen
to end all of it sooner or nobody late (`ahead`), or none: a worker is kept free for who comes soon and cannot wait.
Then that is done, but who has waited for as long as everyone else's step goes first. Where a cluster has planned the
group, the order that its plan promised is the one that runs, whatever else is predicted (`order`).

As the paper has it, tails move to a few workers and the next rollout starts on the rest of them, where that is
foreseen to be better (`gathering`).

Where all workers may run both phases they are two pools too, or one where that is better (few workers, or phases so
unequal that one pool would idle). A worker never runs two things side by side. Tails stay where they are: moving them
helped some of the mixes tried and slowed others, and was a little slower on the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from jigsawrl.phases.rounds import Turn, unsaturated
from jigsawrl.phases.turns import AS_READY, ORDERS, ROUND_ROBIN, Order, OrderName, PhasedJob, starting
from jigsawrl.policies.ahead import LEAST_SLACK, MOST_WORK, SHORTEST, end_if_shared, jobs_of, score
from jigsawrl.policies.concurrent import start_all
from jigsawrl.policies.gathering import gathered
from jigsawrl.policies.starts import places_on, start_on
from jigsawrl.policies.state import Action, Change, Pipeline, Place, State

GAIN = 1e-2
"""Part of the predicted time that another start than the usual one must save: predictions err, and who is short then
waits for who is long."""
FEW = 8
"""Pipelines for which one looks ahead, at a few milliseconds a time; groups are seldom larger than five."""


@dataclass(frozen=True, slots=True)
class RollMux:
    order: OrderName | None = None
    """In which pipelines with pools of their own take turns; None: whichever is predicted to be best."""
    name: str = "rollmux"

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        unfinished = state.unfinished()
        if not unfinished:
            return []
        if all(pipeline.apart for pipeline in unfinished):
            return turns_of(state, unfinished, self.order)
        alive = tuple(worker for worker, lives in enumerate(state.alive) if lives)
        training, rollout = best_pools(unfinished, alive, state.device_bytes)
        actions: list[Action] = []
        taken = {worker for worker, lanes in enumerate(state.lanes.on_worker) if lanes}
        for generates, pool in ((False, training), (True, rollout)):
            phase = next((each for each in state.ready() if each.generates == generates), None)
            if phase is None:
                continue
            where = [worker for worker in pool if worker in phase.home]  # some only, where it has fewer ranks
            where = where if places_on(phase, where) else list(phase.home)
            start = start_on(state, phase, where) if taken.isdisjoint(where) else None
            if start is not None:
                actions.append(start)
                taken.update(start.workers)
        return actions


def turns_of(
    state: State,
    pipelines: list[Pipeline],
    promised: OrderName | None,
    *,
    shares: bool = False,
    gathers: bool = True,
) -> list[Action]:
    """Which phases may start in pools of their own, one at a time on each worker: by the order that was promised, or
    else by the usual one unless another start is predicted to be better.

    With `shares` all start that can, and divide their workers, where all work is predicted to end sooner by that.
    """
    jobs = jobs_of(state, pipelines)
    if promised:
        by: Sequence[Order] = [ORDERS[promised]]
        goes = first_by(by[0], jobs, state.now)
    else:
        by = [ROUND_ROBIN if in_rounds(pipelines) else AS_READY, *orders(jobs)]
        goes = chosen(jobs, state.now, by[0])
    if shares and jobs:
        in_turns = min(score(jobs, state.now, goes, order) for order in by)
        parts = [(part_at_work(state.pipelines[job.name]), 1.0) for job in jobs]
        if end_if_shared(jobs, parts, state.now) < in_turns - GAIN * (in_turns - state.now):
            return [*start_all(state)]
    phases = [state.pipelines[job.name].current for job in goes]
    starts = [start for phase in phases if (start := start_on(state, phase, phase.home))]
    return [*starts, *(gathered(state, jobs, goes, by) if gathers and len(jobs) <= FEW else ())]


def part_at_work(pipeline: Pipeline) -> float:
    """Part of its rollouts' time in which engines do not wait for tools."""
    shape = pipeline.outlook.shape
    return max(0.0, 1 - shape.tool_seconds * (shape.turns - 1) / pipeline.rollout_seconds())


def orders(jobs: Sequence[PhasedJob]) -> tuple[Order, ...]:
    """By which one may go on, whatever the usual order is."""
    late = any(job.due < float("inf") for job in jobs)
    return (AS_READY, MOST_WORK, SHORTEST, *((LEAST_SLACK,) if late else ()))


def first_by(order: Order, jobs: Sequence[PhasedJob], now: float) -> tuple[PhasedJob, ...]:
    """Whose phases start now by this order; of those whose turn it is, the longest since their last one first."""
    waiting = sorted(
        (job for job in jobs if job.since is not None), key=lambda job: (job.turns[job.phase], job.number)
    )
    return tuple(starting(waiting, jobs, order, now))


def chosen(jobs: Sequence[PhasedJob], now: float, usual: Order) -> tuple[PhasedJob, ...]:
    """Whose phases start. The usual order's, unless after others all is predicted to be done sooner, or in time."""
    if any(starves(job, jobs, now) for job in jobs):
        return first_by(AS_READY, jobs, now)
    best = first_by(usual, jobs, now)
    others = orders(jobs) if len(jobs) <= FEW else ()
    options = {first_by(order, jobs, now): None for order in others}
    if not options.keys() - {best}:
        return best
    soonest = score(jobs, now, best, usual)
    margin = GAIN * (soonest - now)
    for first, order in product(options, others):
        end = score(jobs, now, first, order)
        if end < soonest - margin:
            best, soonest = first, end
    return best


def starves(job: PhasedJob, jobs: Sequence[PhasedJob], now: float) -> bool:
    """Whether it has waited for as long as all others together need for a step."""
    others = sum(other.rests[0] for other in jobs if other is not job)
    return job.since is not None and now - job.since > others > 0


def in_rounds(pipelines: list[Pipeline]) -> bool:
    """Whether round-robin is known to be best, by what phases are foreseen to take: the group is not saturated."""
    there = [pipeline for pipeline in pipelines if pipeline.rollout_home]
    seconds = [(pipeline.rollout_seconds(), pipeline.training_seconds()) for pipeline in there]
    turns = [Turn("", first, first, then, 0.0, first + then, float("inf")) for first, then in seconds]
    return not turns or unsaturated(turns, [pipeline.rollout_home for pipeline in there], shared=False)


def best_pools(pipelines: list[Pipeline], workers: Place, device_bytes: float) -> tuple[Place, Place]:
    """Training and rollout pools in which all steps are predicted to end first; one pool if that is best.

    In a cycle every pipeline makes one step; what one has left when another is done it makes alone, on all workers.
    """
    tp = max(p.tp for p in pipelines)
    steps = [p.steps_left for p in pipelines]
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
