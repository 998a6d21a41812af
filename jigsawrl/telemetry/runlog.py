"""A run folder as its report reads it: the event log in types, and each pipeline's rewards and tokens.

    RUN/events.jsonl                 the one log of all pipelines
    RUN/metrics.jsonl                the figures of the only pipeline, or
    RUN/<pipeline>/metrics.jsonl     those of each

Beside sub-stages and steps the report knows these events; others it passes over:

    start, resume                    of the run, with `workers`; or of a pipeline, with `solo`, the seconds of a step
                                     alone, where they are known
    arrived                          a pipeline is there to be run
    predicted, phase                 what a phase was expected to take, and what it took
    died, failed, interrupted        with a `reason`
    recovered, warning               a warning with its `text`
    action                           what the policy did

A run that is scheduled starts with its first prediction: what comes before is set-up. A run that was down until it
was resumed, and set up again, has not run meanwhile: that time is cut out, and all that follows is earlier. A
pipeline that resumes in a run that goes on cuts out nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jigsawrl.errors import JigsawError
from jigsawrl.telemetry import jsonl
from jigsawrl.telemetry.columns import Intervals, join, union, without
from jigsawrl.telemetry.metrics import METRICS_FILE
from jigsawrl.telemetry.timeline import Permit, Span, generated, read_spans

EVENTS_FILE = "events.jsonl"
MAX_WORKERS = 65_536

_FAILURES = frozenset({"died", "failed", "interrupted"})
_ENDS = frozenset({"finished", "failed", "interrupted"})
_RECOVERIES = frozenset({"recovered", "resume"})
_LEAST_OUTAGE = 1.0
_HUGE = 1e12


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that went wrong, or came right again, at a time."""

    t: float
    pipeline: str
    event: str
    reason: str

    @property
    def headline(self) -> str:
        """The reason's last line, where it is many: of a traceback the one that says what happened."""
        return (self.reason.strip().splitlines() or [""])[-1]

    @property
    def failure(self) -> bool:
        return self.event in _FAILURES or self.event == "error"

    @property
    def recovery(self) -> bool:
        return self.event in _RECOVERIES


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
    tokens: dict[str, int] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    permits: list[Permit] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    solo: dict[str, float] = field(default_factory=dict)
    arrivals: dict[str, float] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    actions: Counter[str] = field(default_factory=Counter)
    simulated: bool = False

    @property
    def pipelines(self) -> list[str]:
        """All that are named anywhere."""
        return sorted({span.pipeline for span in self.spans} | self.rewards.keys() | self.done.keys())


def read_run(folder: Path) -> RunLog:
    """The whole folder, finished or not; a JigsawError that names file and line where it is not a run's."""
    if not folder.is_dir():
        what = "is a file, not a run folder" if folder.exists() else "there is no such run folder"
        raise JigsawError(f"{folder}: {what}")
    path = folder / EVENTS_FILE
    if not path.is_file():
        raise JigsawError(f"{folder}: holds no {EVENTS_FILE}, so it is not the folder of a run")
    log = _read_events(path, folder.resolve().name)
    for name, metrics in _metrics_files(folder, log):
        log.rewards[name], tokens = _read_metrics(metrics)
        if tokens is not None:
            log.tokens[name] = tokens
    return log


def _read_events(path: Path, name: str) -> RunLog:
    reader = _Reader(RunLog(name))
    try:
        for number, (_, event) in enumerate(jsonl.read(path), 1):
            try:
                reader.take(event)
            except (
                JigsawError,
                ArithmeticError,
                AttributeError,
                LookupError,
                TypeError,
                ValueError,
            ) as error:
                raise JigsawError(f"{path}, line {number} is no event of a run: {_said(error)}") from error
    except OSError as error:
        raise JigsawError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not reader.log.start < math.inf:
        raise JigsawError(f"{path}: holds no event yet")
    return reader.finish()


def _said(error: Exception) -> str:
    text = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
    return text.partition("\n")[0][:200]


