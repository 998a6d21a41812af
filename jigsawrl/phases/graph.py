"""Which phases a pipeline has to run, and what each of them waits for.

    synchronous     rollout 1 -> training 1 -> rollout 2 -> training 2 -> ...

A kind of pipeline is a `PhaseGraph`: a pure function from a step to its phases, and how many steps may have phases in
flight beside the oldest one that is unfinished. Kinds with several phases in flight (asynchronous ones, evaluation
beside training) are other such functions: `tests/scheduler/graphs.py` has two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jigsawrl.phases.ids import PhaseId

Uses = Literal["engines", "gang"]
"""What a phase runs on: engines side by side that generate, or one gang of ranks that trains."""


@dataclass(frozen=True, slots=True)
class PhaseSpec:
    """A phase instance as its pipeline's graph has it. Phases of steps below 1 count as ended."""

    id: PhaseId
    uses: Uses
    needs: tuple[PhaseId, ...] = ()
    """Phases that must have ended before it may start."""
    after: tuple[PhaseId, ...] = ()
    """Phases that must have started before it may: it may not overtake them."""


@dataclass(frozen=True, slots=True)
class PhaseGraph:
    """A kind of pipeline."""

    phases_of: Callable[[str, int], tuple[PhaseSpec, ...]]
    """The phases of one step of the pipeline of this name."""
    ahead: int = 0
    """Steps beyond the oldest unfinished one of which phases may be in flight."""


def synchronous(pipeline: str, step: int) -> tuple[PhaseSpec, ...]:
    """A rollout with the weights of the step before, then a training on all of it."""
    rollout, training = PhaseId(pipeline, "rollout", step), PhaseId(pipeline, "training", step)
    before = PhaseId(pipeline, "training", step - 1)
    return (
        PhaseSpec(rollout, "engines", needs=(before,)),
        PhaseSpec(training, "gang", needs=(rollout,)),
    )


SYNCHRONOUS = PhaseGraph(synchronous)
