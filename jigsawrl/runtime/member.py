"""A pipeline as a set of processes: what they are at, how often they died, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from jigsawrl.config.pipelines import Homes
from jigsawrl.config.settings import RunConfig
from jigsawrl.graph.outlook import Outlook
from jigsawrl.runtime.family import Family
from jigsawrl.runtime.messages import Counted, Ends
from jigsawrl.scheduler.layout import Layout
from jigsawrl.telemetry.events import Substage

RETRIES = 3
"""Deaths in a row, without a step in between, after which a pipeline is given up."""
MEMORY_RETRIES = 1
"""The same where memory ran out: others may have had it at that moment, but it does not grow."""


@dataclass(slots=True)
class Member:
    name: str
    config: RunConfig
    out: Path
    outlook: Outlook
    """Before anything was seen of it in this run."""
    arrival: float
    layout: Layout
    """Where its actors live."""
    homes: Homes | None = None
    """Where its phases are in pools."""
    family: Family | None = None
    began: bool = False
    loads: bool = False
    """Whether its driver waits for room to set its actors up."""
    done: int = 0
    furthest: int = 0
    """The last step that it ever made."""
    deaths: int = 0
    ends: Ends | None = None
    """What its driver said last."""
    ended: str | None = None
    """finished, failed, interrupted; None while it is under way."""
    reason: str = ""
    training: Substage | None = None
    """What its training gang was at last."""
    counted: Counted | None = None
    """How many samples of its rollout are done, as far as it said."""
    paused: set[int] = field(default_factory=set)
    """Engines that stand still."""
    held: bool = False
    """Whether somebody wants it to wait."""
    cancelled: bool = False

    @property
    def standing(self) -> str:
        return "under way" if self.began else "set-up" if self.family else "to come"

    def made(self, step: int) -> None:
        """A step is done. One that is made again does not make up for deaths."""
        self.done = step
        if step > self.furthest:
            self.furthest, self.deaths = step, 0

    def goes_on(self, done: int) -> None:
        """Its driver is there, after this step: new to us if it was made just before the last death."""
        self.began = True
        self.made(done)
