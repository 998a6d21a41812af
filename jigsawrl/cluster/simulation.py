"""A cluster over time: jobs come, run phase by phase under the permits of their groups, and go; nodes cost.

Durations are drawn for each job and step, so that every scheduler sees the same ones. A job that is moved or
preempted, or whose node breaks, loses the step it was in and starts cold. Every `LOOK` steps a job's typical
durations are held against those it was planned with; if they have drifted, the scheduler is told.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jigsawrl.cluster.groups import Decision
from jigsawrl.cluster.jobs import Job
from jigsawrl.cluster.permits import Permits, Phase
from jigsawrl.cluster.rounds import runners_of
from jigsawrl.cluster.scheduler import Scheduler
from jigsawrl.cluster.shapes import TAIL_SHARE

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
Kind = Literal["arrival", "phase", "tail", "ready", "failure", "repair"]
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
    def slowdown(self) -> float:
        """Its time in the cluster over its time alone, with the very same lengths."""
        return math.inf if self.finished is None else (self.finished - self.arrived) / self.alone

    @property
    def kept(self) -> bool:
        """Whether it took at most `max_slowdown` times as long as alone."""
        return self.slowdown <= self.job.max_slowdown * (1 + 1e-9)

    @property
    def kept_as_planned(self) -> bool:
        """Against the time alone with every response at the token limit, as the paper has it."""
        if self.finished is None:
            return False
        return self.finished - self.arrived <= self.job.max_slowdown * self.worst * (1 + 1e-9)

    @property
    def in_time(self) -> bool:
        if self.job.deadline is None:
            return True
        return self.finished is not None and self.finished - self.arrived <= self.job.deadline * 3600


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole trace."""

    records: dict[str, Record]
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


