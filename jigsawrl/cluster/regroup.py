"""Packing closer: the jobs of a group and of one or two others are partitioned anew, if that pays for the moves.

All partitions of so few jobs are looked at. A move costs the job the step it was in, and a cold start, and its
nodes idle meanwhile; a job whose promise leaves no time for that does not move.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from jigsawrl.cluster.groups import Group, named
from jigsawrl.cluster.nodes import Nodes
from jigsawrl.cluster.shapes import Shape, Shapes, Standing

MOST_JOBS = 9
"""In these groups together, for all their partitions to be looked at."""
NEIGHBOURS = 24
"""Other groups that are tried, those with most room first."""
CLOSEST = 12
"""Of these, in twos."""
EFFORT = 700
"""A decision takes some 50 ms with it, however many jobs there are."""
HORIZON = 12.0
"""Hours for which a saving is counted, at most: by then others have come and gone."""


@dataclass(frozen=True, slots=True)
class Regrouping:
    """New shapes for the jobs of some groups."""

    groups: tuple[int, ...]
    jobs: tuple[str, ...]
    shapes: tuple[Shape, ...]
    kept: tuple[int | None, ...]
    """The group that becomes each shape; None: a new one."""
    saved: float
    """Dollars an hour."""


def moving_seconds(standing: Standing) -> float:
    """What a move costs a job, at most: the step it was in, a cold start, and the wait for its first turn."""
    return 2 * standing.alone + standing.job.cold_seconds


@dataclass(slots=True)
class Effort:
    """What may still be looked at for one decision: partitions, and sets of jobs that were not judged before."""

    left: int = EFFORT


def better(
    shapes: Shapes, groups: Mapping[int, Group], nodes: Nodes, group: Group, effort: Effort
) -> Regrouping | None:
    """The regrouping of this group with others that gains most; None where none pays."""
    others = sorted(
        (each for each in groups.values() if each is not group),
        key=lambda each: (-each.room.total, each.number),
    )[:NEIGHBOURS]
    best: tuple[float, Regrouping] | None = None
    for some in _sets(group, others):
        if effort.left <= 0:
            break
        if least_price(shapes, some) >= _price(some) * (1 - 1e-9):
            continue
        before = shapes.judged
        found = _regrouped(shapes, nodes, some)
        effort.left -= 1 + shapes.judged - before
        if found is not None and (best is None or found[0] > best[0]):
            best = found
    return best[1] if best else None


def _sets(group: Group, others: Sequence[Group]) -> Iterator[tuple[Group, ...]]:
    """The group alone, with one other, with two others; never too many jobs."""
    yield (group,)
    for more in (1, 2):
        for some in combinations(others if more == 1 else others[:CLOSEST], more):
            if len(group.standings) + sum(len(each.standings) for each in some) <= MOST_JOBS:
                yield (group, *some)


def _price(groups: Iterable[Group]) -> float:
    return sum(each.shape.price for each in groups)


def least_price(shapes: Shapes, groups: Sequence[Group]) -> float:
    """No grouping of these jobs costs less: every node is busy for all of the time at most. 0 if nothing is known."""
    pair = groups[0].shape.pair
    if any(each.shape.pair != pair for each in groups) or pair[0] == pair[1]:
        return 0.0
    rollout = training = 0.0
    for group in groups:
        for turn in group.shape.turns:
            job = group.standings[turn.name].job
            training += (turn.training - turn.warm) / turn.limit * group.shape.training_nodes
            rollout += (turn.hold - turn.warm) / turn.limit * job.rollout_nodes
    return shapes.price(pair, max(1, math.ceil(rollout - 1e-6)), max(1, math.ceil(training - 1e-6)))


def possible_groups(
    shapes: Shapes, standings: Sequence[Standing], most: float = math.inf
) -> dict[int, Shape]:
    """Every set of these jobs that can be a group, as bits, with its cheapest shape; given up beyond so many.

    What is not possible is not possible with more jobs either, so sets grow from possible ones. (But for a newcomer
    who trains on more nodes: sets that only he makes possible are left out.)
    """
    found: dict[int, Shape] = {}
    grown: list[int] = []
    for k, standing in enumerate(standings):
        shape = shapes.best([standing])
        if shape is not None:
            found[1 << k] = shape
            grown.append(1 << k)
    while grown and len(found) <= most:
        larger = []
        for mask in grown:
            for k in range(mask.bit_length(), len(standings)):
                more = mask | 1 << k
                if _all_possible(more, found):
                    shape = shapes.best([each for i, each in enumerate(standings) if more >> i & 1])
                    if shape is not None:
                        found[more] = shape
                        larger.append(more)
        grown = larger
    return found


def _all_possible(mask: int, found: Mapping[int, Shape]) -> bool:
    """Whether all sets with one job less are possible."""
    rest = mask
    while rest:
        lowest = rest & -rest
        if mask ^ lowest not in found:
            return False
        rest ^= lowest
    return True


def cheapest_partition(shapes: Shapes, standings: Sequence[Standing]) -> tuple[float, list[Shape]] | None:
    """Of a few jobs into groups; None where someone cannot be in any."""
    found = possible_groups(shapes, standings)
    parts: list[list[tuple[int, float]]] = [[] for _ in standings]
    for mask, shape in found.items():
        parts[(mask & -mask).bit_length() - 1].append((mask, shape.price))
    kept: dict[int, tuple[float, int]] = {0: (0.0, 0)}

    def price(left: int) -> float:
        if left not in kept:
            best, chosen = math.inf, 0
            for mask, part in parts[(left & -left).bit_length() - 1]:
                if mask & ~left == 0:
                    whole = part + price(left ^ mask)
                    if whole < best - 1e-9:
                        best, chosen = whole, mask
            kept[left] = best, chosen
        return kept[left][0]

    left = (1 << len(standings)) - 1
    total = price(left)
    if math.isinf(total):
        return None
    chosen = []
    while left:
        mask = kept[left][1]
        chosen.append(found[mask])
        left ^= mask
    return total, chosen


def _regrouped(shapes: Shapes, nodes: Nodes, groups: Sequence[Group]) -> tuple[float, Regrouping] | None:
    standings = [each for group in groups for each in group.standings.values()]
    found = cheapest_partition(shapes, standings)
    before = _price(groups)
    if found is None or found[0] >= before * (1 - 1e-9) or not _affordable(nodes, groups, found[1]):
        return None
    price, parts = found
    kept = _kept(groups, parts)
    by_number = {group.number: group for group in groups}
    cost = 0.0
    for shape, number in zip(parts, kept, strict=True):
        stays = _stays(by_number[number], shape) if number is not None else set()
        for turn in shape.turns:
            if turn.name in stays:
                continue
            standing = next(each for each in standings if each.job.name == turn.name)
            lost = moving_seconds(standing)
            if shape.slowdown(turn.name) > (standing.allowed - lost) / max(standing.left, 1e-9):
                return None
            cost += lost / 3600 * shape.price
    hours = sum(each.left for each in standings) / len(standings) / 3600
    gain = (before - price) * min(HORIZON, hours) - cost
    if gain <= 0:
        return None
    numbers = tuple(group.number for group in groups)
    jobs = tuple(each.job.name for each in standings)
    return gain, Regrouping(numbers, jobs, tuple(parts), tuple(kept), before - price)


def _affordable(nodes: Nodes, groups: Sequence[Group], parts: Sequence[Shape]) -> bool:
    """Whether there are as many nodes; those that the groups have are theirs to use."""
    more: dict[str, int] = {}
    for sign, some in ((1, parts), (-1, [group.shape for group in groups])):
        for shape in some:
            more[shape.pair[1]] = more.get(shape.pair[1], 0) + sign * shape.training_nodes
            if not shape.shared:
                more[shape.pair[0]] = more.get(shape.pair[0], 0) + sign * shape.rollout_nodes
    return all(count <= nodes.left(pool) for pool, count in more.items())


def _kept(groups: Sequence[Group], parts: Sequence[Shape]) -> list[int | None]:
    """Each new shape goes to the group of which it has most, if that one is in the same pools and still free."""
    kept: list[int | None] = [None] * len(parts)
    common = [
        (len({turn.name for turn in part.turns} & set(group.standings)), -place, group.number)
        for place, part in enumerate(parts)
        for group in groups
        if part.pair == group.shape.pair
    ]
    for count, place, number in sorted(common, reverse=True):
        if count and kept[-place] is None and number not in kept:
            kept[-place] = number
    return kept


def _stays(group: Group, shape: Shape) -> set[str]:
    """Jobs that keep all their nodes when a group takes another shape."""
    if shape.training_nodes != group.shape.training_nodes:
        return set()
    names = group.rollout_nodes if shape.shared else named(group, shape)
    stays = set()
    for turn, nodes in zip(shape.turns, shape.places, strict=True):
        if turn.name in group.standings:
            old, _ = group.nodes_of(turn.name)
            if old == {names[node] for node in nodes}:
                stays.add(turn.name)
    return stays
