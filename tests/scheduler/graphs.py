"""Kinds of pipelines that come next, as graphs of phases: the scheduler core knows no more of them than this."""

from __future__ import annotations

from jigsawrl.phases.graph import PhaseGraph, PhaseSpec
from jigsawrl.phases.ids import PhaseId

BEFORE = 5
"""Steps that an evaluation may lag behind."""


def asynchronous(bound: int) -> PhaseGraph:
    """A rollout may use weights that are `bound` steps old, so several phases are in flight.

    Rollouts start in their order; each training needs its rollout and the training before it.
    """

    def phases_of(pipeline: str, step: int) -> tuple[PhaseSpec, ...]:
        rollout, training = PhaseId(pipeline, "rollout", step), PhaseId(pipeline, "training", step)
        fresh = PhaseId(pipeline, "training", step - 1 - bound)
        before = PhaseId(pipeline, "rollout", step - 1), PhaseId(pipeline, "training", step - 1)
        return (
            PhaseSpec(rollout, "engines", needs=(fresh,), after=before[:1]),
            PhaseSpec(training, "gang", needs=(rollout, before[1])),
        )

    return PhaseGraph(phases_of, ahead=bound)


def evaluating() -> PhaseGraph:
    """What training k has made is evaluated at any time before step k + 5 begins."""

    def phases_of(pipeline: str, step: int) -> tuple[PhaseSpec, ...]:
        rollout, training = PhaseId(pipeline, "rollout", step), PhaseId(pipeline, "training", step)
        evaluation = PhaseId(pipeline, "evaluation", step)
        overdue = PhaseId(pipeline, "evaluation", step - BEFORE)
        return (
            PhaseSpec(rollout, "engines", needs=(PhaseId(pipeline, "training", step - 1), overdue)),
            PhaseSpec(training, "gang", needs=(rollout, overdue)),
            PhaseSpec(evaluation, "engines", needs=(training,)),
        )

    return PhaseGraph(phases_of, ahead=BEFORE - 1)
