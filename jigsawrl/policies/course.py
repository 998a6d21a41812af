"""A pipeline on its way through a predicted future: which pieces of its phase are left, and on which workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jigsawrl.graph.interference import SIGNATURES, Signature, in_one_batch
from jigsawrl.graph.lanes import Segment
from jigsawrl.phases.ids import PhaseKind
from jigsawrl.policies.state import Pipeline, Place

Piece = tuple[Signature, float]
Pieces = tuple[Piece, ...]


@dataclass(slots=True, eq=False)
class Course:
    """A pipeline on its way: the pieces of its phase that are left, last first, or none while it waits."""

    pipeline: Pipeline
    alone: dict[PhaseKind, float]
    """Seconds of each of its phases, alone on all workers."""
    homes: dict[PhaseKind, Sequence[int]]
    """Blocks that each of its phases may use."""
    step: int
    phase: PhaseKind
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
    """On each of its blocks, while its phase runs."""

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
        rollout, training = self.alone["rollout"], self.alone["training"]
        after = (self.pipeline.steps - self.step) * (rollout + training)
        if self.phase == "rollout":
            return self.part_left * rollout + training + after
        return self.part_left * training + after

    @property
    def least_left(self) -> float:
        """Seconds until all its work is done if nobody slows it: a running phase ends where it began, on as many
        workers, and what follows has all."""
        longer = self.whole - self.alone[self.phase] if self.pieces else 0.0
        return self.work_left + self.part_left * longer


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
