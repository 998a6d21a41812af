"""What a run folder says about its run, in types: what happened when, and the figures of each pipeline."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from jigsawrl.telemetry.columns import Columns, to_columns
from jigsawrl.telemetry.figures import Life, Summary
from jigsawrl.telemetry.timeline import Permit, Span


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that went wrong, or came right again, at a time."""

    t: float
    pipeline: str
    """Empty where it was the whole run's."""
    event: str
    reason: str

    @property
    def who(self) -> str:
        return self.pipeline or "the run"

    @property
    def headline(self) -> str:
        """The reason's last line, where it is many: of a traceback the one that says what happened."""
        return (self.reason.strip().splitlines() or [""])[-1]

    @property
    def failure(self) -> bool:
        return self.event in ("died", "failed", "killed", "error")

    @property
    def recovery(self) -> bool:
        return self.event == "recovered"

    @property
    def interruption(self) -> bool:
        """Whether somebody stopped the pipeline, by Ctrl-C or SIGTERM: it was saved, and nothing went wrong."""
        return self.event == "interrupted"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds that a phase was expected to take, and that it took."""

    pipeline: str
    phase: str
    step: int
    predicted: float
    happened: float


@dataclass(frozen=True, slots=True)
class Outage:
    """The run was down for so many seconds; `t` is the time of the run at which."""

    t: float
    seconds: float


@dataclass(slots=True)
class RunLog:
    """All times are those of the log, less the outages before them; `done` is when a pipeline's step was, `began`
    when its first phase, `ended` when it ended for the last time. `setup` is the seconds of the log before `start`.
    """

    name: str
    workers: int = 0
    start: float = math.inf
    end: float = -math.inf
    setup: float = 0.0
    spans: list[Span] = field(default_factory=list)
    done: dict[str, dict[int, float]] = field(default_factory=dict)
    rewards: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    summaries: dict[str, Summary] = field(default_factory=dict)
    generated: dict[str, dict[int, float]] = field(default_factory=dict)
    """Tokens of each pipeline's steps, where the log itself says them."""
    incidents: list[Incident] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    permits: list[Permit] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    solo: dict[str, float] = field(default_factory=dict)
    arrivals: dict[str, float] = field(default_factory=dict)
    steps_before: dict[str, int] = field(default_factory=dict)
    """Of each pipeline, those that it had made when it first came: in another run folder."""
    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    pauses: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    actions: Counter[str] = field(default_factory=Counter)
    simulated: bool = False

    @property
    def columns(self) -> Columns:
        return to_columns(self.spans, self.workers, start=self.start, end=self.end)

    @property
    def pipelines(self) -> list[str]:
        """All that are named anywhere."""
        return sorted({span.pipeline for span in self.spans} | self.rewards.keys() | self.done.keys())

    def life(self, name: str) -> Life:
        """One that never arrived was never there."""
        ended = self.ended.get(name, self.end)
        return Life(self.arrivals.get(name, ended), ended, tuple(self.pauses.get(name, ())))

    @property
    def lives(self) -> dict[str, Life]:
        return {name: self.life(name) for name in self.arrivals}

    @property
    def listed_incidents(self) -> list[Incident]:
        """Those that are listed as failures and recoveries, and warnings."""
        return [one for one in self.incidents if not one.interruption]
