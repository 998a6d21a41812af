"""Plausible lengths from what a console log tells of them: mean, maximum, minimum, clipped share."""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

MOST_SEQUENCES = 1_000_000
HALVINGS = 24
"""Of the intervals in which the spread and the middle are looked for: lengths are whole numbers."""


def reconstructed_lengths(
    count: int, mean: float, longest: float, shortest: float = 1.0, clipped: float = 0.0
) -> NDArray[np.float64]:
    """Quantiles of a log-normal cut at the longest, with the right mean, in a fixed shuffled order.

    The clipped share sits at the longest. The spread is chosen so that the longest of `count` is about where a
    log-normal has it, or, where many are clipped, so that their share comes out; then the middle is moved until
    the mean is right. Shortest, longest and mean are met to within rounding wherever that is possible.
    """
    count = max(1, min(int(count), MOST_SEQUENCES))
    longest = max(1.0, longest)
    shortest = min(max(0.0, shortest), longest)
    mean = min(max(mean, shortest), longest)
    scores = _scores(count)
    rank = min(max(1 - clipped, 0.5 / count), 1 - 0.5 / count)

    def drawn(middle: float, sigma: float) -> NDArray[np.float64]:
        values = np.exp(np.minimum(middle + sigma * scores, 40.0))
        bounded: NDArray[np.float64] = np.minimum(np.maximum(values, shortest), longest)
        return bounded

    def with_mean(sigma: float) -> NDArray[np.float64]:
        low, high = np.log(max(shortest, 1.0)) - 8 * sigma - 1, np.log(longest) + 8 * sigma + 1
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if drawn(middle, sigma).mean() < mean:
                low = middle
            else:
                high = middle
        return drawn(high, sigma)

    # A wider spread at the same mean lifts the sequence at this rank until it touches the longest.
    low, high = 0.01, 3.0
    at = min(count - 1, max(0, int(rank * count)))
    for _ in range(HALVINGS):
        sigma = (low + high) / 2
        if with_mean(sigma)[at] < longest:
            low = sigma
        else:
            high = sigma
    lengths = with_mean((low + high) / 2)
    lengths[0] = shortest
    if count > 1:
        lengths[-1] = longest
        inner = lengths[1:-1]
        if inner.size:
            # What the ends took or gave, the rest makes up for.
            for _ in range(20):
                missing = mean * count - lengths.sum()
                if abs(missing) < 0.5:
                    break
                room = (longest - inner) if missing > 0 else (inner - shortest)
                total = float(room.sum())
                if total <= 0:
                    break
                inner += np.sign(missing) * room * min(1.0, abs(missing) / total)
    else:
        lengths[0] = mean
    shuffled: NDArray[np.float64] = np.random.default_rng(count).permutation(np.rint(lengths))
    return shuffled


@lru_cache(maxsize=4)
def _scores(count: int) -> NDArray[np.float64]:
    """Quantiles of a normal distribution."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
