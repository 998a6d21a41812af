"""Discrete events: sub-stages end, pipelines arrive, workers die; after each the policy is asked."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from jigsawrl.graph.batch import Batch, Engine
from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.interference import Interference
from jigsawrl.graph.lanes import INSTANT, Lane, Lanes, Segment
from jigsawrl.graph.outlook import Outlook
from jigsawrl.policies.state import (
    Action,
    Arrived,
    Confine,
    Ended,
    Event,
    Left,
    Migrate,
    Pause,
    Pipeline,
    Place,
    Policy,
    Ready,
    Resize,
    Resume,
    Start,
    State,
    Survivors,
    Wait,
    Woken,
    WorkerBack,
    WorkerLost,
)
from jigsawrl.simulator.jobs import Failure, Job

OVERDUE = 0.1
"""A sub-stage that should have ended is thought to need this part of its time more."""
TOGETHER = 1e-6
"""Seconds within which things count as happening at once."""


class InvalidAction(Exception):
    """A policy asked for what cannot be; a bug of the policy."""


class Stuck(Exception):
    """Nothing runs, nothing will happen, and work is left; a bug of the policy."""


@dataclass(slots=True)
class Run:
    """A lane's truth beside its outlook."""

    pipeline: str
    place: Place
    engine: Engine | None
    foreseen: tuple[Segment, ...]
    bytes: float
    turns_left: int


