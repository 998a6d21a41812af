"""Drivers and actors in simulated time: they know how long things take, and the scheduler core decides.

Whatever a real run's drivers and actors tell the core is told here too: sub-stages that change, phases that are done,
states that are asleep. What it answers is carried out on lanes whose durations only the simulation knows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jigsawrl.graph.batch import Batch, Engine
from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.interference import Interference
from jigsawrl.graph.lanes import Lane, Lanes, Segment
from jigsawrl.graph.outlook import Outlook
from jigsawrl.phases.ids import PhaseId
from jigsawrl.policies.state import (
    Action,
    Confine,
    Migrate,
    Pause,
    Phase,
    Policy,
    Resize,
    Resume,
    Swap,
    TimerDue,
    WorkerGone,
    WorkerReturned,
)
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import (
    DriverBegan,
    Heard,
    LoadRequest,
    PhaseDone,
    PipelineGone,
    SchedulerEvent,
    StateAsleep,
    SubstageChanged,
    written_action,
)
from jigsawrl.scheduler.invariants import require
from jigsawrl.scheduler.memory import FIRST_SWAP_BYTES_S, SWAP_BYTES_S
from jigsawrl.scheduler.state import GANG
from jigsawrl.simulator.jobs import Failure, Job

SIMULTANEOUS_S = 1e-6
"""Seconds within which events count as simultaneous."""


@dataclass(slots=True)
class Played:
    """A phase that runs, as its driver sees it."""

    engines: int
    """Number of lanes that it began with."""
    busy: dict[int, float]
    """Seconds of work done for it on each worker, as long as they are alone on a whole one."""


@dataclass(slots=True)
class Outcome:
    """The result of a simulation."""

    seconds: float
    finished: dict[str, float]
    """Seconds from each pipeline's arrival to its end."""
    tokens: dict[str, float]
    """Tokens that each pipeline generated, in finished steps."""
    log: list[dict[str, Any]] = field(default_factory=list)