@dataclass(slots=True)
class _Running:
    record: Record
    phase: Phase = "rollout"
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
        self.records: dict[str, Record] = {}
        self.decisions: list[Decision] = []
        self.rates: list[tuple[float, float]] = []
        self._running: dict[str, _Running] = {}
        self._permits: dict[int, Permits] = {}
        self._where: dict[str, int] = {}
        self._events: list[tuple[float, int, Kind, str, int]] = []
        self._count = 0
        self._dollars = 0.0
        self._rented: dict[str, float] = {}
        self._nodes: dict[str, int] = {}
        self._busy: dict[str, float] = {}
        self._peak: dict[str, int] = {}
        self._draws: dict[str, Floats] = {}
        self._decided_at = 0.0
        self._cold: set[str] = set()
        """Jobs that are starting, and have no turns yet."""
        self._jobs = {job.name: job for job in jobs}
        self._unfinished = len(self._jobs)
        for job in self._jobs.values():
            self._push(job.arrival * 3600, "arrival", job.name)
        for each in failures:
            self._push(each.at * 3600, "failure", each.node)
            self._push((each.at + each.hours) * 3600, "repair", each.node)

    def run(self, until: float = math.inf) -> Outcome:
        """To the end, or to a time in seconds."""
        while self._events and self._unfinished and self._events[0][0] <= until:
            when, _, kind, name, epoch = heapq.heappop(self._events)
            self._pass(when)
            if kind == "phase":
                self._ended(name, epoch)
            elif kind == "tail":
                self._tail(name, epoch)
            elif kind == "ready":
                self._ready(name, epoch)
            elif kind == "arrival":
                self._arrived(self._jobs[name])
            else:
                self._stand()
                decide = self.scheduler.fail if kind == "failure" else self.scheduler.repair
                self._decided(decide(name))
        pools = self.scheduler.shapes.cluster.pools
        return Outcome(
            self.records,
            self._dollars,
            self.now,
            {pool: self._peak.get(pool, 0) for pool in pools},
            {pool: self._busy.get(pool, 0.0) / max(self._rented.get(pool, 0.0), 1e-9) for pool in pools},
            self.decisions,
            self.rates,
        )

    def _push(self, when: float, kind: Kind, name: str, epoch: int = 0) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, kind, name, epoch))

    def _pass(self, when: float) -> None:
        """Time goes by, and costs."""
        passed = when - self.now
        self.now = when
        if passed > 0 and self.rates:
            self._dollars += self.rates[-1][1] * passed / 3600
            for pool, count in self._nodes.items():
                self._rented[pool] = self._rented.get(pool, 0.0) + count * passed

    def _arrived(self, job: Job) -> None:
        self._stand()
        record = Record(job, self.now, since=self.now)
        self.records[job.name] = record
        self._running[job.name] = _Running(record)
        self._draws[job.name] = self._drawn(job)
        allowed = None if job.deadline is None else job.deadline * 3600
        decisions = self.scheduler.arrive(job, allowed)
        phases = job.durations(*self.scheduler.standing(job.name).pair, job.training_nodes)
        record.worst = job.steps * sum(each.worst for each in phases)
        self._decided(decisions)

    def _drawn(self, job: Job) -> Floats:
        rng = np.random.default_rng((self.seed, zlib.crc32(job.name.encode())))
        return rng.standard_normal((job.steps, 2))

    def _stand(self) -> None:
        """Tells the scheduler how all jobs stand to their promises."""
        for name, running in self._running.items():
            standing = self.scheduler.standing(name)
            record, job = running.record, running.record.job
            left = standing.alone * (job.steps - record.steps)
            ratio = 1.0
            if self.scheduler.shapes.level >= 1 and running.seen:  # planned are limits, not what it takes
                recent = running.seen[-RECENT:]
                ratio = sum(recent) / len(recent) / standing.alone
            spent = (running.began if name in self._where else self.now) - record.arrived
            allowed = (job.max_slowdown * (running.done + left * ratio) - spent) / ratio
            if job.deadline is not None:
                allowed = min(allowed, job.deadline * 3600 - spent)
            self.scheduler.progress(name, left, allowed)

    def _decided(self, decisions: Sequence[Decision]) -> None:
        """Does what the scheduler has decided."""
        self._decided_at = self.now
        self.decisions += decisions
        changes = self.scheduler.changes()
        started = []
        for name in changes.moved | changes.preempted:
            if name in self._where:
                self._permits[self._where.pop(name)].leave(name)
                self._running[name].record.moves += name in changes.moved
                self._running[name].record.preempted += name in changes.preempted
                self._running[name].record.since = self.now
                self._void(name)
        for number in changes.groups:
            group = self.scheduler.groups.get(number)
            if group is None:
                self._permits.pop(number, None)
                continue
            self._permits.setdefault(number, Permits())
            started += [name for name in group.standings if name not in self._where]
        for name in started:
            self._begin(name)
        for number in changes.groups & self._permits.keys():
            self._seat(number)
        self._count_nodes()

    def _seat(self, number: int) -> None:
        """Gives turns to all jobs of a group that are ready."""
        group = self.scheduler.groups[number]
        seats = {name: nodes for name, nodes in group.seats().items() if name not in self._cold}
        runners = runners_of(group.shape.turns, group.shape.places, group.shape.shared, self.now)
        self._permits[number].seated(group.shape.verdict.order, seats, runners)
        self._grant(number)

    def _void(self, name: str) -> None:
        running = self._running[name]
        self._cold.discard(name)
        running.epoch += 1
        running.step_alone = 0.0

    def _begin(self, name: str) -> None:
        """On its new nodes: at once where it starts for the first time, else after a cold start."""
        running = self._running[name]
        record = running.record
        self._where[name] = self.scheduler.home[name]
        cold = 0.0
        record.waited += self.now - record.since
        if record.started is None:
            record.started = self.now
        else:
            cold = record.job.cold_seconds
        running.began = self.now
        self._cold.add(name)
        self._push(self.now + cold, "ready", name, running.epoch)

    def _ready(self, name: str, epoch: int) -> None:
        running = self._running.get(name)
        if running is not None and running.epoch == epoch:
            self._cold.remove(name)
            self._permits[self._where[name]].ask(name, "rollout")
            self._seat(self._where[name])

    def _tail(self, name: str, epoch: int) -> None:
        """The rest of a rollout needs a part of its nodes only, which is in its `hold` already."""
        running = self._running.get(name)
        if running is not None and running.epoch == epoch:
            self._permits[self._where[name]].tail(name)
            self._grant(self._where[name])

    def _grant(self, number: int) -> None:
        permits = self._permits[number]
        group = self.scheduler.groups[number]
        shared = len(group.standings) > 1
        for name, phase in permits.granted(self.now):
            running = self._running[name]
            job, step = running.record.job, running.record.steps
            pair = group.shape.pair
            durations = job.durations(*pair, group.shape.training_nodes)
            which = 0 if phase == "rollout" else 1
            grown = 1 + job.drift * step / max(1, job.steps)
            seconds = durations[which].grown(grown).drawn(float(self._draws[name][step, which]))
            best = group.standings[name].pair
            own = job.durations(*best, job.training_nodes)[which].grown(grown)
            running.step_alone += own.drawn(float(self._draws[name][step, which]))
            warm = job.warm_rollout if phase == "rollout" else job.warm_training
            whole = seconds + (warm if shared else 0.0)
            hold = whole - (seconds * job.tail * (1 - TAIL_SHARE) if phase == "rollout" and shared else 0.0)
            nodes = permits.seats[name].nodes(phase)
            pool = pair[which]
            self._busy[pool] = self._busy.get(pool, 0.0) + hold * len(nodes)
            running.phase = phase
            if hold < whole:
                self._push(self.now + hold, "tail", name, running.epoch)
            self._push(self.now + whole, "phase", name, running.epoch)

    def _ended(self, name: str, epoch: int) -> None:
        running = self._running.get(name)
        if running is None or running.epoch != epoch:
            return
        number = self._where[name]
        permits = self._permits[number]
        permits.release(name, self.now)
        if running.phase == "rollout":
            permits.ask(name, "training")
        elif self._stepped(name, running):
            return
        else:
            permits.ask(name, "rollout")
        self._grant(self._where[name])

    def _stepped(self, name: str, running: _Running) -> bool:
        """A step is done; whether the job has left its group."""
        record, job = running.record, running.record.job
        record.steps += 1
        running.done += running.step_alone
        running.seen.append(running.step_alone)
        running.step_alone, running.began = 0.0, self.now
        if record.steps == job.steps:
            record.finished, record.alone = self.now, running.done
            self._unfinished -= 1
            del self._running[name]
            self._permits[self._where.pop(name)].leave(name)
            self._stand()
            self._decided(self.scheduler.depart(name))
            return True
        if not self.follow:
            return False
        if record.steps % LOOK == 0 and (grown := self._drifted(name, running)) is not None:
            running.told = grown
            self._stand()
            return self._heard(name, lambda: self.scheduler.measured(name, job.grown(grown, grown)))
        if record.steps % LATE == 0:
            self._stand()
            group = self.scheduler.groups[self._where[name]]
            standing = self.scheduler.standing(name)
            self._permits[self._where[name]].allow(name, standing.alone * standing.bound)
            late = group.shape.slowdown(name) > self.scheduler.standing(name).bound * 1.005
            if late and len(group.standings) > 1:
                return self._heard(name, lambda: self.scheduler.relieve(name))
            if self.scheduler.shapes.surely and self.now - self._decided_at >= RECONSIDER:
                return self._heard(name, self.scheduler.reconsider)
        return False

    def _drifted(self, name: str, running: _Running) -> float | None:
        """How much longer its phases have become, if that is worth a word."""
        job = running.record.job
        seen = sum(running.seen[-LOOK:]) / LOOK
        phases = job.durations(*self.scheduler.standing(name).pair, job.training_nodes)
        grown = seen / sum(each.typical * math.exp(each.spread**2 / 2) for each in phases)
        noise = max(each.spread for each in phases) / math.sqrt(LOOK)
        return grown if abs(grown / running.told - 1) > max(DRIFTED, 2 * noise) else None

    def _heard(self, name: str, decide: Callable[[], Sequence[Decision]]) -> bool:
        """A decision about a job between two of its steps; whether it was moved."""
        epoch = self._running[name].epoch
        self._permits[self._where[name]].ask(name, "rollout")
        self._decided(decide())
        return self._running[name].epoch != epoch or name not in self._permits[self._where[name]].waiting

    def _count_nodes(self) -> None:
        self._nodes = {}
        for group in self.scheduler.groups.values():
            rollout, training = group.shape.pair
            self._nodes[training] = self._nodes.get(training, 0) + len(group.training_nodes)
            if rollout != training:
                self._nodes[rollout] = self._nodes.get(rollout, 0) + len(group.rollout_nodes)
        for pool, count in self._nodes.items():
            self._peak[pool] = max(self._peak.get(pool, 0), count)
        self.rates.append((self.now, self.scheduler.price))
