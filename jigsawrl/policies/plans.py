"""What could be done now: plans, each a set of starts, that differ in who goes first, who is held back, and where.

A plan goes through the waiting phases in an order and puts each where it goes best by a simple rule: on the free
workers if they are at least half of all, else beside others. The first plan takes the longest remaining work first.
The others change one thing about it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jigsawrl.policies.starts import needs, places_on
from jigsawrl.policies.state import Migrate, Pipeline, Start, State

CROWD = 3
"""Lanes on a worker at most."""
PAIR = 2
"""Lanes on a worker that the simple rule puts there."""
TRIED = 3
"""Waiting phases about which something is changed, those with the longest remaining work."""

Option = Literal["free", "beside", "half"]
Plan = tuple[Start | Migrate, ...]


@dataclass(slots=True)
class Planner:
    """Makes plans for one state. Without `fill` nothing runs beside anything else."""

    state: State
    waiting: list[Pipeline]
    """In the order of the first plan."""
    closed: set[int]
    """Workers that must not be shared now."""
    fill: bool
    found: dict[Plan, None] = field(default_factory=dict)

    def plans(self) -> list[Plan]:
        """The first one is that of the simple rule; no two are the same."""
        self._add(self.waiting)
        top = self.waiting[0].outlook.shape.priority if self.waiting else 0
        for pipeline in [p for p in self.waiting if p.outlook.shape.priority == top][:TRIED]:
            others = [p for p in self.waiting if p is not pipeline]
            self._add([pipeline, *others])
            for option in ("free", "beside", "half"):
                self._add([pipeline, *others], option)
            if others or self.state.lanes.lanes:
                self._add(others)
        return list(self.found)

    def after(self, move: Migrate) -> Plan:
        """The simple rule's plan on workers that a gathered tail has left."""
        lanes = [self.state.lanes.lanes[key] for key in move.lanes]
        gone = [worker for lane in lanes for worker in lane.workers if worker != move.worker]
        return (move, *self._starts(self.waiting, None, gone))

    def _add(self, order: list[Pipeline], first: Option | None = None) -> None:
        self.found.setdefault(self._starts(order, first, []), None)

    def _starts(self, order: list[Pipeline], first: Option | None, left: list[int]) -> tuple[Start, ...]:
        load = [len(lanes) for lanes in self.state.lanes.on_worker]
        for worker in left:
            load[worker] -= 1
        held = list(self.state.held)
        starts: list[Start] = []
        for number, pipeline in enumerate(order):
            options: list[Option] = [first] if first and number == 0 else ["free", "beside"]
            for option in options:
                start = self._start(pipeline, option, load, held, eager=first is None or number > 0)
                if start is not None:
                    starts.append(start)
                    break
        return tuple(starts)

    def _start(
        self, pipeline: Pipeline, option: Option, load: list[int], held: list[float], eager: bool
    ) -> Start | None:
        """Its start there, entered into load and memory; None if that cannot be, or is not worth it by the rule."""
        home = [w for w in pipeline.home if self.state.alive[w] and w not in self.closed]
        free = [w for w in home if load[w] == 0]
        if option == "free":
            workers = free if not eager or 2 * len(free) >= len(home) or not self.fill else []
        elif not self.fill:
            return None
        elif option == "beside":
            workers = [w for w in home if load[w] < (PAIR if eager else CROWD)]
        else:
            order = sorted(home, key=lambda w: (load[w], w))
            workers = sorted(w for w in order[: len(order) // 2] if load[w] < CROWD)
        places = places_on(pipeline, workers)
        if not places:
            return None
        needed = needs(pipeline, places)
        taken = [worker for place in places for worker in place]
        if any(held[worker] + needed > self.state.device_bytes for worker in taken):
            return None
        for worker in taken:
            load[worker] += 1
            held[worker] += needed
        return Start(pipeline.name, places)
