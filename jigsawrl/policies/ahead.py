"""What the look-ahead of pools whose workers belong to one phase at a time knows of its pipelines, and how it scores
where an order leads.

Nothing runs beside anything else there, so a future is a row of whole phases, each as long as it is predicted to be.
It is rolled forward for some phases; what is left then takes at least as long as the busiest workers have work, or as
the longest pipeline by itself. (`forward` follows what shares workers, in pieces of phases, and so not as far.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice

from jigsawrl.phases.roll_forward import TOGETHER_S, roll_forward
from jigsawrl.phases.turns import NEVER, ROLLOUT, TRAINING, Order, PhasedJob
from jigsawrl.policies.prospect import LATE, lateness
from jigsawrl.policies.starts import engine_bytes
from jigsawrl.policies.state import Pipeline, State

MOMENTS = 64
"""A future is followed until phases have ended this many times, or until all work is done."""
RESERVE = 0.1
"""Part of the time until a pipeline is due that is kept for what takes longer than predicted."""
MOST_WORK = Order(lambda job, now: (-job.left_in_all(now), job.number))
SHORTEST = Order(lambda job, now: (job.seconds[job.phase], job.number))
LEAST_SLACK = Order(lambda job, now: (job.slack(now), job.number), keeps_free=True)


def jobs_of(state: State, pipelines: Sequence[Pipeline]) -> list[PhasedJob]:
    """Pipelines that run or could, in the order in which they came."""
    ready = {phase.pipeline.name for phase in state.ready() if phase.home}
    there = sorted((p for p in pipelines if p.running or p.name in ready), key=lambda p: (p.arrived, p.name))
    roomy = fit_together(state)
    return [_job_of(state, pipeline, number, roomy) for number, pipeline in enumerate(there)]


def _job_of(state: State, pipeline: Pipeline, number: int, roomy: bool) -> PhasedJob:
    seconds = pipeline.rollout_seconds(), pipeline.training_seconds()
    left = max((lane.left_in_all() for lane in state.lanes_of(pipeline.current)), default=None)
    return PhasedJob(
        pipeline.name,
        number,
        seconds,
        seconds,
        (bits(pipeline.rollout_home), bits(pipeline.trains_on)),
        with_reserve(pipeline.due, state.now),
        steps=pipeline.steps_left,
        phase=ROLLOUT if pipeline.current.generates else TRAINING,
        since=pipeline.current.since if left is None else None,
        ends=None if left is None else state.now + left,
        held=bits(held_by(state, pipeline, roomy)),
        turns=[pipeline.turns.get("rollout", NEVER), pipeline.turns.get("training", NEVER)],
    )


def with_reserve(due: float, now: float) -> float:
    """When to be done so that some of the time is left."""
    return due - RESERVE * (due - now) if now < due < float("inf") else due


def held_by(state: State, pipeline: Pipeline, roomy: bool) -> Iterable[int]:
    """Workers that nobody else may use: those of its running phase, until each has nothing more to do for it if there
    is room for others beside its state."""
    if roomy or not pipeline.running:
        return {worker for lane in state.lanes_of(pipeline) for worker in lane.workers}
    return pipeline.current.home


def fit_together(state: State) -> bool:
    """Whether a worker has room for the engines of all pipelines at once."""
    return sum(engine_bytes(p.outlook, 1, p.tp) for p in state.unfinished()) <= state.device_bytes


def bits(workers: Iterable[int]) -> int:
    return sum(1 << worker for worker in workers)


def score(jobs: Sequence[PhasedJob], now: float, first: Iterable[PhasedJob], order: Order) -> float:
    """When all work would be done if these started now, and then all by this order; more if one is late."""
    going, since, late = [job.copy() for job in jobs], now, 0.0
    names = {job.name for job in first}
    starts = [job for job in going if job.name in names]
    moments = roll_forward(going, order, float("inf"), now, starts)
    for now, ended, _ in islice(moments, MOMENTS + 1):
        late += sum([max(0.0, now - job.due) for job in ended if not job.steps])
    return (
        now
        + least_left([job for job in going if job.steps], now)
        + LATE * (late + _late(going, jobs, since, now))
    )


def end_if_shared(jobs: Sequence[PhasedJob], parts: Sequence[tuple[float, ...]], now: float) -> float:
    """When all work would be done if every phase started as soon as it is ready, and phases divided their workers;
    more if one is late. `parts` are the parts of its time in which each phase of each job is at work, and does not
    wait for tools."""
    going, since, late = [job.copy() for job in jobs], now, 0.0
    part = dict(zip(going, parts, strict=True))
    left = {job: job.seconds[job.phase] if job.ends is None else job.ends - now for job in going}
    for _ in range(MOMENTS):
        crowds = {job: sum([part[o][o.phase] for o in left if o.needed & job.needed]) for job in left}
        if not crowds:
            break
        elapsed = min([seconds * max(1.0, crowds[job]) for job, seconds in left.items()])
        now += elapsed
        for job, crowd in crowds.items():
            left[job] -= elapsed / max(1.0, crowd)
            if left[job] <= TOGETHER_S:
                job.end(now)
                left[job] = job.seconds[job.phase]
                if not job.steps:
                    late += max(0.0, now - job.due)
                    del left[job]
    for job, seconds in left.items():
        job.ends = now + seconds
    return now + least_left(list(left), now) + LATE * (late + _late(going, jobs, since, now))


def _late(going: Sequence[PhasedJob], before: Sequence[PhasedJob], since: float, now: float) -> float:
    """Seconds by which jobs with steps left to make are predicted to be late, by what they have done since then."""
    late = 0.0
    for job, was in zip(going, before, strict=True):
        if job.steps:
            left = job.left_in_all(now)
            late += lateness(job.due, now, now - since, was.left_in_all(since) - left, left)
    return late


def least_left(jobs: Sequence[PhasedJob], now: float) -> float:
    """Seconds that all their work takes at least."""
    busy: dict[int, float] = defaultdict(float)
    for job in jobs:
        done = 0.0 if job.ends is None else job.seconds[job.phase] - (job.ends - now)
        for phase, (workers, seconds) in enumerate(zip(job.workers, job.seconds, strict=True)):
            busy[workers] += (job.steps - (phase < job.phase)) * seconds - (
                done if phase == job.phase else 0.0
            )
    return max([0.0, *(job.left_in_all(now) for job in jobs), *busy.values()])
