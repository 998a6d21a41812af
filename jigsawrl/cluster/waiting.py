"""Who waits for nodes: nobody for ever because of those that came later, nor while less important jobs have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jigsawrl.cluster.groups import Group, affordable
from jigsawrl.cluster.placing import cheapest
from jigsawrl.cluster.pools import Nodes
from jigsawrl.cluster.shapes import Shapes, Standing

OVERTAKINGS = 8
"""Of a waiting job; then all that came later wait until it has nodes."""
PREEMPTIONS = 2
"""Of a job, at most."""


def goes_before(one: Standing, other: Standing) -> bool:
    """Whether the other one overtakes if it gets nodes first."""
    return one.came < other.came and one.job.priority >= other.job.priority


def held_back(shapes: Shapes, nodes: Nodes, waiting: Iterable[Standing], standing: Standing) -> bool:
    """Whether someone who goes before was overtaken often enough, and waits for nodes that there are."""
    return any(
        each.overtaken >= OVERTAKINGS
        and goes_before(each, standing)
        and any(
            all(nodes.most(pool) >= count for pool, count in shape.nodes.items())
            for shape in shapes.isolated(each)
        )
        for each in waiting
    )


def outranked(shapes: Shapes, nodes: Nodes, groups: Iterable[Group], standing: Standing) -> Sequence[Group]:
    """Groups of less important jobs whose nodes make room for this one; none is among them that is not needed.

    A group keeps its nodes if anyone in it is as important, or was preempted often enough. Of the others, those keep
    them first that are more important, then those that came first.
    """
    less = sorted(
        (group for group in groups if all(_yields(each, standing) for each in group.standings.values())),
        key=lambda group: (
            -max(each.job.priority for each in group.standings.values()),
            min(each.came for each in group.standings.values()),
        ),
    )
    for shape in shapes.isolated(standing):
        taken = less
        if not affordable(nodes, taken, [shape]):
            continue
        for group in less:
            fewer = [each for each in taken if each is not group]
            if affordable(nodes, fewer, [shape]):
                taken = fewer
        return taken
    return ()


def outranked_beside(
    shapes: Shapes, nodes: Nodes, groups: Iterable[Group], standing: Standing
) -> tuple[Group, Sequence[Standing]] | None:
    """A group that could take the job if some less important ones left it, and those: one if that is enough, which is
    the least important that came last, else all of them. Whoever stays keeps its promise."""
    mixed = []
    for group in groups:
        less = sorted((each for each in group.standings.values() if _yields(each, standing)), key=_importance)
        if 0 < len(less) < len(group.standings):
            mixed.append((group, less))
    for group, less in sorted(mixed, key=lambda each: _importance(each[1][0])):
        for gone in (*([each] for each in less), less):
            smaller = _without(shapes, group, {each.job.name for each in gone})
            if smaller is not None:
                place = cheapest(shapes, [smaller], nodes, standing)
                if place is not None and place.group is smaller:
                    return group, gone
    return None


def _importance(standing: Standing) -> tuple[float, int]:
    return standing.job.priority, -standing.came


def _without(shapes: Shapes, group: Group, names: set[str]) -> Group | None:
    """What would be left of a group."""
    rest = {name: each for name, each in group.standings.items() if name not in names}
    shape = shapes.without(group.shape, group.standings, names)
    if shape is None:
        return None
    rollout = group.rollout_nodes[: shape.rollout_nodes]
    found = Group(group.number, shape, rest, rollout, group.training_nodes[: shape.training_nodes])
    found.measure(shapes.cluster)
    return found


def _yields(one: Standing, other: Standing) -> bool:
    return one.job.priority < other.job.priority and one.preempted < PREEMPTIONS
