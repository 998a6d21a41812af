"""The closing table: what a run made of the reward, and where its time went, all of it from metrics.jsonl."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from jigsawrl.telemetry import jsonl
from jigsawrl.telemetry.text import duration, number, sparkline

STAGES = {
    "timing_s/gen": "generation",
    "timing_s/reward": "rewards",
    "timing_s/old_log_prob": "old log-probs",
    "timing_s/ref": "reference log-probs",
    "timing_s/values": "critic's values",
    "timing_s/adv": "advantages",
    "timing_s/update_critic": "critic update",
    "timing_s/update_actor": "update",
    "timing_s/update_weights": "weight sync",
    "timing_s/checkpoint": "checkpoints",
}
_SPARKLINE = 40
_BAR = 16


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds of one stage over the whole run, and their share of the time of all steps."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures. The first reward is that of step 1, before any update; the last a mean of `window` steps."""

    steps: int
    window: int
    reward_first: float | None
    reward_last: float | None
    rewards: list[float]
    tokens: int
    seconds: float
    generation_seconds: float
    stages: list[Stage]
    reward_errors: int
    reward_none: int
    """Samples that were left out, as no reward applied to them."""
    non_finite: dict[str, int]

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """For machines: JSON-serialisable, without the reward of every step."""
        fields = asdict(self)
        del fields["rewards"]
        return {**fields, "tokens_per_second": self.tokens_per_second}


def summarize(path: Path) -> Summary:
    """Reads a metrics.jsonl, finished or not; one that is not there is a run without steps."""
    rows = [record for _, record in jsonl.read(path)] if path.exists() else []
    rewards = _column(rows, "reward/mean")
    window = min(10, max(1, round(0.05 * len(rows))))
    seconds = math.fsum(_column(rows, "timing_s/step"))
    return Summary(
        steps=len(rows),
        window=window,
        reward_first=_mean(_column(rows[:1], "reward/mean")),
        reward_last=_mean(_column(rows[-window:], "reward/mean")),
        rewards=rewards,
        tokens=round(math.fsum(_column(rows, "perf/tokens"))),
        seconds=seconds,
        generation_seconds=math.fsum(_column(rows, "timing_s/gen")),
        stages=_stages(rows, seconds),
        reward_errors=round(math.fsum(_column(rows, "reward/errors"))),
        reward_none=round(math.fsum(_column(rows, "reward/none"))),
        non_finite=_non_finite(rows),
    )


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _stages(rows: Sequence[Mapping[str, Any]], total: float) -> list[Stage]:
    """The known stages in the order of a step, others under their own names, and what no stage accounts for."""
    names = {key for row in rows for key in row if key.startswith("timing_s/")} - {"timing_s/step"}
    spent = {key: math.fsum(_column(rows, key)) for key in [*STAGES, *sorted(names - STAGES.keys())]}
    spent = {STAGES.get(key, key.removeprefix("timing_s/")): seconds for key, seconds in spent.items()}
    other = total - math.fsum(spent.values())
    if other > 0.01 * total:
        spent["other"] = other
    return [
        Stage(name, seconds, seconds / total if total else 0.0) for name, seconds in spent.items() if seconds
    ]


def _non_finite(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """In how many steps each metric was NaN or infinite."""
    counts: dict[str, int] = {}
    for row in rows:
        for name in row.get("non_finite", {}):
            counts[name] = counts.get(name, 0) + 1
    return counts


@dataclass(frozen=True, slots=True)
class SummaryTable:
    """The summary for people. Prints with rich, in ASCII where the terminal has nothing more."""

    summary: Summary
    name: str
    folder: Path
    model: Path | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = options.ascii_only
        table = Table(box=ROUNDED, show_header=False, title=Text(self.name, style="bold"), padding=(0, 1))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        summary = self.summary
        if summary.steps:
            self._add_results(table, plain)
        else:
            table.add_row("steps", "none was finished")
        if summary.reward_errors:
            table.add_row(
                "errors", Text(f"{counted(summary.reward_errors, 'reward')} failed", style="yellow")
            )
        if summary.reward_none:
            table.add_row("left out", Text(f"{counted(summary.reward_none, 'sample')} with the reward None"))
        for metric, count in summary.non_finite.items():
            table.add_row("not finite", Text(f"{metric} in {counted(count, 'step')}", style="red"))
        if self.model is not None:
            table.add_row("model", Text(str(self.model)))
        table.add_row("run folder", Text(str(self.folder)))
        yield table

    def _add_results(self, table: Table, plain: bool) -> None:
        summary = self.summary
        first, last = summary.reward_first, summary.reward_last
        if first is not None and last is not None:
            colour = "green" if last > first else "red" if last < first else ""
            change = Text(number(last), style=f"bold {colour}")
            if summary.steps > 1:
                which = "the last step" if summary.window == 1 else f"the last {summary.window} steps"
                arrow = " -> " if plain else " → "
                change = Text.assemble(number(first), arrow, change, (f"   before training, {which}", "dim"))
            table.add_row("reward", change)
            if not plain and len(summary.rewards) > 1:
                table.add_row("", Text(sparkline(summary.rewards, _SPARKLINE), style="cyan"))
        table.add_row("steps", f"{summary.steps:,}")
        if summary.tokens:
            table.add_row("tokens", _tokens(summary))
        if summary.seconds:
            table.add_row("time", duration(summary.seconds))
        if summary.stages:
            table.add_row("", _stage_grid(summary.stages, "#" if plain else "█"))


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _tokens(summary: Summary) -> Text:
    text = Text(f"{summary.tokens:,} generated")
    if summary.tokens_per_second is not None:
        text.append(f", {summary.tokens_per_second:,.0f} a second")
    if summary.generation_seconds:
        text.append(f" ({summary.tokens / summary.generation_seconds:,.0f} while generating)", style="dim")
    return text


def _stage_grid(stages: Sequence[Stage], block: str) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    grid.add_column(style="cyan")
    for stage in stages:
        bar = block * round(_BAR * min(1.0, stage.share))
        grid.add_row(stage.name, duration(stage.seconds), f"{stage.share:.0%}" if stage.share else "", bar)
    return grid
