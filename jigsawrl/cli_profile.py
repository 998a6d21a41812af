"""The command that measures pipelines on this machine, for planning. Runs are real, and short."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from jigsawrl import durable, temporary
from jigsawrl.cli_help import Command
from jigsawrl.cli_output import INTERRUPTED
from jigsawrl.cli_plan import refuse_to_overwrite
from jigsawrl.errors import JigsawError


def add_to(app: typer.Typer) -> None:
    """Makes it a command of `jigsaw`."""
    app.command(
        cls=Command,
        epilog="jigsaw profile examples/four/run.yaml --out mine.json -- three steps of each pipeline\n"
        "jigsaw simulate examples/four/run.yaml --profile mine.json -- what the whole run will take\n"
        "jigsaw run examples/four/run.yaml profile=mine.json -- the scheduler knows from the start",
    )(profile)


def profile(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run file, with one pipeline or several.")],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE.json", help="The profile, if not given profile.json; one that is there is replaced."
        ),
    ] = Path("profile.json"),
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Steps of each pipeline; if not given, 3.")
    ] = 3,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Workers; if not given, as FILE says.")
    ] = None,
) -> None:
    """Measure pipelines on this machine, for planning.

    A few real steps of each, one pipeline after the other. The profile holds what was learned: lengths, tool
    latencies, and costs of every sub-stage; on a GPU also how much sub-stages slow each other down side by side,
    which takes a minute or two more. `simulate`, `compare` and `run` take it. What the runs train is thrown away.
    """
    if out.suffix != ".json":
        raise JigsawError(f"--out: {out} is no profile's name; it ends in .json")
    from jigsawrl.config.pipelines import holds_pipelines, load_mix
    from jigsawrl.runtime.launch import PROFILE, run_mix
    from jigsawrl.runtime.measure import add_table
    from jigsawrl.telemetry.progress import Progress

    refuse_to_overwrite(out)
    temporary.use_for_everything(out.parent)
    options = {"workers": workers, "policy": "serial"}
    shorter = [f"steps={steps}"]
    if holds_pipelines(file):
        named = load_mix(file, [], options).config.pipelines
        shorter = [f"pipelines.{name}.steps={steps}" for name in named]
    mix = load_mix(file, shorter, options)
    with tempfile.TemporaryDirectory(prefix="jigsawrl-profile-") as scratch, Progress() as progress:
        outcome = run_mix(mix, Path(scratch) / mix.config.name, False, progress)
        made = Path(scratch) / mix.config.name / PROFILE
        if any(each.how == "interrupted" for each in outcome.pipelines):
            print("jigsaw: interrupted; nothing was measured", file=sys.stderr)
            sys.exit(INTERRUPTED)
        failed = [each for each in outcome.pipelines if each.how != "finished"]
        if failed or not made.exists():
            reasons = "; ".join(f"{each.name}: {each.reason or each.how}" for each in failed)
            raise JigsawError(f"nothing was measured: {reasons}")
        add_table(mix, made.parent, made, progress.message)
        out.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(out, made.read_bytes())
    print(f"{out}: {len(outcome.pipelines)} pipelines, measured in {outcome.seconds:.1f} s")
