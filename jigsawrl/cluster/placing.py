"""Where a job could join: existing groups as they are, groups with more rollout nodes, a group of its own.

Groups that cannot take it are passed over by what they have left, without a look at their schedule: if all members
just kept their promises, some node would be busy for more than all of the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import NamedTuple

from jigsawrl.cluster.groups import Group, How, affordable
from jigsawrl.cluster.pools import Nodes
from jigsawrl.cluster.shapes import Shape, Shapes, Standing
from jigsawrl.phases.rounds import SLACK

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


class _Candidate(NamedTuple):
    """A group that may take the job; those that come first are tried first."""

    added: float
    leftover: float
    """Part of the time that the group's nodes would still be free; the fullest is tried first."""
    number: int
    group: Group
    fitting: Sequence[int]
    """Its rollout nodes with room, the fullest first."""
    fresh: int
    """Rollout nodes to add."""


def cheapest(
    shapes: Shapes, groups: Iterable[Group], nodes: Nodes, standing: Standing, within: float | None = None
) -> Place | None:
    """The place that adds least to the cost (and in which the job takes at most `within` times as long)."""
    passed: Counter[str] = Counter()
    alone = next((shape for shape in shapes.isolated(standing) if affordable(nodes, (), [shape])), None)
    most = alone.price if alone else float("inf")
    best = Place(None, alone, alone.price, "new group", passed) if alone else None
    least = alone.cost if alone else float("inf")
    worth = 0.0 if shapes.surely else shapes.worth(standing)
    candidates: list[_Candidate] = []
    for group in groups:
        found = _candidates(shapes, group, nodes, standing, most)
        if isinstance(found, str):
            passed[found] += 1
        else:
            candidates += found
    for candidate in sorted(candidates)[: None if shapes.surely else JUDGED]:
        if candidate.added - worth >= least:
            break
        shape = _joined(shapes, candidate, standing)
        if shape is None or (within is not None and shape.slowdown(standing.job.name) > within):
            passed["slowdown"] += 1
        elif (added := shape.cost - candidate.group.shape.cost) < least:
            how: How = "scaled" if candidate.fresh else "packed"
            best, least = Place(candidate.group, shape, candidate.added, how, passed), added
    return best


def _candidates(
    shapes: Shapes, group: Group, nodes: Nodes, standing: Standing, most: float
) -> list[_Candidate] | str:
    """The group with more and more rollout nodes, for less than `most`; or why it cannot take the job."""
    job, shape, room = standing.job, group.shape, group.room
    if len(shape.turns) >= shapes.largest:
        return "full"
    if not job.runs_on(*shape.pair):
        return "pool"
    turn = shapes.turn(standing, shape.pair, shape.training_nodes, True)
    training, rollout = turn.training / turn.limit, turn.hold / turn.limit
    if training > room.training + SLACK:
        return "busy"
    held = job.training_gb * job.training_nodes / shape.training_nodes
    if held > room.training_gb:
        return "memory"
    both = (training, held) if shape.shared else (0.0, 0.0)
    fitting = [
        node
        for node, free in enumerate(room.rollout)
        if rollout + both[0] <= free + SLACK and job.rollout_gb + both[1] <= room.rollout_gb[node]
    ]
    fresh = max(0, job.rollout_nodes - len(fitting))
    if shape.shared and fresh:
        return "busy"
    fitting.sort(key=room.rollout.__getitem__)
    price, left = shapes.cluster.pools[shape.pair[0]].price, nodes.left(shape.pair[0])
    return [
        _Candidate(more * price, room.training - training + more, group.number, group, fitting, more)
        for more in range(fresh, 1 if shape.shared else job.rollout_nodes + 1)
        if more <= left and more * price < most
    ]


def _joined(shapes: Shapes, candidate: _Candidate, standing: Standing) -> Shape | None:
    """The first of its node choices in which all promises are kept."""
    group, shape = candidate.group, candidate.group.shape
    count = shape.rollout_nodes + candidate.fresh
    new = tuple(range(shape.rollout_nodes, count))
    members = [*group.standings.values(), standing]
    chosen = combinations(candidate.fitting, standing.job.rollout_nodes - candidate.fresh)
    judged = (
        shapes.judge(shape.pair, count, shape.training_nodes, members, [*shape.places, (*old, *new)])
        for old in islice(chosen, TRIED)
    )
    return next(filter(None, judged), None)
