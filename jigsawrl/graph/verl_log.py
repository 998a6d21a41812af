"""Reads verl's console logs as they are.

A step is a line `step:7 - timing_s/gen:59.0 - response_length/mean:290.1 - ...`, with plain numbers or numpy's; some
versions break it before each " - ". verl's own JSON-lines log holds the same. A log may hold several runs, one after
another; a run that was stopped and resumed is one. Single lengths are not in a log: they are made up from mean,
maximum and clipped share, and marked so. Only logs of synchronous trainers can be read: where rollouts and updates
overlap, the seconds in a log do not add up to steps.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from jigsawrl.errors import JigsawError
from jigsawrl.graph.log_lines import LogLine, LogLines
from jigsawrl.graph.verl_settings import Settings

MOST_STEPS = 100_000
MOST_TIMES = 8
"""How often one step is kept if it is logged again and again."""
NEEDED = (
    "response_length/mean",
    "prompt_length/mean",
    "perf/total_num_tokens",
    "timing_s/gen",
    "timing_s/old_log_prob",
    "timing_s/ref",
    "timing_s/update_actor",
    "timing_s/step",
)
"""What tells of a step. A line that lacks one of these while most steps have it was cut off."""
OPTIONAL = (
    "response_length/max",
    "response_length/min",
    "response_length/clip_ratio",
    "num_turns/mean",
    "timing_s/agent_loop/tool_calls/mean",
    "timing_s/update_weights",
    "timing_s/reward",
    "timing_s/values",
    "timing_s/adv",
    "timing_s/update_critic",
)
"""What is left out alone where it makes no sense."""
_KEPT = frozenset(
    (
        *NEEDED,
        *OPTIONAL,
        "timing_s/generate_sequences",
        "timing_s/ref_log_prob",
        "perf/time_per_step",
        "perf/throughput",
    )
)

_STEP = re.compile(r"(?<![\w/.-])step:\s*(\d{1,12})(?=\s+-\s+\S+:)")
_STEP_ALONE = re.compile(r"\s*step:\s*(\d{1,12})\s*$")
_NUMBER = re.compile(
    r"^(?:(?:np|numpy|torch)\.)?(?:float\d*|u?int\d*|bool_?|tensor)?\(?\s*([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+|nan|inf(?:inity)?))"
    r"(?:,[^)]*)?\)?$",
    re.IGNORECASE,
)
_BETWEEN = re.compile(r"\s+-\s+")
_ASYNC_PROCESS = re.compile(r"FullyAsync|OneStepTaskRunner|OneStepOff")
_ASYNC_METRIC = re.compile(
    r"fully_async/|timing_s/(?:wait_prev_gen|generate_async|sync_rollout_weights|param_sync)$"
)

Metrics = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Logged:
    """One line of metrics."""

    line: int
    metrics: Metrics


@dataclass(slots=True)
class Run:
    """One run of verl's trainer in a log."""

    line: int
    """Where it begins."""
    settings: Settings = field(default_factory=Settings)
    steps: dict[int, list[Logged]] = field(default_factory=dict)
    """The lines of each step: more than one where a step was repeated, or its metrics were logged in parts."""
    launches: set[int] = field(default_factory=set)
    """Steps that were the first after the trainer had started."""
    asynchronous: str | None = None
    """What in the log shows that the trainer is asynchronous, if anything does."""

    def add(self, step: int, logged: Logged) -> None:
        lines = self.steps.setdefault(step, [])
        if len(lines) < MOST_TIMES:
            lines.append(logged)

    def resumes(self, earlier: Run) -> bool:
        """Whether this goes on with the run before it, and does not begin another."""
        first, alike = next(iter(self.steps)), bool(self.asynchronous) == bool(earlier.asynchronous)
        return first > 1 and alike and not self.settings.contradicts(earlier.settings)

    def join(self, later: Run) -> None:
        self.launches |= later.launches - self.steps.keys()
        for step, lines in later.steps.items():
            for each in lines:
                self.add(step, each)


def read_runs_in(path: Path) -> tuple[list[Run], str | None]:
    """The runs in a log, in order, and why it breaks off, if it does."""
    lines = LogLines(path)
    reader = _Reader(path)
    for line in lines:
        reader.read(line)
    if reader.line == 0:
        raise JigsawError(f"{path}: {lines.damage or 'is empty'}")
    runs: list[Run] = []
    for each in (run for run in reader.runs if run.steps):
        each.asynchronous = each.asynchronous or each.settings.asynchronous
        if runs and each.resumes(runs[-1]):
            runs[-1].join(each)
        else:
            runs.append(each)
    if not runs:
        why = f"; {lines.damage}" if lines.damage else ""
        raise JigsawError(
            f"{path}: none of its {reader.line:,} lines is a step such as 'step:1 - timing_s/gen:59.0 - ...'{why};\n"
            f"log with trainer.logger=['console']"
        )
    return runs, lines.damage


