"""The parts of the page below the timeline: HTML from figures, each a function of what it shows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from statistics import median

from jigsawrl.telemetry.axes import log_ticks, ticks, time_ticks
from jigsawrl.telemetry.bands import Band
from jigsawrl.telemetry.charts import Axis, Point, Series, curves, scatter, span_of, thinned
from jigsawrl.telemetry.palette import css_name
from jigsawrl.telemetry.report import CAUSES, Cause, PipelineReport, Report, mostly
from jigsawrl.telemetry.runlog import Incident, Prediction, RunLog
from jigsawrl.telemetry.text import clock, duration, number

_MOST_POINTS = 4000
_MOST_DOTS = 1500
_MOST_INCIDENTS = 200
_WORDS = {
    "died": "died",
    "failed": "failed",
    "killed": "killed",
    "error": "sub-stage failed",
    "recovered": "recovered",
    "warning": "warning",
}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], figures: range, last: bool = False) -> str:
    """Cells are HTML. These columns are figures, the others text; with `last` the last row is a sum."""

    def line(cells: Sequence[str], tag: str) -> str:
        opened = [
            f'<{tag} class="figure">' if index in figures else f"<{tag}>" for index in range(len(cells))
        ]
        return "".join(f"{mark}{cell}</{tag}>" for mark, cell in zip(opened, cells, strict=True))

    body = [line(row, "td") for row in rows]
    lines = [f"<tr>{row}</tr>" for row in body]
    if last:
        lines[-1] = f'<tr class="sum">{body[-1]}</tr>'
    head = f"<thead><tr>{line(heads, 'th')}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'


def chip(css: str, name: str) -> str:
    """A patch of colour and what it stands for."""
    return f'<span class="key"><i class="chip {css}"></i>{escape(name)}</span>'


def slowdowns(log: RunLog, report: Report) -> dict[str, float]:
    """How many times as long a step took as it takes alone, of the pipelines of which that is known."""
    return {
        pipeline.name: pipeline.seconds_per_step / log.solo[pipeline.name]
        for pipeline in report.pipelines
        if log.solo.get(pipeline.name, 0.0) > 0
    }


def throughput(log: RunLog, report: Report, colours: Mapping[str, int]) -> str:
    """Steps, tokens and rewards of each pipeline and of all. Slowdown only where the time alone is known."""
    slow = slowdowns(log, report)
    heads = ["pipeline", "steps", "s/step", "tokens", "tokens/s"]
    heads += ["slowdown"] if slow else []
    heads += ["reward"] if log.rewards else []
    figures = range(1, len(heads))
    heads.append("its time goes to")
    rows = []
    for pipeline in report.pipelines:
        row = [
            chip(f"p{colours[pipeline.name]}", pipeline.name),
            f"{pipeline.steps:,}",
            number(pipeline.seconds_per_step),
            f"{pipeline.tokens:,}",
            _rate(pipeline.tokens_per_second),
        ]
        if slow:
            row.append(f"{slow[pipeline.name]:.2f}×" if pipeline.name in slow else "")
        if log.rewards:
            row.append(_change(pipeline))
        rows.append([*row, f'<span class="dim">{mostly(pipeline)}</span>'])
    steps = sum(pipeline.steps for pipeline in report.pipelines)
    total = ["all", f"{steps:,}", "", f"{report.tokens:,}", _rate(report.tokens_per_second)]
    rows.append(total + [""] * (len(heads) - len(total)))
    return table(heads, rows, figures, last=True)


def _rate(rate: float | None) -> str:
    return f"{rate:,.0f}" if rate else ""


def _change(pipeline: PipelineReport) -> str:
    """Its first and its last reward."""
    first, last = pipeline.reward_first, pipeline.reward_last
    if first is None and last is None:
        return ""
    return " → ".join("?" if reward is None else number(reward) for reward in (first, last))


def worker_bars(report: Report, bands: Sequence[Band]) -> Iterator[str]:
    """Each worker's time: useful, or a bubble of which cause."""
    yield '<div class="bars">'
    if len(report.workers) > 1:
        yield bar("all", report.busy_fraction, report.bubbles, report.worker_seconds)
    for band in bands:
        worker = report.workers[band.workers[0]]
        yield bar(band.name, worker.busy, worker.bubbles, report.seconds)
    yield "</div>"


def bar(name: str, busy: float, bubbles: Mapping[Cause, float], whole: float) -> str:
    """Of so many seconds of workers, by what they went to; the name is HTML."""
    parts: dict[str, float] = {
        "busy": busy,
        **{cause: bubbles[cause] / whole if whole else 0.0 for cause in CAUSES},
    }
    drawn = "".join(
        f'<i class="c-{css_name(what)}" style="width:{100 * share:.2f}%" title="{what}: {share:.1%}"></i>'
        for what, share in parts.items()
        if share > 0
    )
    return f'<div class="who">{name}</div><div class="bar">{drawn}</div><div class="figure">{busy:.0%} busy</div>'


