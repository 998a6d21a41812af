"""Groups as they are: a shape on named nodes."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from jigsawrl.cluster.pools import Cluster, Nodes
from jigsawrl.cluster.shapes import Shape, Standing

Names = frozenset[str]
How = Literal["packed", "scaled", "new group", "waits", "moved", "preempted"]


@dataclass(frozen=True, slots=True)
class Room:
    """What a group has left, as the least that its members take: parts of the time, and GB of host memory."""

    training: float
    rollout: tuple[float, ...]
    """Of each rollout node."""
    training_gb: float
    rollout_gb: tuple[float, ...]

    @property
    def total(self) -> float:
        """Time of all its nodes."""
        return self.training + sum(self.rollout)


@dataclass(slots=True, eq=False)
class Group:
    """Jobs, and the nodes they are pinned to."""

    number: int
    shape: Shape
    standings: dict[str, Standing]
    """In the order of the shape's turns."""
    rollout_nodes: tuple[str, ...]
    training_nodes: tuple[str, ...]
    room: Room = field(default_factory=lambda: Room(0.0, (), 0.0, ()))

    def nodes_of(self, name: str) -> tuple[Names, Names]:
        """A job's rollout and training nodes."""
        nodes = self.shape.seats[name]
        return frozenset([self.rollout_nodes[node] for node in nodes]), frozenset(self.training_nodes)

    def seats(self) -> dict[str, tuple[Names, Names]]:
        """The rollout and training nodes of each job."""
        return {name: self.nodes_of(name) for name in self.standings}

    def measure(self, cluster: Cluster) -> None:
        """Finds out what room there is."""
        shape = self.shape
        training = sum(turn.training / turn.limit for turn in shape.turns)
        training_gb = 0.0
        busy, held = [0.0] * len(self.rollout_nodes), [0.0] * len(self.rollout_nodes)
        for turn, nodes in zip(shape.turns, shape.places, strict=True):
            job = self.standings[turn.name].job
            training_gb += job.training_gb * job.training_nodes / shape.training_nodes
            for node in nodes:
                busy[node] += turn.hold / turn.limit
                held[node] += job.rollout_gb
        roll, train = cluster.pools[shape.pair[0]].host_gb, cluster.pools[shape.pair[1]].host_gb
        self.room = Room(
            1 - training,
            tuple(1 - part - (training if shape.shared else 0.0) for part in busy),
            train - training_gb,
            tuple(roll - each - (training_gb if shape.shared else 0.0) for each in held),
        )


def roomiest(groups: Iterable[Group], count: int) -> list[Group]:
    """Those whose nodes have most time left."""
    return heapq.nsmallest(count, groups, key=lambda group: (-group.room.total, group.number))


def total_nodes(shapes: Iterable[Shape]) -> Counter[str]:
    """How many nodes of each pool they take."""
    total: Counter[str] = Counter()
    for shape in shapes:
        total.update(shape.nodes)
    return total


def affordable(nodes: Nodes, groups: Iterable[Group], shapes: Iterable[Shape]) -> bool:
    """Whether there are nodes for these shapes; those that the groups have are theirs to use."""
    more = total_nodes(shapes) - total_nodes(group.shape for group in groups)
    return all(nodes.left(pool) >= count for pool, count in more.items())


def named(group: Group, shape: Shape) -> list[str | None]:
    """Which of the group's rollout nodes each one of a shape is: those its jobs have; None: any other."""
    had = {job: sorted(rollout) for job, (rollout, _) in group.seats().items()}
    names: list[str | None] = [None] * shape.rollout_nodes
    for job, nodes in shape.seats.items():
        mine = [name for name in had.get(job, ()) if name not in names]
        for node in nodes:
            if names[node] is None and mine:
                names[node] = mine.pop(0)
    return names


@dataclass(frozen=True, slots=True)
class Decision:
    """What was done with a job, and why."""

    job: str
    how: How
    group: int | None
    rollout_nodes: tuple[str, ...]
    training_nodes: tuple[str, ...]
    added: float
    """Dollars an hour more (or fewer) than before."""
    slowdown: float | None
    """As planned."""
    why: str
    passed_over: Mapping[str, int] = field(default_factory=dict)
    """How many other groups could not take it, by the reason."""
    beside: tuple[str, ...] = ()
    """Jobs whose group it joined."""
