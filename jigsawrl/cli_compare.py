"""Comparing policies from the command line, for real or simulated: what is run, printed and written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from jigsawrl import temporary
from jigsawrl.cli_output import FAILED, INTERRUPTED, answer, stdout_on_stderr
from jigsawrl.cli_runs import figure
from jigsawrl.streams import stdout_is_a_log
from jigsawrl.telemetry.comparison import Comparison
from jigsawrl.telemetry.summary import cut_off_share
from jigsawrl.telemetry.text import duration

if TYPE_CHECKING:
    from jigsawrl.config.pipelines import Mix

_BAR = 30


def compare_for_real(mix: Mix, policies: Sequence[str], out: Path | None, as_json: bool) -> int:
    """The exit code."""
    from jigsawrl.runtime.compare import (
        FIGURES_FILE,
        PAGE_FILE,
        REAL_POLICIES,
        check_comparison,
        compare_runs,
    )
    from jigsawrl.telemetry.progress import Progress

    if not as_json:
        stdout_is_a_log()
    folder = out or Path("runs", f"{mix.config.name}-compare")
    temporary.use_for_everything(folder)
    check_comparison(mix, folder)
    try:
        with stdout_on_stderr(as_json):
            found = compare_runs(mix, policies or REAL_POLICIES, folder, lambda: Progress(json=as_json))
    except KeyboardInterrupt as interrupt:
        print(f"jigsaw: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    written = f"{PAGE_FILE}, {FIGURES_FILE}, and a run folder for each policy"
    answer(as_json, found.as_dict(), [ComparisonTable(found), learned(found)], folder, written)
    return FAILED if any(run.failed for run in found.runs) else 0


def learned(found: Comparison) -> Table:
    """What the pipelines made of their rewards under the best policy, or else the first."""
    run = next((run for run in found.runs if run.policy == found.best), found.runs[0])
    summaries = {name: run.log.summaries[name] for name in run.fates if name in run.log.summaries}
    cut_off = {name: cut_off_share(summary) for name, summary in summaries.items()}
    last = ["cut off"] if any(cut_off.values()) else []
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=f"mean reward under {run.policy}")
    for name in ("pipeline", "steps", "first reward", "last", *last):
        table.add_column(name, justify="left" if name == "pipeline" else "right", no_wrap=True)
    for name, summary in summaries.items():
        rewards = figure(summary.reward_first), figure(summary.reward_last)
        table.add_row(name, str(summary.steps), *rewards, *([cut_off[name]] if last else []))
    return table


@dataclass(frozen=True, slots=True)
class ComparisonTable:
    """Policies side by side, run for real or simulated."""

    comparison: Comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found, columns = self.comparison, self.comparison.columns("x")
        what = "throughput" if found.simulated else "tokens/s"
        caption = f"vs {found.baseline.policy}: {what}; slowdown: of a pipeline against alone, mean and worst"
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption)
        first, *middle, last = columns
        table.add_column(first, no_wrap=True)
        for name in middle:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column(last, overflow="fold")
        for policy, *figures in zip(*columns.values(), strict=True):
            chosen = policy == found.best and len(found.runs) > 1
            star = f" {'*' if options.ascii_only else '★'}" if chosen else ""
            table.add_row(f"{policy}{star}", *figures, style="bold green" if chosen else "")
        yield table
        yield self._bars("#" if options.ascii_only else "█")
        for run in found.runs:
            for name in run.failed:
                fate = run.fates[name]
                reason = fate.reason.partition("\n")[0]
                yield Text(f"{run.policy}: {name} {fate.ended}: {reason}", style="red")

    def _bars(self, block: str) -> Table:
        """Time until all are done, a bar each."""
        longest = max(run.seconds for run in self.comparison.runs)
        grid = Table.grid(padding=(0, 2))
        for run in self.comparison.runs:
            cells = round(_BAR * run.seconds / longest) if longest else 0
            style = "green" if run.policy == self.comparison.best else "cyan"
            grid.add_row(f"  {run.policy}", Text(block * max(1, cells), style=style), duration(run.seconds))
        return grid
