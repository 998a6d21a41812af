"""Nodes that can be rented, in pools of one kind with prices, memory, and what they may run; and which are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice
from typing import Literal

from jigsawrl.graph.hardware import Hardware

Runs = Literal["rollout", "training", "both"]
Pair = tuple[str, str]
"""A pool for rollouts and one for training; twice the same where phases share their nodes."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes of one kind."""

    name: str
    kind: Hardware
    gpus: int
    """In each node."""
    nodes: int | None
    """How many there are; None: as many as are asked for."""
    host_gb: float
    """Host memory of each node that resident jobs may fill."""
    price: float
    """Dollars an hour for each node."""
    runs: Runs

    @property
    def limit(self) -> float:
        """How many nodes can be rented at all."""
        return float("inf") if self.nodes is None else self.nodes


@dataclass(frozen=True)
class Cluster:
    """All pools."""

    pools: Mapping[str, Pool]
    link_bandwidth: float = 20e9 / 8
    """Bytes a second between pools; new weights cross it once a step."""

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Where a group may be: a pool for each phase, or one that runs both."""
        return tuple(
            (rollout.name, training.name)
            for rollout in self.pools.values()
            for training in self.pools.values()
            if rollout.runs != "training" and training.runs != "rollout"
        )


@dataclass(slots=True)
class Nodes:
    """Which nodes are rented, free, or broken.

    Names are the pool's and a number; the lowest free number is rented first.
    """

    cluster: Cluster
    taken: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By pool: the numbers of nodes that are rented or broken."""
    broken: set[str] = field(default_factory=set)

    def left(self, pool: str) -> float:
        """How many more can be rented."""
        return self.cluster.pools[pool].limit - len(self.taken[pool])

    def most(self, pool: str) -> float:
        """How many could be rented if nobody had any."""
        return self.cluster.pools[pool].limit - sum(name.rpartition("-")[0] == pool for name in self.broken)

    def rent(self, pool: str, number: int) -> tuple[str, ...]:
        taken = self.taken[pool]
        free = list(islice((each for each in count() if each not in taken), number))
        taken.update(free)
        return tuple(f"{pool}-{each}" for each in free)

    def give_back(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.broken:
                pool, _, number = name.rpartition("-")
                self.taken[pool].remove(int(number))

    def fail(self, name: str) -> None:
        """It is not rented again until it is repaired."""
        pool, _, number = name.rpartition("-")
        self.broken.add(name)
        self.taken[pool].add(int(number))

    def repair(self, name: str) -> None:
        self.broken.discard(name)
        self.give_back((name,))
