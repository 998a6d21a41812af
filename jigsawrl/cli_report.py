"""The commands that show what a run did, and why. They do not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from jigsawrl.cli_help import Command


def add_to(app: typer.Typer) -> None:
    """Makes them commands of `jigsaw`."""
    app.command(
        cls=Command,
        epilog="jigsaw report runs/sums -- makes runs/sums/report.html; open it in a browser\n"
        "jigsaw report runs/sums --json -- the figures for a script",
    )(report)
    app.command(
        cls=Command,
        epilog="jigsaw replay runs/mix -- are the decisions of this run what its policy decides today?",
    )(replay)


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


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of several pipelines.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Make every decision of a run again, from its log alone.

    The policy hears what it heard then, and must decide the same. Exit code 1 where it does not: the policy, or what
    it knows of the pipelines, is another one now.
    """
    from jigsawrl.runtime.replay import other_python, replayed

    decisions = list(replayed(run))
    others = [each for each in decisions if not each.same]
    if as_json:
        first = {"at": others[0].at, "was": others[0].was, "now": others[0].now} if others else None
        print(json.dumps({"decisions": len(decisions), "others": len(others), "first": first}))
    elif not others:
        print(f"{len(decisions)} decisions, all as they were")
    else:
        print(f"{len(decisions)} decisions, {len(others)} of them others than they were; first:")
        print(f"  it was  {json.dumps(others[0].was)}")
        print(f"  it is   {json.dumps(others[0].now)}")
        if python := other_python(run):
            print(
                f"the run was made by Python {python}, whose sums differ in their last digits: replay it with that"
            )
    if others:
        raise typer.Exit(1)