def rewards(log: RunLog, colours: Mapping[str, int]) -> Iterator[str]:
    """Over time, where the log says when a step was done, and over steps."""
    known = {name: values for name, values in log.rewards.items() if values}
    if not known:
        yield '<p class="none">No rewards: the run folder has no metrics.jsonl with <code>reward/mean</code>.</p>'
        return
    keys = [chip(f"p{colours[name]}", name) for name in known]
    yield f'<div class="legend">{"".join(keys)}</div>'
    low, high = span_of([value for values in known.values() for _, value in values])
    y = Axis("mean reward", low, high, ticks(low, high, 5))
    most = max(60, min(400, _MOST_POINTS // (2 * len(known))))
    last = max(step for values in known.values() for step, _ in values)
    first = min(step for values in known.values() for step, _ in values)
    over_steps, over_time = [], []
    for name, values in known.items():
        css = f"p{colours[name]}"
        steps = thinned(values, most)
        over_steps.append(
            Series(css, [_reward_point(name, x, f"step {x:,.0f}", value) for x, value in steps])
        )
        done = log.done.get(name, {})
        timed = thinned([(done[step] - log.start, value) for step, value in values if step in done], most)
        over_time.append(Series(css, [_reward_point(name, x, clock(x), value) for x, value in timed]))
    yield '<div class="pair">'
    if any(series.points for series in over_time):
        end = log.end - log.start
        yield from curves("Over time", Axis("time", 0.0, end, time_ticks(end, 5)), y, over_time)
    yield from curves("Over steps", Axis("step", first, last, ticks(first, last, 5)), y, over_steps)
    yield "</div>"


def _reward_point(name: str, x: float, where: str, value: float) -> Point:
    return Point(x, value, f"{name}, {where}: {number(value)}")


def predictions(found: Sequence[Prediction], colours: Mapping[str, int]) -> Iterator[str]:
    """A dot for each phase, and how far off each kind of phase was."""
    if not found:
        yield (
            '<p class="none">No predictions: phases are predicted where several pipelines are scheduled, '
            "and this log has none.</p>"
        )
        return
    usual = [one for one in found if one.predicted > 0 and one.happened > 0]
    yield '<div class="pair">'
    if usual:
        yield from _prediction_chart(usual, colours)
    yield _prediction_table(found, colours)
    yield "</div>"


def _prediction_chart(found: Sequence[Prediction], colours: Mapping[str, int]) -> Iterator[str]:
    values = [value for one in found for value in (one.predicted, one.happened)]
    low, high = min(values), max(values)
    log = high > 20 * low
    if log:
        low, high = low / 1.3, high * 1.3
        marks = log_ticks(low, high)
    else:
        low, high = span_of([0.0, high])
        low = 0.0
        marks = ticks(low, high, 5)
    shown = found[:: -(-len(found) // _MOST_DOTS)]
    series = [
        Series(f"p{colours[name]}", [_prediction_point(one) for one in shown if one.pipeline == name])
        for name in sorted({one.pipeline for one in shown})
    ]
    x, y = (Axis(f"{what} seconds", low, high, marks, log) for what in ("predicted", "happened"))
    yield from scatter("Each phase: on the line it took what was predicted", x, y, series)


def _prediction_point(one: Prediction) -> Point:
    said = f"predicted {duration(one.predicted)}, took {duration(one.happened)}"
    return Point(one.predicted, one.happened, f"{one.pipeline}, {one.phase} of step {one.step}: {said}")


def _prediction_table(found: Sequence[Prediction], colours: Mapping[str, int]) -> str:
    kinds: dict[tuple[str, str], list[Prediction]] = {}
    for one in found:
        kinds.setdefault((one.pipeline, one.phase), []).append(one)
    rows = []
    for (pipeline, phase), every in sorted(kinds.items()):
        off = [abs(one.happened / one.predicted - 1) for one in every if one.predicted > 0]
        rows.append(
            [
                chip(f"p{colours[pipeline]}", pipeline),
                escape(phase),
                f"{len(every):,}",
                duration(median(one.predicted for one in every)),
                duration(median(one.happened for one in every)),
                f"{median(off):.0%}" if off else "",
            ]
        )
    return table(["pipeline", "phase", "phases", "predicted", "happened", "off by"], rows, range(2, 6))


def incidents(found: Sequence[Incident], start: float, colours: Mapping[str, int]) -> Iterator[str]:
    """In the order of their times; of very many warnings only the first."""
    if not found:
        yield '<p class="none">Nothing failed.</p>'
        return
    rest = max(0, len(found) - _MOST_INCIDENTS)
    warnings = [one for one in found if one.event == "warning"]
    dropped = {id(one) for one in warnings[len(warnings) - min(rest, len(warnings)) :]}
    shown = [one for one in found if id(one) not in dropped][:_MOST_INCIDENTS]
    rows = [
        [
            clock(one.t - start),
            chip(f"p{colours[one.pipeline]}", one.pipeline) if one.pipeline in colours else escape(one.who),
            f'<span class="{tone(one)}">{_WORDS[one.event]}</span>',
            _reason(one),
        ]
        for one in sorted(shown, key=lambda one: one.t)
    ]
    yield table(["time", "pipeline", "what", "reason"], rows, range(0))
    if rest:
        yield f'<p class="none">And {rest:,} more in events.jsonl.</p>'


def _reason(one: Incident) -> str:
    """On one line, the rest to be unfolded."""
    if "\n" not in one.reason.strip():
        return escape(one.reason)
    whole = escape(one.reason.strip())
    return f"<details><summary>{escape(one.headline)}</summary><pre>{whole}</pre></details>"


def tone(incident: Incident) -> str:
    """Its CSS class."""
    return "bad" if incident.failure else "good" if incident.recovery else "warn"
