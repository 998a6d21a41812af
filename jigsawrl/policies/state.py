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
    rollout_home: Place
    """Workers that its rollouts may use; its trainings too, if they have no home of their own."""
    steps: int
    arrived: float
    step: int = 1
    phase: Phase = "rollout"
    status: Status = "ready"
    since: float = 0.0
    """When the phase became ready, started or ended."""
    lanes: list[int] = field(default_factory=list)
    """Of the running phase."""
    training_home: Place | None = None
    """Workers it trains on, where those run nothing else."""
    turns: dict[Phase, float] = field(default_factory=dict)
    """When each of its phases last started."""

    @property
    def home(self) -> Place:
        """Workers that the phase it is in may use."""
        return self.trains_on if self.phase == "training" else self.rollout_home

    @home.setter
    def home(self, workers: Place) -> None:
        """All of them for both phases."""
        self.rollout_home, self.training_home = workers, None

    @property
    def trains_on(self) -> Place:
        return self.rollout_home if self.training_home is None else self.training_home

    @property
    def apart(self) -> bool:
        """Whether its phases have actors of their own, each in a pool of theirs."""
        return self.training_home is not None

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
        return min(by_deadline, self.arrived + shape.max_slowdown * self.steps * self.solo_seconds())

    def rollout_seconds(self, level: float = 0.5) -> float:
        """Alone on all workers that its rollouts may use; by a cautious forecast with a level above one half."""
        return self.outlook.rollout_seconds(max(1, len(self.rollout_home) // self.tp), self.tp, level)

    def training_seconds(self) -> float:
        """Alone on all workers it trains on."""
        return self.outlook.training_seconds(max(len(self.trains_on), 1 if self.apart else self.tp))

    def solo_seconds(self, level: float = 0.5) -> float:
        """A step alone on all of its workers."""
        return self.rollout_seconds(level) + self.training_seconds()

    def phase_seconds_on(self, workers: int) -> float:
        """Of the phase it is in, alone on so many workers."""
        if self.phase == "rollout":
            return self.outlook.rollout_seconds(max(1, workers // self.tp), self.tp)
        return self.outlook.training_seconds(workers)

    def busy_left(self, workers: int) -> float:
        """Seconds for which it would keep each of so many workers busy until it is done."""
        return (self.steps - self.step + 1) * self.outlook.busy_seconds(workers)


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
        return pipeline.rollout_seconds() if pipeline.phase == "rollout" else pipeline.training_seconds()

    def left_alone(self, pipeline: Pipeline, level: float = 0.5) -> float:
        """Seconds of all its work that is left if it had all of its workers to itself from now on; its coming steps
        by a cautious forecast with a level above one half."""
        after = (pipeline.steps - pipeline.step) * pipeline.solo_seconds(level)
        if pipeline.phase == "rollout":
            after += pipeline.training_seconds()
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
    onward: bool = False
    """Whether the training after a rollout may start at once, on the same workers, without asking, and so on for a
    moment."""


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
class Confine:
    """A rollout keeps to half of its workers from now on, or has all of them again."""

    lane: int
    confined: bool


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
    """The state of a pipeline that does not run goes to the store, or one that is to come is loaded.

    Of one whose phases have actors of their own, the state of those of one phase goes.
    """

    pipeline: str
    out: bool
    phase: Phase | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again then, if nothing happens before."""

    until: float


Action = Start | Pause | Resume | Resize | Confine | Migrate | Swap | Wait


class Policy(Protocol):
    """All cleverness lives in one of these."""

    @property
    def name(self) -> str: ...

    def decide(self, state: State, events: list[Event]) -> list[Action]: ...
