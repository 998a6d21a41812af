"""The command that shows what a run did. It does not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from jigsawrl.cli_help import Command


def add_to(app: typer.Typer) -> None:
    """Makes it a command of `jigsaw`."""
    app.command(
        cls=Command,
        epilog="jigsaw report runs/sums -- makes runs/sums/report.html; open it in a browser\n"
        "jigsaw report runs/sums --json -- the figures for a script",
    )(report)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, of a finished run or a live one.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Make the page of a run: timeline, bubbles, rewards, throughput, predictions, failures.

    report.html needs nothing but a browser; timeline.json beside it opens in Perfetto.
    """
    from jigsawrl.telemetry.runreport import run_report

    made = run_report(run)
    made.write()
    if as_json:
        print(json.dumps(made.as_dict()))
        return
    from rich.console import Console

    from jigsawrl.telemetry.report import ReportTable

    console = Console()
    console.print(ReportTable(made.report, made.log.name))
    for line in made.notes():
        console.print(line, highlight=False, markup=False)
    console.print(
        f"written: {made.page} and {made.timeline.name}", highlight=False, soft_wrap=True, markup=False
    )