class OnDemand(Mapping[int, Survivors]):
    """Survivors of the lanes that are in their last tail, counted only for who asks."""

    def __init__(self, lanes: dict[int, Lane], runs: dict[int, Run]) -> None:
        self._lanes, self._runs = lanes, runs
        self._counted: dict[int, Survivors] = {}

    def __contains__(self, lane_id: object) -> bool:
        if not isinstance(lane_id, int) or lane_id not in self._runs:
            return False
        return self._runs[lane_id].turns_left == 1 and self._lanes[lane_id].segment.kind == "tail"

    def __getitem__(self, lane_id: int) -> Survivors:
        if lane_id not in self:
            raise KeyError(lane_id)
        if lane_id not in self._counted:
            lane, engine = self._lanes[lane_id], self._runs[lane_id].engine
            assert engine is not None
            batch = engine.survivors(lane.index, lane.left)
            context = float(batch.context.mean()) if len(batch.context) else 0.0
            self._counted[lane_id] = Survivors(len(batch.remaining), context)
        return self._counted[lane_id]

    def __iter__(self) -> Iterator[int]:
        return (key for key in self._runs if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(slots=True)
class Outcome:
    """What a simulation gave."""

    seconds: float
    finished: dict[str, float]
    """When each pipeline was done, from its arrival."""
    tokens: dict[str, float]
    """Generated, in finished steps."""
    log: list[dict[str, Any]] = field(default_factory=list)


class Simulation:
    """One run of one policy. With `rollout_workers`, those first ones only roll out, and the others only train."""

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
        self.policy = policy
        self.rollout_workers = rollout_workers
        self.jobs = {job.shape.name: job for job in jobs}
        self.hardware = hardware
        self.seed = seed
        self.noise = noise
        self.lanes = Lanes(table, workers)
        self.runs: dict[int, Run] = {}
        self.pipelines: dict[str, Pipeline] = {}
        self.alive = [True] * workers
        self.held = [0.0] * workers
        self.next_lane = 0
        self.coming: list[tuple[float, int, Event]] = []
        self.outcome = Outcome(0.0, {}, dict.fromkeys(self.jobs, 0.0))
        for name, job in self.jobs.items():
            self._schedule(job.shape.arrival, Arrived(name))
        for failure in failures:
            self._schedule(failure.at, WorkerLost(failure.worker))
            if failure.back != float("inf"):
                self._schedule(failure.back, WorkerBack(failure.worker))

    def run(self) -> Outcome:
        """Until every pipeline is done."""
        while not self._done():
            self._decide(self._next_events())
        self.outcome.seconds = self.lanes.now
        return self.outcome

    def _done(self) -> bool:
        return len(self.outcome.finished) == len(self.jobs)

    def _schedule(self, at: float, event: Event) -> None:
        heapq.heappush(self.coming, (at, len(self.coming) + len(self.outcome.log) * 1024, event))

    # What happens

    def _next_events(self) -> list[Event]:
        """Moves the clock to the next happening and collects all that happens then."""
        ends = self.lanes.next_end()
        due = min(ends, self.coming[0][0] if self.coming else float("inf"))
        if due == float("inf"):
            waiting = [p.name for p in self.pipelines.values() if p.status != "done"]
            raise Stuck(f"{self.policy.name} leaves {', '.join(waiting)} waiting for ever")
        events: list[Event] = []
        for lane in self.lanes.advance(due):
            events += self._end(lane)
        while self.coming and self.coming[0][0] <= due + TOGETHER:
            events += self._happen(heapq.heappop(self.coming)[2])
        return events

    def _end(self, lane: Lane) -> list[Event]:
        """A sub-stage ended. Its lane goes on by itself."""
        self._log_span(lane)
        kind, pipeline = lane.segment.kind, self.pipelines[lane.pipeline]
        if kind == "tool":
            self.runs[lane.id].turns_left -= 1
        while (goes_on := self.lanes.proceed(lane)) and lane.left <= 0:
            pass
        events: list[Event] = [Ended(pipeline.name, lane.id, kind)]
        if not goes_on:
            self._drop(lane.id)
            if not pipeline.lanes:
                events += self._phase_done(pipeline)
        return events

    def _phase_done(self, pipeline: Pipeline) -> list[Event]:
        job, now = self.jobs[pipeline.name], self.lanes.now
        pipeline.status, pipeline.since = "ready", now
        if pipeline.phase == "rollout":
            pipeline.phase = "training"
            return [Ready(pipeline.name, "training")]
        lengths = job.lengths(pipeline.step)
        tokens = float(lengths.sum())
        self.outcome.tokens[pipeline.name] += tokens
        self._log("step", pipeline=pipeline.name, step=pipeline.step, tokens=tokens)
        pipeline.outlook = Outlook(
            job.shape, job.costs, self.hardware, pipeline.outlook.forecast.after(lengths)
        )
        pipeline.phase, pipeline.step = "rollout", pipeline.step + 1
        if pipeline.step > pipeline.steps:
            pipeline.status = "done"
            self.outcome.finished[pipeline.name] = now - pipeline.arrived
            return [Left(pipeline.name)]
        self._settle(pipeline)
        return [Ready(pipeline.name, "rollout")]

    def _happen(self, event: Event) -> list[Event]:
        if isinstance(event, Arrived):
            return [event, self._arrive(event.pipeline)]
        if isinstance(event, WorkerLost):
            return [event, *self._lose(event.worker)]
        if isinstance(event, WorkerBack):
            self.alive[event.worker] = True
            for pipeline in self.pipelines.values():
                if pipeline.status == "ready" and pipeline.phase == "rollout":
                    self._settle(pipeline)
        return [event]

    def _arrive(self, name: str) -> Event:
        job = self.jobs[name]
        outlook = Outlook(job.shape, job.costs, self.hardware, job.forecast)
        now = self.lanes.now
        pipeline = Pipeline(name, outlook, (), job.shape.steps, now, since=now)
        self._settle(pipeline)
        self.pipelines[name] = pipeline
        return Ready(name, "rollout")

    def _settle(self, pipeline: Pipeline) -> None:
        """A pipeline's home are all workers of its phase that are alive, for rollouts in whole engines."""
        first = self.rollout_workers
        alive = [worker for worker, lives in enumerate(self.alive) if lives]
        pinned = self.jobs[pipeline.name].rollout_workers
        home = [worker for worker in alive if first is None or worker < first]
        if pinned is not None:
            home = [worker for worker in home if worker in pinned]
        pipeline.home = tuple(home[: len(home) // pipeline.tp * pipeline.tp])
        if first is not None:
            pipeline.training_home = tuple(worker for worker in alive if worker >= first)

    def _lose(self, worker: int) -> list[Event]:
        """Pipelines with a lane there start their step again, elsewhere."""
        self.alive[worker] = False
        events: list[Event] = []
        for pipeline in self.pipelines.values():
            if worker not in {*pipeline.rollout_home, *pipeline.trains_on} or pipeline.status == "done":
                continue
            for key in list(pipeline.lanes):
                self._log_span(self.lanes.lanes[key], lost=True)
                self.lanes.remove(key)
                self._drop(key)
            pipeline.phase, pipeline.status, pipeline.since = "rollout", "ready", self.lanes.now
            self._settle(pipeline)
            events.append(Ready(pipeline.name, "rollout"))
        return events

    def _drop(self, lane_id: int) -> None:
        """Gives back what a lane held."""
        run = self.runs.pop(lane_id)
        self.pipelines[run.pipeline].lanes.remove(lane_id)
        for worker in run.place:
            self.held[worker] -= run.bytes

    # What the policy does about it

    def state(self) -> State:
        """The world as the policy may know it: times are predictions, corrected by the progress seen."""
        known = self.lanes.copy()
        for lane in known.lanes.values():
            done = lane.segment.seconds - lane.left
            lane.segments = self.runs[lane.id].foreseen
            seconds = lane.segment.seconds
            lane.left = max(seconds - done, OVERDUE * seconds, INSTANT)
        return State(
            now=self.lanes.now,
            lanes=known,
            pipelines=self.pipelines,
            device_bytes=self.hardware.device_bytes,
            held=self.held,
            alive=self.alive,
            survivors=OnDemand(self.lanes.lanes, self.runs),
        )

    def _decide(self, events: list[Event]) -> None:
        for action in self.policy.decide(self.state(), events):
            told = {each.name: getattr(action, each.name) for each in fields(action)}
            self._log("action", action=type(action).__name__.lower(), **told)
            self._act(action)
        self._check()

    def _act(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Migrate():
                self._migrate(action)
            case Resize(lane, share):
                self._restart_span(self._lane(lane))
                self.lanes.resize(lane, share)
            case Confine(lane, confined):
                self.lanes.confine(self._lane(lane).id, confined)
            case Pause(lane):
                self._restart_span(self._lane(lane))
                self.lanes.pause(lane, True)
            case Resume(lane):
                self._restart_span(self._lane(lane))
                self.lanes.pause(lane, False)
            case Wait(until):
                self._schedule(until, Woken())

    def _lane(self, lane_id: int) -> Lane:
        if lane_id not in self.lanes.lanes:
            raise InvalidAction(f"{self.policy.name}: there is no lane {lane_id}")
        return self.lanes.lanes[lane_id]

    def _start(self, action: Start) -> None:
        pipeline = self.pipelines.get(action.pipeline)
        if pipeline is None or pipeline.status != "ready":
            raise InvalidAction(f"{self.policy.name} starts {action.pipeline}, which is not ready")
        outlook, step = pipeline.outlook, pipeline.step
        lengths = self.jobs[pipeline.name].lengths(step)
        if pipeline.phase == "rollout":
            tp, count = len(action.places[0]), len(action.places)
            batch = Batch.fresh(lengths, outlook.shape.prompt_tokens, outlook.shape.turns)
            needed = outlook.memory(count, tp, len(pipeline.home)).rollout
            foreseen = outlook.engine(count, tp).segments
            for place, part in zip(action.places, batch.split(count), strict=True):
                truth = outlook.engine_of(part, tp)
                self._run(pipeline, place, action.share, truth.segments, foreseen, needed, truth)
        else:
            (place,) = action.places
            needed = outlook.memory_trained(pipeline.tp, len(place)).training
            segments = outlook.training(len(place), float(lengths.sum()))
            foreseen = outlook.training(len(place))
            self._run(pipeline, place, action.share, segments, foreseen, needed, None)
        pipeline.status, pipeline.since = "running", self.lanes.now
        pipeline.turns[pipeline.phase] = self.lanes.now

    def _run(
        self,
        pipeline: Pipeline,
        place: Place,
        share: float,
        segments: tuple[Segment, ...],
        foreseen: tuple[Segment, ...],
        bytes_: float,
        engine: Engine | None,
    ) -> None:
        """One lane more. How long its sub-stages take turns out only now."""
        self.next_lane += 1
        if self.noise and engine is None:
            rng = np.random.default_rng((self.seed, self.next_lane))
            factors = np.exp(rng.normal(0.0, self.noise, len(segments)))
            segments = tuple(
                replace(segment, seconds=segment.seconds * float(factor))
                for segment, factor in zip(segments, factors, strict=True)
            )
        lane = Lane(self.next_lane, pipeline.name, pipeline.step, pipeline.phase, place, share, segments)
        lane.base = pipeline.outlook.shape.base
        self.runs[lane.id] = Run(pipeline.name, place, engine, foreseen, bytes_, pipeline.outlook.shape.turns)
        pipeline.lanes.append(lane.id)
        for worker in place:
            self.held[worker] += bytes_
        self.lanes.add(lane)
        while lane.left <= 0 and self.lanes.proceed(lane):
            pass

    def _migrate(self, action: Migrate) -> None:
        pipeline = self.pipelines[action.pipeline]
        batches = []
        for key in action.lanes:
            lane, run = self._lane(key), self.runs[key]
            if run.engine is None or run.turns_left > 1 or lane.segment.kind not in ("decode", "tail"):
                raise InvalidAction(
                    f"{self.policy.name} moves lane {key}, which is not decoding its last turn"
                )
            batches.append(run.engine.survivors(lane.index, lane.left))
            self._log_span(lane)
            self.lanes.remove(key)
            self._drop(key)
        batch = Batch.merged(batches)
        outlook, done = pipeline.outlook, float(batch.context.max()) - pipeline.outlook.shape.prompt_tokens
        believed = Batch(outlook.forecast.beyond(done, len(batch.remaining)), batch.context)
        count, tp = len(action.places), len(action.places[0])
        needed = outlook.memory_moved(len(batch.remaining) / count, tp)
        parts = zip(action.places, batch.split(count), believed.split(count), strict=True)
        for place, part, guess in parts:
            truth, foreseen = outlook.moved(part, tp), outlook.moved(guess, tp)
            self._run(pipeline, place, action.share, truth.segments, foreseen.segments, needed, truth)
            self.runs[self.next_lane].turns_left = 1

    # Records and invariants

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

    def _restart_span(self, lane: Lane) -> None:
        """Ends the span in the log where a lane's share changes."""
        self._log_span(lane)
        lane.mark(self.lanes.now)

    def _check(self) -> None:
        """What must hold after every event, whatever the policy did."""
        room = self.hardware.device_bytes * (1 + 1e-9)
        if max(self.held) > room:
            worker = next(worker for worker, held in enumerate(self.held) if held > room)
            raise InvalidAction(
                f"{self.policy.name} overfills worker {worker}: {self.held[worker] / 1e9:.1f} GB"
            )
        for worker, lanes in enumerate(self.lanes.on_worker):
            if not lanes:
                continue
            if not self.alive[worker]:
                raise InvalidAction(f"{self.policy.name} uses worker {worker}, which is dead")
            share = self.lanes.handed_out(worker)
            if share > 1 + 1e-9:
                raise InvalidAction(f"{self.policy.name} hands out {share:.2f} of worker {worker}")
