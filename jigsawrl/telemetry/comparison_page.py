"""compare.html: the same pipelines under several policies, figures, bars and timelines on one page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from jigsawrl.telemetry import sections
from jigsawrl.telemetry.bands import timeline
from jigsawrl.telemetry.comparison import Comparison, Side
from jigsawrl.telemetry.page import bubble_legend, head, kind_legend, marks_of, pipeline_legend, section
from jigsawrl.telemetry.report import Cause
from jigsawrl.telemetry.runreport import PAGE_FILE
from jigsawrl.telemetry.text import counted, duration, number, printable

_EXPLAINED = (
    "Times count from the first phase of any pipeline. Slowdown: a pipeline's time against its own alone, as "
    "measured under serial, mean and worst. Rewards: whether deterministic pipelines got those of the first run, "
    "step for step."
)


def comparison_page(comparison: Comparison) -> str:
    """The whole document. Pages of the single runs are beside it, in a folder for each policy."""
    return "\n".join(_document(comparison)) + "\n"


def _document(comparison: Comparison) -> Iterator[str]:
    runs = comparison.runs
    names = sorted({name for run in runs for name in (*run.log.pipelines, *run.fates)})
    colours = {name: index for index, name in enumerate(names)}
    title = escape(printable(comparison.name, 80))
    shared = f"{counted(len(names), 'pipeline')} on {counted(comparison.workers, 'worker')}"
    policies = f"{len(runs)} polic{'y' if len(runs) == 1 else 'ies'}, one after another"
    yield head(f"{title} – jigsaw compare", len(colours))
    yield f'<header><h1>{title}</h1><p class="dim">{shared} under {policies}</p></header><main>'
    yield from section("policies", "Policies", _figures(comparison))
    yield from section("workers", "Where the workers' time went", _workers(runs))
    yield from section("timelines", "Timelines", _timelines(runs, colours))
    yield from section("pipelines", "Pipelines", [_fates(runs, colours)])
    yield "</main></body></html>"


def _figures(comparison: Comparison) -> Iterator[str]:
    runs, columns = comparison.runs, comparison.columns("×")
    names = [_policy(run, run.policy == comparison.best and len(runs) > 1) for run in runs]
    others = [[escape(cell) for cell in column] for column in [*columns.values()][1:]]
    yield sections.table([*columns], zip(names, *others, strict=True), range(1, len(columns) - 1))
    yield '<div class="pair">'
    times = [(run.policy, run.seconds, duration(run.seconds)) for run in runs]
    rates = [(run.policy, run.tokens_per_second, number(run.tokens_per_second)) for run in runs]
    yield from _bars("Time until all were done", times)
    yield from _bars("Tokens a second, all pipelines together", rates)
    yield "</div>"
    yield f'<p class="dim">{_EXPLAINED}</p>'


def _policy(run: Side, best: bool) -> str:
    name = escape(run.policy)
    link = f'<a href="{name}/{PAGE_FILE}">{name}</a>'
    failed = f' <span class="bad">without {escape(", ".join(run.failed))}</span>' if run.failed else ""
    return f"<b>{link}</b> best{failed}" if best else f"{link}{failed}"


def _bars(title: str, bars: Sequence[tuple[str, float, str]]) -> Iterator[str]:
    longest = max(value for _, value, _ in bars) or 1.0
    yield f'<figure class="chart"><figcaption>{title}</figcaption><div class="bars">'
    for name, value, shown in bars:
        fill = f'<i class="c-busy" style="width:{100 * value / longest:.2f}%"></i>'
        yield f'<div class="who">{escape(name)}</div><div class="bar">{fill}</div><div class="figure">{shown}</div>'
    yield "</div></figure>"


def _workers(runs: Iterable[Side]) -> Iterator[str]:
    """One bar for all workers under each policy."""
    yield bubble_legend(_causes(runs))
    yield '<div class="bars">'
    for run in runs:
        report = run.report
        yield sections.bar(escape(run.policy), report.busy_fraction, report.bubbles, report.worker_seconds)
    yield "</div>"


def _causes(runs: Iterable[Side]) -> set[Cause]:
    return set().union(*(run.report.causes for run in runs))


def _timelines(runs: Sequence[Side], colours: Mapping[str, int]) -> Iterator[str]:
    """One below the other; a second is as long in all of them."""
    longest = max(run.report.seconds for run in runs) or 1.0
    yield pipeline_legend(colours)
    yield kind_legend([span for run in runs for span in run.log.spans], _causes(runs))
    for run in runs:
        yield f"<h3>{escape(run.policy)}, {duration(run.seconds)}</h3>"
        if not run.log.spans:
            yield '<p class="none">No sub-stage has run.</p>'
            continue
        name, part = f"timeline-{escape(run.policy)}", min(1.0, run.seconds / longest)
        yield from timeline(run.log.columns, run.log.arrivals, colours, marks_of(run.log), name, part)


def _fates(runs: Sequence[Side], colours: Mapping[str, int]) -> str:
    """Each pipeline under each policy."""
    heads = ["pipeline", "policy", "done after", "alone", "slowdown", "reward first", "last", "ended"]
    rows = [
        [
            sections.chip(f"p{colours[name]}", name),
            escape(run.policy),
            *fate.times("×"),
            "" if fate.reward_first is None else number(fate.reward_first),
            "" if fate.reward_last is None else number(fate.reward_last),
            escape(": ".join(filter(None, (fate.ended, fate.reason.partition("\n")[0])))),
        ]
        for name in colours
        for run in runs
        if (fate := run.fates.get(name)) is not None
    ]
    return sections.table(heads, rows, range(2, 7))
