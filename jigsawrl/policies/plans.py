"""What could be done now: plans, each a set of starts, that differ in who goes first, who is held back, and where.

A plan goes through the waiting phases in an order and puts each where it goes best by a simple rule: on the free
workers if they are at least half of all, else beside others. The first plan takes the longest remaining work first.
The others change one thing about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise, permutations, product
from math import floor, log2
from typing import Literal

from jigsawrl.graph.interference import Interference, company, merely_divided, mix_freely
from jigsawrl.phases.ids import PhaseId
from jigsawrl.policies.narrow import few_workers, most_on_each, work_on
from jigsawrl.policies.rule import Choice, Parts, Rule, Sparing, part_of, roomiest
from jigsawrl.policies.starts import needs, places_on, start_on
from jigsawrl.policies.state import Migrate, Phase, Place, Start, State
from jigsawrl.policies.tails import moved_bytes

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
Actions = tuple[Start | Migrate, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done now, and by which rule one goes on."""

    actions: Actions
    rule: Rule

    def starts(self, phase: PhaseId) -> bool:
        return any(isinstance(each, Start) and each.phase == phase for each in self.actions)


@dataclass(slots=True)
class Room:
    """What is on each worker, while a plan is made."""

    load: list[int]
    """Those that disturb others; who decodes in one batch counts as one."""
    held: list[float]
    """Bytes."""
    batches: list[set[str]]
    """Bases on which somebody decodes there."""
    work: list[float]
    """Seconds of it that are left for those who are there; empty where it does not matter."""

    @staticmethod
    def of(state: State) -> Room:
        batches: list[set[str]] = [set() for _ in state.alive]
        for lane in state.lanes.lanes.values():
            if lane.base and lane.phase == "rollout":
                for worker in lane.workers:
                    batches[worker].add(lane.base)
        load = [state.lanes.crowd(worker) for worker in range(len(state.alive))]
        return Room(load, list(state.held), batches, work_on(state) if merely_divided(state.table) else [])

    def beside(self, phase: Phase) -> list[int]:
        """How many it would be beside: a batch that it joins is no other."""
        base = base_of(phase)
        if not base:
            return self.load
        return [max(0, load - (base in there)) for load, there in zip(self.load, self.batches, strict=True)]

    def take(self, phase: Phase, start: Start) -> None:
        base, needed = base_of(phase), needs(phase, start.places)
        for worker in start.workers:
            self.held[worker] += needed
            if base not in self.batches[worker]:
                self.load[worker] += 1
            if base:
                self.batches[worker].add(base)
            if self.work:
                self.work[worker] += phase.pipeline.busy_left(len(start.workers))


