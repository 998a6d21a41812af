"""What could be done now: plans, each a set of starts, that differ in who goes first, who is held back, and where.

A plan goes through the waiting phases in an order and puts each where it goes best by a simple rule: on the free
workers if they are at least half of all, else beside others. The first plan takes the longest remaining work first.
The others change one thing about it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations
from typing import Literal

from jigsawrl.graph.interference import Interference, company, merely_divided, mix_freely
from jigsawrl.policies.narrow import few_workers, work_on
from jigsawrl.policies.starts import needs, places_on
from jigsawrl.policies.state import Migrate, Pipeline, Place, Start, State

TRIED = 2
"""Waiting phases about which something is changed, those with the longest remaining work."""
WIDER = (2, 3)
"""How many times as many workers as the others one pipeline's rollouts may have."""

Option = Literal["free", "beside", "few"] | float | Place
"""Which workers: the free ones, all with room for company, as few as keeps all busy, this part of all, the emptiest
first, or just these."""
RULE: tuple[Option, ...] = ("free", "beside")
RULE_FREELY: tuple[Option, ...] = ("beside",)
RULE_DIVIDED: tuple[Option, ...] = ("few", "beside")
Actions = tuple[Start | Migrate, ...]
Parts = tuple[tuple[str, Place], ...]
Rule = tuple[tuple[str, ...], bool, bool, Parts]
"""By which one goes on: an order, and how strictly; whether what is free is divided; parts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done now, and by which rule one goes on."""

    actions: Actions
    order: tuple[str, ...] = ()
    strict: bool = False
    divide: bool = False
    parts: Parts = ()
    """Workers that each rollout keeps to, while trainings take all; none if there are no such parts."""

    @property
    def rule(self) -> Rule:
        return self.order, self.strict, self.divide, self.parts


@dataclass(slots=True)
class Room:
    """What is on each worker, while a plan is made."""

    load: list[int]
    """Those that disturb others; who decodes in one batch counts as one."""
    held: list[float]
    """Bytes."""
    batches: list[set[str]]
    """Bases on which somebody decodes there."""
    work: list[float] = field(default_factory=list)
    """Seconds of it that are left for those who are there, where it matters."""

    @staticmethod
    def of(state: State) -> Room:
        batches: list[set[str]] = [set() for _ in state.alive]
        for lane in state.lanes.lanes.values():
            if lane.base and lane.phase == "rollout":
                for worker in lane.workers:
                    batches[worker].add(lane.base)
        load = [state.lanes.crowd(worker) for worker in range(len(state.alive))]
        work = work_on(state) if merely_divided(state.table) else []
        return Room(load, list(state.held), batches, work)

    def beside(self, pipeline: Pipeline) -> list[int]:
        """How many its phase would be beside: a batch that it joins is no other."""
        base = pipeline.outlook.shape.base
        if not base or pipeline.phase != "rollout":
            return self.load
        return [max(0, load - (base in there)) for load, there in zip(self.load, self.batches, strict=True)]

    def take(self, pipeline: Pipeline, workers: list[int], needed: float) -> None:
        base = pipeline.outlook.shape.base if pipeline.phase == "rollout" else ""
        for worker in workers:
            self.held[worker] += needed
            if base not in self.batches[worker]:
                self.load[worker] += 1
            if base:
                self.batches[worker].add(base)
            if self.work:
                self.work[worker] += pipeline.busy_left(len(workers))


