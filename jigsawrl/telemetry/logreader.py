"""Reads a run folder, finished or not.

    RUN/events.jsonl                 the one log of all pipelines
    RUN/metrics.jsonl                the figures of the only pipeline, or
    RUN/<pipeline>/metrics.jsonl     those of each

Beside sub-stages and steps, those of a simulation with `tokens`, these events are understood; others are passed over:

    start, resume                    of the run, with `workers`; or of a pipeline, with `solo`, the seconds of a step
                                     alone, where they are known
    end                              of the run, where it has several pipelines
    submitted, arrived               a pipeline came while others ran; it is set up, and there to be run
    predicted, phase                 what a phase was expected to take, and what it took
    pause, resume, cancel            what a user told a pipeline
    died, failed                     with a `reason`
    finished, interrupted, cancelled
    recovered, warning               a warning with its `text`
    action                           what the policy did

A run that is scheduled starts with its first prediction: what comes before is set-up. A run that was down until it
was resumed, and set up again, has not run meanwhile: that time is cut out, and all that follows is earlier. A
pipeline that resumes in a run that goes on cuts out nothing. Where a log stops without an end, and no process writes
it any more, the run was killed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.foreign import FLOAT32_MAX, shown
from jigsawrl.telemetry import jsonl
from jigsawrl.telemetry.events import EVENTS_FILE
from jigsawrl.telemetry.figures import summarize
from jigsawrl.telemetry.metrics import METRICS_FILE
from jigsawrl.telemetry.runclock import RunClock, outages_of
from jigsawrl.telemetry.runlog import Incident, Prediction, RunLog
from jigsawrl.telemetry.timeline import Permit, generated, read_spans
from jigsawrl.underway import is_under_way

MAX_WORKERS = 65_536

_ENDS = frozenset({"finished", "failed", "interrupted", "cancelled"})
_TOLD = frozenset({"died", "failed", "recovered", "warning"})
_REWARD = "reward/mean"
"""May be whatever a reward function may return."""
_COUNTED = frozenset({_REWARD, "reward/errors", "reward/none", "response_length/clip_ratio", "perf/tokens"})
_HUGE = 1e12
_KILLED = "the process of the run was killed, or its machine went down: the log stops here"


def read_run(folder: Path) -> RunLog:
    """The whole folder; a JigsawError that names file and line where it is not a run's."""
    if not folder.is_dir():
        what = "is a file, not a run folder" if folder.exists() else "there is no such run folder"
        raise JigsawError(f"{folder}: {what}")
    path = folder / EVENTS_FILE
    if not path.is_file():
        raise JigsawError(f"{folder}: holds no {EVENTS_FILE}, so it is not the folder of a run")
    log = _read_events(path, folder.resolve().name, is_under_way(folder))
    for name, metrics in _metrics_files(folder, log):
        rows = _read_metrics(metrics)
        rewarded = [row for row in rows if row.get("reward/mean") is not None]
        log.rewards[name] = [(int(row["step"]), float(row["reward/mean"])) for row in rewarded]
        made_here = [row for row in rows if row["step"] > log.steps_before.get(name, 0)]
        log.summaries[name] = summarize(made_here, log.life(name).seconds)
    return _with_generated(log)


def log_of(events: Iterable[Mapping[str, Any]], name: str) -> RunLog:
    """A run that is over, from its events alone."""
    reader = _Reader(RunLog(name))
    for event in events:
        reader.take(event)
    return _with_generated(reader.finish(under_way=False))


def _with_generated(log: RunLog) -> RunLog:
    """Pipelines without metrics have the figures that the log itself says."""
    for name, made in log.generated.items():
        if name not in log.summaries:
            steps = [{"perf/tokens": tokens} for tokens in made.values()]
            log.summaries[name] = summarize(steps, log.life(name).seconds)
    return log


def _read_events(path: Path, name: str, under_way: bool) -> RunLog:
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
    return reader.finish(under_way)


def _said(error: Exception) -> str:
    text = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
    return text.partition("\n")[0][:200]


class _Session:
    """What one process wrote: from a start or a resume of the run until its end."""

    def __init__(self, event: Mapping[str, Any]) -> None:
        self.of = str(event.get("pipeline", ""))
        """The only pipeline; empty where there may be several."""
        named = event.get("pipelines")
        self.pipelines = (
            {self.of} if self.of else {str(name) for name in named} if isinstance(named, list) else set()
        )
        self.ended: set[str] = set()
        self.interrupted: dict[str, Incident] = {}
        self.closed = False

    @property
    def over(self) -> bool:
        return self.closed or (bool(self.ended) and self.pipelines <= self.ended)


