"""What a policy is told and what it may answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from jigsawrl.graph.interference import Interference
from jigsawrl.graph.lanes import Lane, Lanes
from jigsawrl.graph.outlook import Outlook
from jigsawrl.telemetry.events import Substage

Phase = Literal["rollout", "training"]
Status = Literal["ready", "running", "done"]
Place = tuple[int, ...]
"""Workers that one lane spans."""


@dataclass(slots=True)
class Pipeline:
    """A pipeline and the phase it is in."""

    name: str
    outlook: Outlook
    home: Place
    """Workers it may use, and over which it trains."""
    steps: int
    arrived: float
    step: int = 1
    phase: Phase = "rollout"
    status: Status = "ready"
    since: float = 0.0
    """When the phase became ready, started or ended."""
    lanes: list[int] = field(default_factory=list)
    """Of the running phase."""

    @property
    def tp(self) -> int:
        return self.outlook.shape.tp

    @property
    def due(self) -> float:
        """When it should be done, by its deadline and by how much slower than alone it may become."""
        shape = self.outlook.shape
        by_deadline = self.arrived + shape.deadline if shape.deadline is not None else float("inf")
        if shape.max_slowdown is None:
            return by_deadline
        alone = self.steps * self.outlook.solo_seconds(max(len(self.home), self.tp))
        return min(by_deadline, self.arrived + shape.max_slowdown * alone)


@dataclass(frozen=True, slots=True)
class Survivors:
    """What is left of an engine whose last turn is in its tail."""

    sequences: int
    context: float
    """Mean tokens behind them."""


@dataclass(slots=True)
class State:
    """The world as far as it is known; policies must not change it.

    `lanes` hold predicted times, corrected by what has been seen of the running sub-stages.
    """

    now: float
    lanes: Lanes
    pipelines: dict[str, Pipeline]
    device_bytes: float
    """Of each worker."""
    held: list[float]
    """Bytes in use on each worker."""
    alive: list[bool]
    survivors: Mapping[int, Survivors]
    """Of every lane that could be gathered elsewhere."""

    @property
    def table(self) -> Interference:
        return self.lanes.table

    def unfinished(self) -> list[Pipeline]:
        return [p for p in self.pipelines.values() if p.status != "done"]

    def ready(self) -> list[Pipeline]:
        """Pipelines whose phase could start, longest waiting first."""
        waiting = [p for p in self.pipelines.values() if p.status == "ready" and self.usable(p.home)]
        return sorted(waiting, key=lambda p: (p.since, p.name))

    def usable(self, place: Place) -> bool:
        return all(self.alive[worker] for worker in place)

    def running(self, pipeline: Pipeline) -> list[Lane]:
        return [self.lanes.lanes[key] for key in pipeline.lanes]

    def phase_seconds(self, pipeline: Pipeline) -> float:
        """Of its waiting phase, alone on all of its workers."""
        outlook, workers = pipeline.outlook, max(len(pipeline.home), pipeline.tp)
        if pipeline.phase == "rollout":
            return outlook.rollout_seconds(max(1, workers // pipeline.tp), pipeline.tp)
        return outlook.training_seconds(workers)

    def left_alone(self, pipeline: Pipeline) -> float:
        """Seconds of all its work that is left if it had all of its workers to itself from now on."""
        outlook, workers = pipeline.outlook, max(len(pipeline.home), pipeline.tp)
        after = (pipeline.steps - pipeline.step) * outlook.solo_seconds(workers)
        if pipeline.phase == "rollout":
            after += outlook.training_seconds(workers)
        if pipeline.status == "running":
            return after + max(lane.left_in_all() for lane in self.running(pipeline))
        return after + self.phase_seconds(pipeline)

    def fits(self, place: Place, bytes_needed: float) -> bool:
        return all(self.held[worker] + bytes_needed <= self.device_bytes for worker in place)


# Events


@dataclass(frozen=True, slots=True)
class Arrived:
    pipeline: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A pipeline's phase can start."""

    pipeline: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class Ended:
    """A sub-stage ended; its lane went on to the next one by itself, or is gone."""

    pipeline: str
    lane: int
    kind: Substage


@dataclass(frozen=True, slots=True)
class Left:
    """A pipeline is done, or was cancelled."""

    pipeline: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Its lanes are gone; the pipelines they belonged to start their step again."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerBack:
    worker: int


@dataclass(frozen=True, slots=True)
class Woken:
    """The time of a `Wait` has come."""


Event = Arrived | Ready | Ended | Left | WorkerLost | WorkerBack | Woken


# Actions


@dataclass(frozen=True, slots=True)
class Start:
    """Starts a pipeline's phase: a rollout with one engine at each place, or training at one place, its home."""

    pipeline: str
    places: tuple[Place, ...]
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Pause:
    """A lane stops where it is and keeps its memory."""

    lane: int


@dataclass(frozen=True, slots=True)
class Resume:
    lane: int


@dataclass(frozen=True, slots=True)
class Resize:
    """Another share of its workers, from now on."""

    lane: int
    share: float


@dataclass(frozen=True, slots=True)
class Migrate:
    """Gathers the survivors of lanes that are in the last turn's tail at fewer places, dealt out evenly."""

    pipeline: str
    lanes: tuple[int, ...]
    places: tuple[Place, ...]
    share: float = 1.0

    @property
    def workers(self) -> list[int]:
        return [worker for place in self.places for worker in place]


@dataclass(frozen=True, slots=True)
class Swap:
    """The state of a pipeline that does not run goes to the store, or one that is to come is loaded."""

    pipeline: str
    out: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again then, if nothing happens before."""

    until: float


Action = Start | Pause | Resume | Resize | Migrate | Swap | Wait


class Policy(Protocol):
    """All cleverness lives in one of these."""

    @property
    def name(self) -> str: ...

    def decide(self, state: State, events: list[Event]) -> list[Action]: ...
