"""The look-ahead: fill, merge, and choose by where it leads.

After every event that matters the possible plans are collected (`plans`), and tails that could be gathered. Each is
tried on a prediction of what follows (`forward`), and the one after which all work is predicted to end first is
carried out. Pipelines with a deadline or a bound on their slowdown go first when they have no time to lose.
"""

from __future__ import annotations

from dataclasses import dataclass

from jigsawrl.graph.interference import merely_divided, undisturbed
from jigsawrl.phases.ids import PhaseId
from jigsawrl.policies.balance import balanced
from jigsawrl.policies.placement import groups, many, on_its_workers, part_of
from jigsawrl.policies.plans import Actions, Planner
from jigsawrl.policies.rollmux import turns_of
from jigsawrl.policies.shares import best, equal, shared
from jigsawrl.policies.starts import going_on, start_on
from jigsawrl.policies.state import (
    Action,
    Change,
    Migrate,
    Pause,
    Phase,
    PhaseReady,
    Pipeline,
    Resume,
    Start,
    State,
    SubstageEnded,
)
from jigsawrl.policies.tails import gatherings, last_tails, moved_bytes
from jigsawrl.policies.trials import FEW_PIPELINES, Trials, to_the_end
from jigsawrl.policies.turns import out_of_turn, waits_long

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

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        pipelines = state.unfinished()
        if self.lookahead and merely_divided(state.table) and all(p.apart for p in pipelines):
            return self._in_pools(state, pipelines)
        if self.lookahead and self.fill and many(state, pipelines):
            return self._in_groups(state, changes)
        return self._decide(state, changes)

    def _in_pools(self, state: State, pipelines: list[Pipeline]) -> list[Action]:
        """In turns, or all at once, on the workers of pools that are merely divided by those who share them."""
        actions = turns_of(state, pipelines, None, shares=self.fill, gathers=self.merge)
        moves = [action for action in actions if isinstance(action, Migrate)]
        starts = [action for action in actions if isinstance(action, Start)]
        return [*moves, *shared(state, starts, equal, {lane for move in moves for lane in move.lanes})]

    def _in_groups(self, state: State, changes: list[Change]) -> list[Action]:
        """Groups where something happened decide, and those where somebody waits and nobody runs, or whose turn it is
        stands still; all where somebody waits, when pipelines come or go."""
        of_all = [each for each in changes if not isinstance(each, SubstageEnded | PhaseReady)]
        of_one = [each for each in changes if isinstance(each, SubstageEnded | PhaseReady)]
        waiting = {phase.pipeline.name for phase in state.ready()}
        stand = {lane.pipeline for lane in state.lanes.lanes.values() if waits_long(lane, state.now)}
        named = {pipeline_of(each) for each in of_one} | (waiting if of_all else set()) | stand
        actions: list[Action] = []
        for group in groups(state, named | waiting):
            names, idle = group.names, not any(member.runs for member in group.members)
            if idle or not named.isdisjoint(names):
                mine = [*of_all, *(each for each in of_one if idle or pipeline_of(each) in names)]
                actions += [on_its_workers(group, a) for a in self._decide(part_of(state, group), mine)]
        return actions

    def _decide(self, state: State, changes: list[Change]) -> list[Action]:
        urgent = most_urgent(state)
        chosen = self._choose(state, urgent) if any(matters(state, each) for each in changes) else ()
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
            taken.update(worker for lane in state.lanes_of(urgent) for worker in lane.workers)
            taken.update(
                worker for start in starts if start.pipeline == urgent.name for worker in start.workers
            )
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

    def _waiting(self, state: State, urgent: Pipeline | None) -> list[Phase]:
        """Phases that may start: the one that must, or all. Late ones go first, then those with the longest work
        before them."""
        ready = state.ready()
        pressed = [phase for phase in ready if phase.pipeline is urgent]
        late = [phase for phase in ready if self._late(state, phase)]
        others = sorted(
            (phase for phase in ready if phase not in late),
            key=lambda p: (-p.outlook.shape.priority, -state.left_alone(p.pipeline), p.id),
        )
        return pressed[:1] or [*late, *others]

    def _late(self, state: State, phase: Phase) -> bool:
        """Whether it has waited so long that it goes first now. Where plans are followed to the end of all work
        nobody is forgotten: who waits for long does so because all work ends sooner by that."""
        if self.lookahead and to_the_end(state) and undisturbed(state.table):
            return False
        waited = state.now - phase.since
        return waited > 0 and waited > PATIENCE * phase.pipeline.solo_seconds()

    def _moves(self, state: State, pipeline: Pipeline) -> list[Migrate]:
        """Its whole rollout is in the tail, on several engines: onto a quarter of them, or one, as wide as they are.

        On fewer workers than an engine spans a tail takes several times as long.
        """
        tails = last_tails(state, pipeline.current)
        load = {lane.workers: len(state.lanes.on_worker[lane.workers[0]]) for lane in tails}
        places = sorted(load, key=lambda place: (load[place], place))
        moves = gatherings(state, tails, places, sorted({len(places) // 4, 1}, reverse=True))
        return [move for move in moves if state.fits(move.workers, moved_bytes(state, move))]

    def _choose(self, state: State, urgent: Pipeline | None) -> Actions:
        waiting = self._waiting(state, urgent)
        if not waiting:
            return ()
        if waiting[0].pipeline is urgent:
            start = start_on(state, waiting[0], waiting[0].home)
            return (start,) if start else ()
        closed = {w for lane in state.lanes_of(urgent) for w in lane.workers} if urgent else set()
        first = waiting[0].id if self._late(state, waiting[0]) else None
        planner = Planner(state, waiting, closed, self.fill)
        merged = state.unfinished() if self.merge and state.survivors else []
        merged.sort(key=lambda p: (-len(p.lanes), p.name))
        moves = [move for pipeline in merged for move in self._moves(state, pipeline)][:MOVES]
        if (
            not self.lookahead
            or (not moves and merely_divided(state.table))
            or all(phase.seconds < SHORT for phase in waiting)
        ):
            plan = planner.after(moves[0]) if moves else planner.plan(waiting)
            return plan.actions if first is None or plan.starts(first) else ()
        return self._best(state, planner, moves, first)

    def _best(self, state: State, planner: Planner, moves: list[Migrate], first: PhaseId | None) -> Actions:
        """Where all work is predicted to end first; the simple rule's plan and no move, unless others save something.

        What little work there is left is thought through more thoroughly, and to its end; most thoroughly where
        neighbours do not disturb each other, and plans that differ little can be told apart. Where those who share a
        worker merely divide it, only moves are thought of: nothing is won by holding anybody back.
        """
        divided, trials = merely_divided(state.table), Trials(state, first)
        if divided:
            trials.consider([planner.plan(planner.waiting)])
        elif trials.few:
            trials.consider(planner.orders(FIRST_EXACT if trials.exact else FIRST))
        else:
            trials.consider(planner.plans())
        if self.fill and not divided and trials.open and len(state.unfinished()) <= FEW_PIPELINES:
            trials.consider(planner.apart())
        if self.fill and trials.exact and trials.open:
            trials.consider(planner.sparing(trials.soonest, trials.best))
            trials.consider(planner.putting_off(trials.best))
        if trials.few and trials.open:
            for plan in trials.foremost():
                trials.consider(planner.variants(plan, trials.exact))
        if not trials.scores:
            return ()
        chosen = trials.chosen()
        ends = trials.scores[chosen]
        for plan in map(planner.after, moves):
            score = trials.score(plan)
            if score < ends - GAIN * (ends - state.now):
                ends, chosen = score, plan
        return chosen.actions


def pipeline_of(change: SubstageEnded | PhaseReady) -> str:
    return change.pipeline if isinstance(change, SubstageEnded) else change.phase.pipeline


def most_urgent(state: State) -> Pipeline | None:
    """The pipeline that has no time to lose, the one due first if there are several: it goes before all others."""
    pressed = [p for p in state.unfinished() if p.due < float("inf") and tight(state, p)]
    return min(pressed, key=lambda p: (p.due, p.name), default=None)


def tight(state: State, pipeline: Pipeline) -> bool:
    """Whether it must have its workers to itself to be done when it is due."""
    left = state.left_alone(pipeline)
    return pipeline.due - state.now - left < max(TIGHT * left, TIGHT_STEPS * pipeline.solo_seconds())


def matters(state: State, change: Change) -> bool:
    """Whether it may change what is best to do: work came or went, workers came free, a rollout is all tail."""
    lanes = state.lanes.lanes
    match change:
        case SubstageEnded(_, key, kind) if key in lanes and lanes[key].signature != "host":
            phase = PhaseId(lanes[key].pipeline, lanes[key].phase, lanes[key].step)
            return kind == "decode" and bool(last_tails(state, state.phase(phase)))
    return True