class _Reader:
    """Takes the events of a log in its order."""

    def __init__(self, log: RunLog) -> None:
        self.log = log
        self._predicted: dict[tuple[str, str, int], float] = {}
        self._down: list[tuple[float, float]] = []
        self._of_run = False
        self._setting_up = False

    def take(self, event: Mapping[str, Any]) -> None:
        log, kind, t = self.log, _text(event, "event"), _number(event, "t")
        if kind in ("start", "resume"):
            self._of_run = self._of_run or "pipeline" not in event
        again = kind == "resume" and not (self._of_run and "pipeline" in event)
        if again and log.start < math.inf and t >= log.end:
            self._down.append((log.end, t))
            self._setting_up = self._of_run
        log.start, log.end = min(log.start, t), max(log.end, t)
        if kind == "substage":
            self._substage(event)
        elif kind == "step":
            log.done.setdefault(_text(event, "pipeline"), {})[_step(event)] = t
        elif kind in ("start", "resume"):
            self._begin(event, t)
        elif kind == "arrived":
            log.arrivals.setdefault(_text(event, "pipeline"), t)
        elif kind == "predicted":
            self._predicted[_phase(event)] = _number(event, "seconds")
            log.began.setdefault(_text(event, "pipeline"), t)
            if self._setting_up:
                self._down[-1] = self._down[-1][0], t
                self._setting_up = False
        elif kind == "phase":
            self._phase(event)
        elif kind == "action":
            log.actions[_text(event, "action")] += 1
        if kind in _ENDS and "pipeline" in event:
            log.ended[_text(event, "pipeline")] = t
        if kind in _FAILURES or kind in _RECOVERIES or kind == "warning":
            log.incidents.append(Incident(t, str(event.get("pipeline", "")), kind, _reason(event)))

    def finish(self) -> RunLog:
        """With the set-up and the outages cut out."""
        log = self.log
        if self._down:
            clock = _RunTime(_outages(self._down, log.spans))
            log.outages = clock.outages
            log.spans = [replace(span, t0=clock.at(span.t0), t1=clock.at(span.t1)) for span in log.spans]
            log.done = {
                name: {step: clock.at(t) for step, t in steps.items()} for name, steps in log.done.items()
            }
            log.incidents = [replace(incident, t=clock.at(incident.t)) for incident in log.incidents]
            log.permits = [
                replace(each, asked=clock.at(each.asked), t0=clock.at(each.t0), t1=clock.at(each.t1))
                for each in log.permits
            ]
            for times in (log.arrivals, log.began, log.ended):
                times.update({name: clock.at(t) for name, t in times.items()})
            log.end = clock.at(log.end)
        if log.began:
            first = min([*log.began.values(), *(span.t0 for span in log.spans)])
            log.setup, log.start = first - log.start, first
            log.incidents = [replace(incident, t=max(first, incident.t)) for incident in log.incidents]
            log.arrivals = {name: max(first, t) for name, t in log.arrivals.items()}
        return log

    def _substage(self, event: Mapping[str, Any]) -> None:
        _text(event, "pipeline")
        (span,) = read_spans([event])
        for name in ("t0", "t1", "step"):
            _number(event, name)
        generated(span)
        if span.workers and not 0 <= span.workers[0] <= span.workers[-1] < MAX_WORKERS:
            raise ValueError(f"there is no worker {span.workers}")
        log = self.log
        log.spans.append(span)
        log.workers = max(log.workers, *(worker + 1 for worker in span.workers), 0)
        log.start, log.end = min(log.start, span.t0), max(log.end, span.t1)
        if "error" in span.fields:
            reason = f"{span.substage} of step {span.step} ended with {span.fields['error']}"
            log.incidents.append(Incident(span.t1, span.pipeline, "error", reason))

    def _begin(self, event: Mapping[str, Any], t: float) -> None:
        log = self.log
        if isinstance(workers := event.get("workers"), int):
            if not 0 <= workers < MAX_WORKERS:
                raise ValueError(f"there cannot be {workers} workers")
            log.workers = max(log.workers, workers)
        log.simulated = log.simulated or event.get("simulated") is True
        if "pipeline" in event:
            name = _text(event, "pipeline")
            log.arrivals.setdefault(name, t)
            if "solo" in event:
                log.solo[name] = _number(event, "solo")
        else:
            log.name = str(event.get("name", log.name))
        for name, shape in event.get("scene", {}).items():
            log.arrivals[name] = t + _number(shape, "arrival")

    def _phase(self, event: Mapping[str, Any]) -> None:
        happened = _number(event, "t1") - _number(event, "t0")
        predicted = self._predicted.pop(_phase(event), None)
        if predicted is not None:
            self.log.predictions.append(Prediction(*_phase(event), predicted, happened))
        if "asked" in event:
            times = [_number(event, each) for each in ("asked", "t0", "t1")]
            self.log.permits.append(Permit(*_phase(event), *times))