@dataclass(slots=True)
class Planner:
    """Makes plans for one state, some of them more than once. Without `fill` nothing runs beside anything else."""

    state: State
    waiting: list[Phase]
    """In the order of the first plan."""
    closed: set[int]
    """Workers that must not be shared now."""
    fill: bool

    def plans(self) -> list[Plan]:
        """The first one is that of the simple rule."""
        found = [self.plan(self.waiting), self.plan(self.waiting, rule=Rule(divide=True))]
        top = self.waiting[0].outlook.shape.priority
        for phase in [p for p in self.waiting if p.outlook.shape.priority == top][:TRIED]:
            others = without(phase, self.waiting)
            found += [self.plan([phase, *others]), *self.changed(phase, others, (0.5,))]
        return found

    def orders(self, lengths: Iterable[int]) -> list[Plan]:
        """The simple rule with so many pipelines first for good, in any order, letting others overtake and not."""
        names = [p.name for p in self.state.unfinished()]
        counts = sorted({min(length, max(1, len(names) - 1)) for length in lengths})
        rules = [
            Rule(),
            Rule(strict=True),
            *([Rule(divide=True)] if "free" in rule_of(self.state.table) else []),
        ]
        orders = chain.from_iterable(permutations(names, count) for count in counts)
        return [self._by(replace(rule, order=order)) for order in orders for rule in rules]

    def sparing(self, soonest: float, latest: float) -> list[Plan]:
        """Everything should end by a time between these: who has time to spare until then keeps to fewer workers."""
        choices = product(round_times(soonest, latest), SPARED, (False, True))
        return [self._by(Rule(sparing=Sparing(*choice))) for choice in choices]

    def putting_off(self, latest: float) -> list[Plan]:
        """One pipeline waits, for as long as all work could still end by then, and leaves its room to the others."""
        now = self.state.now
        return [
            self.plan(without(phase, self.waiting), rule=Rule(put_off=(phase.pipeline.name, until)))
            for phase in self.waiting
            for until in round_times(now, latest - self.state.left_alone(phase.pipeline))
            if until > now
        ]

    def apart(self) -> list[Plan]:
        """Every rollout keeps to a part of the workers, all as wide, or one wider than the others.

        A tail gains little by many workers: several side by side, each on a few, are faster than all on all.
        """
        even = dict.fromkeys(sorted(p.name for p in self.state.unfinished()), 1)
        wider = [{**even, name: width} for name in even for width in WIDER]
        return [self._by(Rule(parts=parts)) for parts in map(self._parts, [even, *wider]) if parts]

    def _parts(self, widths: dict[str, int]) -> Parts:
        """Side by side, in whole engines; none if there are too few workers for that."""
        workers = [worker for worker, lives in enumerate(self.state.alive) if lives]
        each, parts = len(workers) / sum(widths.values()), []
        for name, edges in zip(widths, pairwise(accumulate(widths.values(), initial=0)), strict=True):
            tp = self.state.pipelines[name].tp
            first, last = (round(edge * each / tp) * tp for edge in edges)
            parts.append((name, tuple(workers[first:last])))
        return tuple(parts) if all(place for _, place in parts) else ()

    def variants(self, plan: Plan, exact: bool) -> list[Plan]:
        """The same rule, but for parts, after one change now: someone is held back, or put elsewhere.

        The others start by the simple rule or, if `exact`, by the plan's.
        """
        rule = replace(plan.rule, parts=())
        order, found = self._ordered(rule), []
        for phase in order:
            others = without(phase, order)
            changed = self.changed(phase, others, (0.25, 0.5, 0.75), rule if exact else SIMPLE)
            found += [Plan(each.actions, rule) for each in changed]
        return found

    def changed(
        self, phase: Phase, others: list[Phase], parts: tuple[float, ...], rule: Rule = SIMPLE
    ) -> list[Plan]:
        """Plans in which this phase goes first, to other workers, or is held back."""
        options: tuple[Option, ...] = ("free", "beside", *parts)
        elsewhere = [self.plan([phase, *others], option, rule) for option in options]
        return [*elsewhere, self.plan(others, rule=rule)]

    def _ordered(self, rule: Rule) -> list[Phase]:
        return sorted(self.waiting, key=lambda phase: rule.rank(phase.pipeline.name))

    def _by(self, rule: Rule) -> Plan:
        return self.plan(self._ordered(rule), rule=rule)

    def plan(self, order: list[Phase], first: Option | None = None, rule: Rule = SIMPLE) -> Plan:
        """Phases start by the rule in this order, but the first of them on these workers, if any are named."""
        return Plan(self._starts(order, first, rule, Room.of(self.state)), rule)

    def after(self, move: Migrate) -> Plan:
        """The simple rule's plan on workers that a gathered tail has left."""
        room, needed = Room.of(self.state), moved_bytes(self.state, move)
        for worker in move.workers:
            room.load[worker] += 1
            room.held[worker] += needed
        for key in move.lanes:
            for worker in self.state.lanes.lanes[key].workers:
                room.load[worker] -= 1
        return Plan((move, *self._starts(self.waiting, None, SIMPLE, room)), SIMPLE)

    def _starts(self, order: list[Phase], first: Option | None, rule: Rule, room: Room) -> tuple[Start, ...]:
        starts, left_alone = [], self.state.left_alone
        for number, phase in enumerate(order):
            named = first if number == 0 else None
            options = self._options(phase, rule) if named is None else (named,)
            part = part_of([left_alone(each.pipeline) for each in order[number:]]) if rule.divide else 0.0
            found = (self._start(phase, option, room, named is None, part) for option in options)
            start = next(filter(None, found), None)
            if start:
                starts.append(start)
            elif rule.strict:
                break
        return tuple(starts)

    def _options(self, phase: Phase, rule: Rule) -> tuple[Option, ...]:
        """Where the rule has a phase start: on the first of these that can be."""
        if rule.parts:
            return (dict(rule.parts)[phase.pipeline.name] if phase.generates else "beside",)
        if rule.sparing:
            return (rule.sparing,)
        return rule_of(self.state.table) if self.fill else ("free",)

    def _start(self, phase: Phase, option: Option, room: Room, by_rule: bool, part: float) -> Start | None:
        """Its start there, entered into the room; None if that cannot be, or is not as the rule has it."""
        start = start_on(self.state, phase, self._workers(phase, option, room, by_rule, part), room.held)
        if start is not None:
            room.take(phase, start)
        return start

    def _workers(self, phase: Phase, option: Option, room: Room, by_rule: bool, part: float) -> list[int]:
        """Those that the option names, in order; none if that is not as the rule has it."""
        home, load = [w for w in phase.home if w not in self.closed], room.beside(phase)
        crowd = company(self.state.table) + (0 if by_rule else 1)
        free, roomy = [w for w in home if load[w] == 0], [w for w in home if load[w] < crowd]
        match option:
            case "free" if part:  # about so many, in whole engines, and at least one
                tp = phase.pipeline.tp
                return free[: max(1, round(len(free) * part / tp)) * tp]
            case "free":
                return free if not by_rule or 2 * len(free) >= len(home) or not self.fill else []
            case _ if not self.fill:
                return []
            case "beside":
                return roomy
            case "few":
                least = sorted(
                    (w for w in home if load[w] < most_on_each(self.state)), key=room.work.__getitem__
                )
                return sorted(least[: few_workers(self.state, phase.pipeline, len(home))])
            case Sparing():
                return self._spared(phase, roomy, room.held, option)
            case tuple():
                return [w for w in roomy if w in option]
            case _:
                emptiest = sorted(home, key=lambda w: (load[w], w))[: max(1, int(len(home) * option))]
                return sorted(w for w in emptiest if load[w] < crowd)

    def _spared(self, phase: Phase, workers: list[int], held: list[float], sparing: Sparing) -> list[int]:
        """As few of these as the time to spare allows, those with most room; fewer where it does not fit on so
        many."""
        home, state, tp = phase.home, self.state, phase.pipeline.tp
        step = tp * max(1, round(len(home) / WIDTHS / tp))
        choices: Sequence[Choice] = [
            (count, phase.seconds_on(count), needed)
            for count in range(step, len(home) + 1, step)
            if (needed := needs(phase, places_on(phase, home[:count]))) <= state.device_bytes
        ]
        if choices and (sparing.trainings or phase.generates):
            choices = sparing.narrowed(choices, state.now, state.left_alone(phase.pipeline))
        return roomiest(choices, workers, held, state.device_bytes)


def without(phase: Phase, phases: list[Phase]) -> list[Phase]:
    return [each for each in phases if each is not phase]


def base_of(phase: Phase) -> str:
    """The base on which others may decode in one batch with it; empty if there is none."""
    return phase.outlook.shape.base if phase.generates else ""


def round_times(first: float, last: float) -> list[float]:
    """A few times between these, the same ones again when the two have come closer to each other."""
    if last <= first:
        return []
    step = 2.0 ** floor(log2((last - first) / AIMS))
    return [step * number for number in range(floor(first / step), floor(last / step) + 1)]


def rule_of(table: Interference) -> tuple[Option, ...]:
    """Where a waiting phase goes: the first of these that can be."""
    if merely_divided(table):
        return ("few",)
    return ("beside",) if mix_freely(table) else ("free", "beside")
