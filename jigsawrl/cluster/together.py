"""Packing closer where many groups must change at once: all jobs of many groups are partitioned anew.

Where groups are well filled, none of them can be emptied into one or two others, but by moving a few jobs of each of
many. All sets of the jobs that can be a group are listed, each with what it would cost in the next hours and what the
moves into it cost, and the cheapest choice that takes every job once is searched for. A job that has no time for a
move is in a set only if it stays where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, islice

from jigsawrl.cluster.cover import Column, cheaper
from jigsawrl.cluster.groups import Group, affordable, roomiest
from jigsawrl.cluster.pools import Nodes
from jigsawrl.cluster.regroup import (
    Choice,
    Regrouping,
    least_price,
    movers,
    moving_seconds,
    possible_groups,
)
from jigsawrl.cluster.shapes import Shape, Shapes, Standing

MOST_JOBS, MOST_SETS = 40, 2000
STEPS = 3000
"""Of the search."""
CENT = 0.01
HOURS = 4.0
"""That are looked ahead."""


def regroupings(
    shapes: Shapes,
    groups: Mapping[int, Group],
    nodes: Nodes,
    first: Collection[int],
    new: Collection[str],
    effort: int,
) -> Iterator[Regrouping]:
    """What pays, for the `first` groups and those with most room; `new` jobs have not begun and move for free."""
    some = _pool(groups, first)
    if not some or least_price(shapes, some) >= sum([group.shape.price for group in some]) - CENT:
        return
    standings = {name: each for group in some for name, each in group.standings.items()}
    lost = {name: 0.0 if name in new else moving_seconds(each) for name, each in standings.items()}
    found = possible_groups(shapes, list(standings.values()), MOST_SETS, effort).values()
    choices: list[Choice] = [(group.shape, group) for group in some]
    choices += [(shape, keeper) for shape in found for keeper in _keepers(some, shape, standings, lost)]
    costs = [_cost(shapes, choice, standings, lost) for choice in choices]
    bits = {each: 1 << row for row, each in enumerate([*standings, *(group.number for group in some)])}
    columns = [
        Column(sum([bits[name] for name in shape.seats]) + (bits[keeper.number] if keeper else 0), cost)
        for (shape, keeper), cost in zip(choices, costs, strict=True)
    ]
    chosen = cheaper(columns, len(standings), len(bits), sum(costs[: len(some)]) - CENT, STEPS)
    if chosen is None:
        return
    for old, parts in _apart(some, _settled([choices[k] for k in chosen], some)):
        plan = Regrouping(old, parts)
        gain = sum([_cost(shapes, (group.shape, group), standings, lost) for group in old])
        gain -= sum([_cost(shapes, choice, standings, lost) for choice in parts])
        if plan.saved > CENT and gain > 0 and affordable(nodes, old, [shape for shape, _ in parts]):
            yield plan


def _pool(groups: Mapping[int, Group], first: Collection[int]) -> list[Group]:
    others = roomiest((each for each in groups.values() if each.number not in first), MOST_JOBS)
    found = [*(groups[number] for number in first), *others]
    counts = accumulate([len(group.standings) for group in found])
    return [group for group, count in zip(found, counts, strict=True) if count <= MOST_JOBS]


def _keepers(
    groups: Sequence[Group],
    shape: Shape,
    standings: Mapping[str, Standing],
    lost: Mapping[str, float],
) -> list[Group | None]:
    """Who could take this shape: the group of most of its jobs, and a new one; nobody if not all can move in time."""
    late = {
        name
        for name, slowdown in shape.slowdowns.items()
        if lost[name] and max(1.0, slowdown) > standings[name].bound_after(lost[name])
    }
    there = [
        (-sum([lost[name] for name in shape.seats if name in group.standings]), group.number, group)
        for group in groups
        if shape.seats.keys() & group.standings.keys() and group.shape.pair == shape.pair
    ]
    in_time = (group for _, _, group in sorted(there) if late.isdisjoint(movers(group, shape)))
    return [*islice(in_time, 1), *([] if late else [None])]


def _settled(choices: Sequence[Choice], groups: Sequence[Group]) -> list[Choice]:
    """A new group is not founded for jobs whose own group nobody else takes."""
    kept = {keeper.number for _, keeper in choices if keeper}
    found = []
    for shape, keeper in choices:
        if keeper is None:
            free = (each for each in groups if each.number not in kept and each.shape.pair == shape.pair)
            keeper = next((each for each in free if shape.seats.keys() & each.standings.keys()), None)
            if keeper is not None:
                kept.add(keeper.number)
        found.append((shape, keeper))
    return found


def _cost(
    shapes: Shapes, choice: Choice, standings: Mapping[str, Standing], lost: Mapping[str, float]
) -> float:
    """Dollars of the next hours, each node until its last job is done, and of the moves."""
    (shape, keeper), pools = choice, shapes.cluster.pools
    ends = [
        min(HOURS, standings[turn.name].left / 3600 * seconds / turn.alone)
        for turn, seconds in zip(shape.turns, shape.verdict.seconds, strict=True)
    ]
    dollars = max(ends) * shape.training_nodes * pools[shape.pair[1]].price
    if not shape.shared:
        until = [0.0] * shape.rollout_nodes
        for end, nodes in zip(ends, shape.places, strict=True):
            for node in nodes:
                until[node] = max(until[node], end)
        dollars += sum(until) * pools[shape.pair[0]].price
    moved = sum([lost[name] for name in movers(keeper, shape)])
    return dollars + moved / 3600 * shape.price / len(shape.turns)


def _apart(groups: Sequence[Group], choices: Sequence[Choice]) -> Iterator[tuple[list[Group], list[Choice]]]:
    """Groups that exchange jobs, with their new shapes; each such lot can be done without the others."""
    home = {name: group.number for group in groups for name in group.standings}
    lot = {group.number: group.number for group in groups}
    for shape, _ in choices:
        mine = {lot[home[name]] for name in shape.seats}
        lot = {number: min(mine) if old in mine else old for number, old in lot.items()}
    for number in sorted(set(lot.values())):
        old = [group for group in groups if lot[group.number] == number]
        yield old, [choice for choice in choices if lot[home[choice[0].turns[0].name]] == number]