@dataclass(slots=True)
class Planner:
    """Makes plans for one state. Without `fill` nothing runs beside anything else."""

    state: State
    waiting: list[Pipeline]
    """In the order of the first plan."""
    closed: set[int]
    """Workers that must not be shared now."""
    fill: bool

    def plans(self) -> list[Plan]:
        """The first one is that of the simple rule; no two are the same."""
        found = {self.plan(self.waiting): None, self.plan(self.waiting, divide=True): None}
        top = self.waiting[0].outlook.shape.priority
        for pipeline in [p for p in self.waiting if p.outlook.shape.priority == top][:TRIED]:
            order = [pipeline, *(p for p in self.waiting if p is not pipeline)]
            found |= dict.fromkeys([self.plan(order), *self.changed(pipeline, order, (0.5,))])
        return list(found)

    def orders(self) -> list[Plan]:
        """The simple rule with any two pipelines first for good, letting others overtake and not."""
        names = [p.name for p in self.state.unfinished()]
        found: dict[Plan, None] = {}
        for named in ((), *permutations(names, min(2, len(names)))):
            order = self._ordered(named)
            for strict, divide in ((False, False), (True, False), (False, True)):
                found[self.plan(order, named=named, strict=strict, divide=divide)] = None
        return list(found)

    def _ordered(self, named: tuple[str, ...]) -> list[Pipeline]:
        return sorted(self.waiting, key=lambda p: named.index(p.name) if p.name in named else len(named))

    def apart(self) -> list[Plan]:
        """Every rollout keeps to a part of the workers, all as wide, or one wider than the others.

        A tail gains little by many workers: several side by side, each on a few, are faster than all on all.
        """
        names = sorted(p.name for p in self.state.unfinished())
        even = dict.fromkeys(names, 1)
        found: dict[Plan, None] = {}
        for widths in (even, *({**even, name: width} for name in names for width in WIDER)):
            parts = self._parts(widths)
            if parts:
                found[Plan(self._starts(self.waiting, None, False, parts=parts), parts=parts)] = None
        return list(found)

    def _parts(self, widths: dict[str, int]) -> Parts:
        """Side by side, in whole engines; none if there are too few workers for that."""
        workers = [worker for worker, lives in enumerate(self.state.alive) if lives]
        each = len(workers) / sum(widths.values())
        parts: list[tuple[str, Place]] = []
        before = 0
        for name, width in widths.items():
            tp = self.state.pipelines[name].tp
            first, last = (round(edge * each / tp) * tp for edge in (before, before + width))
            parts.append((name, tuple(workers[first:last])))
            before += width
        return tuple(parts) if all(place for _, place in parts) else ()

    def variants(self, plan: Plan) -> list[Plan]:
        """The same rule with one thing changed now: someone is held back, or put elsewhere."""
        order = self._ordered(plan.order)
        found: dict[Plan, None] = {}
        for pipeline in order:
            moved = [pipeline, *(p for p in order if p is not pipeline)]
            for each in self.changed(pipeline, moved, (0.25, 0.5, 0.75)):
                found[Plan(each.actions, plan.order, plan.strict, plan.divide)] = None
        return list(found)

    def changed(self, pipeline: Pipeline, order: list[Pipeline], parts: tuple[float, ...]) -> list[Plan]:
        """Plans in which this pipeline, first in the order, goes to other workers or is held back."""
        options: tuple[Option, ...] = ("free", "beside", *parts)
        plans = [self.plan(order, option) for option in options]
        others = [p for p in order if p is not pipeline]
        if others or self.state.lanes.lanes:
            plans.append(self.plan(others))
        return plans

    def plan(
        self,
        order: list[Pipeline],
        first: Option | None = None,
        named: tuple[str, ...] = (),
        strict: bool = False,
        divide: bool = False,
    ) -> Plan:
        return Plan(self._starts(order, first, strict, divide=divide), named, strict, divide)

    def after(self, move: Migrate) -> Plan:
        """The simple rule's plan on workers that a gathered tail has left."""
        return Plan((move, *self._starts(self.waiting, None, False, move)))

    def _starts(
        self,
        order: list[Pipeline],
        first: Option | None,
        strict: bool,
        move: Migrate | None = None,
        divide: bool = False,
        parts: Parts = (),
    ) -> tuple[Start, ...]:
        room = Room.of(self.state)
        if move is not None:
            for worker in move.workers:
                room.load[worker] += 1
                room.held[worker] += moved_bytes(self.state, move)
            for key in move.lanes:
                for worker in self.state.lanes.lanes[key].workers:
                    room.load[worker] -= 1
        starts: list[Start] = []
        for number, pipeline in enumerate(order):
            by_rule = first is None or number > 0
            options = rule_of(self.state.table)
            if not by_rule and first is not None:
                options = (first,)
            if parts:
                options = (dict(parts)[pipeline.name] if pipeline.phase == "rollout" else "beside",)
            among = len(order) - number if divide else 0
            found = (self._start(pipeline, option, room, by_rule, among) for option in options)
            start = next((start for start in found if start is not None), None)
            if start is not None:
                starts.append(start)
            elif strict:
                break
        return tuple(starts)

    def _start(
        self,
        pipeline: Pipeline,
        option: Option,
        room: Room,
        by_rule: bool,
        among: int,
    ) -> Start | None:
        """Its start there, entered into the room; None if that cannot be, or is not as the rule has it."""
        home = [w for w in pipeline.home if self.state.alive[w] and w not in self.closed]
        crowd = company(self.state.table) + (0 if by_rule else 1)
        load, held = room.beside(pipeline), room.held
        free = [w for w in home if load[w] == 0]
        if option == "free" and among:
            workers = free[: max(pipeline.tp, len(free) // among)]
        elif option == "free":
            workers = free if not by_rule or 2 * len(free) >= len(home) or not self.fill else []
        elif not self.fill:
            return None
        elif option == "beside":
            workers = [w for w in home if load[w] < crowd]
        elif option == "few":
            least = sorted(home, key=lambda w: (room.work[w], w))
            workers = sorted(least[: few_workers(self.state, pipeline, len(home))])
        elif isinstance(option, tuple):
            workers = [w for w in home if w in option and load[w] < crowd]
        else:
            order = sorted(home, key=lambda w: (load[w], w))
            count = max(1, int(len(order) * option))
            workers = sorted(w for w in order[:count] if load[w] < crowd)
        places = places_on(pipeline, workers)
        if not places:
            return None
        needed = needs(pipeline, places)
        taken = [worker for place in places for worker in place]
        if any(held[worker] + needed > self.state.device_bytes for worker in taken):
            return None
        room.take(pipeline, taken, needed)
        return Start(pipeline.name, places)


def rule_of(table: Interference) -> tuple[Option, ...]:
    """Where a waiting phase goes: the first of these that can be."""
    if merely_divided(table):
        return RULE_DIVIDED
    return RULE_FREELY if mix_freely(table) else RULE


def moved_bytes(state: State, move: Migrate) -> float:
    """What a gathered tail holds on each of its workers."""
    sequences = sum(state.survivors[key].sequences for key in move.lanes)
    outlook = state.pipelines[move.pipeline].outlook
    return outlook.memory_moved(sequences / len(move.places), len(move.places[0]))
