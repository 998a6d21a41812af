"""The report: how long each pipeline took, how busy each worker was, and why it was not busier.

Every second of every worker is useful work or a bubble with one cause, the first of these that holds:

    sync, swap     weights or state are moved there, and nothing else runs
    tail           a pipeline that runs there at other times is in its tail elsewhere
    tool           such a pipeline waits for tools or rewards
    dependency     some pipeline has arrived and is not finished
    empty queue    there is nothing left, or not yet, to run
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from jigsawrl.telemetry.bar_grid import bar_grid
from jigsawrl.telemetry.columns import (
    KIND,
    NEVER,
    Columns,
    Indices,
    Intervals,
    groups,
    join,
    length,
    to_columns,
    union,
    without,
)
from jigsawrl.telemetry.events import SUBSTAGES, Substage
from jigsawrl.telemetry.figures import Life, Summary, rate
from jigsawrl.telemetry.text import counted, duration, number
from jigsawrl.telemetry.timeline import OVERHEADS, WAITS, Span, generated

Cause = Literal["tail", "tool", "sync", "swap", "dependency", "empty queue"]
CAUSES: tuple[Cause, ...] = get_args(Cause)

_MOST_WORKERS = 8
_MOST_KINDS = 3


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """One pipeline. Its first and its last span count from the run's start; `seconds` is its time, and the other
    figures are what `figures.py` says, too.

    `kinds` is the fraction of its time in which at least one such sub-stage runs; several may at once.
    `waiting` is the fraction in which none does.
    """

    name: str
    steps: int
    first: float
    last: float
    seconds: float
    tokens: int
    kinds: dict[Substage, float]
    waiting: float
    reward_first: float | None = None
    reward_last: float | None = None

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float | None:
        return rate(self.tokens, self.seconds)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker. `busy` is the fraction of the run in which something useful runs there, and `occupied` the mean
    over the run of the share that is taken, by syncs and swaps too, at most 1. `bubbles` are seconds."""

    worker: int
    busy: float
    occupied: float
    bubbles: dict[Cause, float]


