"""The look-ahead: fill, merge, and choose by where it leads.

After every event that matters the possible plans are collected (`plans`), and tails that could be gathered. Each is
tried on a prediction of what follows (`forward`), and the one after which all work is predicted to end first is
carried out. Pipelines with a deadline or a bound on their slowdown go first when they have no time to lose.
"""

from __future__ import annotations

from dataclasses import dataclass

from jigsawrl.graph.interference import SIGNATURES, merely_divided, undisturbed
from jigsawrl.policies.balance import balanced
from jigsawrl.policies.onward import going_on
from jigsawrl.policies.plans import Actions, Planner, moved_bytes
from jigsawrl.policies.shares import best, equal, shared
from jigsawrl.policies.starts import start_on
from jigsawrl.policies.state import (
    Action,
    Ended,
    Event,
    Migrate,
    Pause,
    Pipeline,
    Place,
    Resume,
    Start,
    State,
)
from jigsawrl.policies.tails import last_tails
from jigsawrl.policies.trials import FEW_PIPELINES, Trials, to_the_end
from jigsawrl.policies.turns import out_of_turn

GAIN = 1e-3
"""Part of the predicted time that moving a tail must save to be worth it."""
TIGHT, TIGHT_STEPS = 0.1, 0.5
"""A pipeline has no time to lose if it has less to spare than this part of what it needs, or of a step of its own:
a phase on too few workers costs that much."""
MOVES = 3
"""Ways to gather tails that are tried, tails on most workers first."""
SHORT = 0.5
"""Seconds of a phase that are not worth the time that looking ahead takes itself, about a hundredth of them."""
FIRST, FIRST_EXACT = (0, 2), (0, 1, 2, 3)
"""Pipelines that go first for good, in any order."""
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
        chosen = self._choose(state, urgent) if any(matters(state, event) for event in events) else ()
        starts = [action for action in chosen if isinstance(action, Start)]
        moves = [action for action in chosen if isinstance(action, Migrate)]
        leaving = {lane for move in moves for lane in move.lanes}
        pauses = self._make_way(state, urgent, starts, leaving)
        leaving |= {action.lane for action in pauses if isinstance(action, Pause)}
        returning = {action.lane for action in pauses if isinstance(action, Resume)}
        rule = best(state) if self.shares else equal
        starts = starts if moves or pauses else going_on(state, starts)
        confined = balanced(state, leaving) if self.shares else []
        return [*moves, *pauses, *shared(state, starts, rule, leaving, returning), *confined]

    def _make_way(
        self, state: State, urgent: Pipeline | None, starts: list[Start], leaving: set[int]
    ) -> list[Pause | Resume]:
        """Others stand still where a pipeline runs that has no time to lose, and where it is not their turn."""
        taken: set[int] = set()
        if urgent is not None:
            taken.update(worker for lane in state.running(urgent) for worker in lane.workers)
            begins = [start for start in starts if start.pipeline == urgent.name]
            taken.update(worker for start in begins for place in start.places for worker in place)
        lanes = state.lanes.lanes.values()
        others = [lane for lane in lanes if urgent is None or lane.pipeline != urgent.name]
        stand = {lane.id for lane in others if not taken.isdisjoint(lane.workers)}
        if self.shares:
            stand |= out_of_turn(state, stand | leaving)
        return [
            Pause(lane.id) if lane.id in stand else Resume(lane.id)
            for lane in lanes
            if (lane.id in stand) != lane.paused and lane.id not in leaving
        ]

    def _waiting(self, state: State, urgent: Pipeline | None) -> list[Pipeline]:
        """Who may start: the one that must, or all, those with the longest work before them first."""
        ready = state.ready()
        if len(ready) < 2:
            return ready
        must = [p for p in ready if p is urgent] or [p for p in ready if self._late(state, p)]
        return must[:1] or sorted(
            ready, key=lambda p: (-p.outlook.shape.priority, -state.left_alone(p), p.name)
        )

    def _late(self, state: State, pipeline: Pipeline) -> bool:
        """Whether it has waited so long that it goes first now. Where plans are followed to the end of all work
        nobody is forgotten: who waits for long does so because all work ends sooner by that."""
        if self.lookahead and to_the_end(state) and undisturbed(state.table):
            return False
        waited = state.now - pipeline.since
        return waited > 0 and waited > PATIENCE * pipeline.solo_seconds()

    def _moves(self, state: State, pipeline: Pipeline) -> list[Migrate]:
        """Its whole rollout is in the tail, on several workers: onto one of them, one engine's, a quarter of all."""
        tails = last_tails(state, pipeline)
        load = {worker: len(state.lanes.on_worker[worker]) for lane in tails for worker in lane.workers}
        if len(load) < 2 or len(tails) < len(pipeline.lanes):
            return []
        if not any(state.survivors[lane.id].sequences for lane in tails):
            return []
        places = sorted((lane.workers for lane in tails), key=lambda place: (load[place[0]], place))
        least = min(load, key=lambda w: (load[w], w))
        targets: set[tuple[Place, ...]] = {((least,),)}
        targets |= {tuple(places[:count]) for count in (1, len(places) // 4) if 0 < count < len(places)}
        ids = tuple(lane.id for lane in tails)
        moves = [Migrate(pipeline.name, ids, target) for target in sorted(targets)]
        return [m for m in moves if all(state.fits(place, moved_bytes(state, m)) for place in m.places)]

    def _choose(self, state: State, urgent: Pipeline | None) -> Actions:
        waiting = self._waiting(state, urgent)
        if not waiting:
            return ()
        if waiting[0] is urgent:
            start = start_on(state, urgent, urgent.home)
            return (start,) if start else ()
        closed = {w for lane in state.running(urgent) for w in lane.workers} if urgent else set()
        planner = Planner(state, waiting, closed, self.fill)
        moves: list[Migrate] = []
        if self.merge and state.survivors:
            spread = sorted(state.unfinished(), key=lambda p: (-len(p.lanes), p.name))
            moves = [move for found in [self._moves(state, p) for p in spread] for move in found][:MOVES]
        if (
            not self.lookahead
            or (not moves and merely_divided(state.table))
            or all(state.phase_seconds(p) < SHORT for p in waiting)
        ):
            return planner.after(moves[0]).actions if moves else planner.plan(waiting).actions
        must = self._late(state, waiting[0]) or not state.lanes.lanes
        return self._best(state, planner, moves, must)

    def _best(self, state: State, planner: Planner, moves: list[Migrate], must: bool) -> Actions:
        """Where all work is predicted to end first; the simple rule's plan and no move, unless others save something.

        What little work there is left is thought through more thoroughly, and to its end; most thoroughly where
        neighbours do not disturb each other, and plans that differ little can be told apart. Where those who share a
        worker merely divide it, only moves are thought of: nothing is won by holding anybody back.
        """
        divided, few = merely_divided(state.table), to_the_end(state)
        exact = few and undisturbed(state.table)
        trials = Trials(state, few, exact, must)
        if divided:
            trials.consider([planner.plan(planner.waiting)])
        elif few:
            trials.consider(planner.orders(FIRST_EXACT if exact else FIRST))
        else:
            trials.consider(planner.plans())
        if self.fill and not divided and trials.open and len(state.unfinished()) <= FEW_PIPELINES:
            trials.consider(planner.apart())
        if self.fill and exact and trials.open:
            trials.consider(planner.sparing(trials.soonest, trials.best))
            trials.consider(planner.putting_off(trials.best))
        if few and trials.open:
            for plan in trials.foremost():
                trials.consider(planner.variants(plan, exact))
        if not trials.scores:
            return ()
        chosen = trials.chosen()
        ends = trials.scores[chosen]
        for plan in map(planner.after, moves):
            score = trials.score(plan)
            if score < ends - GAIN * (ends - state.now):
                ends, chosen = score, plan
        return chosen.actions


def most_urgent(state: State) -> Pipeline | None:
    """The pipeline that has no time to lose, the one due first if there are several: it goes before all others."""
    pressed = [p for p in state.unfinished() if tight(state, p)]
    return min(pressed, key=lambda p: (p.due, p.name), default=None)


def tight(state: State, pipeline: Pipeline) -> bool:
    """Whether it must have its workers to itself to be done when it is due."""
    due = pipeline.due
    if due == float("inf"):
        return False
    left, step = state.left_alone(pipeline), pipeline.solo_seconds()
    return due - state.now - left < max(TIGHT * left, TIGHT_STEPS * step)


def matters(state: State, event: Event) -> bool:
    """Whether it may change what is best to do: work came or went, workers came free, a rollout is all tail."""
    if not isinstance(event, Ended) or event.lane not in state.lanes.lanes:
        return True
    if SIGNATURES[state.lanes.lanes[event.lane].segment.kind] == "host":
        return True
    pipeline = state.pipelines[event.pipeline]
    return event.kind == "decode" and len(last_tails(state, pipeline)) == len(pipeline.lanes)