class _Reader:
    """Takes the events of a log in its order."""

    def __init__(self, log: RunLog) -> None:
        self.log = log
        self._predicted: dict[tuple[str, str, int], float] = {}
        self._down: list[tuple[float, float]] = []
        self._session: _Session | None = None
        self._of_run = False
        self._setting_up = False
        self._last_end: dict[str, str] = {}
        """How pipelines ended that have made no step since."""
        self._finished: set[str] = set()
        """Those of them that had finished when the session began: it takes them up and finds nothing to do."""
        self._paused: dict[str, float] = {}
        self._dead: set[str] = set()
        """Pipelines whose processes died and are not back yet."""

    def take(self, event: Mapping[str, Any]) -> None:
        log, kind, t = self.log, _text(event, "event"), _number(event, "t")
        if kind in ("start", "resume"):
            self._of_run = self._of_run or "pipeline" not in event
            if "pipeline" not in event or not self._of_run:
                self._begin_session(event, kind, t)
        log.start = min(log.start, t)
        if (
            "pipeline" in event or log.end < log.start
        ):  # what else the run logs at its end is no time of any pipeline
            log.end = max(log.end, t)
        if kind == "substage":
            self._substage(event)
        elif kind == "step":
            self._step(event, t)
        elif kind in ("start", "resume"):
            self._begin(event, t)
        elif kind == "arrived":
            self._arrive(event, t)
        elif kind == "submitted" and self._session is not None:
            self._session.pipelines.add(_text(event, "pipeline"))
        elif kind == "predicted":
            self._predicted[_phase(event)] = _number(event, "seconds")
            log.began.setdefault(_text(event, "pipeline"), t)
            self._is_set_up(t)
        elif kind == "phase":
            self._phase(event)
        elif kind == "action":
            log.actions[_text(event, "action")] += 1
        elif kind == "end" and self._session is not None:
            self._session.closed = True
        if "pipeline" in event:
            self._pause_or_end(_text(event, "pipeline"), kind, event, t)
        if kind in _TOLD and not (kind == "failed" and self._of_run and "reason" not in event):
            log.incidents.append(Incident(t, str(event.get("pipeline", "")), kind, _reason(event)))

    def _begin_session(self, event: Mapping[str, Any], kind: str, t: float) -> None:
        log = self.log
        if self._session is not None or log.start < math.inf:
            self._end_session(under_way=False)
            if kind == "resume" and t >= log.end:
                self._down.append((log.end, t))
                self._setting_up = self._of_run
        self._finished = {name for name, kind in self._last_end.items() if kind == "finished"}
        self._session = _Session(event)

    def _end_session(self, under_way: bool) -> None:
        """Nothing more comes of it."""
        log, session = self.log, self._session
        if session is not None:
            log.incidents += session.interrupted.values()
            if not session.over and not under_way and not log.simulated:
                log.incidents.append(Incident(log.end, session.of, "killed", _KILLED))
        for name in list(self._paused):
            self._goes_on(name, log.end)
        self._dead.clear()
        if log.began:
            self._is_set_up(log.end)

    def _is_set_up(self, t: float) -> None:
        """After a resume; whatever was before this is no time of the run."""
        if self._setting_up:
            self._down[-1] = self._down[-1][0], max(self._down[-1][1], t)
            self._setting_up = False

    def finish(self, under_way: bool) -> RunLog:
        """With the set-up and the outages cut out."""
        log = self.log
        self._end_session(under_way)
        for span in log.spans:
            log.arrivals.setdefault(span.pipeline, span.t0)
        if log.arrivals.keys() <= log.ended.keys() and log.ended:
            log.end = max([*log.ended.values(), *(span.t1 for span in log.spans)])
        if self._down:
            self._cut_out(RunClock(outages_of(self._down, log.spans)))
        if log.began:
            first = min([*log.began.values(), *(span.t0 for span in log.spans)])
            log.setup, log.start = first - log.start, first
            log.incidents = [replace(incident, t=max(first, incident.t)) for incident in log.incidents]
            log.arrivals = {name: max(first, t) for name, t in log.arrivals.items()}
        log.incidents.sort(key=lambda one: one.t)
        return log

    def _cut_out(self, clock: RunClock) -> None:
        log = self.log
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
        log.pauses = {
            name: [(clock.at(t0), clock.at(t1)) for t0, t1 in pauses] for name, pauses in log.pauses.items()
        }
        for times in (log.arrivals, log.began, log.ended):
            times.update({name: clock.at(t) for name, t in times.items()})
        log.end = clock.at(log.end)

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
        if span.fields.get("error", "KeyboardInterrupt") != "KeyboardInterrupt":
            reason = f"{span.substage} of step {span.step} ended with {span.fields['error']}"
            log.incidents.append(Incident(span.t1, span.pipeline, "error", reason))

    def _step(self, event: Mapping[str, Any], t: float) -> None:
        log, name, step = self.log, _text(event, "pipeline"), _step(event)
        log.done.setdefault(name, {})[step] = t
        self._finished.discard(name)
        self._last_end.pop(name, None)
        if "tokens" in event:
            log.generated.setdefault(name, {})[step] = _number(event, "tokens")

    def _begin(self, event: Mapping[str, Any], t: float) -> None:
        log = self.log
        if isinstance(workers := event.get("workers"), int):
            if not 0 <= workers < MAX_WORKERS:
                raise ValueError(f"there cannot be {workers} workers")
            log.workers = max(log.workers, workers)
        log.simulated = log.simulated or event.get("simulated") is True
        if "pipeline" in event:
            self._arrive(event, t)
            if "solo" in event:
                log.solo[_text(event, "pipeline")] = _number(event, "solo")
        else:
            log.name = str(event.get("name", log.name))
        for name, shape in event.get("scene", {}).items():
            log.arrivals[name] = t + _number(shape, "arrival")

    def _arrive(self, event: Mapping[str, Any], t: float) -> None:
        """Set up, for the first time or again."""
        log, name = self.log, _text(event, "pipeline")
        if name not in log.arrivals:
            log.arrivals[name] = t
            log.steps_before[name] = _step(event) if "step" in event else 0
        if name not in self._finished:
            log.ended.pop(name, None)
        if self._session is not None:
            self._session.pipelines.add(name)
            self._session.ended.discard(name)

    def _pause_or_end(self, name: str, kind: str, event: Mapping[str, Any], t: float) -> None:
        """What a user tells a pipeline, and how it ends."""
        if kind == "pause":
            self._paused.setdefault(name, t)
        elif kind == "died":
            self._dead.add(name)
        elif kind == "recovered":
            self._dead.discard(name)
        elif kind == "cancel" or (kind == "resume" and name not in self._dead):
            self._goes_on(name, t)
        if kind not in _ENDS:
            return
        self._goes_on(name, t)
        again = kind == self._last_end.get(name) == "cancelled" and name in self.log.ended
        self._last_end[name] = kind
        if name not in self._finished and not again:  # what stays cancelled had ended before
            self.log.ended[name] = t
        if self._session is not None:
            self._session.ended.add(name)
            if kind == "interrupted":
                self._session.interrupted[name] = Incident(t, name, kind, _reason(event))
            elif kind == "cancelled":
                self._session.interrupted.pop(name, None)

    def _goes_on(self, name: str, t: float) -> None:
        if name in self._paused:
            self.log.pauses.setdefault(name, []).append((self._paused.pop(name), t))

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
        raise TypeError(f"{name} is {shown(event[name])}, not a text")
    return str(event[name])


def _number(event: Mapping[str, Any], name: str) -> float:
    value, most = event[name], FLOAT32_MAX if name == _REWARD else _HUGE
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= most:
        raise ValueError(f"{name} is {shown(value)}, not a number")
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


def _metrics_files(folder: Path, log: RunLog) -> Iterable[tuple[str, Path]]:
    if (folder / METRICS_FILE).is_file():
        names = log.pipelines or sorted(log.arrivals)
        yield names[0] if len(names) == 1 else log.name, folder / METRICS_FILE
    for path in sorted(folder.glob(f"*/{METRICS_FILE}")):
        yield path.parent.name, path


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines; what the figures are computed from is a number, or is not there."""
    rows = []
    try:
        for number, (_, row) in enumerate(jsonl.read(path), 1):
            try:
                _step(row)
                for name, value in row.items():
                    if value is not None and (name in _COUNTED or name.startswith("timing_s/")):
                        _number(row, name)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise JigsawError(f"{path}, line {number} is no step's metrics: {_said(error)}") from error
            rows.append(row)
    except OSError as error:
        raise JigsawError(f"{path}: cannot be read ({error.strerror or error})") from None
    return rows
