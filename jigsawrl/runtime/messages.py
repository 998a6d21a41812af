"""What drivers and the scheduler tell each other. Small: tokens and weights go from actor to actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jigsawrl.policies.state import Phase
from jigsawrl.telemetry.events import Substage

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig
    from jigsawrl.runtime.layout import Layout


class Message:
    """Travels as its fields in a row: what a dataclass does to be pickled takes longer than all the rest."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple([getattr(self, each) for each in self.__slots__])


# From a driver


@dataclass(frozen=True, slots=True)
class Loads(Message):
    """It could set its actors up: from then on its state is awake."""


@dataclass(frozen=True, slots=True)
class Began(Message):
    """Its loop is set up; so many steps were made before."""

    steps: int
    done: int


@dataclass(frozen=True, slots=True)
class At(Message):
    """An engine is at another sub-stage now, with so many samples; None: it has nothing more to do.

    Engine -1: all actors together, in training.
    """

    engine: int
    substage: Substage | None
    samples: int


@dataclass(frozen=True, slots=True)
class Over(Message):
    """The phase that ran is over, and the next one could start."""

    phase: Phase
    step: int
    busy: tuple[float, ...]
    """Seconds that each of its actors was at work."""
    engines: int
    """That took part."""
    lengths: tuple[int, ...] = ()
    """Tokens of a rollout's samples."""
    turns: float = 1.0
    """Of a rollout's samples, on the mean."""
    tool_seconds: float = 0.0
    """In which no engine of a rollout had anything to do but wait for tools."""
    went_on: float | None = None
    """When the next phase began at once, since its permit was there already."""
    empty: bool = False
    """A training without anything to train on: what it took says nothing of what trainings take."""


@dataclass(frozen=True, slots=True)
class Asleep(Message):
    """Its state is in the store, and nowhere else: all of it, or that of the actors of one phase."""

    phase: Phase | None = None


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


FromDriver = Loads | Began | At | Over | Asleep | Made | Counted | Says | Logged | Ends

# To a driver


@dataclass(frozen=True, slots=True)
class Go(Message):
    """The next phase may run, with these of its engines."""

    engines: tuple[int, ...]
    where: tuple[int, ...]
    """The worker that each of its actors is on."""
    threads: tuple[int, ...]
    """The cores that each of its actors has."""
    prompt: bool = True
    """Whether what its engines are at is to be told at once; else with other news, or soon."""
    training: Go | None = None
    """Of the training after a rollout, if that may run too, without asking; so may the next step, for a moment."""


@dataclass(frozen=True, slots=True)
class Gather(Message):
    """The rollout goes on with these of its engines only."""

    engines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load(Message):
    """There is room for its state."""


@dataclass(frozen=True, slots=True)
class Sleep(Message):
    """Its state goes to the store, all of it or that of the actors of one phase; it comes back with the next `Go`."""

    phase: Phase | None = None


@dataclass(frozen=True, slots=True)
class Stop(Message):
    """Finish the step, save, end."""


ToDriver = Load | Go | Gather | Sleep | Stop

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
