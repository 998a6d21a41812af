"""Packing closer: the jobs of a group and of a few others are partitioned anew, if that pays for the moves.

All partitions of so few jobs are looked at. A move costs the job the step it was in, and a cold start, and its
part of the nodes idles meanwhile; a job whose promise leaves no time for that does not move.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from jigsawrl.cluster.groups import Group, named
from jigsawrl.cluster.nodes import Nodes
from jigsawrl.cluster.shapes import KEPT, Shape, Shapes, Standing, widths

NEAR = {1: (24, 9), 2: (12, 9)}
"""Other groups that are taken together: of how many, those with most room first, and with how many jobs at most, for
all their partitions to be looked at."""
EFFORT, EFFORT_OF_FEW = 450, 20_000
"""For one decision; and for all jobs at once so many over the number of jobs, for of few much can be looked at."""
HORIZON = 12.0
"""Hours that are looked ahead, at most: by then others have come and gone."""


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

    left: int

    @staticmethod
    def together(jobs: int) -> Effort:
        """For all of them at once."""
        return Effort(EFFORT_OF_FEW // max(1, jobs))


def better(
    shapes: Shapes, groups: Mapping[int, Group], nodes: Nodes, group: Group, effort: Effort
) -> Regrouping | None:
    """The regrouping of this group with others that gains most; None where none pays."""
    others = heapq.nsmallest(
        NEAR[1][0],
        (each for each in groups.values() if each is not group),
        key=lambda each: (-each.room.total, each.number),
    )
    best: tuple[float, Regrouping] | None = None
    for some in _sets(group, others):
        if effort.left <= 0:
            break
        if least_price(shapes, some) - _worth(shapes, some) >= _cost(some) - 1e-9:
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
    for more, (closest, most_jobs) in NEAR.items():
        for some in combinations(others[:closest], more):
            if len(group.standings) + sum([len(each.standings) for each in some]) <= most_jobs:
                yield (group, *some)


def _cost(groups: Iterable[Group]) -> float:
    return sum([each.shape.cost for each in groups])


def _worth(shapes: Shapes, groups: Iterable[Group]) -> float:
    """Of all that is done in an hour, if nobody waits; 0 where costs are prices."""
    if shapes.surely:
        return 0.0
    return sum([shapes.worth(each) for group in groups for each in group.standings.values()])


def least_price(shapes: Shapes, groups: Sequence[Group]) -> float:
    """No grouping of these jobs costs less: every node is busy for all of the time at most. 0 if nothing is known."""
    pair = groups[0].shape.pair
    if any(each.shape.pair != pair for each in groups) or pair[0] == pair[1]:
        return 0.0
    rollout = training = 0.0
    for group in groups:
        for turn in group.shape.turns:
            job = group.standings[turn.name].job
            slowest = max(turn.limit, turn.step)
            training += (turn.training - turn.warm) / slowest * group.shape.training_nodes
            rollout += (turn.hold - turn.warm) / slowest * job.rollout_nodes
    return shapes.price(pair, max(1, math.ceil(rollout - 1e-6)), max(1, math.ceil(training - 1e-6)))


def possible_groups(
    shapes: Shapes, standings: Sequence[Standing], most: float = math.inf, effort: Effort | None = None
) -> dict[int, Shape]:
    """Every set of these jobs that can be a group, as bits, with its cheapest shape.

    Given up beyond so many sets, or when the effort is spent: what was found until then, smaller sets first.

    What is not possible is not possible with more jobs either, so sets grow from possible ones; unless who comes
    trains on more nodes than all others, on which everyone's training takes less.
    """
    found: dict[int, Shape] = {}
    wide = [[widths(each.job, pair)[1] for pair in shapes.cluster.pairs] for each in standings]
    for k, standing in enumerate(standings):
        shape = shapes.best([standing])
        if shape is not None:
            found[1 << k] = shape
    alike = all(each == wide[0] for each in wide)
    grown = list(found)
    while grown and len(found) <= most:
        tried = set()
        larger = []
        for mask in grown:
            for k in range(mask.bit_length() if alike else 0, len(standings)):
                more = mask | 1 << k
                if more == mask or more in tried:
                    continue
                tried.add(more)
                if _may_be(more, found, wide):
                    before = shapes.judged
                    shape = shapes.best([each for i, each in enumerate(standings) if more >> i & 1])
                    if shape is not None:
                        found[more] = shape
                        larger.append(more)
                    if effort is not None:
                        effort.left -= shapes.judged - before
                        if effort.left <= 0:
                            return found
        grown = larger
    return found


def _may_be(mask: int, found: Mapping[int, Shape], wide: Sequence[Sequence[int]]) -> bool:
    """Whether all sets with one job less are possible, but those without the one that trains on most nodes."""
    rest = mask
    while rest:
        lowest = rest & -rest
        if mask ^ lowest not in found:
            mine = wide[lowest.bit_length() - 1]
            others = [each for k, each in enumerate(wide) if (mask ^ lowest) >> k & 1]
            if all(width <= max(each) for width, *each in zip(mine, *others, strict=True)):
                return False
        rest ^= lowest
    return True


def cheapest_partition(shapes: Shapes, standings: Sequence[Standing]) -> tuple[float, list[Shape]] | None:
    """Of a few jobs into groups; None where someone cannot be in any. Asked again, it answers from memory."""
    key = tuple(sorted([each.version for each in standings]))
    if key not in shapes.partitions:
        if len(shapes.partitions) >= KEPT:
            shapes.partitions.clear()
        shapes.partitions[key] = _partition(shapes, standings)
    return shapes.partitions[key]


def _partition(shapes: Shapes, standings: Sequence[Standing]) -> tuple[float, list[Shape]] | None:
    found = possible_groups(shapes, standings)
    parts: list[list[tuple[int, float]]] = [[] for _ in standings]
    for mask, shape in found.items():
        parts[(mask & -mask).bit_length() - 1].append((mask, shape.cost))
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
    standings = {name: each for group in groups for name, each in group.standings.items()}
    found = cheapest_partition(shapes, list(standings.values()))
    if found is None or found[0] >= _cost(groups) - 1e-9 or not affordable(nodes, groups, found[1]):
        return None
    parts = found[1]
    kept = _kept(groups, parts)
    by_number = {group.number: group for group in groups}
    gain = sum(bill(shapes, group.shape, standings) for group in groups)
    for shape, number in zip(parts, kept, strict=True):
        gain -= bill(shapes, shape, standings)
        there = stays(by_number[number], shape) if number is not None else set()
        for turn in shape.turns:
            if turn.name in there:
                continue
            standing = standings[turn.name]
            lost = moving_seconds(standing)
            if max(1.0, shape.slowdown(turn.name)) > standing.bound_after(lost):
                return None  # at least alone it keeps its promise, whatever becomes of the group
            gain -= lost / 3600 * shape.price / len(shape.turns)
    if gain <= 0:
        return None
    numbers = tuple(group.number for group in groups)
    saved = sum(group.shape.price for group in groups) - sum(shape.price for shape in parts)
    return gain, Regrouping(numbers, tuple(standings), tuple(parts), tuple(kept), saved)


def bill(shapes: Shapes, shape: Shape, standings: Mapping[str, Standing]) -> float:
    """Dollars that a group will cost until all of its jobs are done, if nobody else comes.

    As jobs end one after the other, nodes are given back and the rest waits less. What is left to do beyond the
    horizon is paid for as work is on the mean, where plans tell how much that is; worst cases do not.
    """
    left = {turn.name: standings[turn.name].left / 3600 for turn in shape.turns}
    dollars, hours = 0.0, HORIZON
    while True:
        pace = {t.name: s / t.alone for t, s in zip(shape.turns, shape.verdict.seconds, strict=True)}
        span = min(hours, min(left[name] * pace[name] for name in left))
        dollars += shape.price * span
        hours -= span
        left = {name: each - span / pace[name] for name, each in left.items()}
        ended = {name for name, each in left.items() if each <= 1e-6}
        left = {name: each for name, each in left.items() if name not in ended}
        if not left or hours <= 0:
            rest = {} if shapes.surely else left
            return dollars + sum(shapes.worth(standings[name]) * each for name, each in rest.items())
        fewer = shapes.without(shape, standings, ended, forced=True)
        assert fewer is not None
        shape = fewer


def affordable(nodes: Nodes, groups: Sequence[Group], parts: Sequence[Shape]) -> bool:
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


def stays(group: Group, shape: Shape) -> set[str]:
    """Jobs that keep all their nodes when a group takes another shape."""
    if shape.training_nodes != group.shape.training_nodes:
        return set()
    names = group.rollout_nodes if shape.shared else named(group, shape)
    found = set()
    for turn, nodes in zip(shape.turns, shape.places, strict=True):
        if turn.name in group.standings:
            old, _ = group.nodes_of(turn.name)
            if old == {names[node] for node in nodes}:
                found.add(turn.name)
    return found
