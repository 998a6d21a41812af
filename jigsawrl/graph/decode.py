"""A batch decoding, pass by pass: who is still active, and what time it is. Exact for a + b*B + c*B*L."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jigsawrl.graph.cost import DecodeCost
from jigsawrl.graph.forecast import Floats


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Sequences sorted by what is left of them. Between two endings the batch is constant and time is quadratic."""

    remaining: Floats
    """Passes each sequence still needs, rising."""
    context: Floats
    """Tokens each of them has behind it."""
    seconds: Floats
    """Time at which each of them ends."""
    cost: DecodeCost

    @classmethod
    def of(cls, remaining: Floats, context: Floats, cost: DecodeCost) -> DecodeCurve:
        order = remaining.argsort(kind="stable")
        left, behind = remaining[order].astype(float), context[order].astype(float)
        active = np.arange(len(left), 0, -1)
        behind_active = behind[::-1].cumsum()[::-1]
        passes = left.copy()
        passes[1:] -= left[:-1]
        made = left - passes / 2  # on the mean of these passes; each counts half of the token it makes
        spans = passes * (cost.a + cost.b * active + cost.c * (behind_active + active * made))
        return cls(left, behind, spans.cumsum(), cost)

    @property
    def total(self) -> float:
        return float(self.seconds[-1]) if len(self.seconds) else 0.0

    @property
    def tokens(self) -> float:
        return float(self.remaining.sum())

    def seconds_at(self, passes: float) -> float:
        """Time of the first so many passes."""
        ended = self._ended(passes)
        if ended and self.remaining[ended - 1] == passes:
            return float(self.seconds[ended - 1])
        return float(np.interp(passes, *self._knots()))

    def passes_at(self, seconds: float) -> float:
        """Passes done by then (straight within a span, which errs by less than a per cent)."""
        passes, times = self._knots()
        return float(np.interp(seconds, times, passes))

    def _knots(self) -> tuple[Floats, Floats]:
        return np.concatenate(([0.0], self.remaining)), np.concatenate(([0.0], self.seconds))

    def active_at(self, passes: float) -> int:
        return len(self.remaining) - self._ended(passes)

    def _ended(self, passes: float) -> int:
        """How many are done by then."""
        return int(self.remaining.searchsorted(passes, side="right"))

    def tail_start(self) -> float:
        """The pass from which on the fixed cost of a pass outweighs what its sequences cost."""
        start = 0.0
        for _ in range(3):  # the knee depends on the context there, which depends on the knee
            ended = max(0, len(self.remaining) - self.cost.knee(self._mean_context(start)))
            before, start = start, float(self.remaining[ended - 1]) if ended else 0.0
            if start == before:
                break
        return start

    def _mean_context(self, passes: float) -> float:
        alive = self.context[self._ended(passes) :]
        return float(alive.sum() / len(alive) + passes) if len(alive) else passes

    def after(self, passes: float) -> tuple[Floats, Floats]:
        """What is left of the survivors, and what they have behind them."""
        ended = self._ended(passes)
        return self.remaining[ended:] - passes, self.context[ended:] + passes
