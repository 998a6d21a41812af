"""compare.html: the same pipelines under several policies, figures, bars and timelines on one page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from statistics import fmean
from typing import Any

from jigsawrl.telemetry import sections
from jigsawrl.telemetry.bands import timeline
from jigsawrl.telemetry.columns import to_columns
from jigsawrl.telemetry.figures import rate
from jigsawrl.telemetry.page import bubble_legend, head, kind_legend, pipeline_legend, section
from jigsawrl.telemetry.picture import printable
from jigsawrl.telemetry.report import CAUSES
from jigsawrl.telemetry.runreport import PAGE_FILE, RunReport
from jigsawrl.telemetry.text import duration, number

_EXPLAINED = (
    "Times count from the first phase of any pipeline. Slowdown: a pipeline's time against its own alone, as "
    "measured under serial, mean and worst. Rewards: whether deterministic pipelines got those of the first run, "
    "step for step."
)


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one pipeline."""

    ended: str
    reason: str
    steps: int
    seconds: float
    """Its time: from its arrival until it ended."""
    alone: float | None
    """The same with all workers for itself, where that was measured."""
    tokens: int
    reward_first: float | None
    reward_last: float | None
    same_rewards: bool | None
    """Whether all its rewards were those of the first run; None where they need not be."""

    @property
    def slowdown(self) -> float | None:
        return self.seconds / self.alone if self.alone and self.ended == "finished" else None


@dataclass(frozen=True, slots=True)
class Compared:
    """The pipelines under one policy. `ratio` is its tokens/s against those it is held against."""

    policy: str
    made: RunReport
    seconds: float
    ratio: float
    fates: Mapping[str, Fate]

    @property
    def tokens(self) -> int:
        return sum(fate.tokens for fate in self.fates.values())

    @property
    def tokens_per_second(self) -> float:
        return rate(self.tokens, self.seconds) or 0.0

    @property
    def slowdowns(self) -> list[float]:
        return [fate.slowdown for fate in self.fates.values() if fate.slowdown is not None]

    @property
    def mean_slowdown(self) -> float | None:
        return fmean(self.slowdowns) if self.slowdowns else None

    @property
    def worst_slowdown(self) -> float | None:
        return max(self.slowdowns, default=None)

    @property
    def failed(self) -> list[str]:
        return [name for name, fate in self.fates.items() if fate.ended != "finished"]

    @property
    def rewards(self) -> str:
        """Whether those of deterministic pipelines are what they have to be."""
        known = {
            name: fate.same_rewards for name, fate in self.fates.items() if fate.same_rewards is not None
        }
        others = [name for name, same in known.items() if not same]
        return f"differ: {', '.join(others)}" if others else "equal" if known else ""

    def as_dict(self) -> dict[str, Any]:
        """For machines: JSON-serialisable."""
        report = self.made.report
        whole = report.worker_seconds
        return {
            "policy": self.policy,
            "seconds": self.seconds,
            "setup_seconds": self.made.log.setup,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "ratio": self.ratio,
            "mean_slowdown": self.mean_slowdown,
            "worst_slowdown": self.worst_slowdown,
            "busy_fraction": report.busy_fraction,
            "bubbles": {cause: lost / whole if whole else 0.0 for cause, lost in report.bubbles.items()},
            "pipelines": {
                name: {**asdict(fate), "slowdown": fate.slowdown} for name, fate in self.fates.items()
            },
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    name: str
    workers: int
    against: str
    """The policy that the others are held against."""
    runs: Sequence[Compared]

    @property
    def best(self) -> str | None:
        """The policy with the most tokens a second, of those under which every pipeline came to its end."""
        whole = [run for run in self.runs if not run.failed]
        return max(whole, key=lambda run: run.tokens_per_second).policy if whole else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "simulated": False,
            "workers": self.workers,
            "against": self.against,
            "best": self.best,
            "policies": [run.as_dict() for run in self.runs],
        }


def comparison_page(comparison: Comparison) -> str:
    """The whole document. Pages of the single runs are beside it, in a folder for each policy."""
    return "\n".join(_document(comparison)) + "\n"


def _document(comparison: Comparison) -> Iterator[str]:
    runs = comparison.runs
    names = sorted({name for run in runs for name in (*run.made.log.pipelines, *run.fates)})
    colours = {name: index for index, name in enumerate(names)}
    title = escape(printable(comparison.name, 80))
    pipelines = f"{len(names)} pipeline{'' if len(names) == 1 else 's'}"
    workers = f"{comparison.workers} worker{'' if comparison.workers == 1 else 's'}"
    policies = f"{len(runs)} polic{'y' if len(runs) == 1 else 'ies'}, one after another"
    yield head(f"{title} – jigsaw compare", len(colours))
    yield f'<header><h1>{title}</h1><p class="dim">{pipelines} on {workers} under {policies}</p></header><main>'
    yield from section("policies", "Policies", _figures(comparison))
    yield from section("workers", "Where the workers' time went", _workers(runs))
    yield from section("timelines", "Timelines", _timelines(runs, colours))
    yield from section("pipelines", "Pipelines", [_fates(runs, colours)])
    yield "</main></body></html>"


