"""Commands for a run that is under way: submit, pause, resume, cancel. They do not import torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from jigsawrl.cli_help import Command

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of several pipelines, under way.")]
Pipeline = Annotated[str, typer.Argument(metavar="PIPELINE", help="Its name in the run.")]


def add_to(app: typer.Typer) -> None:
    """Makes them commands of `jigsaw`."""
    app.command(
        cls=Command,
        epilog="jigsaw submit runs/four more.yaml -- a fifth pipeline, from now on\n"
        "jigsaw submit runs/four more.yaml --name urgent --priority 1 -- it goes first",
    )(submit)
    app.command(cls=Command, epilog="jigsaw pause runs/four sums -- it waits after its phase")(pause)
    app.command(cls=Command, epilog="jigsaw resume runs/four sums -- it goes on")(resume)
    app.command(cls=Command, epilog="jigsaw cancel runs/four sums -- it stops after its step, saved")(cancel)


def submit(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run file with one pipeline.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its name; if not given, the file's.")
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Steps, if not as the file says.")] = None,
    priority: Annotated[int, typer.Option(metavar="N", help="Higher goes first.")] = 0,
    max_slowdown: Annotated[
        float | None, typer.Option(metavar="X", help="Times as long as alone, at most.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds from now until it should be done.")
    ] = None,
) -> None:
    """Add a pipeline to a run that is under way."""
    from jigsawrl.config.pipelines import run_of

    config = run_of(file)
    entry: dict[str, Any] = {"run": os.path.abspath(file), "steps": steps, "priority": priority}
    entry |= {"max_slowdown": max_slowdown, "deadline": deadline}
    _ask(run, do="submit", name=name or config.name, entry=entry)


def pause(run: Run, pipeline: Pipeline) -> None:
    """Let a pipeline wait after its phase, until it is resumed."""
    _ask(run, do="pause", pipeline=pipeline)


def resume(run: Run, pipeline: Pipeline) -> None:
    """Let a paused pipeline go on. (A run that has ended goes on with `jigsaw run FILE --resume`.)"""
    _ask(run, do="resume", pipeline=pipeline)


def cancel(run: Run, pipeline: Pipeline) -> None:
    """End a pipeline: the step it is in is finished and saved."""
    _ask(run, do="cancel", pipeline=pipeline)


def _ask(run: Path, **request: Any) -> None:
    from jigsawrl.runtime.control import ask

    for name, standing in ask(run, **request)["pipelines"].items():
        print(f"{name}: {standing}")