class Simulation:
    """One run of one policy. With `rollout_workers`, that many workers only generate and the others only train."""

    def __init__(
        self,
        policy: Policy,
        jobs: Sequence[Job],
        hardware: Hardware,
        workers: int,
        table: Interference,
        *,
        seed: int = 0,
        noise: float = 0.0,
        failures: Sequence[Failure] = (),
        rollout_workers: int | None = None,
    ) -> None:
        self.core = SchedulerCore(
            policy, table, workers, hardware.device_bytes, rollout_workers=rollout_workers, checked=True
        )
        self.core.state.untold = ()
        self.jobs = {job.shape.name: job for job in jobs}
        self.truth = {
            name: Outlook(job.shape, job.costs, hardware, job.forecast) for name, job in self.jobs.items()
        }
        self.seed, self.noise = seed, noise
        self.lanes = Lanes(table, workers)
        self.engines: dict[int, Engine] = {}
        """The samples of each lane that generates."""
        self.played: dict[PhaseId, Played] = {}
        self.loading: list[str] = []
        """Pipelines whose drivers wait for room to be set up."""
        self.steps = dict.fromkeys(self.jobs, 0)
        """Steps done by each pipeline."""
        self.slept: set[tuple[str, str | None]] = set()
        """States that have been asleep before."""
        self.coming: list[tuple[float, int, Heard]] = []
        self.scheduled = 0
        self.outcome = Outcome(0.0, {}, dict.fromkeys(self.jobs, 0.0))
        self._join(jobs)
        for failure in failures:
            self._schedule(failure.at, "", WorkerGone(failure.worker))
            self._schedule(failure.back, "", WorkerReturned(failure.worker))

    def _join(self, jobs: Sequence[Job]) -> None:
        first = min((job.shape.arrival for job in jobs), default=0.0)
        for name, job in self.jobs.items():
            whole = self.core.state.layout
            layout = whole if job.rollout_workers is None else replace(whole, rollout=job.rollout_workers)
            self.core.join(name, self.truth[name], layout, awaited=job.shape.arrival <= first)
            self._schedule(job.shape.arrival, name, LoadRequest())

    def run(self) -> Outcome:
        """Runs until every pipeline is done."""
        while len(self.outcome.finished) < len(self.jobs):
            events = self._next_events()
            actions = self.core.handle(self.lanes.now, events)
            if any(isinstance(event, WorkerGone) for _, event in events):
                self._lose()
            self._carry_out(actions)
        self.outcome.seconds = self.lanes.now
        return self.outcome

    def _schedule(self, at: float, name: str, event: SchedulerEvent) -> None:
        self.scheduled += 1
        heapq.heappush(self.coming, (at, self.scheduled, (name, event)))

    # What happens

    def _next_events(self) -> list[Heard]:
        """Moves the clock to the next event, and collects all that happens then."""
        soonest = self.coming[0][0] if self.coming else float("inf")
        due = min(self.lanes.next_end(), soonest, *self.core.waits)
        require(16, due < float("inf"), f"{self.core.policy.name} waits for nothing")
        events = [event for lane in self.lanes.advance(due) for event in self._end(lane)]
        while self.coming and self.coming[0][0] <= due + SIMULTANEOUS_S:
            name, event = heapq.heappop(self.coming)[2]
            events.append((name, event))
            if isinstance(event, LoadRequest):
                self.loading.append(name)
        events += self._left_in_tails()
        if any(until <= due for until in self.core.waits):
            events.append(("", TimerDue()))
        return events

    def _end(self, lane: Lane) -> list[Heard]:
        """A sub-stage ended. Its lane goes on by itself."""
        self._log_span(lane)
        phase = self.core.state.phase_of(lane)
        self._count(lane)
        engine = lane.workers[0] if phase.generates else GANG
        while (goes_on := self.lanes.proceed(lane)) and lane.left <= 0:
            pass
        if goes_on:
            return [(lane.pipeline, SubstageChanged(engine, lane.segment.kind, _samples(lane)))]
        self.engines.pop(lane.id, None)
        events: list[Heard] = [(lane.pipeline, SubstageChanged(engine, None, 0))]
        if not any(key in self.lanes.lanes for key in phase.lanes):
            events += [(lane.pipeline, event) for event in self._phase_done(phase)]
        return events

    def _left_in_tails(self) -> Iterator[Heard]:
        """What engines in their last tail report with whatever else happens: how many samples they have by now."""
        for lane in self.lanes.lanes.values():
            if lane.segment.kind == "tail" and self.core.state.in_tail(lane.id):
                left = self.engines[lane.id].left(lane.index, lane.left)
                if left != self.core.state.uses[lane.id].samples:
                    yield lane.pipeline, SubstageChanged(lane.workers[0], "tail", left)

    def _count(self, lane: Lane) -> None:
        """Counts what was done of a lane's sub-stage as work of its workers."""
        if lane.signature not in ("host", "link"):
            busy = self.played[PhaseId(lane.pipeline, lane.phase, lane.step)].busy
            for worker in lane.workers:
                busy[worker] = busy.get(worker, 0.0) + lane.segment.seconds - lane.left

    def _phase_done(self, phase: Phase) -> list[SchedulerEvent]:
        name, step = phase.pipeline.name, phase.index
        played, shape = self.played.pop(phase.id), self.jobs[name].shape
        busy, lengths = tuple(played.busy.values()), self.jobs[name].lengths(step)
        if phase.generates:
            told = tuple(lengths.astype(int).tolist())
            waits = shape.tool_seconds * (shape.turns - 1)
            went_on = self.lanes.now if name in self.core.state.covered else None
            return [PhaseDone(phase.kind, step, busy, played.engines, told, shape.turns, waits, went_on)]
        tokens = float(lengths.sum())
        self.outcome.tokens[name] += tokens
        self.steps[name] = step
        self._log("step", pipeline=name, step=step, tokens=tokens)
        done = PhaseDone(phase.kind, step, busy, 0)
        if step < shape.steps:
            return [done]
        self.outcome.finished[name] = self.lanes.now - shape.arrival
        return [done, PipelineGone()]

    def _lose(self) -> None:
        """Removes the lanes that the core gave up; the drivers of their pipelines begin again."""
        pipelines = self.core.state.pipelines
        for lane in list(self.lanes.lanes.values()):
            if pipelines[lane.pipeline].status == "recovering":
                self._log_span(lane, lost=True)
                self._remove(lane)
                self.played.pop(PhaseId(lane.pipeline, lane.phase, lane.step), None)
        for pipeline in pipelines.values():
            if pipeline.status == "recovering":
                self._schedule(self.lanes.now, pipeline.name, LoadRequest())

    def _remove(self, lane: Lane) -> None:
        self.lanes.remove(lane.id)
        self.engines.pop(lane.id, None)

    # What is done about it

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            self._log("action", **written_action(action))
            match action:
                case Resize(lane) | Pause(lane) | Resume(lane) | Confine(lane):
                    self._follow(lane)
                case Migrate():
                    self._migrate(action)
                case Swap(name, out=True, phase=kind):
                    self._schedule(self.lanes.now + self._swap_seconds(action), name, StateAsleep(kind))
        for phase in self.core.permitted():
            if phase.id not in self.played:
                self._begin(phase)
        for name in [name for name in self.loading if self.core.may_load(name)]:
            self.loading.remove(name)
            self._schedule(self.lanes.now, name, DriverBegan(self.jobs[name].shape.steps, self.steps[name]))

    def _swap_seconds(self, swap: Swap) -> float:
        """Seconds until the state is asleep, with those that it takes to wake up again."""
        memories = [memory for memory in self.core.memory.of(swap.pipeline) if memory.kind == swap.phase]
        known = (swap.pipeline, swap.phase) in self.slept
        self.slept.add((swap.pipeline, swap.phase))
        size = max(memory.states[swap.pipeline] for memory in memories)
        return size / (SWAP_BYTES_S if known else FIRST_SWAP_BYTES_S)

    def _follow(self, key: int) -> None:
        """From now on a lane has the share that the core gave it, and is paused as decided. What it changes to be
        limited to a part is not known: speeds are as if it were not."""
        lane, decided = self.lanes.lanes.get(key), self.core.state.lanes.lanes[key]
        if lane is None:
            return  # it has not begun
        self._log_span(lane)
        lane.mark(self.lanes.now)
        self.lanes.resize(key, decided.share)
        self.lanes.pause(key, decided.paused)

    def _begin(self, phase: Phase) -> None:
        name, places = phase.pipeline.name, [self.core.state.lanes.lanes[key] for key in phase.lanes]
        width, truth = len(places[0].workers), self.truth[name]
        lengths = self.jobs[name].lengths(phase.index)
        workers = [worker for lane in places for worker in lane.workers]
        self.played[phase.id] = Played(len(places), dict.fromkeys(workers, 0.0))
        if not phase.generates:
            self._add(places[0], self._noisy(places[0].id, truth.training(width, float(lengths.sum()))))
            return
        for lane, part in zip(places, truth.batch(lengths).split(len(places)), strict=True):
            self._generate(lane, truth.engine_of(part, width))

    def _generate(self, decided: Lane, engine: Engine) -> None:
        self.engines[decided.id] = engine
        self._add(decided, engine.segments)

    def _noisy(self, key: int, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        factors = np.exp(np.random.default_rng((self.seed, key)).normal(0.0, self.noise, len(segments)))
        return tuple(
            replace(segment, seconds=segment.seconds * float(factor))
            for segment, factor in zip(segments, factors, strict=True)
        )

    def _add(self, decided: Lane, segments: tuple[Segment, ...]) -> None:
        """Adds a lane where the core has it. How long its sub-stages really take is known from here on."""
        lane = replace(decided, segments=segments, index=0)
        self.lanes.add(lane)
        while lane.left <= 0 and self.lanes.proceed(lane):
            pass

    def _migrate(self, action: Migrate) -> None:
        batches = []
        for key in action.lanes:
            lane, engine = self.lanes.lanes[key], self.engines[key]
            batches.append(engine.survivors(lane.index, lane.left))
            self._log_span(lane)
            self._count(lane)
            self._remove(lane)
        state, count = self.core.state, len(action.places)
        phase = state.phase_of(lane)
        for key, part in zip(phase.lanes[-count:], Batch.merged(batches).split(count), strict=True):
            to = state.lanes.lanes[key]
            self._generate(to, self.truth[action.pipeline].moved(part, len(to.workers)))

    # Records

    def _log(self, event: str, **fields: Any) -> None:
        self.outcome.log.append({"t": self.lanes.now, "event": event, **fields})

    def _log_span(self, lane: Lane, **fields: Any) -> None:
        if self.lanes.now > lane.started and not lane.paused:
            self._log(
                "substage",
                substage=lane.segment.kind,
                pipeline=lane.pipeline,
                workers=lane.workers,
                step=lane.step,
                t0=lane.started,
                t1=self.lanes.now,
                share=lane.share,
                sequences=lane.segment.sequences,
                tokens=round(lane.part * lane.segment.tokens),
                **fields,
            )


def _samples(lane: Lane) -> int:
    """Samples that an engine reports: those of an earlier turn's tail cannot be moved, and do not count."""
    later = [segment.kind for segment in lane.segments[lane.index + 1 :]]
    waits = lane.segment.kind == "tool" or (lane.segment.kind == "tail" and "tail" in later)
    return 0 if waits else lane.segment.sequences
