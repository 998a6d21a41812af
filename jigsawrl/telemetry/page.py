"""report.html: a run on one page that needs nothing else, light or dark as its reader prefers, on any width."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from html import escape
from importlib.resources import files

from jigsawrl.telemetry import palette, sections
from jigsawrl.telemetry.bands import Mark, bands_of, timeline
from jigsawrl.telemetry.columns import Columns
from jigsawrl.telemetry.report import CAUSES, Cause, Report
from jigsawrl.telemetry.runlog import RunLog
from jigsawrl.telemetry.text import clock, counted, duration, printable
from jigsawrl.telemetry.timeline import Span

_NOTHING_FROM_OUTSIDE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_MOST_STEPS = 20_000
LEAST_SETUP = 0.05
"""Seconds from which on it is worth a word."""
_UNIX = 1e8
"""A log whose times are less than this counts from 0, as a simulation's does."""


def page(log: RunLog, report: Report) -> str:
    """The whole document."""
    return "\n".join(_document(log, report)) + "\n"


def _document(log: RunLog, report: Report) -> Iterator[str]:
    names = set(log.pipelines) | {one.pipeline for one in log.predictions}
    colours = {name: index for index, name in enumerate(sorted(names))}
    columns = log.columns
    title = escape(printable(log.name, 80))
    yield head(f"{title} – jigsaw report", len(colours))
    yield f'<header><h1>{title}</h1><p class="dim">{_subtitle(log, report)}</p>{_tiles(log, report)}</header><main>'
    yield from section("timeline-section", "Timeline", _timeline(log, report, columns, colours))
    yield from section("workers", "Where the workers' time went", _workers(report, columns))
    throughput = "Throughput and slowdown" if log.solo else "Throughput"
    yield from section("throughput", throughput, [sections.throughput(log, report, colours)])
    yield from section("rewards", "Rewards", sections.rewards(log, colours))
    yield from section(
        "predictions", "Predicted against happened", sections.predictions(log.predictions, colours)
    )
    yield from section(
        "incidents", "Failures and recoveries", sections.incidents(log.listed_incidents, log.start, colours)
    )
    yield '</main><div id="tip" hidden></div>'
    yield f'<script type="application/json" id="steps">{_json(_steps(columns, log))}</script>'
    yield f"<script>{_resource('page.js')}</script></body></html>"


def head(title: str, pipelines: int) -> str:
    """The beginning of a document, with the colours of so many pipelines; the title is HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{_NOTHING_FROM_OUTSIDE}">'
        f"<title>{title}</title>"
        f"<style>{_resource('page.css')}{palette.style(pipelines)}</style></head><body>"
    )


def _resource(name: str) -> str:
    return files("jigsawrl.telemetry").joinpath(name).read_text("utf-8")


def _json(value: object) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def section(name: str, title: str, parts: Iterable[str]) -> Iterator[str]:
    yield f'<section id="{name}"><h2>{escape(title)}</h2>'
    yield from parts
    yield "</section>"


def _subtitle(log: RunLog, report: Report) -> str:
    parts = [f"{duration(report.seconds)} on {counted(log.workers, 'worker')}"]
    if log.simulated:
        parts.append("simulated")
    if log.setup >= LEAST_SETUP:
        parts.append(f"set-up took {duration(log.setup)}")
    if log.start > _UNIX:
        parts.append(f"from {datetime.fromtimestamp(log.start, UTC):%Y-%m-%d %H:%M} UTC")
    if log.actions:
        actions = ", ".join(f"{count:,} {escape(name)}" for name, count in log.actions.most_common(6))
        parts.append(f"actions of the policy: {actions}")
    stops = sorted({clock(one.t - log.start) for one in log.incidents if one.interruption})
    parts += [f"interrupted at {t}" for t in stops]
    parts += [
        f"down for {duration(one.seconds)} at {clock(one.t - log.start)}, left out" for one in log.outages
    ]
    return " · ".join(parts)


def _tiles(log: RunLog, report: Report) -> str:
    failures = sum(one.failure for one in log.incidents)
    rate = report.tokens_per_second
    tiles = [
        (f"{len(report.pipelines):,}", "pipeline" if len(report.pipelines) == 1 else "pipelines"),
        (f"{sum(pipeline.steps for pipeline in report.pipelines):,}", "steps"),
        (f"{rate:,.0f}" if rate else "–", "tokens a second"),
        (f"{report.busy_fraction:.0%}", "of worker time busy"),
        (f"{failures:,}", "failure" if failures == 1 else "failures"),
    ]
    shown = "".join(f"<div><b>{figure}</b><span>{what}</span></div>" for figure, what in tiles)
    return f'<div class="tiles">{shown}</div>'


def _timeline(log: RunLog, report: Report, columns: Columns, colours: Mapping[str, int]) -> Iterator[str]:
    if not log.spans:
        yield '<p class="none">No sub-stage has run yet.</p>'
        return
    yield '<div class="tools">' + pipeline_legend(colours)
    yield '<button id="whole" type="button" hidden>whole run</button></div>'
    yield kind_legend(log.spans, report.causes)
    yield from timeline(columns, log.arrivals, colours, marks_of(log))
    yield (
        '<p class="dim">The height of a piece is its share of the worker; the thin strip below each worker is its '
        'bubbles, coloured by cause.<span class="script"> Drag to zoom, click a pipeline to single it out.</span> '
        '<a href="timeline.json">timeline.json</a> opens in Perfetto (ui.perfetto.dev).</p>'
    )


def marks_of(log: RunLog) -> list[Mark]:
    """Failures and recoveries, to be put on a timeline."""
    return [
        (one.t - log.start, sections.tone(one), f"{one.who}: {one.event}: {one.headline}")
        for one in log.incidents
        if one.failure or one.recovery
    ]


def pipeline_legend(colours: Mapping[str, int]) -> str:
    keys = "".join(
        f'<span class="key pick" data-of="of{index}"><i class="chip p{index}"></i>{escape(printable(name))}</span>'
        for name, index in colours.items()
    )
    return f'<div class="legend">{keys}</div>'


def kind_legend(spans: Iterable[Span], bubbles: Collection[Cause]) -> str:
    """The sub-stages of these spans, and the causes that are none of them."""
    shown = palette.legend({span.substage for span in spans}, bubbles)
    return f'<div class="legend">{"".join(sections.chip(*each) for each in shown)}</div>'


def _workers(report: Report, columns: Columns) -> Iterator[str]:
    yield bubble_legend(report.causes)
    yield from sections.worker_bars(report, bands_of(columns))


def bubble_legend(bubbles: Collection[Cause]) -> str:
    keys = [sections.chip("c-busy", "busy")]
    keys += [sections.chip(f"c-{palette.css_name(cause)}", cause) for cause in CAUSES if cause in bubbles]
    return f'<div class="legend">{"".join(keys)}</div>'


def _steps(columns: Columns, log: RunLog) -> dict[str, list[tuple[int, float, float]]]:
    """For each pipeline its steps with their first and last moment; none where there are too many to carry along."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for span in log.spans:
        steps = found.setdefault(span.pipeline, {})
        t0, t1 = steps.get(span.step, (span.t0, span.t1))
        steps[span.step] = min(t0, span.t0), max(t1, span.t1)
    if sum(map(len, found.values())) > _MOST_STEPS:
        return {}
    start = columns.start
    return {
        name: [(step, round(t0 - start, 4), round(t1 - start, 4)) for step, (t0, t1) in steps.items()]
        for name, steps in found.items()
    }
