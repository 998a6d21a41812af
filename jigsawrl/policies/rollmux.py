"""RollMux inside one group: phases take turns, one rollout and one training at a time.

The workers are two pools, as RollMux has them, or one where that is better (few workers, or phases so unequal that
one pool would idle). A worker never runs two things side by side. The paper also moves tails to a few workers and
lets the next rollout start on the rest. That is left out: in the mixes tried it helped some and slowed others, and
was a little slower on the mean.
"""

from __future__ import annotations

from jigsawrl.policies.starts import start_on
from jigsawrl.policies.state import Action, Event, Pipeline, Place, State


class RollMux:
    name = "rollmux"

    def decide(self, state: State, events: list[Event]) -> list[Action]:
        unfinished = state.unfinished()
        if not unfinished:
            return []
        alive = tuple(worker for worker, lives in enumerate(state.alive) if lives)
        training, rollout = best_pools(unfinished, alive, state.device_bytes)
        actions: list[Action] = []
        taken = {worker for worker, lanes in enumerate(state.lanes.on_worker) if lanes}
        for phase, pool in (("training", training), ("rollout", rollout)):
            waiting = [p for p in state.ready() if p.phase == phase]
            if not waiting or not taken.isdisjoint(pool):
                continue
            start = start_on(state, waiting[0], pool)
            if start is not None:
                actions.append(start)
                taken |= {worker for place in start.places for worker in place}
        return actions


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
        if any(p.outlook.memory(1, p.tp, len(workers) - size).training > device_bytes for p in pipelines):
            continue
        rollout = [p.outlook.rollout_seconds(size // p.tp, p.tp) for p in pipelines]
        training = [p.outlook.training_seconds(len(workers) - size) for p in pipelines]
        cycle = max(*map(sum, zip(rollout, training, strict=True)), sum(rollout), sum(training))
        if min(steps) * cycle + after < best:
            best, chosen = min(steps) * cycle + after, (workers[size:], workers[:size])
    return chosen
