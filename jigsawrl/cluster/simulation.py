"""A cluster over time: jobs come, run phase by phase in the order of their groups, and go; nodes cost.

Durations are drawn for each job and step, so that every scheduler sees the same ones. A job that is moved or
preempted, or whose node breaks, loses the step it was in and starts cold. Every `LOOK` steps a job's typical
durations are held against those it was planned with; if they have drifted, the scheduler is told.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from jigsawrl.cluster.group_turns import GroupTurns
from jigsawrl.cluster.groups import Decision, Group, total_nodes
from jigsawrl.cluster.jobs import Job
from jigsawrl.cluster.rounds import jobs_of
from jigsawrl.cluster.scheduler import Scheduler
from jigsawrl.cluster.shapes import TAIL_SHARE
from jigsawrl.phases.turns import ORDERS, ROLLOUT, PhasedJob

LOOK = 8
"""Steps after which durations are looked at."""
LATE = 2
"""Steps after which it is looked whether a job falls behind its promise."""
RECONSIDER = 3600.0
"""Seconds after a decision from which it is asked whether groups can be packed closer by now."""
RECENT = 4 * LOOK
"""Steps by which it is seen what a job takes of the limits it was planned with."""
DRIFTED = 0.05
"""Relative; a smaller difference is not worth a word."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Failure:
    """A node that breaks, and when it works again. Hours."""

    node: str
    at: float
    hours: float


