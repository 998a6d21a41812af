"""Fits coefficients that are not negative to measurements that are not clean."""

from __future__ import annotations

import numpy as np

from jigsawrl.graph.cost import UNKNOWN, DecodeCost, LinearCost
from jigsawrl.graph.forecast import Floats
from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.shape import ModelShape

ROUNDS = 30
TUKEY = 3.0
"""Errors beyond so many typical ones are taken for outliers."""


def robust(
    columns: Floats,
    seconds: Floats,
    prior: Floats,
    spread: float | Floats,
    weights: float | Floats = 1.0,
) -> tuple[Floats, float]:
    """Least squares of relative errors, outliers weighed down, drawn towards a prior, never negative.

    The prior counts as one measurement of each coefficient with the relative error `spread` against
    measurements whose error is what the fit itself finds. With the coefficients comes their relative error: one
    standard deviation of what was not taken for an outlier.
    """
    count = len(seconds)
    scale = 1 / np.maximum(seconds, 1e-9)
    rows, target = columns * scale[:, None], np.ones(count)
    pull = 1 / np.maximum(np.abs(prior) * spread, 1e-12)
    noise, trust = 0.1, np.ones(count)
    found = prior.copy()
    for _ in range(ROUNDS):
        root = np.sqrt(weights * trust) / noise
        design = np.vstack([rows * root[:, None], np.diag(pull)])
        wanted = np.concatenate([target * root, prior * pull])
        before, found = found, nonnegative(design, wanted)
        off = np.abs(columns @ found - seconds) / np.maximum(columns @ found, 1e-9)
        typical = float(np.median(off)) * 1.4826 if count > 2 else float(np.mean(off))
        noise = min(max(typical, 0.02), 1.0)
        trust = np.minimum(1.0, (TUKEY * noise / np.maximum(off, 1e-9)) ** 2)
        if np.allclose(before, found, rtol=1e-6, atol=0):
            break
    return found, max(noise, 0.1 if count < 3 else 0.0)


def nonnegative(design: Floats, wanted: Floats) -> Floats:
    """Least squares with no coefficient below 0, for a handful of them: by leaving out what would be."""
    found = np.zeros(design.shape[1])
    inside = list(range(len(found)))
    norms = np.maximum(np.linalg.norm(design, axis=0), 1e-300)
    while inside:
        part, *_ = np.linalg.lstsq(design[:, inside] / norms[inside], wanted, rcond=None)
        if part.min() >= 0:
            found[inside] = part / norms[inside]
            break
        del inside[int(part.argmin())]
    return found


def fit_decode(batch: Floats, length: Floats, seconds: Floats, prior: DecodeCost) -> DecodeCost:
    """From single passes. Sizes are weighed alike, so that many passes of one size do not drown the others."""
    keep = (batch >= 1) & (seconds > 0)
    batch, length, seconds = batch[keep], length[keep], seconds[keep]
    if len(batch) < 3:
        return prior
    columns = np.column_stack([np.ones_like(batch), batch, batch * length])
    bins = np.floor(2 * np.log2(np.maximum(batch, 1))).astype(int)
    counts = np.bincount(bins)
    coefficients, error = robust(
        columns,
        seconds,
        np.array([prior.a, prior.b, prior.c]),
        1.0,
        weights=1 / np.sqrt(counts[bins]) * np.sqrt(len(batch) / len(counts)),
    )
    a, b, c = map(float, coefficients)
    return DecodeCost(a, b, c, error)


def fit_linear(
    prior: LinearCost, tokens: Floats, length: Floats, seconds: Floats, weights: float | Floats = 1.0
) -> LinearCost:
    """A fixed part and a part in tokens; attention keeps the prior's proportion to the latter.

    Tokens cost at least half of what the prior says: runs that differ otherwise may seem to show that they are
    free.
    """
    if not len(tokens):
        return prior
    attention = prior.per_token_context / prior.per_token
    work, least = tokens * (1 + attention * length), prior.per_token / 2
    columns = np.column_stack([np.ones_like(tokens), work, work * least])
    (fixed, above, _), error = robust(
        columns,
        seconds,
        np.array([prior.fixed, prior.per_token - least, 1.0]),
        np.array([1.0, 1.0, 1e-4]),
        weights,
    )
    each = float(above) + least
    return LinearCost(float(fixed), each, each * attention, error)


def linear_prior(
    model: ModelShape, hardware: Hardware, gpus: int, passes: float, efficiency: float, fixed: float
) -> LinearCost:
    """Arithmetic over what the workers do at this part of their peak; a training step is three passes, or four
    with recomputation."""
    rate = hardware.flops * gpus * efficiency
    return LinearCost(
        fixed,
        passes * model.flops(1, 0) / rate,
        passes * (model.flops(1, 1) - model.flops(1, 0)) / rate,
        UNKNOWN,
    )
