"""The cheapest way to take every row exactly once: which of many sets, each with its cost, make up the whole.

A price for every row is found first, such that the sets look as dear as they can without being overpaid (a Lagrangian
relaxation, by subgradients). Together the prices bound from below what any choice costs; a set that is too much above
its prices is in no cheaper choice and is left out. The rest is searched depth first, the best by these prices first,
for so many steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ITERATIONS = 100
PATIENCE = 8
"""Iterations without a better bound after which steps are halved."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Column:
    """A set that may be chosen."""

    mask: int
    """Its rows, as bits."""
    cost: float


def cheaper(columns: Sequence[Column], musts: int, rows: int, below: float, steps: int) -> list[int] | None:
    """Columns that take each of the first `musts` rows once and the other rows at most once, for less than `below`.

    Every row that must be taken is in some column. None where there is no such choice, or where none was found in so
    many steps.
    """
    bound, reduced = _priced(columns, musts, rows, below)
    if bound >= below:
        return None
    left = [k for k in np.argsort(reduced, kind="stable").tolist() if bound + reduced[k] < below]
    above = {k: max(0.0, float(reduced[k])) for k in left}
    with_row: list[list[int]] = [[k for k in left if columns[k].mask >> row & 1] for row in range(musts)]
    order = sorted(range(musts), key=lambda row: (len(with_row[row]), row))
    best: list[int] | None = None
    chosen: list[int] = []

    def search(taken: int, so_far: float, cost: float) -> None:
        nonlocal best, below, steps
        row = next((row for row in order if not taken >> row & 1), None)
        if row is None:
            if cost < below:
                best, below = list(chosen), cost
            return
        for k in with_row[row]:
            if so_far + above[k] >= below or steps <= 0:
                return
            if not columns[k].mask & taken:
                steps -= 1
                chosen.append(k)
                search(taken | columns[k].mask, so_far + above[k], cost + columns[k].cost)
                chosen.pop()

    search(0, bound, 0.0)
    return best


def _priced(columns: Sequence[Column], musts: int, rows: int, below: float) -> tuple[float, Floats]:
    """A lower bound of what every choice costs, and what each column costs above the prices of its rows."""
    index = _indices(columns, rows)
    costs = np.array([each.cost for each in columns])
    shares = costs / np.maximum(1, (index < musts).sum(axis=1))
    prices = np.full(rows + 1, np.inf)
    np.minimum.at(prices, index, shares[:, None])
    prices[musts:] = 0.0
    best, best_reduced = -np.inf, costs
    factor, since = 1.0, 0
    for _ in range(ITERATIONS):
        reduced = costs - prices[index].sum(axis=1)
        chosen = reduced < 0
        bound = float(prices.sum() + reduced[chosen].sum())
        if bound > best + 1e-9:
            best, best_reduced, since = bound, reduced, 0
        else:
            since += 1
            if since >= PATIENCE:
                factor, since = factor / 2, 0
        slope = 1.0 - np.bincount(index[chosen].ravel(), minlength=rows + 1)
        slope[musts:][(slope[musts:] > 0) & (prices[musts:] >= 0)] = 0.0
        slope[rows] = 0.0
        size = float((slope**2).sum())
        if best >= below or size == 0:
            break
        prices += factor * (below - bound) / size * slope
        prices[musts:] = np.minimum(prices[musts:], 0.0)
    return best, best_reduced


def _indices(columns: Sequence[Column], rows: int) -> NDArray[np.int64]:
    """The rows of each column; one beyond the last row fills up."""
    mine = [[row for row in range(rows) if each.mask >> row & 1] for each in columns]
    widest = max(map(len, mine))
    return np.array([[*each, *[rows] * (widest - len(each))] for each in mine])
