"""The look-ahead: fill, merge, and choose by where it leads.

After every event the possible next actions are collected: a ready phase on all workers, on those that are free, on
half of them; a tail gathered on one worker. Each is tried on a prediction of what follows (`forward`). The best is
kept and the rest tried on top of it, until nothing makes the predicted end of all work come sooner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jigsawrl.graph.batch import Batch
from jigsawrl.graph.interference import best_shares
from jigsawrl.graph.lanes import Segment
from jigsawrl.policies.forward import Forward
from jigsawrl.policies.shares import equal, shared
from jigsawrl.policies.starts import needs, start_on
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
SAME = 1e-9
"""What starts as well now as later starts now."""
READY = 3
"""Waiting phases that are considered at one time, longest waiting first."""
TIGHT = 1.1
"""Time until it is due, over the time it needs alone, under which a pipeline has no time to lose."""
CROWD = 3
"""Lanes on a worker at most."""
MOVES = 2
"""Tails that may be gathered, those on most workers first."""
PATIENCE = 3.0
"""Steps of its own that a phase waits before it goes first."""


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
        chosen = self._choose(state, urgent) if any(map(matters, events)) else []
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

    # Candidates

    def _choices(self, state: State, urgent: Pipeline | None) -> list[Start | Migrate]:
        choices: list[Start | Migrate] = []
        for pipeline in self._waiting(state, urgent):
            choices += self._starts(state, pipeline, urgent)
        if self.merge and choices:  # workers are freed for those who wait
            moves = [move for p in state.pipelines.values() for move in self._moves(state, p)]
            choices += sorted(moves, key=lambda move: (-len(move.lanes), move.pipeline))[:MOVES]
        return choices

    def _waiting(self, state: State, urgent: Pipeline | None) -> list[Pipeline]:
        ready = sorted(state.ready(), key=lambda p: (-p.outlook.shape.priority, p.since, p.name))
        late = [p for p in ready if p is urgent] or [p for p in ready if self._late(state, p)]
        return late[:1] or ready[:READY]

    def _late(self, state: State, pipeline: Pipeline) -> bool:
        return state.now - pipeline.since > PATIENCE * pipeline.outlook.solo_seconds(len(pipeline.home))

    def _starts(self, state: State, pipeline: Pipeline, urgent: Pipeline | None) -> list[Start]:
        """On all workers that have room for company, on the free ones, on the half with the least on them."""
        if pipeline is urgent:
            start = start_on(state, pipeline, pipeline.home)
            return [start] if start else []
        load = {worker: len(state.lanes.on_worker[worker]) for worker in pipeline.home}
        if urgent is not None:
            load.update((worker, CROWD) for lane in state.running(urgent) for worker in lane.workers)
        sets = [[worker for worker in pipeline.home if load[worker] == 0]]
        if self.fill:
            order = sorted(pipeline.home, key=lambda w: (load[w], w))
            half = sorted(order[: len(order) // 2])
            sets += [
                [worker for worker in workers if load[worker] < CROWD] for workers in (pipeline.home, half)
            ]
        found: dict[Start, None] = {}
        for workers in sets:
            start = start_on(state, pipeline, workers)
            if start is not None:
                found[start] = None
        return list(found)

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

    # The choice

    def _choose(self, state: State, urgent: Pipeline | None) -> list[Start | Migrate]:
        choices = self._choices(state, urgent)
        if not choices or not self.lookahead:
            return self._first(state, choices)
        chosen: list[Start | Migrate] = []
        future = Forward(state)
        until = state.now + self._horizon(state)
        best = before = future.copy().follow(until).score(state.now)
        overdue = [p.name for p in state.ready() if p is urgent or self._late(state, p)]
        while choices:
            scores = [self._score(future.copy(), state, choice, until) for choice in choices]
            soonest = min(scores)
            choice = choices[scores.index(soonest)]
            needed = GAIN * (best - state.now) if isinstance(choice, Migrate) else -SAME * best
            must = (not state.lanes.lanes and not chosen) or choice.pipeline in overdue
            if soonest > best - needed and not must:
                break
            chosen.append(choice)
            best = soonest
            # What was no good alone is no better beside another.
            good = [each for each, score in zip(choices, scores, strict=True) if score <= before]
            choices = [other for other in good if compatible(state, chosen, other)]
            if choices:
                self._apply(future, state, choice)
        return chosen

    def _score(self, future: Forward, state: State, choice: Start | Migrate, until: float) -> float:
        """Where it leads if this is done first."""
        self._apply(future, state, choice)
        return future.follow(until).score(state.now)

    def _apply(self, future: Forward, state: State, choice: Start | Migrate) -> None:
        if isinstance(choice, Start):
            future.start(choice)
        else:
            future.gather(choice, moved_segments(state, choice))

    def _first(self, state: State, choices: list[Start | Migrate]) -> list[Start | Migrate]:
        """Without looking ahead: whatever can start starts, whatever can be gathered is gathered."""
        chosen: list[Start | Migrate] = []
        for choice in choices:
            if compatible(state, chosen, choice):
                chosen.append(choice)
        return chosen

    def _horizon(self, state: State) -> float:
        """Long enough for every pipeline to get through a step."""
        workers = len(state.lanes.on_worker)
        return 1.5 * max(
            p.outlook.solo_seconds(workers) for p in state.pipelines.values() if p.status != "done"
        )


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


def compatible(state: State, chosen: list[Start | Migrate], other: Start | Migrate) -> bool:
    """Whether it can still be done: one action for a pipeline, and room in memory."""
    if any(choice.pipeline == other.pipeline for choice in chosen):
        return False
    held = list(state.held)
    for choice in [*chosen, other]:
        if isinstance(choice, Start):
            pipeline = state.pipelines[choice.pipeline]
            needed = needs(pipeline, choice.places)
            for place in choice.places:
                for worker in place:
                    held[worker] += needed
        else:
            held[choice.worker] += moved_bytes(state, choice)
    return max(held) <= state.device_bytes


def moved_segments(state: State, move: Migrate) -> tuple[Segment, ...]:
    """The lane that a gathered tail is foreseen to be."""
    outlook = state.pipelines[move.pipeline].outlook
    survivors = [state.survivors[key] for key in move.lanes]
    count = sum(each.sequences for each in survivors)
    context = sum(each.sequences * each.context for each in survivors) / count
    remaining = outlook.forecast.beyond(context - outlook.shape.prompt_tokens, count)
    return outlook.moved(Batch(remaining, np.full(count, context))).segments


def moved_bytes(state: State, move: Migrate) -> float:
    count = sum(state.survivors[key].sequences for key in move.lanes)
    return state.pipelines[move.pipeline].outlook.memory_moved(count)