@dataclass(slots=True)
class Record:
    """What became of a job. Seconds since the start of the trace."""

    job: Job
    arrived: float
    started: float | None = None
    finished: float | None = None
    alone: float = 0.0
    """What its very phases would have taken alone."""
    worst: float = 0.0
    """What it would have taken alone with every response at the token limit."""
    steps: int = 0
    moves: int = 0
    preempted: int = 0
    waited: float = 0.0
    """For nodes, before it started and whenever it had to give them up."""
    since: float = 0.0
    """When it last began to wait."""

    @property
    def took(self) -> float:
        """Seconds from its arrival to its end."""
        return math.inf if self.finished is None else self.finished - self.arrived

    @property
    def slowdown(self) -> float:
        """Its time in the cluster over its time alone, with the very same lengths."""
        return math.inf if self.finished is None else self.took / self.alone

    @property
    def kept(self) -> bool:
        """Whether it took at most `max_slowdown` times as long as alone."""
        return self.slowdown <= self.job.max_slowdown * (1 + 1e-9)

    @property
    def kept_as_planned(self) -> bool:
        """Against the time alone with every response at the token limit, as the paper has it."""
        return self.took <= self.job.max_slowdown * self.worst * (1 + 1e-9)

    @property
    def in_time(self) -> bool:
        return self.job.deadline is None or self.took <= self.job.deadline * 3600


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole trace."""

    records: Mapping[str, Record]
    dollars: float
    seconds: float
    peak_nodes: dict[str, int]
    busy: dict[str, float]
    """By pool: the part of rented node time in which a phase ran."""
    decisions: Sequence[Decision]
    rates: Sequence[tuple[float, float]]
    """Dollars an hour, from a time on."""

    @property
    def dollars_per_hour(self) -> float:
        return self.dollars / (self.seconds / 3600)

    @property
    def slo_attainment(self) -> float:
        return sum(each.kept for each in self.records.values()) / len(self.records)


@dataclass(slots=True, kw_only=True)
class _Running(Record):
    """A record in the making."""

    draws: Floats
    """By step and phase, of the standard normal."""
    placed: bool = False
    """It has nodes."""
    cold: bool = False
    """It is starting on its nodes, and has no turns yet."""
    epoch: int = 0
    """Ends of phases that were begun before a move are void."""
    done: float = 0.0
    """Alone seconds of finished steps."""
    began: float = 0.0
    """When the step it is in began."""
    step_alone: float = 0.0
    told: float = 1.0
    """Drift that the scheduler knows of."""
    seen: list[float] = field(default_factory=list)


class ClusterSimulation:
    """Plays a trace with one scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        jobs: Iterable[Job],
        *,
        seed: int = 0,
        failures: Sequence[Failure] = (),
        follow: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.seed, self.follow = seed, follow
        self.now = 0.0
        self._jobs: dict[str, _Running] = {}
        """Those that have come."""
        self.decisions: list[Decision] = []
        self.rates: list[tuple[float, float]] = []
        self._turns: dict[int, GroupTurns] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()
        self._dollars = 0.0
        self._nodes: Counter[str] = Counter()
        self._peak: Counter[str] = Counter()
        self._rented: defaultdict[str, float] = defaultdict(float)
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._decided_at = 0.0
        self._unfinished = 0
        for job in jobs:
            self._push(job.arrival * 3600, partial(self._arrived, job))
            self._unfinished += 1
        for each in failures:
            self._push(each.at * 3600, partial(self._changed, scheduler.fail, each.node))
            self._push((each.at + each.hours) * 3600, partial(self._changed, scheduler.repair, each.node))

    def run(self, until: float = math.inf) -> Outcome:
        """To the end, or to a time in seconds."""
        while self._events and self._unfinished and self._events[0][0] <= until:
            when, _, happens = heapq.heappop(self._events)
            self._pass(when)
            happens()
        pools = self.scheduler.shapes.cluster.pools
        return Outcome(
            self._jobs,
            self._dollars,
            self.now,
            {pool: self._peak[pool] for pool in pools},
            {pool: self._busy[pool] / max(self._rented[pool], 1e-9) for pool in pools},
            self.decisions,
            self.rates,
        )

    def _push(self, when: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), happens))

    def _later(self, seconds: float, running: _Running, happens: Callable[[_Running], None]) -> None:
        """Lets something happen to a job in so many seconds, unless it leaves its nodes before."""
        epoch = running.epoch

        def unless_void() -> None:
            if running.epoch == epoch:
                happens(running)

        self._push(self.now + seconds, unless_void)

    def _pass(self, when: float) -> None:
        """Time goes by, and costs."""
        passed = when - self.now
        self.now = when
        if passed > 0 and self.rates:
            self._dollars += self.rates[-1][1] * passed / 3600
            for pool, rented in self._nodes.items():
                self._rented[pool] += rented * passed

    def _changed(self, change: Callable[[str], Sequence[Decision]], node: str) -> None:
        """A node breaks, or works again."""
        self._stand()
        self._decided(change(node))

    def _arrived(self, job: Job) -> None:
        self._stand()
        rng = np.random.default_rng((self.seed, zlib.crc32(job.name.encode())))
        draws = rng.standard_normal((job.steps, 2))
        running = self._jobs[job.name] = _Running(job, self.now, since=self.now, draws=draws)
        decisions = self.scheduler.arrive(job, None if job.deadline is None else job.deadline * 3600)
        phases = job.durations(*self.scheduler.standing(job.name).pair, job.training_nodes)
        running.worst = job.steps * sum(each.worst for each in phases)
        self._decided(decisions)

    def _stand(self) -> None:
        """Tells the scheduler how all jobs stand to their promises."""
        for name, running in self._jobs.items():
            if running.finished is not None:
                continue
            alone, job = self.scheduler.standing(name).alone, running.job
            left = alone * (job.steps - running.steps)
            ratio = 1.0
            if self.scheduler.shapes.surely and running.seen:  # planned are limits, not what it takes
                recent = running.seen[-RECENT:]
                ratio = sum(recent) / len(recent) / alone
            spent = (running.began if running.placed else self.now) - running.arrived
            allowed = (job.max_slowdown * (running.done + left * ratio) - spent) / ratio
            if job.deadline is not None:
                allowed = min(allowed, job.deadline * 3600 - spent)
            self.scheduler.progress(name, left, allowed)

    def _decided(self, decisions: Sequence[Decision]) -> None:
        """Does what the scheduler has decided."""
        self._decided_at = self.now
        self.decisions += decisions
        changes = self.scheduler.changes()
        for name in changes.moved | changes.preempted:
            running = self._jobs[name]
            if running.placed:
                running.moves += name in changes.moved
                running.preempted += name in changes.preempted
                running.placed = running.cold = False
                running.since, running.step_alone = self.now, 0.0
                running.epoch += 1
        for number in changes.groups:
            group = self.scheduler.groups.get(number)
            if group is None:
                self._turns.pop(number, None)
                continue
            self._turns.setdefault(number, GroupTurns())
            for name in group.standings:
                self._begin(self._jobs[name])
        for number in changes.groups & self._turns.keys():
            self._seat(number)
        self._nodes = total_nodes(group.shape for group in self.scheduler.groups.values())
        self._peak |= self._nodes
        self.rates.append((self.now, self.scheduler.price))

    def _begin(self, running: _Running) -> None:
        """Begins on its new nodes: at once where it starts for the first time, else after a cold start."""
        if running.placed:
            return
        running.waited += self.now - running.since
        cold_seconds = 0.0 if running.started is None else running.job.cold_seconds
        running.started = self.now if running.started is None else running.started
        running.placed = running.cold = True
        running.began = self.now
        self._later(cold_seconds, running, self._ready)

    def _ready(self, running: _Running) -> None:
        running.cold = False
        self._seat(self.scheduler.home[running.job.name])

    def _seat(self, number: int) -> None:
        """Gives turns to all jobs of a group that are ready."""
        shape = self.scheduler.groups[number].shape
        jobs = jobs_of(shape.turns, shape.places, shape.shared, self.now)
        ready = [job for job in jobs if not self._jobs[job.name].cold]
        self._turns[number].seat(ORDERS[shape.verdict.order], ready, self.now)
        self._start(number)

    def _start(self, number: int) -> None:
        for job in self._turns[number].start(self.now):
            self._begin_phase(job, self.scheduler.groups[number])

    def _begin_phase(self, phased: PhasedJob, group: Group) -> None:
        name, which, shared = phased.name, phased.phase, len(group.standings) > 1
        running = self._jobs[name]
        job, step = running.job, running.steps
        grown = 1 + job.drift * step / max(1, job.steps)
        draw = float(running.draws[step, which])
        pair = group.shape.pair
        seconds = job.durations(*pair, group.shape.training_nodes)[which].grown(grown).drawn(draw)
        own = job.durations(*group.standings[name].pair, job.training_nodes)[which].grown(grown)
        running.step_alone += own.drawn(draw)
        warm = job.warm_rollout if which == ROLLOUT else job.warm_training
        whole = seconds + (warm if shared else 0.0)
        hold = whole - (seconds * job.tail * (1 - TAIL_SHARE) if which == ROLLOUT and shared else 0.0)
        self._busy[pair[which]] += hold * len(group.nodes_of(name)[which])
        if hold < whole:
            self._later(hold, running, self._tail)
        self._later(whole, running, self._ended)

    def _tail(self, running: _Running) -> None:
        """The rest of a rollout needs a part of its nodes only, which is in its `hold` already."""
        number = self.scheduler.home[running.job.name]
        self._turns[number].jobs[running.job.name].held = 0
        self._start(number)

    def _ended(self, running: _Running) -> None:
        name = running.job.name
        turns = self._turns[self.scheduler.home[name]]
        turns.end(name, self.now)
        if turns.jobs[name].phase != ROLLOUT or not self._stepped(name, running):
            self._start(self.scheduler.home[name])

    def _stepped(self, name: str, running: _Running) -> bool:
        """A step is done; whether the job has left its group."""
        job = running.job
        running.steps += 1
        running.done += running.step_alone
        running.seen.append(running.step_alone)
        running.step_alone, running.began = 0.0, self.now
        if running.steps == job.steps:
            running.finished, running.alone = self.now, running.done
            self._unfinished -= 1
            self._stand()
            self._decided(self.scheduler.depart(name))
            return True
        if not self.follow:
            return False
        if running.steps % LOOK == 0 and (grown := self._drifted(running)) is not None:
            running.told = grown
            self._stand()
            return self._heard(running, self.scheduler.measured(name, job.grown(grown, grown)))
        if running.steps % LATE == 0:
            self._stand()
            group, standing = self.scheduler.groups[self.scheduler.home[name]], self.scheduler.standing(name)
            self._turns[group.number].jobs[name].limit = standing.alone * standing.bound
            if group.shape.slowdown(name) > standing.bound * 1.005 and len(group.standings) > 1:
                return self._heard(running, self.scheduler.relieve(name))
            if self.scheduler.shapes.surely and self.now - self._decided_at >= RECONSIDER:
                return self._heard(running, self.scheduler.reconsider())
        return False

    def _drifted(self, running: _Running) -> float | None:
        """How much longer its phases have become, if that is worth a word."""
        job = running.job
        seen = sum(running.seen[-LOOK:]) / LOOK
        phases = job.durations(*self.scheduler.standing(job.name).pair, job.training_nodes)
        grown = seen / sum(each.typical * math.exp(each.spread**2 / 2) for each in phases)
        noise = max(each.spread for each in phases) / math.sqrt(LOOK)
        return grown if abs(grown / running.told - 1) > max(DRIFTED, 2 * noise) else None

    def _heard(self, running: _Running, decisions: Sequence[Decision]) -> bool:
        """Does what was decided about a job between two of its steps; whether it was moved, or goes on already."""
        name, epoch = running.job.name, running.epoch
        self._decided(decisions)
        return running.epoch != epoch or self._turns[self.scheduler.home[name]].jobs[name].since is None
