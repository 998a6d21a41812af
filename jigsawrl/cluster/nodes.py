"""Which nodes of each pool are rented, free, or broken."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from jigsawrl.cluster.pools import Cluster


@dataclass(slots=True)
class Nodes:
    """Names are the pool's and a number; the lowest free number is rented first."""

    cluster: Cluster
    free: dict[str, list[int]] = field(default_factory=dict)
    next: dict[str, int] = field(default_factory=dict)
    """Numbers from here on were never used."""
    broken: set[str] = field(default_factory=set)

    def left(self, pool: str) -> float:
        """How many more can be rented."""
        limit = self.cluster.pools[pool].nodes
        unused = float("inf") if limit is None else limit - self.next.get(pool, 0)
        return unused + len(self.free.get(pool, ()))

    def most(self, pool: str) -> float:
        """How many could be rented if nobody had any."""
        limit = self.cluster.pools[pool].nodes
        broken = sum(name.rpartition("-")[0] == pool for name in self.broken)
        return float("inf") if limit is None else limit - broken

    def rent(self, pool: str, count: int) -> tuple[str, ...]:
        free = self.free.setdefault(pool, [])
        taken = []
        for _ in range(count):
            if free:
                number = heapq.heappop(free)
            else:
                number = self.next.get(pool, 0)
                self.next[pool] = number + 1
            taken.append(f"{pool}-{number}")
        return tuple(taken)

    def give_back(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self.broken:
                pool, _, number = name.rpartition("-")
                heapq.heappush(self.free.setdefault(pool, []), int(number))

    def fail(self, name: str, rented: bool) -> None:
        """It is not rented again until it is repaired."""
        pool, _, number = name.rpartition("-")
        self.broken.add(name)
        if not rented:
            while self.next.get(pool, 0) <= int(number):
                heapq.heappush(self.free.setdefault(pool, []), self.next.get(pool, 0))
                self.next[pool] = self.next.get(pool, 0) + 1
            self.free[pool].remove(int(number))
            heapq.heapify(self.free[pool])

    def repair(self, name: str) -> None:
        self.broken.discard(name)
        self.give_back((name,))