def _text(event: Mapping[str, Any], name: str) -> str:
    if not isinstance(event[name], str):
        raise TypeError(f"{name} is {event[name]!r}, not a text")
    return str(event[name])


def _number(event: Mapping[str, Any], name: str) -> float:
    value = event[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _HUGE:
        raise ValueError(f"{name} is {value!r}, not a number")
    return float(value)


def _step(event: Mapping[str, Any]) -> int:
    return int(_number(event, "step"))


def _phase(event: Mapping[str, Any]) -> tuple[str, str, int]:
    return _text(event, "pipeline"), _text(event, "phase"), _step(event)


def _reason(event: Mapping[str, Any]) -> str:
    """What the event says about itself, in whatever words it has."""
    said = [str(event[key]) for key in ("process", "reason", "text", "error") if event.get(key)]
    step = f"step {event['step']}" if "step" in event else ""
    return ": ".join(said) or step


@dataclass(frozen=True, slots=True)
class _RunTime:
    """The clock of the run: the log's, which stands still during outages."""

    down: Intervals

    def at(self, t: float) -> float:
        passed = np.clip(t - self.down[:, 0], 0.0, self.down[:, 1] - self.down[:, 0])
        return t - float(passed.sum())

    @property
    def outages(self) -> list[Outage]:
        return [Outage(self.at(begin), end - begin) for begin, end in self.down.tolist()]


def _outages(down: Sequence[tuple[float, float]], spans: Sequence[Span]) -> Intervals:
    """The times before a resume in which nothing of any pipeline ran."""
    ran = union(np.array([span.t0 for span in spans]), np.array([span.t1 for span in spans]))
    idle = without(join(ran, np.array(down)), ran)
    return idle[idle[:, 1] - idle[:, 0] > _LEAST_OUTAGE]


def _metrics_files(folder: Path, log: RunLog) -> Iterable[tuple[str, Path]]:
    if (folder / METRICS_FILE).is_file():
        names = log.pipelines or sorted(log.arrivals)
        yield names[0] if len(names) == 1 else log.name, folder / METRICS_FILE
    for path in sorted(folder.glob(f"*/{METRICS_FILE}")):
        yield path.parent.name, path


def _read_metrics(path: Path) -> tuple[list[tuple[int, float]], int | None]:
    """The mean reward of each step that has one, and the tokens of all steps where that is known."""
    rewards = []
    tokens: float | None = None
    try:
        for number, (_, row) in enumerate(jsonl.read(path), 1):
            try:
                step = _step(row)
                if row.get("reward/mean") is not None:
                    rewards.append((step, _number(row, "reward/mean")))
                if row.get("perf/tokens") is not None:
                    tokens = (tokens or 0.0) + _number(row, "perf/tokens")
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise JigsawError(f"{path}, line {number} is no step's metrics: {_said(error)}") from error
    except OSError as error:
        raise JigsawError(f"{path}: cannot be read ({error.strerror or error})") from None
    return rewards, None if tokens is None else round(tokens)
