"""What the scheduler believes: which pipelines there are, where their phases run, and how far they have come.

Durations are predictions; what is heard of real sub-stages corrects them. Whatever a policy decides is entered here
as it is carried out. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from jigsawrl.graph.batch import Batch
from jigsawrl.graph.interference import CORES, Interference
from jigsawrl.graph.lanes import Lane, Lanes, Segment
from jigsawrl.phases.graph import SYNCHRONOUS
from jigsawrl.phases.ids import PhaseId
from jigsawrl.policies.starts import covered_bytes, needs, training_bytes
from jigsawrl.policies.state import Migrate, Phase, Pipeline, Place, Start, State, Survivors
from jigsawrl.scheduler.colocation import Colocation, note
from jigsawrl.scheduler.layout import Layout
from jigsawrl.telemetry.events import Substage

MIN_SEGMENT_S = 1e-3
"""Seconds of a lane for which no sub-stage is predicted."""
OVERDUE_PART = 0.1
"""A sub-stage that should have ended is expected to need this part of its time more."""
UNTOLD: tuple[Substage, ...] = ("swap", "prefill", "reward", "logprob")
"""Sub-stages whose ends need not be reported: engines report that they decode when the first sample has ended. Of a
training only the end may be reported; gradients are expected to go on until then, for what follows them is brief."""

GANG = -1
"""Stands for all actors of a training, where else an engine is named."""


@dataclass(slots=True)
class LaneUse:
    """What is known of a lane besides its sub-stages."""

    engine: int
    """The actor, or `GANG`."""
    bytes: float
    """Bytes in use on each of its workers."""
    samples: int = 0
    moved: bool = False
    """Whether its samples came from elsewhere: then its engine may have said before that it has nothing more to
    do."""


class TailSurvivors(Mapping[int, Survivors]):
    """Survivors of lanes in their tail, computed when they are asked for."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int) and self._state.in_tail(key)

    def __getitem__(self, key: int) -> Survivors:
        if key not in self:
            raise KeyError(key)
        return self._state.survivors_of(key)

    def __iter__(self) -> Iterator[int]:
        return (key for key in self._state.uses if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class SchedulerState(State):
    """What policies are told, and what only the core knows besides.

    Workers have `units` that can be held apart. With `rollout_workers`, those first ones only generate and the
    others only train; else every worker does both.
    """

    def __init__(
        self,
        table: Interference,
        workers: int,
        device_bytes: float,
        units: int = 1,
        rollout_workers: int | None = None,
    ) -> None:
        super().__init__(
            now=0.0,
            lanes=Lanes(table, workers),
            pipelines={},
            device_bytes=device_bytes,
            held=[0.0] * workers,
            alive=[True] * workers,
            survivors=TailSurvivors(self),
        )
        self.time_sliced_above = units if table.name == CORES.name else 1 << 30
        """More than this many lanes on a worker are known to be time-sliced, as processes on cores are."""
        self.colocations: dict[PhaseId, Colocation] = {}
        """What each running phase was co-located with."""
        self.uses: dict[int, LaneUse] = {}
        """What is known of each lane besides its sub-stages, by the lane's id."""
        self.lane_ids = count(1)
        self.covered: dict[str, dict[str, Start]] = {}
        """How phases start that a permit covers, by pipeline and kind of phase."""
        self.apart = rollout_workers is not None
        """Whether workers run one kind of phase only."""
        self.layout = Layout(
            self.workers, self.workers[rollout_workers or 0 :], self.workers[:rollout_workers]
        )
        """The layout of a pipeline that uses all workers."""
        self.layouts: dict[str, Layout] = {}
        """Where the actors of each pipeline live, whether its processes do or not."""
        self.untold = UNTOLD
        """Empty where drivers report the end of every sub-stage."""

    @property
    def workers(self) -> Place:
        return tuple(range(len(self.alive)))

    @property
    def time_sliced(self) -> bool:
        """Whether lanes that share a worker are time-sliced in any case: there is nothing to learn about that."""
        return self.time_sliced_above == 1

    def advance(self, now: float) -> None:
        until = max(now, self.now)
        if until > self.now and not self.time_sliced:
            note(self.colocations, self.lanes, until - self.now, self.time_sliced_above)
        self.lanes.drift(until, OVERDUE_PART, self.untold)
        self.now = until

    def stands_still(self) -> bool:
        """Whether no phase that runs can end, for a lane of each is paused: nothing comes free by itself."""
        lanes, running = self.lanes.lanes, self.running()
        return bool(running) and all(any(lanes[key].paused for key in phase.lanes) for phase in running)

    def kind(self, key: int) -> Substage:
        """The sub-stage that a lane is at."""
        return self.lanes.lanes[key].segment.kind

    def in_tail(self, key: int) -> bool:
        """Whether the lane is one whose survivors could be moved."""
        return key in self.uses and self.uses[key].samples > 0 and self.kind(key) == "tail"

    def phase_of(self, lane: Lane) -> Phase:
        return self.phase(PhaseId(lane.pipeline, lane.phase, lane.step))

    def seats(self, lane: Lane) -> dict[int, int]:
        """The worker of each actor that a lane uses: a rollout's engine is that of its worker; all actors that train
        do so wherever the gang was placed."""
        layout = self.layouts[lane.pipeline]
        if self.phase_of(lane).generates:
            return {layout.engine_on(worker): worker for worker in lane.workers}
        return layout.seats(lane.workers)

    def survivors_of(self, key: int) -> Survivors:
        """How many samples of a lane are left, and how long they should be by now."""
        lane, use = self.lanes.lanes[key], self.uses[key]
        pipeline = self.pipelines[lane.pipeline]
        outlook = pipeline.outlook
        quantiles = outlook.forecast.quantiles()
        of_engine = outlook.shape.sequences / len(pipeline.rollout_home) * len(lane.workers)
        place = 1 - use.samples / max(use.samples, of_engine)
        done = float(np.interp(place, np.linspace(0, 1, len(quantiles)), quantiles))
        return Survivors(use.samples, outlook.shape.prompt_tokens + done)

    # Pipelines and their phases

    def settle(self, pipeline: Pipeline) -> None:
        """Keeps the pipeline to the workers of its layout that are alive, and its rollouts to whole engines."""
        layout, tp = self.layouts[pipeline.name], pipeline.tp
        rollout = [worker for worker in layout.rollout if self.alive[worker]]
        pipeline.rollout_home = tuple(rollout[: len(rollout) // tp * tp])
        if self.apart:
            pipeline.training_home = tuple(worker for worker in layout.training if self.alive[worker])

    def extend(self, pipeline: Pipeline) -> None:
        """Makes the window of its graph reach as far as it may."""
        oldest = min((id.index for id in pipeline.phases), default=pipeline.made + 1)
        while pipeline.made < min(pipeline.steps, oldest + pipeline.graph.ahead):
            pipeline.made += 1
            for spec in pipeline.graph.phases_of(pipeline.name, pipeline.made):
                pipeline.phases[spec.id] = Phase(spec, pipeline)

    def has_ended(self, id: PhaseId) -> bool:
        """Whether a phase is done: those of steps below the window are."""
        pipeline = self.pipelines[id.pipeline]
        return id.index <= pipeline.made and id not in pipeline.phases

    def has_started(self, id: PhaseId) -> bool:
        phase = self.pipelines[id.pipeline].phases.get(id)
        return self.has_ended(id) if phase is None else phase.status == "running"

    def block(self, phases: Iterable[Phase]) -> None:
        """Phases that were ready are blocked again."""
        for phase in phases:
            if phase.status == "ready":
                phase.status = "blocked"

    def free(self, phase: Phase) -> bool:
        """Whether nothing in its pipeline keeps it from starting."""
        spec = phase.spec
        return all(map(self.has_ended, spec.needs)) and all(map(self.has_started, spec.after))

    def end(self, phase: Phase) -> None:
        self.drop(phase)
        phase.status = "done"
        del phase.pipeline.phases[phase.id]
        self.extend(phase.pipeline)

    def drop(self, phase: Phase) -> None:
        for key in list(phase.lanes):
            self.remove(key)
        self.colocations.pop(phase.id, None)

    def lose(self, pipeline: Pipeline) -> None:
        """All phases of the pipeline are lost, with their lanes."""
        for phase in pipeline.phases.values():
            self.drop(phase)
            phase.status = "lost"

    def remove(self, key: int) -> None:
        lane, use = self.lanes.lanes[key], self.uses.pop(key)
        self.phase_of(lane).lanes.remove(key)
        self.lanes.remove(key)
        for worker in lane.workers:
            self.held[worker] -= use.bytes

    # What is done

    def start(self, action: Start) -> Phase:
        phase = self.phase(action.phase)
        pipeline = phase.pipeline
        self.colocations[phase.id] = Colocation()
        segments, needed = predicted(phase, action.places), self.bytes_for(action)
        if pipeline.name in self.covered:
            covers = self.covered[pipeline.name]["rollout"]
            needed = max(needed, covered_bytes(pipeline, covers))  # no other phase may have it meanwhile
        samples = round(phase.outlook.shape.sequences / len(action.places)) if phase.generates else 0
        for place in action.places:
            self._add(phase, place, action.share, segments, needed, samples)
        phase.status, phase.since, phase.alone = "running", self.now, True
        phase.predicted = max(self.lanes.lanes[key].left_in_all() for key in phase.lanes)
        pipeline.turns[phase.kind], pipeline.ran_on = self.now, tuple(action.workers)
        return phase

    def cover(self, start: Start, roomy: bool) -> None:
        """Notes which phases the permit of a rollout covers: the training on the same workers, and so on; none unless
        there is room for them all the time."""
        rollout = self.phase(start.phase)
        pipeline = rollout.pipeline
        if not rollout.generates:
            return
        self.covered.pop(pipeline.name, None)
        alike = roomy and pipeline.graph is SYNCHRONOUS and not pipeline.apart
        if start.auto_continue and self.time_sliced and alike:
            place = tuple(sorted(start.workers))
            needed = self.bytes_for(start) + training_bytes(pipeline, len(place))
            if self.fits(place, needed):
                training = Start(PhaseId(pipeline.name, "training", rollout.index), (place,), start.share)
                self.covered[pipeline.name] = {"rollout": start, "training": training}

    def migrate(self, action: Migrate) -> None:
        phase = self.phase_of(self.lanes.lanes[action.lanes[0]])
        samples = sum(self.uses[key].samples for key in action.lanes)
        context = max(self.survivors_of(key).context for key in action.lanes)
        needed = self.bytes_for(action)
        for key in self.leaves(action):
            self.remove(key)
        for key in [key for key in action.lanes if key in self.uses]:
            self._finish(key, last=True)
        outlook = phase.outlook
        left = outlook.forecast.beyond(context - outlook.shape.prompt_tokens, max(1, samples))
        parts = Batch(left, np.full(len(left), context)).split(len(action.places))
        for place, part in zip(action.places, parts, strict=True):
            segments = _lasting(outlook.moved(part, len(place)).segments)
            self._add(phase, place, action.share, segments, needed, len(part.remaining), moved=True)

    def bytes_for(self, action: Start | Migrate) -> float:
        """Bytes that a phase that starts, or survivors that are moved, hold on each of their workers."""
        if isinstance(action, Start):
            return needs(self.phase(action.phase), action.places)
        outlook = self.pipelines[action.pipeline].outlook
        before = max(self.uses[key].bytes for key in action.lanes)
        if outlook.shape.whole:  # as everywhere
            return before
        samples = sum(self.uses[key].samples for key in action.lanes)
        moved = outlook.memory_moved(samples / len(action.places), len(action.places[0]))
        return max(moved, before) if action.pipeline in self.covered else moved

    def leaves(self, action: Migrate) -> list[int]:
        """The lanes that a move ends. Where a training needs no permit, it keeps the room of the others."""
        workers, covered = set(action.workers), action.pipeline in self.covered
        return [
            key for key in action.lanes if not covered or workers.issuperset(self.lanes.lanes[key].workers)
        ]

    def _add(
        self,
        phase: Phase,
        place: Place,
        share: float,
        segments: tuple[Segment, ...],
        needed: float,
        samples: int,
        moved: bool = False,
    ) -> None:
        """Adds a lane of a phase, with this many samples and bytes on each of its workers."""
        name, base = phase.pipeline.name, phase.outlook.shape.base
        lane = Lane(next(self.lane_ids), name, phase.index, phase.kind, place, share, segments, base=base)
        engine = self.layouts[name].engine_on(place[0]) if phase.generates else GANG
        self.uses[lane.id] = LaneUse(engine, needed, samples, moved)
        phase.lanes.append(lane.id)
        for worker in place:
            self.held[worker] += needed
        self.lanes.add(lane)

    def advance_lane(self, key: int, kind: Substage | None, samples: int) -> Substage | None:
        """A lane is at another sub-stage now; None: its engine has nothing more to do. Returns what it was at, if
        that is news."""
        lane = self.lanes.lanes[key]
        was, self.uses[key].samples = lane.segment.kind, samples
        if kind is None:
            self._finish(key, last=self.uses[key].moved or len(self.phase_of(lane).lanes) == 1)
        elif kind != was:
            self.lanes.replan(lane, _from(lane, kind))
        return was if kind != was else None

    def _finish(self, key: int, last: bool) -> None:
        """A lane's engine has nothing more to do. What waits there for others, rewards or a training that needs no
        permit, keeps the room."""
        lane = self.lanes.lanes[key]
        if last or lane.pipeline in self.covered:
            self.uses[key].samples = 0
            self.lanes.replan(lane, (Segment("reward", MIN_SEGMENT_S),))
        else:
            self.remove(key)


def predicted(phase: Phase, places: Sequence[Place]) -> tuple[Segment, ...]:
    """Sub-stages of each lane of the phase, at these places."""
    width, outlook = len(places[0]), phase.outlook
    segments = outlook.engine(len(places), width).segments if phase.generates else outlook.training(width)
    return _lasting(segments)


def _lasting(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    return tuple(segment for segment in segments if segment.seconds > 0) or (
        Segment("decode", MIN_SEGMENT_S),
    )


def _from(lane: Lane, kind: Substage) -> tuple[Segment, ...]:
    """The lane's sub-stages from the next one of this kind on; those that are left, if none was predicted."""
    later = lane.segments[lane.index + 1 :]
    kinds = [segment.kind for segment in later]
    if kind in kinds:
        return later[kinds.index(kind) :]
    earlier = [segment for segment in lane.segments[: lane.index + 1] if segment.kind == kind]
    again = earlier[-1] if earlier else Segment(kind, max(lane.left, MIN_SEGMENT_S))
    return (again, *later)
