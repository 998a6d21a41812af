"""Lengths of the coming step, foreseen from those of the last ones.

Steps of one pipeline resemble each other: where a batch thins out is foreseeable, when its last straggler ends is
not. A forecast is therefore quantiles of the length, each with its own spread between steps, and a trend for
pipelines whose answers grow longer or shorter as they learn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

POINTS = (np.arange(128) + 0.5) / 128
"""Quantiles that a step is remembered by."""
STEPS = 8
"""Steps remembered."""
FADE = 0.7
"""Weight of a step against that of the one after it."""
PRIOR_SPREAD = 0.5
"""Relative spread assumed before there is anything to compare."""
FADED_STEPS = 3.0
"""The trend is trusted for about so many steps; more would run away."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is remembered: for each of the last steps the logarithm of its length at every quantile."""

    history: tuple[Floats, ...]
    max_tokens: int
    _known: dict[float, Floats] = field(default_factory=dict, compare=False, repr=False)
    """Quantiles that were asked for before."""

    @classmethod
    def from_prior(cls, lengths: Floats, max_tokens: int) -> Forecast:
        """From a profile, or from what a user expects."""
        return cls((), max_tokens).after(lengths)

    def after(self, lengths: Floats) -> Forecast:
        """The forecast when a step with these lengths is done."""
        last = len(lengths) - 1
        step = np.log(np.maximum(np.interp(POINTS * last, np.arange(last + 1), np.sort(lengths)), 1.0))
        return Forecast((*self.history, step)[-STEPS:], self.max_tokens)

    def quantiles(self, level: float = 0.5) -> Floats:
        """Length at each of POINTS; `level` above one half gives a cautious forecast, for planning."""
        if level not in self._known:
            foreseen = self._centre() + NormalDist().inv_cdf(level) * self.spread()
            self._known[level] = np.minimum(np.exp(foreseen), self.max_tokens)
        return self._known[level]

    def lengths(self, count: int, level: float = 0.5, of: int | None = None) -> Floats:
        """A batch as it is foreseen, in mixed order: `count` lengths, the longest ones of equal parts of all `of`.

        That is what the slowest of several engines gets, and everyone waits for it.
        """
        where = (_mixed(count) + 1) / count - 0.5 / (of or count)
        return np.ceil(np.interp(where, POINTS, self.quantiles(level)))

    def beyond(self, tokens: float, count: int, level: float = 0.5) -> Floats:
        """What `count` sequences that have come to `tokens` still have before them."""
        quantiles = self.quantiles(level)
        passed = float(np.interp(tokens, quantiles, POINTS, left=0.0, right=1.0))
        if passed >= POINTS[-1]:  # further than foreseen: half of the way that is left, give or take
            where = (np.arange(count) + 0.5) / count
            return np.ceil(np.maximum(1.0, (self.max_tokens - tokens) * where))
        where = passed + (1 - passed) * (np.arange(count) + 0.5) / count
        return np.ceil(np.maximum(1.0, np.interp(where, POINTS, quantiles) - tokens))

    def spread(self) -> Floats:
        """Relative spread of each quantile between steps: small at the head, large at the last straggler."""
        if len(self.history) < 2:
            return np.full(len(POINTS), PRIOR_SPREAD)
        weights = self._weights()
        away = np.stack(self.history) - self._line()
        return np.sqrt((weights[:, None] * away**2).sum(axis=0) * len(weights) / (len(weights) - 1))

    def _weights(self) -> Floats:
        weights = FADE ** np.arange(len(self.history))[::-1]
        return weights / weights.sum()

    def _trend(self) -> float:
        """Change of the log-length per step, one for all quantiles; only as far as the steps agree on it."""
        if len(self.history) < 3:
            return 0.0
        centres = np.stack(self.history)[:, 32:96].mean(axis=1)
        moves = centres[1:] - centres[:-1]
        error = moves.std(ddof=1) / np.sqrt(len(moves))
        mean = float(moves.mean())
        return float(np.sign(mean) * max(0.0, abs(mean) - error))

    def _line(self) -> Floats:
        """Where the trend says each remembered step should have been."""
        ages = np.arange(len(self.history))[::-1]
        mean = (self._weights()[:, None] * np.stack(self.history)).sum(axis=0)
        mean_age = float((self._weights() * ages).sum())
        return mean[None, :] + self._trend() * (mean_age - ages)[:, None]

    def _centre(self) -> Floats:
        weights, ages = self._weights(), np.arange(len(self.history))[::-1]
        ahead = min(float((weights * ages).sum()) + 1, FADED_STEPS)
        mean = (weights[:, None] * np.stack(self.history)).sum(axis=0)
        return np.maximum.accumulate(mean + self._trend() * ahead)


@lru_cache(maxsize=1024)
def _mixed(count: int) -> NDArray[np.int64]:
    """The numbers below `count` in an order that is always the same."""
    return np.random.default_rng(count).permutation(count)
