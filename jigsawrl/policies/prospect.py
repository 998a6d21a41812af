"""Where a predicted future leads, and how good that is."""

from __future__ import annotations

from dataclasses import dataclass

LATE = 10.0
"""A second late weighs as much as so many seconds more for all."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """Where a future leads: the time it was followed to, and the solo seconds of work left then."""

    now: float
    left: dict[str, float]
    done: float
    late: float
    """Seconds by which pipelines will miss their times if they go on at this pace, all together."""

    def rate(self, since: float) -> float:
        """Solo seconds of work that were done in a second."""
        return max(1.0, self.done / max(self.now - since, 1e-9))

    def makespan(self, rate: float) -> float:
        """When all would be done at this rate, less as one after the other is done; exact where nothing is left.

        Those that are together go on equally fast, so it is best if all have as much left.
        """
        if not self.left:
            return self.now
        gain = (rate - 1) / max(1, len(self.left) - 1)
        end, before = self.now, 0.0
        for count, left in zip(range(len(self.left), 0, -1), sorted(self.left.values()), strict=True):
            end += (left - before) * count / min(count, 1 + gain * (count - 1))
            before = left
        return end

    def score(self, rate: float) -> float:
        """The less the better."""
        return self.makespan(rate) + LATE * self.late