@dataclass(frozen=True, slots=True)
class Report:
    """A run in figures. `busy` and `bubbles` are seconds of worker time and add up to workers times `seconds`."""

    start: float
    seconds: float
    busy: float
    bubbles: dict[Cause, float]
    pipelines: list[PipelineReport]
    workers: list[WorkerReport]

    @property
    def worker_seconds(self) -> float:
        return self.seconds * len(self.workers)

    @property
    def causes(self) -> set[Cause]:
        """The causes of all bubbles."""
        return {cause for cause, seconds in self.bubbles.items() if seconds}

    @property
    def busy_fraction(self) -> float:
        return _fraction(self.busy, self.worker_seconds)

    @property
    def tokens(self) -> int:
        return sum(pipeline.tokens for pipeline in self.pipelines)

    @property
    def tokens_per_second(self) -> float | None:
        return rate(self.tokens, self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """For machines: JSON-serialisable."""
        pipelines = [
            {
                **asdict(pipeline),
                "seconds_per_step": pipeline.seconds_per_step,
                "tokens_per_second": pipeline.tokens_per_second,
            }
            for pipeline in self.pipelines
        ]
        own = {"busy_fraction": self.busy_fraction, "tokens": self.tokens}
        return {**asdict(self), **own, "tokens_per_second": self.tokens_per_second, "pipelines": pipelines}


def report(
    spans: Iterable[Span],
    workers: int,
    *,
    start: float | None = None,
    end: float | None = None,
    lives: Mapping[str, Life] | None = None,
    summaries: Mapping[str, Summary] | None = None,
) -> Report:
    """The run from `start` to `end`, by default from the first span to the last.

    A pipeline of which no life is known arrived with its first span and ended with its last one, and its bubbles
    count from the start. One of which no steps are known has made and generated what its spans say; they leave out
    what a prefill samples, and count what was lost.
    """
    spans = list(spans)
    columns = to_columns(spans, workers, start=start, end=end)
    lives = lives or {}
    arrivals = {name: life.arrived for name, life in lives.items()}
    spent = [
        {what: length(times) for what, times in worker.items()} for worker in worker_times(columns, arrivals)
    ]
    return Report(
        start=columns.start,
        seconds=columns.seconds,
        busy=math.fsum(worker["busy"] for worker in spent),
        bubbles={cause: math.fsum(worker[cause] for worker in spent) for cause in CAUSES},
        pipelines=_pipelines(columns, spans, lives, summaries or {}),
        workers=[
            WorkerReport(
                worker=worker,
                busy=_fraction(spent[worker]["busy"], columns.seconds),
                occupied=_fraction(_share_seconds(columns, rows), columns.seconds),
                bubbles={cause: spent[worker][cause] for cause in CAUSES},
            )
            for worker, rows in enumerate(columns.rows_of_workers())
        ],
    )


def worker_times(
    columns: Columns, arrivals: Mapping[str, float] | None = None
) -> list[dict[Cause | Literal["busy"], Intervals]]:
    """For each worker when it is busy and when it is a bubble of which cause: all of its time, no moment twice."""
    tails = _by_pipeline(columns, frozenset({"tail"}))
    waits = _by_pipeline(columns, WAITS)
    there = _unfinished(columns, arrivals or {})
    whole = np.array([[0.0, columns.seconds]])
    elsewhere: dict[tuple[int, ...], tuple[Intervals, Intervals]] = {}
    times = []
    for rows in columns.rows_of_workers():
        users = tuple(np.unique(columns.pipeline[rows]).tolist())
        if users not in elsewhere:
            elsewhere[users] = join(*(tails[user] for user in users)), join(*(waits[user] for user in users))
        in_tail, in_wait = elsewhere[users]
        layers: dict[Cause | Literal["busy"], Intervals] = {
            "busy": _running(columns, rows, frozenset(SUBSTAGES) - WAITS - OVERHEADS),
            "sync": _running(columns, rows, frozenset({"sync"})),
            "swap": _running(columns, rows, frozenset({"swap"})),
            "tail": in_tail,
            "tool": in_wait,
            "dependency": there,
            "empty queue": whole,
        }
        times.append(_uncovered(layers))
    return times


def _uncovered(
    layers: Mapping[Cause | Literal["busy"], Intervals],
) -> dict[Cause | Literal["busy"], Intervals]:
    """What of each layer no earlier one covers."""
    covered = NEVER
    visible: dict[Cause | Literal["busy"], Intervals] = {}
    for name, layer in layers.items():
        grown = join(covered, layer)
        visible[name] = without(grown, covered)
        covered = grown
    return visible


def _running(columns: Columns, rows: Indices, kinds: frozenset[Substage]) -> Intervals:
    return columns.when(rows[np.isin(columns.kind[rows], [KIND[kind] for kind in kinds])])


def _by_pipeline(columns: Columns, kinds: frozenset[Substage]) -> list[Intervals]:
    return [_running(columns, rows, kinds) for rows in groups(columns.pipeline, len(columns.pipelines))]


def _unfinished(columns: Columns, arrivals: Mapping[str, float]) -> Intervals:
    """When at least one pipeline is there and has something left to run."""
    lives = []
    for name, rows in zip(columns.pipelines, groups(columns.pipeline, len(columns.pipelines)), strict=True):
        arrival = max(0.0, arrivals.get(name, columns.start) - columns.start)
        lives.append((min(arrival, columns.t0[rows].min()), columns.t1[rows].max()))
    every = np.array(lives, dtype=np.float64).reshape(-1, 2)
    return join(every)


def _share_seconds(columns: Columns, rows: Indices) -> float:
    """The time integral of the share that these spans take together, at most 1 at any time."""
    times = np.concatenate([columns.t0[rows], columns.t1[rows]])
    changes = np.concatenate([columns.share[rows], -columns.share[rows]])
    order = np.argsort(times, kind="stable")
    taken = np.clip(np.cumsum(changes[order]), 0.0, 1.0)
    return float(taken[:-1] @ np.diff(times[order]))


def _pipelines(
    columns: Columns, spans: Sequence[Span], lives: Mapping[str, Life], summaries: Mapping[str, Summary]
) -> list[PipelineReport]:
    steps: dict[str, set[int]] = {name: set() for name in columns.pipelines}
    tokens = dict.fromkeys(columns.pipelines, 0)
    for span in spans:
        steps[span.pipeline].add(span.step)
        tokens[span.pipeline] += generated(span)
    found = []
    for name, rows in zip(columns.pipelines, groups(columns.pipeline, len(columns.pipelines)), strict=True):
        seen = _pipeline(columns, rows, name, len(steps[name]), tokens[name], lives.get(name))
        found.append(_with_figures(seen, summaries[name]) if name in summaries else seen)
    return found


def _pipeline(
    columns: Columns, rows: Indices, name: str, steps: int, tokens: int, life: Life | None
) -> PipelineReport:
    """What its spans say."""
    first, last = float(columns.t0[rows].min()), float(columns.t1[rows].max())
    life = life or Life(columns.start + first, columns.start + last)
    spent = {kind: length(_running(columns, rows, frozenset({kind}))) for kind in SUBSTAGES}
    pauses = np.array(life.pauses, dtype=np.float64).reshape(-1, 2) - columns.start
    waiting = life.ended - life.arrived - length(join(columns.when(rows), union(pauses[:, 0], pauses[:, 1])))
    return PipelineReport(
        name=name,
        steps=steps,
        first=first,
        last=last,
        seconds=life.seconds,
        tokens=tokens,
        kinds={kind: _fraction(seconds, life.seconds) for kind, seconds in spent.items() if seconds},
        waiting=_fraction(max(0.0, waiting), life.seconds),
    )


def _with_figures(seen: PipelineReport, known: Summary) -> PipelineReport:
    """What the metrics of its steps say, where they say it."""
    return replace(
        seen,
        steps=known.steps or seen.steps,
        tokens=known.tokens or seen.tokens,
        reward_first=known.reward_first,
        reward_last=known.reward_last,
    )


def _fraction(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ReportTable:
    """The report for people. Prints with rich, in ASCII where the terminal has nothing more."""

    report: Report
    name: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = options.ascii_only
        table = Table(box=ROUNDED, show_header=False, title=Text(self.name, style="bold"), padding=(0, 1))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        report = self.report
        table.add_row("time", duration(report.seconds))
        if report.tokens_per_second:
            table.add_row("tokens", f"{report.tokens:,} generated, {report.tokens_per_second:,.0f} a second")
        if report.pipelines:
            table.add_row("pipelines", _pipeline_grid(report.pipelines))
        if report.worker_seconds:
            table.add_row("workers", _worker_grid(report, plain))
            table.add_row("bubbles", _bubble_grid(report, plain))
        yield table


def _pipeline_grid(pipelines: Sequence[PipelineReport]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(overflow="fold")
    for _ in range(3):
        grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="dim", overflow="fold")
    for pipeline in pipelines:
        rate = pipeline.tokens_per_second
        grid.add_row(
            Text(pipeline.name),
            counted(pipeline.steps, "step"),
            f"{number(pipeline.seconds_per_step)} s/step",
            f"{rate:,.0f} tokens/s" if rate else "",
            mostly(pipeline),
        )
    return grid


def mostly(pipeline: PipelineReport) -> str:
    """Where most of a pipeline's time goes."""
    parts: list[tuple[str, float]] = [*pipeline.kinds.items(), ("waiting", pipeline.waiting)]
    largest = sorted(parts, key=lambda part: -part[1])[:_MOST_KINDS]
    return ", ".join(f"{kind} {share:.0%}" for kind, share in largest if share >= 0.005)


def _worker_grid(report: Report, plain: bool) -> Table:
    """Each worker's busy fraction; of many only the least, the mean and the most."""
    busy = [worker.busy for worker in report.workers]
    rows = [(str(worker.worker), worker.busy) for worker in report.workers]
    if len(busy) > _MOST_WORKERS:
        rows = [("least", min(busy)), (f"mean of {len(busy)}", report.busy_fraction), ("most", max(busy))]
    return bar_grid((((name, f"{fraction:.0%} busy"), fraction) for name, fraction in rows), plain)


def _bubble_grid(report: Report, plain: bool) -> Table:
    parts = {cause: seconds / report.worker_seconds for cause, seconds in report.bubbles.items()}
    largest = sorted(parts.items(), key=lambda part: -part[1])
    rows = [((cause, f"{part:.1%}"), part) for cause, part in largest if part >= 0.0005]
    return bar_grid(rows or [(("none",), 0.0)], plain)
