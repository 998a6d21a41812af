"""The look-ahead: fill, merge, and choose by where it leads.

After every event that matters the possible plans are collected (`plans`), and tails that could be gathered. Each is
tried on a prediction of what follows (`forward`), and the one after which all work is predicted to end first is
carried out. Pipelines with a deadline or a bound on their slowdown go first when they have no time to lose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jigsawrl.graph.batch import Batch
from jigsawrl.graph.interference import best_shares
from jigsawrl.graph.lanes import Segment
from jigsawrl.policies.forward import Forward
from jigsawrl.policies.plans import Plan, Planner
from jigsawrl.policies.shares import equal, shared
from jigsawrl.policies.starts import start_on
from jigsawrl.policies.state import (
    Action,
    Ended,
    Event,
    Migrate,
    Pause,
    Pipeline,
    Resume,
    Start,
    State,
)
from jigsawrl.policies.tails import last_tails

GAIN = 1e-3
"""Part of the predicted time that moving a tail must save to be worth it."""
TIGHT = 1.1
"""Time until it is due, over the time it needs alone, under which a pipeline has no time to lose."""
MOVES = 2
"""Tails that may be gathered, those on most workers first."""
PATIENCE = 3.0
"""Steps of its own that a phase waits before it goes first."""
FEW = 4
"""So many pipelines are followed to the end of all work; more, through about a step."""


@dataclass(frozen=True, slots=True)
class Jigsaw:
    """Levers can be left out one by one, to see how far each carries."""

    fill: bool = True
    shares: bool = True
    merge: bool = True
    lookahead: bool = True
    name: str = "jigsaw"

    def decide(self, state: State, events: list[Event]) -> list[Action]:
        urgent = most_urgent(state)
        chosen = self._choose(state, urgent) if any(map(matters, events)) else ()
        starts = [action for action in chosen if isinstance(action, Start)]
        moves = [action for action in chosen if isinstance(action, Migrate)]
        leaving = {lane for move in moves for lane in move.lanes}
        pauses = self._make_way(state, urgent, starts, leaving)
        leaving |= {action.lane for action in pauses if isinstance(action, Pause)}
        returning = {action.lane for action in pauses if isinstance(action, Resume)}
        rule = (lambda kinds: best_shares(state.table, kinds, (1.0,) * len(kinds))) if self.shares else equal
        return [*moves, *pauses, *shared(state, starts, rule, leaving, returning)]

    def _make_way(
        self, state: State, urgent: Pipeline | None, starts: list[Start], leaving: set[int]
    ) -> list[Pause | Resume]:
        """Others stand still where a pipeline runs that has no time to lose, and go on where it does not."""
        taken: set[int] = set()
        if urgent is not None:
            taken.update(worker for lane in state.running(urgent) for worker in lane.workers)
            begins = [start for start in starts if start.pipeline == urgent.name]
            taken.update(worker for start in begins for place in start.places for worker in place)
        actions: list[Pause | Resume] = []
        for lane in state.lanes.lanes.values():
            own = urgent is not None and lane.pipeline == urgent.name
            stands = not own and not taken.isdisjoint(lane.workers)
            if stands != lane.paused and lane.id not in leaving:
                actions.append(Pause(lane.id) if stands else Resume(lane.id))
        return actions

    def _waiting(self, state: State, urgent: Pipeline | None) -> list[Pipeline]:
        """Who may start: the one that must, or all, those with the longest work before them first."""
        ready = state.ready()
        must = [p for p in ready if p is urgent] or [p for p in ready if late(state, p)]
        return must[:1] or sorted(
            ready, key=lambda p: (-p.outlook.shape.priority, -state.left_alone(p), p.name)
        )

    def _moves(self, state: State, pipeline: Pipeline) -> list[Migrate]:
        """Its whole rollout is in the tail, on several workers: onto the one of them with the least beside it."""
        tails = last_tails(state, pipeline)
        workers = {worker for lane in tails for worker in lane.workers}
        if len(workers) < 2 or len(tails) < len(pipeline.lanes):
            return []
        active = sum(state.survivors[lane.id].sequences for lane in tails)
        target = min(workers, key=lambda w: (len(state.lanes.on_worker[w]), w))
        if active == 0 or not state.fits((target,), pipeline.outlook.memory_moved(active)):
            return []
        return [Migrate(pipeline.name, tuple(lane.id for lane in tails), target)]

    def _choose(self, state: State, urgent: Pipeline | None) -> Plan:
        waiting = self._waiting(state, urgent)
        if not waiting:
            return ()
        if waiting[0] is urgent:
            start = start_on(state, urgent, urgent.home)
            return (start,) if start else ()
        closed = {w for lane in state.running(urgent) for w in lane.workers} if urgent else set()
        planner = Planner(state, waiting, closed, self.fill)
        plans = planner.plans()
        if late(state, waiting[0]) or not state.lanes.lanes:
            plans = [plan for plan in plans if plan] or plans
        moved: list[Plan] = []
        if self.merge:
            moves = [move for p in state.pipelines.values() for move in self._moves(state, p)]
            widest = sorted(moves, key=lambda move: (-len(move.lanes), move.pipeline))[:MOVES]
            moved = [planner.after(move) for move in widest]
        if not self.lookahead:
            return (moved or plans)[0]
        return self._best(state, plans, moved)

    def _best(self, state: State, plans: list[Plan], moved: list[Plan]) -> Plan:
        """Where all work is predicted to end first; the first of equals, and a move only if it saves something."""
        if len(plans) + len(moved) == 1:
            return plans[0]
        now = Forward(state)
        horizon = self._horizon(state)
        scores = [self._score(now, state, plan, horizon) for plan in plans]
        best = min(scores)
        chosen = plans[scores.index(best)]
        for plan in moved:
            score = self._score(now, state, plan, horizon)
            if score < best - GAIN * (best - state.now):
                best, chosen = score, plan
        return chosen

    def _score(self, now: Forward, state: State, plan: Plan, until: float) -> float:
        future = now.copy()
        for action in plan:
            if isinstance(action, Start):
                future.start(action)
            else:
                future.gather(action, moved_segments(state, action))
        return future.follow(until).score(state.now)

    def _horizon(self, state: State) -> float:
        unfinished = [p for p in state.pipelines.values() if p.status != "done"]
        if len(unfinished) <= FEW:
            return float("inf")
        workers = len(state.lanes.on_worker)
        return state.now + 1.5 * max(p.outlook.solo_seconds(workers) for p in unfinished)


def late(state: State, pipeline: Pipeline) -> bool:
    """Whether it has waited so long that it goes first now."""
    return state.now - pipeline.since > PATIENCE * pipeline.outlook.solo_seconds(len(pipeline.home))


def most_urgent(state: State) -> Pipeline | None:
    """The pipeline that has no time to lose, the one due first if there are several: it goes before all others."""
    pressed = [p for p in state.pipelines.values() if p.status != "done" and tight(state, p)]
    return min(pressed, key=lambda p: (p.due, p.name), default=None)


def tight(state: State, pipeline: Pipeline) -> bool:
    """Whether it must have its workers to itself to be done when it is due."""
    due = pipeline.due
    return due < float("inf") and due - state.now < TIGHT * state.left_alone(pipeline)


def matters(event: Event) -> bool:
    """Whether it may change what is best to do: work came or went, workers came free, a tail began."""
    return not isinstance(event, Ended) or event.kind in ("decode", "tail", "sync")


def moved_segments(state: State, move: Migrate) -> tuple[Segment, ...]:
    """The lane that a gathered tail is foreseen to be."""
    outlook = state.pipelines[move.pipeline].outlook
    survivors = [state.survivors[key] for key in move.lanes]
    count = sum(each.sequences for each in survivors)
    context = sum(each.sequences * each.context for each in survivors) / count
    remaining = outlook.forecast.beyond(context - outlook.shape.prompt_tokens, count)
    return outlook.moved(Batch(remaining, np.full(count, context))).segments
