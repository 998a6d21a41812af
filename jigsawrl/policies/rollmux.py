"""RollMux inside one group: phases take turns, one rollout and one training at a time.

Where workers are in two pools for good, every pipeline has its turn in each, in a fixed cyclic order: one rollout and
one training of each are a meta-iteration. As long as the group is not saturated, no other cyclic order makes more use
of both pools; a pool then rather waits than lets someone overtake. Where it is saturated, whoever has waited longest
goes next, so that the pool that is short never waits.

Where all workers may run both phases they are two pools too, or one where that is better (few workers, or phases so
unequal that one pool would idle). A worker never runs two things side by side. The paper also moves tails to a few
workers and lets the next rollout start on the rest. That is left out: in the mixes tried it helped some and slowed
others, and was a little slower on the mean.
"""

from __future__ import annotations

from jigsawrl.cluster.rounds import Turn, unsaturated
from jigsawrl.policies.starts import start_on
from jigsawrl.policies.state import Action, Event, Phase, Pipeline, Place, State

PHASES: tuple[Phase, Phase] = ("training", "rollout")


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
            if not waiting or not taken.isdisjoint(pool):
                continue
            start = start_on(state, waiting[0], pool)
            if start is not None:
                actions.append(start)
                taken |= {worker for place in start.places for worker in place}
        return actions


def permits(state: State, pipelines: list[Pipeline]) -> list[Action]:
    """One pipeline at a time in each of the two pools that there are. Nobody's turn is waited for when all wait."""
    running = {pipeline.phase for pipeline in pipelines if pipeline.status == "running"}
    if in_rounds(pipelines):
        starts = _starts(state, running, {phase: whose_turn(pipelines, phase) for phase in PHASES})
        if starts or running:
            return starts
    return _starts(state, running, {})


def _starts(state: State, running: set[Phase], turns: dict[Phase, Pipeline]) -> list[Action]:
    """In each free pool the one whose turn it is, if it is there; where nobody's is, who has waited longest."""
    actions: list[Action] = []
    for phase in PHASES:
        waiting = [p for p in state.ready() if p.phase == phase and phase not in running]
        chosen = [p for p in waiting if p is turns.get(phase, p)]
        start = start_on(state, chosen[0], chosen[0].home) if chosen else None
        if start is not None:
            actions.append(start)
    return actions


def in_rounds(pipelines: list[Pipeline]) -> bool:
    """Whether round-robin is known to be best, by what phases are foreseen to take: the group is not saturated."""
    turns = []
    for pipeline in pipelines:
        rollout, training = pipeline.rollout_seconds(), pipeline.training_seconds()
        turns.append(Turn(pipeline.name, rollout, rollout, training, 0.0, rollout + training, float("inf")))
    return unsaturated(turns, [(0,)] * len(turns), shared=False)


def whose_turn(pipelines: list[Pipeline], phase: Phase) -> Pipeline:
    """The one after whoever had this phase last, in the order in which they came."""
    order = sorted(pipelines, key=lambda p: (p.arrived, p.name))
    latest = max(order, key=lambda p: p.turns.get(phase, float("-inf")))
    if phase not in latest.turns:
        return order[0]
    return order[(order.index(latest) + 1) % len(order)]


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
