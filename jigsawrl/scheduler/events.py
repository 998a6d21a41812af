"""What the core is told: by drivers, by whatever looks after processes and workers, and by users.

Events of one sender keep their order; those of different senders need not. The core ignores what comes twice, and
what comes from processes that are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from jigsawrl.phases.ids import PhaseId
from jigsawrl.phases.turns import OrderName
from jigsawrl.policies.state import Action, Start, TimerDue, WorkerGone, WorkerReturned
from jigsawrl.telemetry.events import Substage


class Message:
    """A message that is pickled as its fields in a row: the default of a dataclass takes longer than all the rest."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple([getattr(self, each) for each in self.__slots__])


# From a driver


@dataclass(frozen=True, slots=True)
class LoadRequest(Message):
    """The driver could set its actors up: from then on the pipeline's state is awake."""


@dataclass(frozen=True, slots=True)
class DriverBegan(Message):
    """The loop is set up, after this many of its steps."""

    steps: int
    done: int


@dataclass(frozen=True, slots=True)
class SubstageChanged(Message):
    """An engine is at another sub-stage, with this many samples; None: it has nothing more to do.

    Engine -1 stands for the training gang.
    """

    engine: int
    substage: Substage | None
    samples: int
    phase: tuple[str, int] | None = None
    """Kind and step of the phase; None: it is the only one that the pipeline runs."""


@dataclass(frozen=True, slots=True)
class PhaseDone(Message):
    """A phase has ended."""

    phase: str
    """The kind of the phase."""
    step: int
    busy: tuple[float, ...]
    """Seconds for which each of its actors was at work."""
    engines: int
    """Number of engines that took part."""
    lengths: tuple[int, ...] = ()
    """Tokens of a rollout's samples."""
    turns: float = 1.0
    """Mean number of turns of a rollout's samples."""
    tool_seconds: float = 0.0
    """Seconds in which no engine of a rollout had anything to do but wait for tools."""
    went_on: float | None = None
    """When the next phase began at once, since the permit covered it."""
    empty: bool = False
    """Whether a training had nothing to train on: its time says nothing about trainings."""


@dataclass(frozen=True, slots=True)
class StateAsleep(Message):
    """The pipeline's state is in the store only: all of it, or that of the actors of one kind of phase."""

    phase: str | None = None


# From whatever looks after processes, workers and users. Policies are told of `WorkerGone`, `WorkerReturned` and
# `TimerDue`, too.


@dataclass(frozen=True, slots=True)
class Sent:
    """An event that comes from the pipeline's processes, or tells of them; ignored once others took their place.

    Where nothing late can arrive, since the channel goes with the processes, events come without it.
    """

    incarnation: int
    """How often the pipeline's processes had been lost when these were started."""
    event: SchedulerEvent


@dataclass(frozen=True, slots=True)
class PipelineLost:
    """The pipeline's processes died, and with them the phases that ran. It may begin again."""


@dataclass(frozen=True, slots=True)
class PipelineGone:
    """The pipeline has ended, one way or another: nothing more is heard of it."""


@dataclass(frozen=True, slots=True)
class PipelineHeld:
    """A user wants the pipeline to wait, or to go on."""

    wait: bool


@dataclass(frozen=True, slots=True)
class TurnsReordered:
    """Pipelines take turns in another order from now on: the plan of their cluster has changed."""

    order: OrderName


SchedulerEvent = (
    LoadRequest
    | DriverBegan
    | SubstageChanged
    | PhaseDone
    | StateAsleep
    | PipelineLost
    | PipelineGone
    | PipelineHeld
    | WorkerGone
    | WorkerReturned
    | TurnsReordered
    | TimerDue
    | Sent
)
Heard = tuple[str, SchedulerEvent]
"""An event, and the pipeline that it is about; the empty name where it is about none."""

# In the log

_NAMES: dict[str, Callable[..., SchedulerEvent]] = {
    "Loads": LoadRequest,
    "Began": DriverBegan,
    "At": SubstageChanged,
    "Over": PhaseDone,
    "Asleep": StateAsleep,
    "Lost": PipelineLost,
    "Gone": PipelineGone,
    "Held": PipelineHeld,
    "WorkerGone": WorkerGone,
    "WorkerReturned": WorkerReturned,
    "Reordered": TurnsReordered,
    "Due": TimerDue,
    "Sent": Sent,
}
_WRITTEN_AS = {kind: name for name, kind in _NAMES.items()}


def written(heard: Heard) -> list[Any]:
    """An event as it stands in the log."""
    name, event = heard
    if isinstance(event, Sent):
        return [name, "Sent", event.incarnation, *written((name, event.event))[1:]]
    return [name, _WRITTEN_AS[type(event)], *(getattr(event, each) for each in event.__slots__)]


def read(entry: list[Any]) -> Heard:
    """The event that `written` wrote."""
    name, kind, *fields = entry
    if kind == "Sent":
        return name, Sent(fields[0], read([name, *fields[1:]])[1])
    return name, _NAMES[kind](*map(_frozen, fields))


_ACTIONS: dict[str, Callable[..., Action]] = {kind.__name__.lower(): kind for kind in get_args(Action)}


def read_action(entry: dict[str, Any]) -> Action:
    """The action that `written_action` wrote."""
    fields = {key: _frozen(value) for key, value in entry.items()}
    kind = fields.pop("action")
    if kind == "start":
        fields["phase"] = PhaseId(fields.pop("pipeline"), fields["phase"], fields.pop("step"))
    return _ACTIONS[kind](**fields)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def written_action(action: Action) -> dict[str, Any]:
    """An action as it stands in the log."""
    fields = {each: getattr(action, each) for each in action.__slots__}
    if isinstance(action, Start):
        id: PhaseId = fields.pop("phase")
        fields = {"pipeline": id.pipeline, "phase": id.kind, "step": id.index, **fields}
    return {"action": type(action).__name__.lower(), **fields}
