"""Other ways to place a job, to hold the scheduler against. None of them looks at promises; memory always counts.

Alone on two pools is a scheduler with groups of one (`largest=1`); co-located is the same on one pool that runs both.
"""

from __future__ import annotations

import random

from jigsawrl.cluster.groups import Group, How
from jigsawrl.cluster.placing import Place, cheapest
from jigsawrl.cluster.scheduler import Placing, Scheduler
from jigsawrl.cluster.shapes import Standing


def at_random(seed: int) -> Placing:
    """Any group with memory for it, packed or with rollout nodes of its own, or a new one: all as likely."""
    rng = random.Random(seed)

    def choose(scheduler: Scheduler, standing: Standing) -> Place | None:
        places = [
            place
            for group in scheduler.groups.values()
            for fresh in (False, True)
            if (place := _joined(scheduler, group, standing, _shuffled(group, rng), fresh))
        ]
        alone = cheapest(scheduler.shapes, (), scheduler.nodes, standing)
        return rng.choice([*places, alone] if alone else places) if places or alone else None

    return choose


def most_idle(scheduler: Scheduler, standing: Standing) -> Place | None:
    """The group whose nodes idle for the largest part of the time, on its idlest ones; a new one if none is idle."""
    groups = sorted(scheduler.groups.values(), key=lambda group: (-_idle(group), group.number))
    for group in groups:
        order = sorted(range(group.shape.rollout_nodes), key=lambda node: -group.room.rollout[node])
        if _idle(group) > 0 and (place := _joined(scheduler, group, standing, order, fresh=False)):
            return place
    return cheapest(scheduler.shapes, (), scheduler.nodes, standing)


def _shuffled(group: Group, rng: random.Random) -> list[int]:
    return rng.sample(range(group.shape.rollout_nodes), k=group.shape.rollout_nodes)


def _idle(group: Group) -> float:
    free = [group.room.training, *group.room.rollout]
    return sum(free) / len(free)


def _joined(
    scheduler: Scheduler, group: Group, standing: Standing, order: list[int], fresh: bool
) -> Place | None:
    """The group with this job, on its first nodes in an order or on new ones; None where memory does not hold it."""
    shape, shapes, need = group.shape, scheduler.shapes, standing.job.rollout_nodes
    if len(shape.turns) >= shapes.largest or not standing.job.runs_on(*shape.pair):
        return None
    more = need if fresh else max(0, need - len(order))
    if more and (shape.shared or more > scheduler.nodes.left(shape.pair[0])):
        return None
    nodes = (*order[: need - more], *range(shape.rollout_nodes, shape.rollout_nodes + more))
    found = shapes.judge(
        shape.pair,
        shape.rollout_nodes + more,
        shape.training_nodes,
        [*group.standings.values(), standing],
        [*shape.places, nodes],
        forced=True,
    )
    how: How = "scaled" if more else "packed"
    return Place(group, found, found.price - shape.price, how, {}) if found else None
