"""Plausible lengths from what a console log tells of them: mean, maximum, minimum, clipped share."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from jigsawrl.graph.forecast import Floats

MOST_SEQUENCES = 1_000_000
HALVINGS = 24
"""Of the intervals in which the spread and the middle are looked for: lengths are whole numbers."""


def reconstructed_lengths(
    count: int, mean: float, longest: float, shortest: float = 1.0, clipped: float = 0.0
) -> Floats:
    """Quantiles of a log-normal cut at the longest, with the right mean, in a fixed shuffled order.

    The clipped share sits at the longest. The spread is chosen so that the longest of `count` is about where a
    log-normal has it, or, where many are clipped, so that their share comes out; then the middle is moved until
    the mean is right. Shortest, longest and mean are met to within rounding wherever that is possible.
    """
    count = max(1, min(int(count), MOST_SEQUENCES))
    longest = max(1.0, longest)
    shortest = min(max(0.0, shortest), longest)
    mean = min(max(mean, shortest), longest)
    inverse = NormalDist().inv_cdf
    scores = np.array([inverse((i + 0.5) / count) for i in range(count)])
    rank = min(max(1 - clipped, 0.5 / count), 1 - 0.5 / count)

    def drawn(middle: float, sigma: float) -> Floats:
        values = np.exp(np.minimum(middle + sigma * scores, 40.0))
        return np.minimum(np.maximum(values, shortest), longest)

    def with_mean(sigma: float) -> Floats:
        _, middle = _halved(
            np.log(max(shortest, 1.0)) - 8 * sigma - 1,
            np.log(longest) + 8 * sigma + 1,
            lambda middle: drawn(middle, sigma).mean() < mean,
        )
        return drawn(middle, sigma)

    # A wider spread at the same mean lifts the sequence at this rank until it touches the longest.
    at = min(count - 1, max(0, int(rank * count)))
    low, high = _halved(0.01, 3.0, lambda sigma: with_mean(sigma)[at] < longest)
    lengths = with_mean((low + high) / 2)
    lengths[-1] = longest
    lengths[0] = shortest if count > 1 else mean
    inner = lengths[1:-1]
    for _ in range(20):  # What the ends took or gave, the rest makes up for.
        missing = mean * count - lengths.sum()
        room = (longest - inner) if missing > 0 else (inner - shortest)
        total = float(room.sum())
        if abs(missing) < 0.5 or total <= 0:
            break
        inner += np.sign(missing) * room * min(1.0, abs(missing) / total)
    return np.random.default_rng(count).permutation(np.rint(lengths))


def _halved(low: float, high: float, too_low: Callable[[float], bool]) -> tuple[float, float]:
    """The interval between what is too low and what is not, halved again and again."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if too_low(middle):
            low = middle
        else:
            high = middle
    return low, high
