"""A pipeline on its way through a predicted future: which pieces of its phase are left, and on which workers."""

from __future__ import annotations

from dataclasses import dataclass

from jigsawrl.graph.fused import in_one_batch
from jigsawrl.graph.interference import SIGNATURES, Signature
from jigsawrl.graph.lanes import Segment
from jigsawrl.policies.state import Phase, Pipeline, Place

Piece = tuple[Signature, float]
Pieces = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Alone:
    """Seconds of a pipeline's phases and of a step of it, alone on all workers."""

    rollout: float
    training: float
    step: float


@dataclass(slots=True, eq=False)
class Course:
    """A pipeline on its way: the pieces of its phase that are left, last first, or none while it waits."""

    pipeline: Pipeline
    alone: Alone
    step: int
    phase: Phase
    pieces: Pieces = ()
    blocks: Place = ()
    signature: Signature = "host"
    """What binds the piece at hand."""
    left: float = 0.0
    """Of the piece at hand, alone on whole workers."""
    speed: float = 1.0
    whole: float = 0.0
    """Seconds of the whole phase, alone."""
    bytes: float = 0.0
    due: float = float("inf")
    at_first: float = 0.0
    """Seconds of work that were left of it when the future began."""

    def copy(self) -> Course:
        return Course(
            self.pipeline,
            self.alone,
            self.step,
            self.phase,
            self.pieces,
            self.blocks,
            self.signature,
            self.left,
            self.speed,
            self.whole,
            self.bytes,
            self.due,
            self.at_first,
        )

    def begin(self, pieces: Pieces) -> None:
        """Sets out on the first of these."""
        self.pieces = pieces
        self.signature, self.left = pieces[-1]

    @property
    def part_left(self) -> float:
        """Of its phase."""
        if not self.pieces:
            return 1.0
        rest = self.left + sum([seconds for _, seconds in self.pieces[:-1]])
        return rest / self.whole if self.whole > 0 else 0.0

    @property
    def work_left(self) -> float:
        """Seconds of all its work that is left, alone on all workers."""
        alone, steps = self.alone, self.pipeline.steps - self.step
        if self.phase == "rollout":
            return self.part_left * alone.rollout + alone.training + steps * alone.step
        return self.part_left * alone.training + steps * alone.step


def batch_of(course: Course) -> str:
    return in_one_batch(course.signature, course.phase, course.pipeline.outlook.shape.base)


def coarse(segments: tuple[Segment, ...]) -> Pieces:
    """What binds a phase, and for how long in all, last first."""
    pieces: dict[Signature, float] = {}
    for segment in segments:
        if segment.seconds > 0:
            signature = SIGNATURES[segment.kind]
            pieces[signature] = pieces.get(signature, 0.0) + segment.seconds
    return tuple(reversed(pieces.items()))
