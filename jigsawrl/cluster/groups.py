"""Groups as they are: a shape on named nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jigsawrl.cluster.permits import Nodes
from jigsawrl.cluster.pools import Cluster
from jigsawrl.cluster.shapes import Shape, Standing

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


@dataclass(slots=True)
class Group:
    """Jobs, and the nodes they are pinned to."""

    number: int
    shape: Shape
    standings: dict[str, Standing]
    """In the order of the shape's turns."""
    rollout_nodes: tuple[str, ...]
    training_nodes: tuple[str, ...]
    room: Room = field(default_factory=lambda: Room(0.0, (), 0.0, ()))

    def nodes_of(self, name: str) -> tuple[Nodes, Nodes]:
        """A job's rollout and training nodes."""
        places = zip(self.shape.turns, self.shape.places, strict=True)
        nodes = next(nodes for turn, nodes in places if turn.name == name)
        return frozenset(self.rollout_nodes[node] for node in nodes), frozenset(self.training_nodes)

    def seats(self) -> dict[str, tuple[Nodes, Nodes]]:
        return {turn.name: self.nodes_of(turn.name) for turn in self.shape.turns}

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


def named(group: Group, shape: Shape) -> list[str | None]:
    """Which of the group's rollout nodes each one of a shape is: those its jobs have; None: any other."""
    had = {name: sorted(group.nodes_of(name)[0]) for name in group.standings}
    names: list[str | None] = [None] * shape.rollout_nodes
    taken: set[str] = set()
    for turn, nodes in zip(shape.turns, shape.places, strict=True):
        mine = [name for name in had.get(turn.name, ()) if name not in taken]
        for node in nodes:
            if names[node] is None and mine:
                taken.add(mine[0])
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
