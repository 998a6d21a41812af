"""What a simulation leaves behind: the files of a real run, figures, pictures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jigsawrl.config.runfolder import writable_part
from jigsawrl.errors import JigsawError
from jigsawrl.simulator.compare import described
from jigsawrl.simulator.from_config import Scene
from jigsawrl.telemetry import jsonl
from jigsawrl.telemetry.comparison import Comparison, Side
from jigsawrl.telemetry.picture import svg
from jigsawrl.telemetry.runreport import write_files, write_report
from jigsawrl.telemetry.text import duration

SIMULATION_FILES = ("events.jsonl", "timeline.json", "picture.svg", "report.json", "report.html")
COMPARISON_FILES = ("comparison.svg", "comparison.json")


def simulation_document(scene: Scene, run: Side) -> dict[str, Any]:
    return {**described(scene), **run.as_dict(), "report": run.report.as_dict()}


def comparison_document(scene: Scene, found: Comparison) -> dict[str, Any]:
    return {**described(scene), **found.as_dict()}


def check_out(out: Path, files: Iterable[str]) -> None:
    """A JigsawError if writing there would touch files of something else."""
    if writable_part(out) == out:
        others = sorted(each.name for each in out.glob("[!.]*") if each.name not in files)
        if others:
            raise JigsawError(
                f"{out}: holds {others[0]}, which is not of a simulation; choose another folder with --out"
            )


def write_simulation(scene: Scene, run: Side, out: Path) -> None:
    """The same files that a real run has, and a picture."""
    title = f"{scene.config.name}: {run.policy} on {scene.config.workers} {scene.hardware.name}, simulated"
    write_files(
        out,
        {
            "events.jsonl": b"".join(map(jsonl.encode, run.events)),
            "picture.svg": svg([(title, run.log)]).encode(),
            "report.json": jsonl.encode(simulation_document(scene, run)),
        },
    )
    write_report(out)


def write_comparison(scene: Scene, found: Comparison, out: Path) -> None:
    write_files(
        out,
        {
            "comparison.svg": svg([(_title(found, run), run.log) for run in found.runs]).encode(),
            "comparison.json": jsonl.encode(comparison_document(scene, found)),
        },
    )


def _title(found: Comparison, run: Side) -> str:
    note = ", the best" if run.policy == found.best and len(found.runs) > 1 else ""
    return f"{run.policy}: {duration(run.seconds)}, {found.ratio(run):.2f}x serial{note}"