def _figures(comparison: Comparison) -> Iterator[str]:
    runs = comparison.runs
    heads = ["policy", "time", "tokens/s", f"vs {comparison.against}", "slowdown", "worst", "busy", "rewards"]
    rows = [
        [
            _policy(run, run.policy == comparison.best and len(runs) > 1),
            duration(run.seconds),
            number(run.tokens_per_second),
            f"{run.ratio:.2f}×",
            _times(run.mean_slowdown),
            _times(run.worst_slowdown),
            f"{run.made.report.busy_fraction:.0%}",
            escape(run.rewards),
        ]
        for run in runs
    ]
    yield sections.table(heads, rows, range(1, 7))
    yield '<div class="pair">'
    yield from _bars(
        "Time until all were done", [(run.policy, run.seconds, duration(run.seconds)) for run in runs]
    )
    rates = [(run.policy, run.tokens_per_second, number(run.tokens_per_second)) for run in runs]
    yield from _bars("Tokens a second, all pipelines together", rates)
    yield "</div>"
    yield f'<p class="dim">{_EXPLAINED}</p>'


def _policy(run: Compared, best: bool) -> str:
    name = escape(run.policy)
    link = f'<a href="{name}/{PAGE_FILE}">{name}</a>'
    failed = f' <span class="bad">without {escape(", ".join(run.failed))}</span>' if run.failed else ""
    return f"<b>{link}</b> best{failed}" if best else f"{link}{failed}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"


def _bars(title: str, bars: Sequence[tuple[str, float, str]]) -> Iterator[str]:
    longest = max(value for _, value, _ in bars) or 1.0
    yield f'<figure class="chart"><figcaption>{title}</figcaption><div class="bars">'
    for name, value, shown in bars:
        fill = f'<i class="c-busy" style="width:{100 * value / longest:.2f}%"></i>'
        yield f'<div class="who">{escape(name)}</div><div class="bar">{fill}</div><div class="figure">{shown}</div>'
    yield "</div></figure>"


def _workers(runs: Iterable[Compared]) -> Iterator[str]:
    """One bar for all workers under each policy."""
    reports = {run.policy: run.made.report for run in runs}
    yield bubble_legend({cause for cause in CAUSES if any(one.bubbles[cause] for one in reports.values())})
    yield '<div class="bars">'
    for policy, report in reports.items():
        yield sections.bar(escape(policy), report.busy_fraction, report.bubbles, report.worker_seconds)
    yield "</div>"


def _timelines(runs: Sequence[Compared], colours: Mapping[str, int]) -> Iterator[str]:
    """One below the other; a second is as long in all of them."""
    longest = max(run.made.report.seconds for run in runs) or 1.0
    every = {
        run.policy: to_columns(
            run.made.log.spans, run.made.log.workers, start=run.made.log.start, end=run.made.log.end
        )
        for run in runs
    }
    used = {kind for columns in every.values() for kind in columns.kind.tolist()}
    yield pipeline_legend(colours)
    yield kind_legend(
        used, {cause for cause in CAUSES if any(run.made.report.bubbles[cause] for run in runs)}
    )
    for run in runs:
        log, columns = run.made.log, every[run.policy]
        yield f"<h3>{escape(run.policy)}, {duration(run.seconds)}</h3>"
        if not log.spans:
            yield '<p class="none">No sub-stage has run.</p>'
            continue
        marks = [
            (one.t - log.start, sections.tone(one), f"{one.who}: {one.event}: {one.headline}")
            for one in log.incidents
            if one.failure or one.recovery
        ]
        part = min(1.0, columns.seconds / longest)
        yield from timeline(columns, log.arrivals, colours, marks, f"timeline-{escape(run.policy)}", part)


def _fates(runs: Sequence[Compared], colours: Mapping[str, int]) -> str:
    """Each pipeline under each policy."""
    heads = ["pipeline", "policy", "done after", "alone", "slowdown", "reward first", "last", "ended"]
    rows = [
        [
            sections.chip(f"p{colours[name]}", name),
            escape(run.policy),
            duration(fate.seconds),
            "" if fate.alone is None else duration(fate.alone),
            _times(fate.slowdown),
            "" if fate.reward_first is None else number(fate.reward_first),
            "" if fate.reward_last is None else number(fate.reward_last),
            escape(": ".join(filter(None, (fate.ended, fate.reason.partition("\n")[0])))),
        ]
        for name in colours
        for run in runs
        if (fate := run.fates.get(name)) is not None
    ]
    return sections.table(heads, rows, range(2, 7))
