"""`jigsaw fit` on the first half of a log's steps, `jigsaw simulate` with what it writes, and the second half.

The log is cut after the last step of its first half, and the command gets the cut log as a file: it sees what a user
would have had at that time. Of an odd number of steps the smaller half is fitted. The simulated run has as many
steps as the second half. What it takes for a step is held against the mean of the second half's steps, and so is the
constant predictor: the mean of the first half's.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from common import figure
from rich.table import Table

from jigsawrl.cli import main
from jigsawrl.errors import JigsawError
from jigsawrl.graph.log_lines import is_log, log_name, open_text
from jigsawrl.graph.traces import Trace
from jigsawrl.graph.verl_log import Run, read_runs_in
from jigsawrl.graph.verl_trace import trace_of

FEWEST = 4
"""Steps of a log that can be halved."""


@dataclass(frozen=True)
class Halved:
    """One log: seconds of a step, simulated, of the first half and of the second."""

    log: str
    fitted: int
    judged: int
    predicted: float
    constant: float
    logged: float
    warnings: list[str]

    @property
    def error(self) -> float:
        return abs(self.predicted - self.logged) / self.logged

    @property
    def constant_error(self) -> float:
        return abs(self.constant - self.logged) / self.logged

    def as_json(self) -> dict[str, Any]:
        figures = ("predicted", "constant", "logged", "error", "constant_error")
        return {**asdict(self), **{name: round(getattr(self, name), 4) for name in figures}}


def halve_logs(paths: Sequence[Path], seed: int) -> tuple[list[Halved], dict[str, str]]:
    """The runs in these logs and folders that could be judged, and of the others why not."""
    done: list[Halved] = []
    left_out: dict[str, str] = {}
    logs = [
        log for path in paths for log in (sorted(filter(is_log, path.iterdir())) if path.is_dir() else [path])
    ]
    with TemporaryDirectory() as folder:
        for log in logs:
            try:
                runs, _ = read_runs_in(log)
            except JigsawError as error:
                left_out[log_name(log)] = _on_one_line(error)
                continue
            for number, run in enumerate(runs, 1):
                name = log_name(log) + (f"-{number}" if len(runs) > 1 else "")
                try:
                    done.append(_halved(log, run, trace_of(run, name, log, str(log)), seed, Path(folder)))
                except JigsawError as error:
                    left_out[name] = _on_one_line(error)
    return done, left_out


def _halved(log: Path, run: Run, trace: Trace, seed: int, folder: Path) -> Halved:
    steps = [step for step in trace.steps if step.seconds]
    if len(steps) < FEWEST:
        raise JigsawError(f"{log}: has {len(steps)} steps, and {FEWEST} are needed")
    first, second = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    until = min(run.steps[step.step][0].line for step in second)
    if max(run.steps[step.step][0].line for step in first) >= until:
        raise JigsawError(f"{log}: its steps are not in order, or share a line")
    cut, profile, mix = (folder / f"{trace.name}.{end}" for end in ("log", "json", "yaml"))
    with open_text(log) as source, open(cut, "w", newline="", encoding="utf-8") as file:
        number = 1
        for piece in source:
            if run.line <= number < until:
                file.write(piece)
            number += piece.endswith("\n")
    fitted = _jigsaw("fit", str(cut), "--out", str(profile), "--json")
    mix.write_text(json.dumps({"pipelines": {"a": {"workload": trace.name, "steps": len(second)}}}))
    what_if = ("--profile", str(profile), "--workers", str(trace.gpus), "--seed", str(seed))
    simulated = _jigsaw("simulate", str(mix), *what_if, "--json")
    return Halved(
        trace.name,
        len(first),
        len(second),
        simulated["seconds"] / len(second),
        fmean(step.seconds or 0.0 for step in first),
        fmean(step.seconds or 0.0 for step in second),
        fitted["workloads"][trace.name]["warnings"],
    )


def _jigsaw(*arguments: str) -> Any:
    """What a command prints as JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(list(arguments))
        except SystemExit as end:
            if end.code:
                raise JigsawError(f"jigsaw {' '.join(arguments)}: {err.getvalue().strip()}") from None
    return json.loads(out.getvalue())


def _on_one_line(error: JigsawError) -> str:
    return " ".join(str(error).split())


def halves_table(rows: Sequence[Halved]) -> Table:
    shown = Table(
        title="jigsaw fit on the first half of a log, jigsaw simulate -> second half: seconds of a step",
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
        box=None,
    )
    shown.add_column("log", no_wrap=True)
    for name in ("steps", "simulated", "logged", "off %", "constant %"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row.log,
            f"{row.fitted} -> {row.judged}",
            figure(row.predicted),
            figure(row.logged),
            f"{100 * row.error:.1f}",
            f"{100 * row.constant_error:.1f}",
        )
    return shown
