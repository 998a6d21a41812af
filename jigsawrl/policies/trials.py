"""Plans tried on a prediction of what follows each of them, and which of them is best."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jigsawrl.graph.batch import Batch
from jigsawrl.graph.interference import merely_divided, undisturbed
from jigsawrl.graph.lanes import Segment
from jigsawrl.policies.forward import Forward
from jigsawrl.policies.plans import Plan
from jigsawrl.policies.prospect import Prospect
from jigsawrl.policies.rule import Rule
from jigsawrl.policies.state import Migrate, Start, State

DOUBT = 0.03
"""Part of the predicted time that another plan than the simple rule's must save, where neighbours disturb each other:
what follows depends on who meets whom when, which is foreseen only roughly."""
FEW, FEW_PIPELINES = 24, 4
"""So many phases of so many pipelines are followed to the end of all work; more, through about a step."""
BEST = 3
"""Plans of which variants are tried."""
HARDLY = 1e-6
"""Seconds that are no difference."""


@dataclass(slots=True)
class Trials:
    state: State
    few: bool
    """Whether they are followed to the end of all work."""
    exact: bool
    """Whether what follows is foreseen so well that plans which differ little can be told apart."""
    must: bool
    """Whether something has to start."""
    now: Forward = field(init=False)
    soonest: float = field(init=False)
    """Every pipeline alone on all workers would be done by then."""
    scores: dict[Plan, float] = field(default_factory=dict)
    """In the order in which they were tried, that of the simple rule first; the less the better."""
    rates: dict[Plan | Rule, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = Forward(self.state)
        self.soonest = self.now.soonest()

    def consider(self, plans: list[Plan]) -> None:
        for plan in plans:
            if plan not in self.scores and (plan.actions or not self.must):
                self.scores[plan] = self.score(plan)

    def score(self, plan: Plan) -> float:
        """On one worker plans of the same rule differ in what they start now alone. Beyond the horizon all are as
        fast as the first of them: who puts work off till then has done more until then, and is no faster."""
        prospect = self._followed(plan)
        like = plan.rule if len(self.state.alive) == 1 else plan
        return prospect.score(self.rates.setdefault(like, prospect.rate(self.state.now)))

    @property
    def best(self) -> float:
        return min(self.scores.values())

    @property
    def open(self) -> bool:
        """Whether a plan that was not tried yet could be chosen instead."""
        return not self.exact or (bool(self.scores) and self.best > self.soonest + HARDLY)

    def foremost(self) -> list[Plan]:
        return sorted(self.scores, key=lambda plan: self.scores[plan])[:BEST]

    def chosen(self) -> Plan:
        """The best one, or the simple rule's if that is hardly worse."""
        simple, (best, *_) = next(iter(self.scores)), self.foremost()
        return simple if self.scores[simple] - self.scores[best] < self._doubt(self.scores[simple]) else best

    def _doubt(self, ends: float) -> float:
        """Seconds that another plan must save."""
        return 0.0 if undisturbed(self.state.table) else DOUBT * (ends - self.state.now)

    def _until(self) -> float:
        """Nothing is learned by following a plan for longer than the foremost take, where that is known."""
        if not self.few:
            return self.state.now + self._horizon()
        if self.exact and len(self.scores) >= BEST:
            return sorted(self.scores.values())[BEST - 1]
        return float("inf")

    def _horizon(self) -> float:
        """Long enough for every pipeline to get through a step."""
        workers = len(self.state.lanes.on_worker)
        return 1.5 * max(p.outlook.solo_seconds(workers) for p in self.state.unfinished())

    def _followed(self, plan: Plan) -> Prospect:
        """Where a plan leads."""
        future = self.now.copy()
        future.rule = plan.rule
        for action in plan.actions:
            if isinstance(action, Start):
                future.start(action)
            else:
                future.gather(action, moved_segments(self.state, action))
        return future.follow(self._until())


def to_the_end(state: State) -> bool:
    """Whether so little work is left that plans are followed to the end of all of it."""
    pipelines = state.unfinished()
    phases = sum(2 * (p.steps - p.step) + (2 if p.phase == "rollout" else 1) for p in pipelines)
    return phases <= FEW and len(pipelines) <= FEW_PIPELINES and not merely_divided(state.table)


def moved_segments(state: State, move: Migrate) -> tuple[Segment, ...]:
    """The lane that a gathered tail is foreseen to be."""
    outlook = state.pipelines[move.pipeline].outlook
    survivors = [state.survivors[key] for key in move.lanes]
    count = sum(each.sequences for each in survivors)
    context = sum(each.sequences * each.context for each in survivors) / count
    remaining = outlook.forecast.beyond(context - outlook.shape.prompt_tokens, count)
    part = Batch(remaining, np.full(count, context)).split(len(move.places))[0]
    return outlook.moved(part, len(move.places[0])).segments
