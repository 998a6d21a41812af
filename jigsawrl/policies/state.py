"""What a policy is told and what it may answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from jigsawrl.graph.interference import Interference
from jigsawrl.graph.lanes import Lane, Lanes
from jigsawrl.graph.outlook import Outlook
from jigsawrl.phases.graph import SYNCHRONOUS, PhaseGraph, PhaseSpec
from jigsawrl.phases.ids import PhaseId, PhaseKind
from jigsawrl.telemetry.events import Substage

PhaseStatus = Literal["blocked", "ready", "running", "lost", "done"]
PipelineStatus = Literal["active", "held", "recovering", "ended"]
Place = tuple[int, ...]
"""Workers that one lane spans."""


@dataclass(slots=True, eq=False)
class Phase:
    """A phase instance of a pipeline, and how far it has come."""

    spec: PhaseSpec
    pipeline: Pipeline
    status: PhaseStatus = "blocked"
    asked: float = 0.0
    """When it became ready."""
    since: float = 0.0
    """When it became ready, or started."""
    lanes: list[int] = field(default_factory=list)
    """While it runs."""
    predicted: float = 0.0
    """Seconds that it was predicted to take alone, when it started."""
    alone: bool = True
    """Whether no other pipeline was on its workers while it ran."""
    permitted: bool = False
    """Whether its driver has a permit for it: one of its own, or that of an earlier phase, which covers it."""

    @property
    def id(self) -> PhaseId:
        return self.spec.id

    @property
    def kind(self) -> PhaseKind:
        return self.spec.id.kind

    @property
    def index(self) -> int:
        """The step that it belongs to."""
        return self.spec.id.index

    @property
    def generates(self) -> bool:
        """Whether it runs on engines; else on a gang that trains."""
        return self.spec.uses == "engines"

    @property
    def home(self) -> Place:
        """Workers that it may use."""
        return self.pipeline.rollout_home if self.generates else self.pipeline.trains_on

    @property
    def outlook(self) -> Outlook:
        return self.pipeline.outlook

    @property
    def seconds(self) -> float:
        """Predicted, alone on all workers that it may use."""
        return self.pipeline.rollout_seconds() if self.generates else self.pipeline.training_seconds()

    def seconds_on(self, workers: int) -> float:
        """Predicted, alone on this many workers."""
        if self.generates:
            return self.outlook.rollout_seconds(max(1, workers // self.pipeline.tp), self.pipeline.tp)
        return self.outlook.training_seconds(workers)


@dataclass(slots=True, eq=False)
class Pipeline:
    """A pipeline, and the window of its graph that is not done yet."""

    name: str
    outlook: Outlook
    rollout_home: Place
    """Workers that its rollouts may use; its trainings too, if they have no home of their own."""
    steps: int
    arrived: float
    graph: PhaseGraph = SYNCHRONOUS
    training_home: Place | None = None
    """Workers it trains on, where those run nothing else."""
    status: PipelineStatus = "active"
    phases: dict[PhaseId, Phase] = field(default_factory=dict)
    """Phases of the window that are not done, in the order of their steps."""
    made: int = 0
    """The last step of the window. Phases of steps up to here that are not in `phases` are done."""
    turns: dict[PhaseKind, float] = field(default_factory=dict)
    """When a phase of each kind last started."""
    ran_on: Place = ()
    """Workers of the phase that started last."""
    hidden: bool = False
    """Whether policies do not see it for the moment: it waits for memory that is released soon."""

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
    def current(self) -> Phase:
        """The phase it is in, where its phases follow each other; else the first that runs, or could."""
        return min(
            self.phases.values(), key=lambda phase: (phase.status != "running", phase.status != "ready")
        )

    @property
    def phase(self) -> PhaseKind:
        """Whether its current phase is a rollout, or like one, or a training."""
        return "rollout" if self.current.generates else "training"

    @property
    def step(self) -> int:
        """The step of its first phase that is not done; the last one, if all are."""
        return next((id.index for id in self.phases), self.made)

    @property
    def steps_left(self) -> int:
        """Steps that are not done."""
        return self.steps - self.step + 1

    @property
    def running(self) -> list[Phase]:
        return [phase for phase in self.phases.values() if phase.status == "running"]

    @property
    def lanes(self) -> list[int]:
        """Lanes of all phases that run."""
        return [key for phase in self.phases.values() for key in phase.lanes]

    @property
    def at_work(self) -> bool:
        """Whether it runs something, or could."""
        return not self.hidden and any(each.status in ("ready", "running") for each in self.phases.values())

    @property
    def due(self) -> float:
        """When it should be done, by its deadline and by how much slower than alone it may become."""
        shape = self.outlook.shape
        by_deadline = float("inf") if shape.deadline is None else self.arrived + shape.deadline
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

    def busy_left(self, workers: int) -> float:
        """Seconds for which it would keep each of this many workers busy until it is done."""
        return self.steps_left * self.outlook.busy_seconds(workers)


@dataclass(frozen=True, slots=True)
class Survivors:
    """What is left of an engine whose last turn is in its tail."""

    sequences: int
    context: float
    """Mean tokens behind them."""


@dataclass(slots=True)
class State:
    """What is known when a policy is asked; it must not change any of it.

    `lanes` hold predicted times, corrected by what has been seen of the running sub-stages.
    """

    now: float
    lanes: Lanes
    pipelines: dict[str, Pipeline]
    device_bytes: float
    """Bytes that each worker has."""
    held: list[float]
    """Bytes in use on each worker."""
    alive: list[bool]
    survivors: Mapping[int, Survivors]
    """Survivors of every lane whose tail could be moved elsewhere."""

    @property
    def table(self) -> Interference:
        return self.lanes.table

    def unfinished(self) -> list[Pipeline]:
        """Pipelines with a phase that runs or could start."""
        return [p for p in self.pipelines.values() if p.at_work]

    def ready(self) -> list[Phase]:
        """Phases that could start, longest waiting first."""
        waiting = (
            phase
            for pipeline in self.pipelines.values()
            if not pipeline.hidden
            for phase in pipeline.phases.values()
            if phase.status == "ready"
        )
        return sorted(waiting, key=lambda phase: (phase.since, phase.id))

    def running(self) -> list[Phase]:
        return [phase for pipeline in self.pipelines.values() for phase in pipeline.running]

    def lanes_of(self, what: Pipeline | Phase) -> list[Lane]:
        """Lanes of a phase, or of all phases of a pipeline, that run."""
        return [self.lanes.lanes[key] for key in what.lanes]

    def phase(self, id: PhaseId) -> Phase:
        return self.pipelines[id.pipeline].phases[id]

    def left_alone(self, pipeline: Pipeline, level: float = 0.5) -> float:
        """Seconds of all its work that is left if it had all of its workers to itself from now on; its coming steps
        by a cautious forecast with a level above one half."""
        current = pipeline.current
        after = (pipeline.steps - pipeline.step) * pipeline.solo_seconds(level)
        if current.generates:
            after += pipeline.training_seconds()
        if current.status == "running":
            return after + max(lane.left_in_all() for lane in self.lanes_of(current))
        return after + current.seconds

    def fits(self, workers: Iterable[int], needed: float, held: Sequence[float] | None = None) -> bool:
        """Whether each of these workers has room for so many bytes, beside those `held` or else those in use now."""
        held = self.held if held is None else held
        return all(held[worker] + needed <= self.device_bytes for worker in workers)


# What has happened since the policy was last asked


@dataclass(frozen=True, slots=True)
class PipelineArrived:
    pipeline: str


@dataclass(frozen=True, slots=True)
class PhaseReady:
    """All that the phase waits for has ended."""

    phase: PhaseId


@dataclass(frozen=True, slots=True)
class SubstageEnded:
    """Its lane went on to the next sub-stage by itself, or is gone."""

    pipeline: str
    lane: int
    kind: Substage


@dataclass(frozen=True, slots=True)
class PipelineLeft:
    """It is done, was cancelled, or lost what it was at."""

    pipeline: str


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """Its lanes are gone; the pipelines they belonged to repeat their step."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerReturned:
    """The worker can be used again."""

    worker: int


@dataclass(frozen=True, slots=True)
class TimerDue:
    """The time of a `Wait` has come."""


Change = PipelineArrived | PhaseReady | SubstageEnded | PipelineLeft | WorkerGone | WorkerReturned | TimerDue


# Actions


@dataclass(frozen=True, slots=True)
class Start:
    """Starts a phase: a rollout with one engine at each place, or training at one place."""

    phase: PhaseId
    places: tuple[Place, ...]
    share: float = 1.0
    auto_continue: bool = False
    """Whether the permit covers the phases that follow, on the same workers, for a moment."""

    @property
    def pipeline(self) -> str:
        return self.phase.pipeline

    @property
    def workers(self) -> list[int]:
        return [worker for place in self.places for worker in place]


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

    Of one whose phases have actors of their own, the state of those of one kind of phase goes.
    """

    pipeline: str
    out: bool
    phase: PhaseKind | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again then, if nothing happens before."""

    until: float


Action = Start | Pause | Resume | Resize | Confine | Migrate | Swap | Wait


class Policy(Protocol):
    """All cleverness lives in one of these."""

    @property
    def name(self) -> str: ...

    def decide(self, state: State, changes: list[Change]) -> list[Action]: ...
