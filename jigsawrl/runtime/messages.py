"""What drivers and the scheduler tell each other. Small: tokens and weights go from actor to actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jigsawrl.policies.state import Phase
from jigsawrl.telemetry.events import Substage

# From a driver


@dataclass(frozen=True, slots=True)
class Loads:
    """It could set its actors up: from then on its state is awake."""


@dataclass(frozen=True, slots=True)
class Began:
    """Its loop is set up; so many steps were made before."""

    steps: int
    done: int


@dataclass(frozen=True, slots=True)
class At:
    """An engine is at another sub-stage now, with so many samples; None: it has nothing more to do.

    Engine -1: all actors together, in training.
    """

    engine: int
    substage: Substage | None
    samples: int


@dataclass(frozen=True, slots=True)
class Over:
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


@dataclass(frozen=True, slots=True)
class Asleep:
    """Its state is in the store, and nowhere else."""


@dataclass(frozen=True, slots=True)
class Made:
    """A step is done."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Says:
    """A line for people."""

    text: str


@dataclass(frozen=True, slots=True)
class Logged:
    """Events for the log: its lines, as they are written there."""

    lines: bytes


@dataclass(frozen=True, slots=True)
class Ends:
    """Nothing more comes from this driver. `refused`: the pipeline cannot run, and trying again would not help."""

    how: str
    reason: str = ""
    refused: bool = False


FromDriver = Loads | Began | At | Over | Asleep | Made | Says | Logged | Ends

# To a driver


@dataclass(frozen=True, slots=True)
class Go:
    """The next phase may run, with these of its engines."""

    engines: tuple[int, ...]
    where: tuple[int, ...]
    """The worker that each of its actors is on."""
    threads: tuple[int, ...]
    """The cores that each of its actors has."""


@dataclass(frozen=True, slots=True)
class Gather:
    """The rollout goes on with these of its engines only."""

    engines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """There is room for its state."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Its state goes to the store, and comes back with the next `Go`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish the step, save, end."""


ToDriver = Load | Go | Gather | Sleep | Stop
