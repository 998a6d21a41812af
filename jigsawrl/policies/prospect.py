"""Where a predicted future leads, and how good that is."""

from __future__ import annotations

from dataclasses import dataclass

LATE = 10.0
"""A second late weighs as much as so many seconds more for all."""
SLOWEST = 8.0
"""A pipeline that stands still for a while is not thought to stand still for ever."""


def lateness(
    due: float, now: float, passed: float, done: float, left: float, slowest: float = float("inf")
) -> float:
    """Seconds by which a pipeline will miss its time if it goes on as fast as it did while `passed` seconds went by,
    in which it made `done` seconds of the work that it would do alone; neither faster than alone nor slower than
    `slowest` times that."""
    pace = max(1.0, min(passed / max(done, 1e-9), slowest))
    return max(0.0, now + pace * left - due)


@dataclass(frozen=True, slots=True)
class Prospect:
    """Where a future leads: the time it was followed to, and the work that is left then."""

    now: float
    left: list[float]
    """Seconds of it, alone, of each pipeline that has some; least first."""
    rate: float
    """Seconds of work alone that were done in a second until then."""
    late: float
    """Seconds by which pipelines will miss their times if they go on at this pace, all together."""
    least: float
    """When all could be done at the soonest: phases that run end on as many workers as they began on."""

    def makespan(self, rate: float) -> float:
        """When all would be done at this rate, less as one after the other is done; exact where nothing is left.

        Those that are together go on equally fast, so it is best if all have as much left.
        """
        gain = (rate - 1) / max(1, len(self.left) - 1)
        end, before = self.now, 0.0
        for count, left in zip(range(len(self.left), 0, -1), self.left, strict=True):
            end += (left - before) * count / min(count, 1 + gain * (count - 1))
            before = left
        return end

    def score(self, rate: float) -> float:
        """The less the better."""
        return max(self.least, self.makespan(rate)) + LATE * self.late
