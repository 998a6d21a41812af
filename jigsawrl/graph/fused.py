"""Rollouts on one frozen base decode in one batch: beside others they count as one, and hardly disturb each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from jigsawrl.graph.interference import Signature

FUSED = 0.95
"""Speed that each more in a batch leaves to those in it: on an H200 four decodes of 16 sequences fused into one of 64
go 3.4 times as fast as one after the other, 0.85 each."""
DEMAND: dict[Signature, int] = {"host": 0, "link": 1, "tail": 2, "bulk": 3, "prefill": 4, "compute": 5}
"""The most demanding of a batch binds all of it."""

Occupant = TypeVar("Occupant")


def speeds_with_fused(
    occupants: Sequence[Occupant],
    bases: Sequence[str],
    join: Callable[[Sequence[Occupant]], Occupant],
    speeds: Callable[[tuple[Occupant, ...]], Sequence[float]],
) -> tuple[float, ...]:
    """Of all occupants of a worker, where those of one base (not empty) are in one batch.

    `join` makes one occupant of several; `speeds` are those of occupants that have nothing in common.
    """
    batches: dict[object, list[int]] = {}
    for number, base in enumerate(bases):
        batches.setdefault(base or number, []).append(number)
    joined = tuple(join([occupants[n] for n in batch]) for batch in batches.values())
    found = [0.0] * len(occupants)
    for batch, speed in zip(batches.values(), speeds(joined), strict=True):
        for number in batch:
            found[number] = speed * FUSED ** (len(batch) - 1)
    return tuple(found)


def most_demanding(signatures: Sequence[Signature]) -> Signature:
    return max(signatures, key=lambda signature: DEMAND[signature])


def in_one_batch(signature: Signature, phase: str, base: str) -> str:
    """The base whose batch it is in now; empty: it is in none with others."""
    return base if phase == "rollout" and DEMAND[signature] >= DEMAND["tail"] else ""
