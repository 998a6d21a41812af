"""RollMux inside one group: phases take turns, one rollout and one training at a time.

The workers are two pools, as RollMux has them, or one where that is better (few workers, or phases so unequal that
one pool would idle). A worker never runs two things side by side. When most of a rollout's responses are done its
survivors are gathered on one worker and the next rollout starts on the others.
"""

from __future__ import annotations

from jigsawrl.policies.starts import start_on
from jigsawrl.policies.state import Action, Event, Migrate, Pipeline, Place, State
from jigsawrl.policies.tails import last_tails

DONE = 0.8
"""Part of the responses after which a rollout counts as tail-bound (the paper's)."""


class RollMux:
    name = "rollmux"

    def decide(self, state: State, events: list[Event]) -> list[Action]:
        unfinished = [p for p in state.pipelines.values() if p.status != "done"]
        if not unfinished:
            return []
        alive = tuple(worker for worker, lives in enumerate(state.alive) if lives)
        pools = best_pools(unfinished, alive)
        actions: list[Action] = []
        taken: set[int] = {worker for worker, lanes in enumerate(state.lanes.on_worker) if lanes}
        for phase, pool in zip(("training", "rollout"), pools, strict=True):
            waiting = [p for p in state.ready() if p.phase == phase]
            if not waiting:
                continue
            if phase == "rollout":
                freed, migrations = self._gather(state, pool)
                actions += migrations
                free = [worker for worker in pool if worker not in taken or worker in freed]
                if len(free) < len(pool) and not freed and not self._only_tails(state, pool):
                    continue
            else:
                free = [worker for worker in pool if worker not in taken]
                if len(free) < len(pool):
                    continue
            start = start_on(state, waiting[0], free)
            if start is not None:
                actions.append(start)
                taken |= {worker for place in start.places for worker in place}
        return actions

    def _only_tails(self, state: State, pool: Place) -> bool:
        """Whether what runs in the pool are gathered survivors alone."""
        lanes = {key for worker in pool for key in state.lanes.on_worker[worker]}
        return all(len(state.lanes.lanes[key].workers) == 1 for key in lanes)

    def _gather(self, state: State, pool: Place) -> tuple[set[int], list[Action]]:
        """Workers that become free when tail-bound rollouts are gathered, and what it takes."""
        freed: set[int] = set()
        actions: list[Action] = []
        for pipeline in state.pipelines.values():
            tails = last_tails(state, pipeline)
            workers = {worker for lane in tails for worker in lane.workers}
            if len(workers) < 2 or len(tails) < len(pipeline.lanes):
                continue
            active = sum(state.survivors[lane.id].sequences for lane in tails)
            if active > (1 - DONE) * pipeline.outlook.shape.sequences:
                continue
            target = min(workers)
            if state.fits((target,), pipeline.outlook.memory_moved(active)):
                actions.append(Migrate(pipeline.name, tuple(lane.id for lane in tails), target))
                freed |= workers - {target}
        return freed, actions


def best_pools(pipelines: list[Pipeline], workers: Place) -> tuple[Place, Place]:
    """Training and rollout pools in which all steps are predicted to end first; one pool if that is best."""
    tp = max(p.tp for p in pipelines)
    steps = [p.steps - p.step + 1 for p in pipelines]
    best = sum(n * p.outlook.solo_seconds(len(workers)) for n, p in zip(steps, pipelines, strict=True))
    chosen = workers, workers
    for size in range(tp, len(workers), tp):
        rollout = [
            n * p.outlook.rollout_seconds(size // p.tp, p.tp) for n, p in zip(steps, pipelines, strict=True)
        ]
        training = [
            n * p.outlook.training_seconds(len(workers) - size) for n, p in zip(steps, pipelines, strict=True)
        ]
        chains = [r + t for r, t in zip(rollout, training, strict=True)]
        end = max(*chains, sum(rollout), sum(training))
        if end < best:
            best, chosen = end, (workers[size:], workers[:size])
    return chosen