@dataclass(slots=True)
class _Reader:
    """Divides the lines of a log among runs."""

    path: Path
    line: int = 0
    runs: list[Run] = field(default_factory=lambda: [Run(1)])
    _coming: Settings = field(default_factory=Settings)
    """Of a run that may follow."""
    _steps: int = 0
    _broken: tuple[str, int, Metrics | None] | None = None
    """A step whose metrics follow, one on a line: its process, its number, and those that came."""

    def read(self, line: LogLine) -> None:
        self.line = line.number
        run = self.runs[-1]
        if run.asynchronous is None and _ASYNC_PROCESS.match(line.source):
            if run.steps:
                self.runs.append(Run(line.number))
            self.runs[-1].asynchronous = f"it has a process {line.source.split()[0]}"
        steps = _steps(line)
        for number, metrics in steps:
            if not all(key.startswith("val") for key in metrics):  # validation, apart from any step
                self._add(number, metrics, line.number)
        if steps:
            self._broken = None
        elif found := _STEP_ALONE.match(line.text):
            self._broken = line.source, int(found[1]), None
        elif not self._goes_on(line):
            self._read_settings(line)

    def _goes_on(self, line: LogLine) -> bool:
        if self._broken is None:
            return False
        source, number, metrics = self._broken
        text = line.text.lstrip()
        if source != line.source or not text.startswith("- "):
            self._broken = None
            return False
        if metrics is None:
            metrics = self._add(number, {}, line.number)
            self._broken = source, number, metrics
        if line.ended:
            metrics.update(self._kept(_metrics(text[2:])))
        return True

    def _read_settings(self, line: LogLine) -> None:
        begun = bool(self.runs[-1].steps)
        settings = self._coming if begun else self.runs[-1].settings
        settings.read(line)
        if begun and settings:
            self.runs.append(Run(line.number, settings))
            self._coming = Settings()

    def _kept(self, metrics: Metrics) -> Metrics:
        run = self.runs[-1]
        if run.asynchronous is None:
            shows = next(filter(_ASYNC_METRIC.match, metrics), None)
            run.asynchronous = f"its steps log {shows}" if shows else None
        return {
            key: value
            for key, value in metrics.items()
            if key in _KEPT and (key not in OPTIONAL or sensible(value))
        }

    def _add(self, number: int, metrics: Metrics, line: int) -> Metrics:
        """Takes a line of metrics to a step, and says which were kept."""
        run = self.runs[-1]
        if number < next(reversed(run.steps), 0):
            run = Run(line, run.settings)
            self.runs.append(run)
        run.settings.close()
        if not run.steps and (run.settings or number <= 1):
            run.launches.add(number)
        self._steps += number not in run.steps
        if self._steps > MOST_STEPS:
            raise JigsawError(f"{self.path}, line {line}: more than {MOST_STEPS:,} steps; cut the log")
        kept = self._kept(metrics)
        run.add(number, Logged(line, kept))
        return kept


def _steps(line: LogLine) -> list[tuple[int, Metrics]]:
    """The numbers and metrics of the steps on a line."""
    text = line.text
    if text.lstrip().startswith('{"'):
        return _from_json(text)
    if "step:" not in text:
        return []
    _, *pieces = _STEP.split(text)
    if pieces and not line.ended:  # the last of its metrics may be cut off
        pieces[-1] = pieces[-1].rpartition(" - ")[0]
    steps = [(int(number), _metrics(parts)) for number, parts in zip(pieces[::2], pieces[1::2], strict=True)]
    return [(number, metrics) for number, metrics in steps if any("/" in key for key in metrics)]


def _from_json(text: str) -> list[tuple[int, Metrics]]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return []
    number, data = record.get("step"), record.get("data", record)
    good = type(number) is int and 0 <= number < 10**12 and isinstance(data, dict)
    return [(number, data)] if good and any("/" in key for key in data) else []


def _metrics(text: str) -> Metrics:
    """Pairs `key:value` between " - "; values that are no numbers stay text."""
    metrics: Metrics = {}
    for part in _BETWEEN.split(text):
        key, colon, value = part.strip().rpartition(":")
        if colon and key:
            number = _NUMBER.match(value.strip())
            metrics[key.strip()] = float(number[1]) if number else value.strip()
    return metrics


def sensible(value: Any) -> TypeGuard[float]:
    """Whether it is a number from 0 on."""
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
