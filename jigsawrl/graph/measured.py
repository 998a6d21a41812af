"""An interference table from what was measured of sharing a GPU. Pure.

Rollouts are never held to a part of a GPU, trainings are. So what a rollout has is what a training beside it leaves
free: on `share` of a worker it is as fast as beside a training that keeps to the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations_with_replacement

from jigsawrl.graph.interference import (
    H200,
    LEVELS,
    ROLLOUTS,
    Crowd,
    Curve,
    Felt,
    Interference,
    Occupant,
    Signature,
    at,
)

Side = tuple[Signature, int]
"""What runs, and to how many of LEVELS it keeps; a rollout keeps to all."""
Measured = Mapping[tuple[Side, ...], tuple[float, ...]]
"""Speeds of what ran together, each relative to alone on the whole worker."""

ALL = LEVELS
HELD = (8, 10, 12, 14)
"""Levels at which a training is measured beside a rollout."""
PARTS = (4, *HELD)
"""Levels at which it is measured alone."""
BEST = 10
"""The level at which it does best beside a rollout."""
SIZES = 3
"""Of batches that each kind of decoding is measured with, where `sizes` says so."""
BEYOND = 2.0
"""Three neighbours of a kind take as much as one takes so many times over, where three were not measured; it was 1.75
with tails and 2.5 with larger batches."""
OF_EIGHT = 1.1
"""Times as much in all as four get done that eight get done; it was 1.1 to 1.2."""


def crowds(most: int, divisible: bool) -> list[tuple[Side, ...]]:
    """What to measure, at most so many together: each alone, pairs, and more, trainings at several levels."""
    held = HELD if divisible else ()
    tail, bulk, prefill = rollouts = [(kind, ALL) for kind in ROLLOUTS]
    training: Side = ("compute", ALL)
    found: list[tuple[Side, ...]] = [*((rollout,) for rollout in rollouts), (training,)]
    found += [(("compute", level),) for level in PARTS if divisible]
    found += [(rollout, ("compute", level)) for rollout in rollouts for level in (*held, ALL)]
    found += [*combinations_with_replacement(rollouts, 2), (training, training)]
    best = BEST if held else ALL
    if most >= 3:
        found += [(tail, other, ("compute", best)) for other in (bulk, prefill)]
        found += [(rollout, training, training) for rollout in (tail, bulk)]
    if most >= 4:
        for one, other in ((tail, bulk), (bulk, tail)):
            found += [(one,) * 4, (one, *(other,) * 3), (*(one,) * 3, ("compute", best))]
    return found


def sizes(crowd: tuple[Side, ...]) -> range:
    """Which of its batch sizes a crowd is measured with: all of them alone, and in pairs where a training has all or
    what it does best with; else the middle one."""
    whole = all(kind != "compute" or level in (BEST, ALL) for kind, level in crowd)
    decodes = any(kind in ("tail", "bulk") for kind, _ in crowd)
    return range(SIZES) if len(crowd) <= 2 and whole and decodes else range(SIZES // 2, SIZES // 2 + 1)


def table_from(measured: Measured, name: str, source: str) -> Interference:
    """Curves through the measured points; what more than two felt beyond them is learned already."""
    alone: dict[Signature, Curve] = {"compute": _training_alone(measured)}
    beside: dict[tuple[Signature, Signature], Curve] = {("link", "link"): H200.beside["link", "link"]}
    for kind in ROLLOUTS:
        alone[kind], beside[kind, "compute"], beside["compute", kind] = _with_training(
            measured, kind, alone["compute"]
        )
    beside |= {(one, other): _rollouts(measured, one, other) for one in ROLLOUTS for other in ROLLOUTS}
    both = sum(measured[("compute", ALL), ("compute", ALL)])
    beside["compute", "compute"] = ((0, 1.0), (1, min(1.0, both / 2 / at(alone["compute"], 0.5))))
    table = Interference(name, source, alone, beside)
    return Interference(name, source, alone, beside, _beyond(measured, table))


def _training_alone(measured: Measured) -> Curve:
    """Never slower on more: what is lost on an odd number of processors is won back by using fewer of them."""
    points = [(0.0, 0.0)]
    for level in (*PARTS, ALL):
        if speeds := measured.get((("compute", level),)):
            points.append((level / LEVELS, min(1.0, max(speeds[0], points[-1][1]))))
    return tuple(points)


def _with_training(measured: Measured, kind: Signature, training: Curve) -> tuple[Curve, Curve, Curve]:
    """A rollout's speed on a share, what a training leaves of it, and what it leaves of a training."""
    pairs = {
        level: measured[(kind, ALL), ("compute", level)]
        for level in (*HELD, ALL)
        if ((kind, ALL), ("compute", level)) in measured
    }
    most = pairs[min(pairs)][0]
    points = [(0.0, 0.0)]
    for level in sorted(pairs.keys() - {ALL}, reverse=True):
        points.append((1 - level / LEVELS, min(1.0, max(pairs[level][0] / most, points[-1][1]))))
    best = max(pairs, key=lambda level: sum(pairs[level]))
    left = pairs[best][1] / at(training, best / LEVELS)
    felt = [(0.0, 1.0), (1.0, min(1.0, most))]
    feels = [(0.0, 1.0), (1.0, min(1.0, left))]
    if twice := measured.get(((kind, ALL), ("compute", ALL), ("compute", ALL))):
        felt.append((2.0, min(felt[-1][1], twice[0] / at((*points, (1.0, 1.0)), 1 / 3))))
    for key, speeds in measured.items():
        if key[:3] == ((kind, ALL),) * 3 and key[3:] and key[3][0] == "compute":
            feels.append((3.0, min(1.0, speeds[3] / at(training, key[3][1] / LEVELS))))
    return (*points, (1.0, 1.0)), tuple(felt), tuple(feels)


def _rollouts(measured: Measured, one: Signature, other: Signature) -> Curve:
    """What others of a kind leave of a rollout."""
    points: list[tuple[float, float]] = [(0.0, 1.0)]
    for count in (1, 3):
        key = ((one, ALL), *((other, ALL),) * count)
        turned = (*((other, ALL),) * count, (one, ALL))
        if key in measured:
            points.append((float(count), measured[key][0] if one != other else sum(measured[key]) / len(key)))
        elif turned in measured:
            points.append((float(count), measured[turned][-1]))
    if len(points) == 2:
        points.append((3.0, points[1][1] ** BEYOND))
    return (*points, (7.0, OF_EIGHT * points[2][1] / 2))


def _beyond(measured: Measured, table: Interference) -> dict[Crowd, Felt]:
    """Of crowds of three and more with a training: by how much they are off what the curves say."""
    found: dict[Crowd, Felt] = {}
    for key, speeds in measured.items():
        trainings = [level for kind, level in key if kind == "compute"]
        if len(key) >= 3 and len(trainings) == 1 and trainings[0] != ALL:
            left = (1 - trainings[0] / LEVELS) / (len(key) - 1)
            there = [Occupant(kind, level / LEVELS if kind == "compute" else left) for kind, level in key]
            for place, (own, speed) in enumerate(zip(there, speeds, strict=True)):
                others = there[:place] + there[place + 1 :]
                crowd = own.signature, tuple(sorted(each.signature for each in others))
                found[crowd] = Felt(speed / table.speed(own, others), 1.0)
    return found
