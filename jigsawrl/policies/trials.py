"""Plans tried on a prediction of what follows each of them, and which of them is best."""

from __future__ import annotations

from collections.abc import Iterable

from jigsawrl.graph.interference import merely_divided, undisturbed
from jigsawrl.phases.ids import PhaseId
from jigsawrl.policies.forward import Forward
from jigsawrl.policies.plans import Plan
from jigsawrl.policies.rule import Rule
from jigsawrl.policies.state import State

DOUBT = 0.03
"""Part of the predicted time that another plan than the simple rule's must save, where neighbours disturb each other:
what follows depends on who meets whom when, which is foreseen only roughly."""
FEW, FEW_PIPELINES = 24, 4
"""So many phases of so many pipelines are followed to the end of all work; more, through about a step."""
BEST = 3
"""Plans of which variants are tried."""
HARDLY = 1e-6
"""Seconds that are no difference."""


class Trials:
    """Plans for one state, each with the time by which it is predicted to end all work."""

    def __init__(self, state: State, first: PhaseId | None) -> None:
        self.state = state
        self.first = first
        """A phase that has to start, because it has waited for long."""
        self.few = to_the_end(state)
        """Whether they are followed to the end of all work."""
        self.exact = self.few and undisturbed(state.table)
        """Whether what follows is foreseen so well that plans which differ little can be told apart."""
        self.now = Forward(state)
        self.soonest = state.now + max(self.now.at_first.values())
        """Every pipeline alone on all workers would be done by then."""
        self.scores: dict[Plan, float] = {}
        """In the order in which they were tried, that of the simple rule first; the less the better."""
        self.rates: dict[Plan | Rule, float] = {}

    def consider(self, plans: Iterable[Plan]) -> None:
        """Tries plans that were not tried yet."""
        for plan in plans:
            if plan not in self.scores and self._allowed(plan):
                self.scores[plan] = self.score(plan)

    def _allowed(self, plan: Plan) -> bool:
        """Something has to start where nothing runs."""
        if self.first is not None:
            return plan.starts(self.first)
        return bool(plan.actions or self.state.lanes.lanes)

    def score(self, plan: Plan) -> float:
        """On one worker plans of the same rule differ in what they start now alone. Beyond the horizon all are as
        fast as the first of them: who puts work off till then has done more until then, and is no faster."""
        future = self.now.copy()
        future.rule = plan.rule
        for action in plan.actions:
            future.do(action)
        prospect = future.follow(self._until())
        like = plan.rule if len(self.state.alive) == 1 else plan
        return prospect.score(self.rates.setdefault(like, prospect.rate))

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
        """Nothing is learned by following a plan for longer than the foremost take, where that is known; of many
        pipelines, for longer than each takes to get through a step."""
        if not self.few:
            workers = len(self.state.lanes.on_worker)
            return self.state.now + 1.5 * max(
                p.outlook.solo_seconds(workers) for p in self.state.unfinished()
            )
        if self.exact and len(self.scores) >= BEST:
            return sorted(self.scores.values())[BEST - 1]
        return float("inf")


def to_the_end(state: State) -> bool:
    """Whether so little work is left that plans are followed to the end of all of it."""
    pipelines = state.unfinished()
    phases = sum(2 * (p.steps - p.step) + (2 if p.phase == "rollout" else 1) for p in pipelines)
    return phases <= FEW and len(pipelines) <= FEW_PIPELINES and not merely_divided(state.table)
