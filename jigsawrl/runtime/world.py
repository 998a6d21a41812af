"""What the scheduler believes: which pipelines there are, what runs where, and how far it has come. Pure.

Times are foreseen; what is heard of real sub-stages puts them right. Policies see the same `State` as in the
simulator, and what they answer is entered here as it is carried out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jigsawrl.graph.batch import Batch
from jigsawrl.graph.interference import CORES, Interference
from jigsawrl.graph.lanes import Lane, Lanes, Segment
from jigsawrl.graph.outlook import Outlook
from jigsawrl.policies.starts import bytes_for
from jigsawrl.policies.state import (
    Arrived,
    Ended,
    Event,
    Left,
    Migrate,
    Phase,
    Pipeline,
    Place,
    Ready,
    Start,
    State,
    Survivors,
)
from jigsawrl.runtime.company import Company, note
from jigsawrl.runtime.layout import Layout
from jigsawrl.telemetry.events import Substage

SHORT = 1e-3
"""Seconds of what is not foreseen."""
OVERDUE = 0.1
"""A sub-stage that should have ended is thought to need this part of its time more."""
UNTOLD: tuple[Substage, ...] = ("swap", "prefill", "reward", "logprob")
"""Sub-stages whose ends nobody tells: engines say that they decode when the first sample has ended, and of a training
the end alone is told. Gradients are thought to go on until then, for what follows them is brief."""


@dataclass(slots=True)
class Running:
    """What is known of a lane besides its course."""

    engine: int
    """Of its pipeline; for training, the first of the gang."""
    bytes: float
    samples: int = 0


class OnDemand(Mapping[int, Survivors]):
    """Survivors of lanes in their tail, reckoned only for who asks."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, int) or key not in self._world.running:
            return False
        return self._world.running[key].samples > 0 and self._world.kind(key) == "tail"

    def __getitem__(self, key: int) -> Survivors:
        if key not in self:
            raise KeyError(key)
        return self._world.survivors(key)

    def __iter__(self) -> Iterator[int]:
        return (key for key in self._world.running if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class World:
    """A pipeline may use all workers. A worker has so many `units` that can be held apart.

    With `rollout_workers`, those first ones only roll out, and the others only train; a pipeline may keep to some.
    """

    def __init__(
        self,
        table: Interference,
        workers: int,
        device_bytes: float,
        units: int = 1,
        rollout_workers: int | None = None,
    ) -> None:
        self.lanes = Lanes(table, workers)
        self.by_turns_above = units if table.name == CORES.name else 1 << 30
        """Of more on a worker it is known how they share it: as cores are, by turns."""
        self.company: dict[str, Company] = {}
        """Of every running phase."""
        self.pipelines: dict[str, Pipeline] = {}
        self.running: dict[int, Running] = {}
        self.held = [0.0] * workers
        self.alive = [True] * workers
        self.device_bytes = device_bytes
        self.next_lane = 0
        self.onward: dict[str, tuple[Start, Start]] = {}
        """Rollouts and trainings that may follow each other without asking."""
        self.apart = rollout_workers is not None
        """Whether workers run one phase only."""
        self.layout = Layout(
            self.workers, self.workers[rollout_workers or 0 :], self.workers[:rollout_workers]
        )
        """Of a pipeline that uses all workers."""
        self.layouts: dict[str, Layout] = {}

    @property
    def workers(self) -> Place:
        return tuple(range(len(self.alive)))

    @property
    def by_turns(self) -> bool:
        """Whether whoever shares a worker can only take turns: nobody has to learn what that does."""
        return self.by_turns_above == 1

    def advance(self, now: float) -> None:
        elapsed = max(now - self.lanes.now, 0.0)
        if elapsed > 0 and not self.by_turns:
            note(self.company, self.lanes, elapsed, self.by_turns_above)
        self.lanes.drift(max(now, self.lanes.now), OVERDUE, UNTOLD)

    def state(self) -> State:
        """A policy must not change it."""
        return State(
            now=self.lanes.now,
            lanes=self.lanes,
            pipelines=self.pipelines,
            device_bytes=self.device_bytes,
            held=self.held,
            alive=self.alive,
            survivors=OnDemand(self),
        )

    def settled(self) -> bool:
        """Whether nobody waits to start, stands still, or is in a hurry."""
        shapes = [pipeline.outlook.shape for pipeline in self.pipelines.values()]
        return not (
            any(pipeline.status == "ready" for pipeline in self.pipelines.values())
            or any(lane.paused for lane in self.lanes.lanes.values())
            or any(shape.deadline is not None or shape.max_slowdown is not None for shape in shapes)
        )

    def kind(self, key: int) -> Substage:
        """What a lane is at."""
        return self.lanes.lanes[key].segment.kind

    def seats(self, lane: Lane) -> dict[int, int]:
        """The worker of each actor that is at a lane: a rollout's engine is that of its worker, and all actors train,
        wherever the gang was put; those that only roll out do not."""
        layout = self.layouts[lane.pipeline]
        if lane.phase == "rollout":
            return {layout.engine_on(worker): worker for worker in lane.workers}
        return layout.seats(lane.workers)

    def survivors(self, key: int) -> Survivors:
        """Of a lane: how many samples are under way, and how far they should be."""
        lane, running = self.lanes.lanes[key], self.running[key]
        pipeline = self.pipelines[lane.pipeline]
        outlook = pipeline.outlook
        quantiles = outlook.forecast.quantiles()
        all_there = outlook.shape.sequences / len(pipeline.rollout_home)
        place = 1 - running.samples / max(running.samples, all_there)
        done = float(np.interp(place, np.linspace(0, 1, len(quantiles)), quantiles))
        return Survivors(running.samples, outlook.shape.prompt_tokens + done)

    # What is heard

    def arrive(
        self, name: str, outlook: Outlook, steps: int, again: bool, layout: Layout | None = None
    ) -> Event:
        """`again`: it was here before, and has lost what it was at. Its actors may live on some workers only."""
        now = self.lanes.now
        if again:
            self.drop(name)
            now = self.pipelines[name].arrived
        self.layouts[name] = layout = layout or self.layout
        training = layout.training if self.apart else None
        self.pipelines[name] = Pipeline(name, outlook, layout.rollout, steps, now, training_home=training)
        return Arrived(name)

    def ask(self, name: str, phase: Phase, step: int) -> Event:
        """A pipeline could start a phase."""
        pipeline = self.pipelines[name]
        self.drop(name)
        pipeline.phase, pipeline.step = phase, step
        pipeline.status, pipeline.since = "ready", self.lanes.now
        return Ready(name, phase)

    def at(self, name: str, engine: int, kind: Substage | None, samples: int) -> list[Event]:
        """An engine has come to another sub-stage; None: it has nothing more to do."""
        pipeline = self.pipelines[name]
        for key in list(pipeline.lanes):
            if self.running[key].engine != engine:
                continue
            lane = self.lanes.lanes[key]
            was, self.running[key].samples = lane.segment.kind, samples
            if kind is None and len(pipeline.lanes) > 1:
                self._remove(key)
            elif kind is None:  # rewards are still to come
                self.lanes.replan(lane, (Segment("reward", SHORT),))
            elif kind != was:
                self.lanes.replan(lane, _from(lane, kind))
            else:
                return []
            return [Ended(name, key, was)]
        return []

    def over(self, name: str) -> list[Event]:
        """Its phase has ended. It will ask for the next one."""
        pipeline = self.pipelines[name]
        keys = [(key, self.lanes.lanes[key].segment.kind) for key in pipeline.lanes]
        self.drop(name)
        pipeline.status, pipeline.since = "done", self.lanes.now
        return [Ended(name, key, kind) for key, kind in keys]

    def leave(self, name: str) -> Event:
        self.drop(name)
        self.pipelines[name].status = "done"
        return Left(name)

    def forecast(self, name: str, outlook: Outlook) -> None:
        """What is foreseen of its coming phases from now on."""
        self.pipelines[name].outlook = outlook

    def drop(self, name: str) -> None:
        for key in list(self.pipelines[name].lanes):
            self._remove(key)

    def _remove(self, key: int) -> None:
        if key in self.lanes.lanes:
            lane = self.lanes.remove(key)
            for worker in lane.workers:
                self.held[worker] -= self.running[key].bytes
            self.pipelines[lane.pipeline].lanes.remove(key)
            del self.running[key]

    # What is done

    def start(self, action: Start) -> None:
        pipeline = self.pipelines[action.pipeline]
        self.company[action.pipeline] = Company()
        outlook = pipeline.outlook
        if pipeline.phase == "rollout":
            count, width = len(action.places), len(action.places[0])
            needed = bytes_for(pipeline, "rollout", count, width)
            segments = outlook.engine(count, width).segments
            samples = round(outlook.shape.sequences / count)
            for place in action.places:
                running = Running(self.layouts[pipeline.name].engine_on(place[0]), needed, samples)
                self._add(pipeline, place, action.share, segments, running)
        else:
            (place,) = action.places
            needed = bytes_for(pipeline, "training", 1, len(place))
            self._add(pipeline, place, action.share, outlook.training(len(place)), Running(-1, needed))
        pipeline.status, pipeline.since = "running", self.lanes.now
        pipeline.turns[pipeline.phase] = self.lanes.now
        if pipeline.phase == "rollout":
            self._may_go_on(pipeline, action)

    def _may_go_on(self, pipeline: Pipeline, rollout: Start) -> None:
        """Notes whether its training may follow on the same workers."""
        self.onward.pop(pipeline.name, None)
        if rollout.onward and self.by_turns:
            place = tuple(sorted(worker for place in rollout.places for worker in place))
            more = bytes_for(pipeline, "training", 1, len(place))
            if all(self.held[worker] + more <= self.device_bytes for worker in place):
                self.onward[pipeline.name] = rollout, Start(pipeline.name, (place,), rollout.share)

    def gather(self, action: Migrate) -> None:
        pipeline = self.pipelines[action.pipeline]
        samples = sum(self.running[key].samples for key in action.lanes)
        context = max((self.survivors(key).context for key in action.lanes), default=1.0)
        for key in action.lanes:
            self._remove(key)
        outlook, count = pipeline.outlook, len(action.places)
        left = outlook.forecast.beyond(context - outlook.shape.prompt_tokens, max(1, samples))
        parts = Batch(left, np.full(len(left), context)).split(count)
        needed = outlook.memory_moved(samples / count, len(action.places[0]))
        for place, part in zip(action.places, parts, strict=True):
            segments = outlook.moved(part, len(place)).segments
            engine = self.layouts[pipeline.name].engine_on(place[0])
            running = Running(engine, needed, len(part.remaining))
            self._add(pipeline, place, action.share, segments, running)

    def _add(
        self,
        pipeline: Pipeline,
        place: Place,
        share: float,
        segments: Sequence[Segment],
        running: Running,
    ) -> None:
        self.next_lane += 1
        steps = tuple(segment for segment in segments if segment.seconds > 0) or (Segment("decode", SHORT),)
        lane = Lane(self.next_lane, pipeline.name, pipeline.step, pipeline.phase, place, share, steps)
        lane.base = pipeline.outlook.shape.base
        self.running[lane.id] = running
        pipeline.lanes.append(lane.id)
        for worker in place:
            self.held[worker] += running.bytes
        self.lanes.add(lane)


def _from(lane: Lane, kind: Substage) -> tuple[Segment, ...]:
    """The lane's sub-stages from the next one of this kind on; of those that are left, if none is foreseen."""
    later = lane.segments[lane.index + 1 :]
    for number, segment in enumerate(later):
        if segment.kind == kind:
            return later[number:]
    earlier = [segment for segment in lane.segments[: lane.index + 1] if segment.kind == kind]
    again = replace(earlier[-1]) if earlier else Segment(kind, max(lane.left, SHORT))
    return (again, *later)
