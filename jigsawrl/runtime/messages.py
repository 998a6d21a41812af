"""What drivers and the scheduler tell each other. Small: tokens and weights go from actor to actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jigsawrl.config.settings import RunConfig
from jigsawrl.phases.ids import PhaseId, PhaseKind
from jigsawrl.scheduler.events import (
    DriverBegan,
    LoadRequest,
    Message,
    PhaseDone,
    StateAsleep,
    SubstageChanged,
)
from jigsawrl.scheduler.layout import Layout

# From a driver: what the scheduler core hears (`scheduler/events.py`), and


@dataclass(frozen=True, slots=True)
class Made(Message):
    """A step is done."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Counted(Message):
    """So many samples of a step's rollout are done."""

    step: int
    done: int
    of: int


@dataclass(frozen=True, slots=True)
class Says(Message):
    """A line for people."""

    text: str


@dataclass(frozen=True, slots=True)
class Logged(Message):
    """Events for the log: its lines, as they are written there."""

    lines: bytes


@dataclass(frozen=True, slots=True)
class Ends(Message):
    """Nothing more comes from this driver. `refused`: the pipeline cannot run, and trying again would not help."""

    how: str
    reason: str = ""
    refused: bool = False


FromDriver = (
    LoadRequest
    | DriverBegan
    | SubstageChanged
    | PhaseDone
    | StateAsleep
    | Made
    | Counted
    | Says
    | Logged
    | Ends
)

# To a driver


@dataclass(frozen=True, slots=True)
class Seats(Message):
    """Where a phase runs."""

    engines: tuple[int, ...]
    """Engines that take part."""
    where: tuple[int, ...]
    """The worker that each of the pipeline's actors is on."""
    threads: tuple[int, ...]
    """Cores that each of the pipeline's actors has."""


@dataclass(frozen=True, slots=True)
class PhasePermit(Message):
    """A phase may run, and as far as the permit covers them, those that follow it on the same workers."""

    phase: PhaseId
    seats: Seats
    prompt: bool = True
    """Whether changes of what its engines are at are sent at once; else they may wait for other messages."""
    training: Seats | None = None
    """Seats of the training after the permitted rollout, where that is covered."""
    covers_s: float = 0.0
    """Seconds from its receipt within which another step may begin as this one did, if its training is covered."""

    def seats_for(self, phase: PhaseId, age_s: float) -> Seats | None:
        """The seats of a phase that may run at once under a permit this old; None where it does not cover the phase.

        Drivers follow this and decide nothing.
        """
        if phase == self.phase:
            return self.seats
        if phase.kind == "training":
            return self.training  # its rollout was covered
        goes_on = self.training is not None and phase.kind == self.phase.kind
        return self.seats if goes_on and age_s < self.covers_s else None


def following(phase: PhaseId) -> PhaseId:
    """The phase that a pipeline's loop comes to after this one."""
    if phase.kind == "rollout":
        return phase._replace(kind="training")
    return phase._replace(kind="rollout", index=phase.index + 1)


@dataclass(frozen=True, slots=True)
class Gather(Message):
    """The rollout goes on with these of its engines only."""

    engines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load(Message):
    """There is room for its state."""


@dataclass(frozen=True, slots=True)
class Sleep(Message):
    """Its state, or that of the actors of one phase, goes to the store; it comes back with the next permit."""

    phase: PhaseKind | None = None


@dataclass(frozen=True, slots=True)
class Stop(Message):
    """Finish the step, save, end."""


ToDriver = Load | PhasePermit | Gather | Sleep | Stop

# To shared actors


@dataclass(frozen=True, slots=True)
class Place:
    """Where their process is, and who may come. It is started with this."""

    configs: Sequence[RunConfig]
    base: Path
    device: str
    rank: int
    layout: Layout
    meeting: str


@dataclass(frozen=True, slots=True)
class Join:
    """A pipeline comes, or comes back; its pipe follows."""

    config: RunConfig


@dataclass(frozen=True, slots=True)
class Stand:
    """A pipeline's sequences stand still, or go on."""

    pipeline: str
    still: bool


ToSharedActor = Join | Stand
