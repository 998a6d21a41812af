"""Keeping to few workers, where whoever shares a worker merely takes turns on it.

There nothing is won by going side by side on all of them, and something is lost: twice the engines make twice the
passes over half the samples each, and gangs wait for each other. So each keeps to as few as leaves none idle, those
with the least work before them.
"""

from __future__ import annotations

from jigsawrl.policies.starts import bytes_for
from jigsawrl.policies.state import Pipeline, State


def few_workers(state: State, pipeline: Pipeline, workers: int) -> int:
    """Workers, of so many, that its next phase had better keep to."""
    tp = pipeline.tp
    if workers <= tp or not _all_fit(state):
        return workers
    at_once = sum(_busy_part(each) for each in state.unfinished())
    few = min(workers, tp * max(1, round(workers / tp / max(at_once, 1.0))))
    busy = pipeline.outlook.busy_seconds
    return few if few * busy(few) <= workers * busy(workers) else workers


def _all_fit(state: State) -> bool:
    """Whether every worker has room for all of them at once: a pipeline's state is everywhere, wherever it runs."""
    needed = sum(
        max(bytes_for(each, "rollout", 1, each.tp), bytes_for(each, "training", 1, each.tp))
        for each in state.unfinished()
    )
    return needed <= state.device_bytes


def _busy_part(pipeline: Pipeline) -> float:
    """Of a step's time on one engine's workers, that in which it keeps them busy."""
    outlook, tp = pipeline.outlook, pipeline.tp
    return outlook.busy_seconds(tp) / max(outlook.solo_seconds(tp), 1e-9)


def work_on(state: State) -> list[float]:
    """Seconds of work that those on each worker have before them, if they stay where they are."""
    work = [0.0] * len(state.alive)
    for pipeline in state.unfinished():
        workers = {worker for lane in state.running(pipeline) for worker in lane.workers}
        for worker in workers:
            work[worker] += pipeline.busy_left(len(workers))
    return work
