"""The closing table of one pipeline: what it made of the reward, and where its time went."""

from dataclasses import dataclass
from pathlib import Path

from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from jigsawrl.telemetry.bar_grid import bar_grid
from jigsawrl.telemetry.figures import Stage, Summary
from jigsawrl.telemetry.text import counted, duration, number, sparkline

CUT_OFF_SHOWN = 0.05
"""Least share of cut-off samples that tables show."""
_SPARKLINE = 40


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
        if cut_off := cut_off_share(summary):
            table.add_row("cut off", Text(f"{cut_off} of the samples, at the limit of tokens or turns"))
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
        if summary.rewards:
            colour = (
                "" if first is None or last is None or last == first else "green" if last > first else "red"
            )
            change = Text(_reward(last), style=f"bold {colour}")
            if summary.steps > 1:
                which = "the last step" if summary.window == 1 else f"the last {summary.window} steps"
                arrow = " -> " if plain else " → "
                change = Text.assemble(_reward(first), arrow, change, (f"   before training, {which}", "dim"))
            table.add_row("reward", change)
            if not plain and len(summary.rewards) > 1:
                table.add_row("", Text(sparkline(summary.rewards, _SPARKLINE), style="cyan"))
        table.add_row("steps", f"{summary.steps:,}")
        if summary.tokens:
            table.add_row("tokens", _tokens(summary))
        if summary.seconds:
            table.add_row("time", duration(summary.seconds))
        if summary.stages:
            table.add_row("", bar_grid(map(_stage, summary.stages), plain))


def _reward(reward: float | None) -> str:
    """A question mark where no sample had a reward."""
    return "?" if reward is None else number(reward)


def cut_off_share(summary: Summary) -> str:
    """Share of samples that were cut off, if it is worth a word."""
    share = summary.cut_off or 0.0
    return f"{share:.0%}" if share >= CUT_OFF_SHOWN else ""


def _tokens(summary: Summary) -> Text:
    text = Text(f"{summary.tokens:,} generated")
    if summary.tokens_per_second is not None:
        text.append(f", {_rate(summary.tokens_per_second)} a second")
    if summary.generation_seconds:
        text.append(f" ({_rate(summary.tokens / summary.generation_seconds)} while generating)", style="dim")
    return text


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _stage(stage: Stage) -> tuple[list[str], float]:
    share = f"{stage.share:.0%}" if stage.share else ""
    return [stage.name, duration(stage.seconds), share], stage.share
