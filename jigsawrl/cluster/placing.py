"""Where a job could join: existing groups as they are, groups with more rollout nodes, a group of its own.

Groups that cannot take it are passed over by what they have left, without a look at their schedule: if all members
just kept their promises, some node would be busy for more than all of the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, islice

from jigsawrl.cluster.groups import Group, How
from jigsawrl.cluster.nodes import Nodes
from jigsawrl.cluster.pools import Pair
from jigsawrl.cluster.rounds import SLACK, Turn
from jigsawrl.cluster.shapes import Shape, Shapes, Standing

TRIED = 6
"""Choices among a group's nodes that are judged."""
JUDGED = 60
"""Groups that are judged, where the first that can take a job is not the best."""


@dataclass(frozen=True, slots=True)
class Place:
    """A group's shape with the job in it; `group` is None for a new one."""

    group: Group | None
    shape: Shape
    added: float
    how: How
    passed_over: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Candidate:
    added: float
    leftover: float
    """Part of the time that the group's nodes would still be free; the fullest is tried first."""
    group: Group
    fitting: tuple[int, ...]
    """Its rollout nodes with room, the fullest first."""
    fresh: int
    """Rollout nodes to add."""


def cheapest(
    shapes: Shapes, groups: Iterable[Group], nodes: Nodes, standing: Standing, within: float | None = None
) -> Place | None:
    """The place that adds least to the cost (and in which the job takes at most `within` times as long)."""
    passed: Counter[str] = Counter()
    alone = _alone(shapes, nodes, standing)
    most = alone.price if alone else float("inf")
    best = Place(None, alone, alone.price, "new group", passed) if alone else None
    least = alone.cost if alone else float("inf")
    worth = 0.0 if shapes.surely else shapes.worth(standing)
    found = sorted(_candidates(shapes, groups, nodes, standing, most, passed), key=_order)
    for candidate in found if shapes.surely else found[:JUDGED]:
        if candidate.added - worth >= least:
            break
        shape = _joined(shapes, candidate, standing)
        if shape is None or (within is not None and shape.slowdown(standing.job.name) > within):
            passed["slowdown"] += 1
        elif (added := shape.cost - candidate.group.shape.cost) < least:
            how: How = "scaled" if candidate.fresh else "packed"
            best, least = Place(candidate.group, shape, candidate.added, how, passed), added
    return best


def _order(candidate: _Candidate) -> tuple[float, float, int]:
    return candidate.added, candidate.leftover, candidate.group.number


def _alone(shapes: Shapes, nodes: Nodes, standing: Standing) -> Shape | None:
    for shape in shapes.isolated(standing):
        wanted = {shape.pair[0]: shape.rollout_nodes, shape.pair[1]: shape.training_nodes}
        if all(nodes.left(pool) >= count for pool, count in wanted.items()):
            return shape
    return None


def _candidates(
    shapes: Shapes,
    groups: Iterable[Group],
    nodes: Nodes,
    standing: Standing,
    most: float,
    passed: Counter[str],
) -> list[_Candidate]:
    job = standing.job
    turns: dict[tuple[Pair, int], Turn] = {}
    possible = set(shapes.pairs(job))
    found = []
    for group in groups:
        shape, room = group.shape, group.room
        if len(shape.turns) >= shapes.largest:
            passed["full"] += 1
            continue
        if shape.pair not in possible:
            passed["pool"] += 1
            continue
        key = shape.pair, shape.training_nodes
        turn = turns.get(key)
        if turn is None:
            turn = turns[key] = shapes.turn(standing, *key, True)
        training, rollout = turn.training / turn.limit, turn.hold / turn.limit
        if training > room.training + SLACK:
            passed["busy"] += 1
            continue
        held = job.training_gb * job.training_nodes / shape.training_nodes
        if held > room.training_gb:
            passed["memory"] += 1
            continue
        both = (training, held) if shape.shared else (0.0, 0.0)
        fitting = tuple(
            sorted(
                (
                    node
                    for node, free in enumerate(room.rollout)
                    if rollout + both[0] <= free + SLACK and job.rollout_gb + both[1] <= room.rollout_gb[node]
                ),
                key=lambda node: room.rollout[node],
            )
        )
        price = shapes.cluster.pools[shape.pair[0]].price
        left = nodes.left(shape.pair[0])
        fresh = max(0, job.rollout_nodes - len(fitting))
        if shape.shared and fresh:
            passed["busy"] += 1
            continue
        for more in range(fresh, 1 if shape.shared else job.rollout_nodes + 1):
            if more <= left and more * price < most:
                leftover = room.training - training + more
                found.append(_Candidate(more * price, leftover, group, fitting, more))
    return found


def _joined(shapes: Shapes, candidate: _Candidate, standing: Standing) -> Shape | None:
    """The first of its node choices in which all promises are kept."""
    group, shape = candidate.group, candidate.group.shape
    new = tuple(range(shape.rollout_nodes, shape.rollout_nodes + candidate.fresh))
    members = list(group.standings.values())
    wanted = standing.job.rollout_nodes - candidate.fresh
    for old in islice(combinations(candidate.fitting, wanted), TRIED):
        found = shapes.judge(
            shape.pair,
            shape.training_nodes,
            shape.rollout_nodes + candidate.fresh,
            [*members, standing],
            [*shape.places, (*old, *new)],
        )
        if found is not None:
            return found
    return None
