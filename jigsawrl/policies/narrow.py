"""Keeping to few workers, where whoever shares a worker merely takes turns on it.

There nothing is won by going side by side on all of them, and something is lost: twice the engines make twice the
passes over half the samples each, and gangs wait for each other. So each keeps to as few as leaves none idle, those
with the least work before them.
"""

from __future__ import annotations

from math import ceil

from jigsawrl.policies.starts import generating_bytes, training_bytes
from jigsawrl.policies.state import Pipeline, State

AT_ONCE = 4
"""Phases that keep a worker busy if none waits for tools: while one ends and reports, others compute. What
24 real pipelines took on two cores was within noise of each other with 2, 4 and all at once on each (47 to 51 s)."""


def few_workers(state: State, pipeline: Pipeline, workers: int) -> int:
    """Workers, of so many, that its next phase had better keep to."""
    tp, outlook = pipeline.tp, pipeline.outlook
    needed = max(generating_bytes(pipeline, 1, tp), training_bytes(pipeline, tp))
    if workers <= tp or needed > outlook.hardware.device_bytes:
        return workers
    at_once = sum(_busy_part(each) for each in state.unfinished())
    few = min(workers, tp * max(1, round(workers / tp / max(at_once, 1.0))))
    return few if few * outlook.busy_seconds(few) <= workers * outlook.busy_seconds(workers) else workers


def most_on_each(state: State) -> int:
    """Number of phases on one worker above which no other starts there: as many as keep it busy, though some of them
    wait for tools. With more of them less is left to spread evenly at the end."""
    parts = [_busy_part(each) for each in state.unfinished()]
    return ceil(AT_ONCE * len(parts) / max(sum(parts), 1e-9))


def _busy_part(pipeline: Pipeline) -> float:
    """Of a step's time on one engine's workers, that in which it keeps them busy."""
    outlook, tp = pipeline.outlook, pipeline.tp
    return outlook.busy_seconds(tp) / max(outlook.solo_seconds(tp), 1e-9)


def work_on(state: State) -> list[float]:
    """Seconds of work that those on each worker have before them, if they stay where they are."""
    work = [0.0] * len(state.alive)
    for pipeline in state.unfinished():
        workers = {worker for lane in state.lanes_of(pipeline) for worker in lane.workers}
        for worker in workers:
            work[worker] += pipeline.busy_left(len(workers))
    return work
