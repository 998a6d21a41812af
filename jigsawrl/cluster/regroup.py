"""Packing closer: the jobs of a group and of a few others are partitioned anew, if that pays for the moves.

All partitions of so few jobs are looked at. A move costs the job the step it was in, and a cold start, and its
part of the nodes idles meanwhile; a job whose promise leaves no time for that does not move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from jigsawrl.cluster.groups import Group, affordable, named, roomiest
from jigsawrl.cluster.pools import Nodes
from jigsawrl.cluster.shapes import Shape, Shapes, Standing, widths

NEAR = {0: 0, 1: 24, 2: 12}
"""Of how many groups with most room how many are taken together with one: {how many: of how many}."""
MOST_JOBS = 9
"""Of groups taken together, for all their partitions to be looked at."""
EFFORT, EFFORT_OF_FEW = 450, 20_000
"""What may be looked at for one decision: partitions, and sets of jobs that were not judged before. For all jobs at
once so many sets over the number of jobs, for of few much can be looked at."""
HORIZON = 12.0
"""Hours that are looked ahead, at most: by then others have come and gone."""


Choice = tuple[Shape, Group | None]
"""A new shape and the group that takes it; None: a new group."""


@dataclass(frozen=True, slots=True)
class Regrouping:
    """New shapes for the jobs of some groups."""

    groups: Sequence[Group]
    choices: Sequence[Choice]

    @property
    def saved(self) -> float:
        """Dollars an hour less than before; it says so only until the groups have changed."""
        before = sum([group.shape.price for group in self.groups])
        return before - sum([shape.price for shape, _ in self.choices])


def moving_seconds(standing: Standing) -> float:
    """What a move costs a job, at most: the step it was in, a cold start, and the wait for its first turn."""
    return 2 * standing.alone + standing.job.cold_seconds


def better(
    shapes: Shapes, groups: Mapping[int, Group], nodes: Nodes, group: Group, until: int
) -> Regrouping | None:
    """The regrouping of this group with others that gains most; None where none pays.

    It goes on looking as long as `shapes.looked` is less than `until`.
    """
    others = roomiest((each for each in groups.values() if each is not group), max(NEAR.values()))
    best: tuple[float, Regrouping] | None = None
    sets = ((group, *some) for more, closest in NEAR.items() for some in combinations(others[:closest], more))
    for some in sets:
        if shapes.looked >= until:
            break
        standings = [each for one in some for each in one.standings.values()]
        worth = 0.0 if shapes.surely else sum([shapes.worth(each) for each in standings])
        if len(standings) > MOST_JOBS or least_price(shapes, some) - worth >= _cost(some) - 1e-9:
            continue
        shapes.looked += 1
        found = _regrouped(shapes, nodes, some)
        if found is not None and (best is None or found[0] > best[0]):
            best = found
    return best[1] if best else None


def _cost(groups: Sequence[Group]) -> float:
    return sum([each.shape.cost for each in groups])


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
    shapes: Shapes, standings: Sequence[Standing], most: float = math.inf, effort: float = math.inf
) -> dict[int, Shape]:
    """Every set of these jobs that can be a group, as bits, with its cheapest shape.

    Given up beyond so many sets, or when so many that were not known were judged: what was found until then, smaller
    sets first.

    What is not possible is not possible with more jobs either, so sets grow from possible ones; unless who comes
    trains on more nodes than all others, on which everyone's training takes less.
    """
    wide = [[widths(each.job, pair)[1] for pair in shapes.cluster.pairs] for each in standings]
    alike = all(each == wide[0] for each in wide)
    alone = {1 << k: shapes.best([each]) for k, each in enumerate(standings)}
    found = {mask: shape for mask, shape in alone.items() if shape is not None}
    until = shapes.looked + effort
    grown = list(found)
    while grown and len(found) <= most:
        larger = dict.fromkeys(
            mask | 1 << k
            for mask in grown
            for k in range(mask.bit_length() if alike else 0, len(standings))
            if not mask >> k & 1
        )
        grown = []
        for mask in larger:
            if _may_be(mask, found, wide):
                shape = shapes.best([each for k, each in enumerate(standings) if mask >> k & 1])
                if shape is not None:
                    found[mask] = shape
                    grown.append(mask)
                if shapes.looked >= until:
                    return found
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
    versions = sorted([each.version for each in standings])
    return shapes.partitions.answer(tuple(versions), lambda: _partition(shapes, standings))


def _partition(shapes: Shapes, standings: Sequence[Standing]) -> tuple[float, list[Shape]] | None:
    found = possible_groups(shapes, standings)
    parts: list[list[tuple[int, float]]] = [[] for _ in standings]
    for mask, shape in found.items():
        parts[(mask & -mask).bit_length() - 1].append((mask, shape.cost))

    @cache
    def best(left: int) -> tuple[float, tuple[int, ...]]:
        """The cost of these jobs in groups, and the groups."""
        if not left:
            return 0.0, ()
        least: tuple[float, tuple[int, ...]] = (math.inf, ())
        for mask, cost in parts[(left & -left).bit_length() - 1]:
            if mask & ~left == 0:
                rest, others = best(left ^ mask)
                if cost + rest < least[0] - 1e-9:
                    least = cost + rest, (mask, *others)
        return least

    total, chosen = best((1 << len(standings)) - 1)
    return None if math.isinf(total) else (total, [found[mask] for mask in chosen])


def _regrouped(shapes: Shapes, nodes: Nodes, groups: Sequence[Group]) -> tuple[float, Regrouping] | None:
    standings = {name: each for group in groups for name, each in group.standings.items()}
    found = cheapest_partition(shapes, list(standings.values()))
    if found is None or found[0] >= _cost(groups) - 1e-9 or not affordable(nodes, groups, found[1]):
        return None
    choices = _kept(groups, found[1])
    gain = sum(bill(shapes, group.shape, standings) for group in groups)
    for shape, keeper in choices:
        gain -= bill(shapes, shape, standings)
        for name in movers(keeper, shape):
            lost = moving_seconds(standings[name])
            if max(1.0, shape.slowdown(name)) > standings[name].bound_after(lost):
                return None  # at least alone it keeps its promise, whatever becomes of the group
            gain -= lost / 3600 * shape.price / len(shape.turns)
    return (gain, Regrouping(groups, choices)) if gain > 0 else None


def bill(shapes: Shapes, shape: Shape, standings: Mapping[str, Standing]) -> float:
    """Dollars that a group will cost until all of its jobs are done, if nobody else comes.

    As jobs end one after the other, nodes are given back and the rest waits less. What is left to do beyond the
    horizon is paid for as work is on the mean, where plans tell how much that is; worst cases do not.
    """
    left = {turn.name: standings[turn.name].left / 3600 for turn in shape.turns}
    dollars, hours = 0.0, HORIZON
    while True:
        pace = shape.slowdowns
        span = min(hours, min(left[name] * pace[name] for name in left))
        dollars += shape.price * span
        hours -= span
        after = {name: each - span / pace[name] for name, each in left.items()}
        left = {name: each for name, each in after.items() if each > 1e-6}
        if not left or hours <= 0:
            rest = {} if shapes.surely else left
            return dollars + sum(shapes.worth(standings[name]) * each for name, each in rest.items())
        fewer = shapes.without(shape, standings, after.keys() - left.keys(), forced=True)
        assert fewer is not None
        shape = fewer


def _kept(groups: Sequence[Group], parts: Sequence[Shape]) -> list[Choice]:
    """Each new shape goes to the group of which it has most, if that one is in the same pools and still free."""
    kept: dict[int, Group] = {}
    common = [
        (len(part.seats.keys() & group.standings.keys()), -place, group.number, group)
        for place, part in enumerate(parts)
        for group in groups
        if part.pair == group.shape.pair
    ]
    for count, place, _, group in sorted(common, reverse=True):
        if count and -place not in kept and group not in kept.values():
            kept[-place] = group
    return [(part, kept.get(place)) for place, part in enumerate(parts)]


def movers(group: Group | None, shape: Shape) -> list[str]:
    """Jobs that do not keep all their nodes when a group (None: a new one) takes another shape."""
    if group is None or shape.training_nodes != group.shape.training_nodes:
        return list(shape.seats)
    names = group.rollout_nodes if shape.shared else named(group, shape)
    had = {name: rollout for name, (rollout, _) in group.seats().items()}
    now = {name: frozenset([names[node] for node in nodes]) for name, nodes in shape.seats.items()}
    return [name for name, nodes in now.items() if had.get(name) != nodes]
