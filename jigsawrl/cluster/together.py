"""Packing closer where many groups must change at once: all jobs of many groups are partitioned anew.

Where groups are well filled, none of them can be emptied into one or two others, but by moving a few jobs of each of
many. All sets of the jobs that can be a group are listed, each with what it would cost in the next hours and what the
moves into it cost, and the cheapest choice that takes every job once is searched for. A job that has no time for a
move is in a set only if it stays where it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence

from jigsawrl.cluster.cover import Column, cheaper
from jigsawrl.cluster.groups import Group
from jigsawrl.cluster.nodes import Nodes
from jigsawrl.cluster.regroup import (
    Effort,
    Regrouping,
    affordable,
    least_price,
    moving_seconds,
    possible_groups,
    stays,
)
from jigsawrl.cluster.shapes import Shape, Shapes, Standing

MOST_JOBS, MOST_SETS = 40, 2000
STEPS = 3000
"""Of the search."""
CENT = 0.01
HOURS = 4.0
"""That are looked ahead."""

Choice = tuple[Shape, Group | None]
"""A new shape and the group that takes it; None: a new group."""


def regroupings(
    shapes: Shapes,
    groups: Mapping[int, Group],
    nodes: Nodes,
    first: Collection[int],
    new: Collection[str],
    effort: Effort,
) -> Iterator[Regrouping]:
    """What pays, for the `first` groups and those with most room; `new` jobs have not begun and move for free."""
    some = _pool(groups, first)
    if not some or least_price(shapes, some) >= sum([group.shape.price for group in some]) - CENT:
        return
    standings = {name: each for group in some for name, each in group.standings.items()}
    lost = {name: 0.0 if name in new else moving_seconds(each) for name, each in standings.items()}
    row = {group.number: len(standings) + k for k, group in enumerate(some)}
    number = {name: k for k, name in enumerate(standings)}
    stay = [_cost(shapes, group.shape, group, standings, lost) for group in some]
    choices: list[Choice] = [(group.shape, group) for group in some]
    columns = [
        Column(sum([1 << number[name] for name in group.standings]) | 1 << row[group.number], cost)
        for group, cost in zip(some, stay, strict=True)
    ]
    for mask, shape in possible_groups(shapes, list(standings.values()), MOST_SETS, effort).items():
        for keeper in _keepers(some, shape, standings, lost):
            rows = mask if keeper is None else mask | 1 << row[keeper.number]
            columns.append(Column(rows, _cost(shapes, shape, keeper, standings, lost)))
            choices.append((shape, keeper))
    chosen = cheaper(columns, len(standings), len(standings) + len(some), sum(stay) - CENT, STEPS)
    if chosen is None:
        return
    before = dict(zip(row, stay, strict=True))
    for old, parts in _apart(some, _settled([choices[k] for k in chosen], some)):
        shapes_now = tuple(shape for shape, _ in parts)
        saved = sum([group.shape.price for group in old]) - sum([shape.price for shape in shapes_now])
        gain = sum([before[group.number] for group in old])
        gain -= sum([_cost(shapes, shape, keeper, standings, lost) for shape, keeper in parts])
        if saved > CENT and gain > 0 and affordable(nodes, old, shapes_now):
            jobs = tuple(name for group in old for name in group.standings)
            kept = tuple(None if keeper is None else keeper.number for _, keeper in parts)
            yield Regrouping(tuple(group.number for group in old), jobs, shapes_now, kept, saved)


def _pool(groups: Mapping[int, Group], first: Collection[int]) -> list[Group]:
    mine = [groups[number] for number in first]
    others = heapq.nsmallest(
        MOST_JOBS,
        (each for each in groups.values() if each.number not in first),
        key=lambda each: (-each.room.total, each.number),
    )
    found: list[Group] = []
    count = 0
    for group in [*mine, *others]:
        count += len(group.standings)
        if count > MOST_JOBS:
            break
        found.append(group)
    return found


def _keepers(
    groups: Sequence[Group],
    shape: Shape,
    standings: Mapping[str, Standing],
    lost: Mapping[str, float],
) -> list[Group | None]:
    """Who could take this shape: the group of most of its jobs, and a new one; nobody if not all can move in time."""
    late = {
        turn.name
        for turn, seconds in zip(shape.turns, shape.verdict.seconds, strict=True)
        if lost[turn.name]
        and max(1.0, seconds / turn.alone) > standings[turn.name].bound_after(lost[turn.name])
    }
    names = {turn.name for turn in shape.turns}
    there = [
        (sum([lost[name] for name in common]), -group.number, group)
        for group in groups
        if (common := names & group.standings.keys()) and group.shape.pair == shape.pair
    ]
    found: list[Group | None] = [] if late else [None]
    for _, _, group in sorted(there, key=lambda each: each[:2], reverse=True):
        if not late - stays(group, shape):
            return [group, *found]
    return found


def _settled(choices: Sequence[Choice], groups: Sequence[Group]) -> list[Choice]:
    """A new group is not founded for jobs whose own group nobody else takes."""
    kept = {keeper.number for _, keeper in choices if keeper}
    found = []
    for shape, keeper in choices:
        if keeper is None:
            names = {turn.name for turn in shape.turns}
            free = (each for each in groups if each.number not in kept and each.shape.pair == shape.pair)
            keeper = next((each for each in free if names & each.standings.keys()), None)
            if keeper is not None:
                kept.add(keeper.number)
        found.append((shape, keeper))
    return found


def _cost(
    shapes: Shapes,
    shape: Shape,
    keeper: Group | None,
    standings: Mapping[str, Standing],
    lost: Mapping[str, float],
) -> float:
    """Dollars of the next hours, each node until its last job is done, and of the moves."""
    pools = shapes.cluster.pools
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
    moved = {turn.name for turn in shape.turns} - (stays(keeper, shape) if keeper else set())
    return dollars + sum([lost[name] for name in moved]) / 3600 * shape.price / len(shape.turns)


def _apart(groups: Sequence[Group], choices: Sequence[Choice]) -> Iterator[tuple[list[Group], list[Choice]]]:
    """Groups that exchange jobs, with their new shapes; each such lot can be done without the others."""
    home = {name: group.number for group in groups for name in group.standings}
    lot = {group.number: group.number for group in groups}
    for shape, _ in choices:
        mine = {lot[home[turn.name]] for turn in shape.turns}
        lot = {number: min(mine) if old in mine else old for number, old in lot.items()}
    for number in sorted(set(lot.values())):
        old = [group for group in groups if lot[group.number] == number]
        yield old, [choice for choice in choices if lot[home[choice[0].turns[0].name]] == number]
