"""What could be done now: plans, each a set of starts, that differ in who goes first, who is held back, and where.

A plan goes through the waiting phases in an order and puts each where it goes best by a simple rule: on the free
workers if they are at least half of all, else beside others. The first plan takes the longest remaining work first.
The others change one thing about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import permutations, product
from math import floor, log2
from typing import Literal

from jigsawrl.graph.interference import Interference, company, merely_divided, mix_freely
from jigsawrl.policies.narrow import few_workers, work_on
from jigsawrl.policies.rule import Parts, Rule, Sparing, fewest
from jigsawrl.policies.starts import needs, places_on
from jigsawrl.policies.state import Migrate, Pipeline, Place, Start, State

TRIED = 2
"""Waiting phases about which something is changed, those with the longest remaining work."""
WIDER = (2, 3)
"""How many times as many workers as the others one pipeline's rollouts may have."""

AIMS = 4
"""Times between the soonest and the latest end of all work that are aimed at: twice as many at most."""
SPARED = (0.5, 1.0)
"""Parts of its time to spare that a phase may lose."""
WIDTHS = 8
"""Numbers of workers that a phase with time to spare may keep to."""

Option = Literal["free", "beside", "few"] | float | Place | Sparing
"""Which workers: the free ones, all with room for company, as few as keeps all busy, this part of all, the emptiest
first, or just these."""
SIMPLE = Rule()
"""Longest remaining work first, on the workers that are best for it."""
RULE: tuple[Option, ...] = ("free", "beside")
RULE_FREELY: tuple[Option, ...] = ("beside",)
RULE_DIVIDED: tuple[Option, ...] = ("few", "beside")
Actions = tuple[Start | Migrate, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done now, and by which rule one goes on."""

    actions: Actions
    rule: Rule


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
        found = {self.plan(self.waiting): None, self.plan(self.waiting, rule=Rule(divide=True)): None}
        top = self.waiting[0].outlook.shape.priority
        for pipeline in [p for p in self.waiting if p.outlook.shape.priority == top][:TRIED]:
            order = [pipeline, *(p for p in self.waiting if p is not pipeline)]
            found |= dict.fromkeys([self.plan(order), *self.changed(pipeline, order, (0.5,))])
        return list(found)

    def orders(self, lengths: Iterable[int]) -> list[Plan]:
        """The simple rule with so many pipelines first for good, in any order, letting others overtake and not."""
        names = [p.name for p in self.state.unfinished()]
        divides = rule_of(self.state.table)[0] == "free"
        found: dict[Plan, None] = {}
        for length in sorted({min(length, max(1, len(names) - 1)) for length in lengths}):
            for named in permutations(names, length):
                order = self._ordered(named)
                rules = [
                    Rule(named),
                    Rule(named, strict=True),
                    *([Rule(named, divide=True)] if divides else []),
                ]
                found |= dict.fromkeys(self.plan(order, rule=rule) for rule in rules)
        return list(found)

    def sparing(self, soonest: float, latest: float) -> list[Plan]:
        """Everything should end by a time between these: who has time to spare until then keeps to fewer workers."""
        choices = product(round_times(soonest, latest), SPARED, (False, True))
        rules = [Rule(sparing=Sparing(until, part, trainings)) for until, part, trainings in choices]
        return [self.plan(self.waiting, rule=rule) for rule in rules]

    def putting_off(self, latest: float) -> list[Plan]:
        """One pipeline waits, for as long as all work could still end by then, and leaves its room to the others."""
        found: dict[Plan, None] = {}
        now = self.state.now
        for pipeline in self.waiting:
            others = [p for p in self.waiting if p is not pipeline]
            for until in round_times(now, latest - self.state.left_alone(pipeline)):
                if until > now:
                    found[self.plan(others, rule=Rule(put_off=(pipeline.name, until)))] = None
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
                found[self.plan(self.waiting, rule=Rule(parts=parts))] = None
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

    def variants(self, plan: Plan, exact: bool) -> list[Plan]:
        """The same rule, but for parts, after one change now: someone is held back, or put elsewhere.

        The others start by the simple rule or, if `exact`, by the plan's.
        """
        rule = replace(plan.rule, parts=())
        order = self._ordered(rule.order)
        found: dict[Plan, None] = {}
        for pipeline in order:
            moved = [pipeline, *(p for p in order if p is not pipeline)]
            changed = self.changed(pipeline, moved, (0.25, 0.5, 0.75), rule if exact else SIMPLE)
            found |= dict.fromkeys(Plan(each.actions, rule) for each in changed)
        return list(found)

    def changed(
        self, pipeline: Pipeline, order: list[Pipeline], parts: tuple[float, ...], rule: Rule = SIMPLE
    ) -> list[Plan]:
        """Plans in which this pipeline, first in the order, goes to other workers or is held back."""
        options: tuple[Option, ...] = ("free", "beside", *parts)
        plans = [self.plan(order, option, rule) for option in options]
        others = [p for p in order if p is not pipeline]
        if others or self.state.lanes.lanes:
            plans.append(self.plan(others, rule=rule))
        return plans

    def plan(self, order: list[Pipeline], first: Option | None = None, rule: Rule = SIMPLE) -> Plan:
        return Plan(self._starts(order, first, rule), rule)

    def after(self, move: Migrate) -> Plan:
        """The simple rule's plan on workers that a gathered tail has left."""
        return Plan((move, *self._starts(self.waiting, None, SIMPLE, move)), SIMPLE)

    def _starts(
        self, order: list[Pipeline], first: Option | None, rule: Rule, move: Migrate | None = None
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
            if not by_rule and first is not None:
                options: tuple[Option, ...] = (first,)
            elif rule.parts:
                options = (dict(rule.parts)[pipeline.name] if pipeline.phase == "rollout" else "beside",)
            elif rule.sparing:
                options = (rule.sparing,)
            else:
                options = rule_of(self.state.table)
            among = len(order) - number if rule.divide else 0
            found = (self._start(pipeline, option, room, by_rule, among) for option in options)
            start = next((start for start in found if start is not None), None)
            if start is not None:
                starts.append(start)
            elif rule.strict:
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
        elif isinstance(option, Sparing):
            workers = self._spared(pipeline, [w for w in home if load[w] < crowd], held, option)
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

    def _spared(
        self, pipeline: Pipeline, workers: list[int], held: list[float], sparing: Sparing
    ) -> list[int]:
        """As few of these as the time to spare allows, those with most room; fewer where it does not fit on so
        many."""
        home, state = pipeline.home, self.state
        step = pipeline.tp * max(1, round(len(home) / WIDTHS / pipeline.tp))
        choices = [
            (count, needed)
            for count in range(step, len(home) + 1, step)
            if (needed := needs(pipeline, places_on(pipeline, home[:count]))) <= state.device_bytes
        ]
        if not choices:
            return []
        if sparing.trainings or pipeline.phase == "rollout":
            spare = sparing.until - state.now - state.left_alone(pipeline)
            seconds = [pipeline.phase_seconds_on(count) for count, _ in choices]
            choices = choices[: fewest(seconds, sparing.part * spare) + 1]
        order = sorted(workers, key=lambda w: (held[w], w))
        for count, needed in reversed(choices):
            if count <= len(order) and held[order[count - 1]] + needed <= state.device_bytes:
                return sorted(order[:count])
        return []


def round_times(first: float, last: float) -> list[float]:
    """A few times between these, the same ones again when the two have come closer to each other."""
    if last <= first:
        return []
    step = 2.0 ** floor(log2((last - first) / AIMS))
    return [step * number for number in range(floor(first / step), floor(last / step) + 1)]


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
