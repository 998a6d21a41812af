"""What a simulation leaves behind: the files of a real run, figures, pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from jigsawrl import durable
from jigsawrl.config.runfolder import writable_part
from jigsawrl.errors import JigsawError
from jigsawrl.simulator.compare import Simulated, best_of, vs_serial
from jigsawrl.simulator.from_config import Scene
from jigsawrl.telemetry import jsonl
from jigsawrl.telemetry.picture import svg
from jigsawrl.telemetry.runreport import write_report
from jigsawrl.telemetry.text import duration
from jigsawrl.telemetry.timeline import Span, chrome_trace

SIMULATION_FILES = ("events.jsonl", "timeline.json", "picture.svg", "report.json", "report.html")
COMPARISON_FILES = ("comparison.svg", "comparison.json")


def described(scene: Scene) -> dict[str, Any]:
    """What is simulated, and where its figures come from."""
    pipelines = {
        job.shape.name: {
            "model": job.shape.model.name,
            "steps": job.shape.steps,
            "sequences": job.shape.sequences,
            "tp": job.shape.tp,
            "arrival": job.shape.arrival,
            "priority": job.shape.priority,
            "figures": origin.as_dict(),
        }
        for job, origin in zip(scene.jobs, scene.origins, strict=True)
    }
    return {
        "name": scene.name,
        "simulated": True,
        "seed": scene.seed,
        "workers": scene.workers,
        "hardware": scene.hardware.name,
        "profile": scene.profile,
        "scene": pipelines,
    }


def simulation_document(run: Simulated) -> dict[str, Any]:
    return {**described(run.scene), **run.summary(), "report": run.report.as_dict()}


def comparison_document(scene: Scene, runs: Sequence[Simulated], serial: float) -> dict[str, Any]:
    policies = [{**run.summary(), "throughput_vs_serial": vs_serial(run, serial)} for run in runs]
    return {**described(scene), "best": best_of(runs).policy, "policies": policies}


def check_out(out: Path, files: Iterable[str]) -> None:
    """A JigsawError if writing there would touch files of something else."""
    if writable_part(out) == out:
        others = sorted(each.name for each in out.glob("[!.]*") if each.name not in files)
        if others:
            raise JigsawError(
                f"{out}: holds {others[0]}, which is not of a simulation; choose another folder with --out"
            )


def write_simulation(run: Simulated, out: Path) -> None:
    """The same files that a real run has, and a picture."""
    start = {"t": 0.0, "event": "start", **described(run.scene), "policy": run.policy}
    title = f"{run.scene.name}: {run.policy} on {run.scene.workers} {run.scene.hardware.name}, simulated"
    shapes = [job.shape for job in run.scene.jobs]
    ends = [
        {
            "t": shape.arrival + run.outcome.finished[shape.name],
            "event": "finished",
            "pipeline": shape.name,
            "step": shape.steps,
        }
        for shape in shapes
    ]
    _write(
        out,
        {
            "events.jsonl": b"".join(map(jsonl.encode, [start, *run.outcome.log, *ends])),
            "timeline.json": jsonl.encode(chrome_trace(run.spans)),
            "picture.svg": svg(run.spans, run.scene.workers, title).encode(),
            "report.json": jsonl.encode(simulation_document(run)),
        },
    )
    write_report(out)


def write_comparison(scene: Scene, runs: Sequence[Simulated], serial: float, out: Path) -> None:
    _write(
        out,
        {
            "comparison.svg": stacked(runs, serial).encode(),
            "comparison.json": jsonl.encode(comparison_document(scene, runs, serial)),
        },
    )


def _write(out: Path, files: Mapping[str, bytes]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            durable.replace(out / name, content)
    except OSError as error:
        raise JigsawError(f"{out}: cannot be written ({error.strerror or error})") from None


def stacked(runs: Sequence[Simulated], serial: float) -> str:
    """One chart below the other, all over the same time."""
    end, best = max(run.seconds for run in runs), best_of(runs)
    charts = []
    for run in runs:
        # A wait of no length takes no worker and makes the axis as long as the longest.
        mark = Span("reward", run.spans[0].pipeline, (), 1, end, end)
        note = ", the best" if run is best and len(runs) > 1 else ""
        title = f"{run.policy}: {duration(run.seconds)}, {vs_serial(run, serial):.2f}x serial{note}"
        charts.append(svg([*run.spans, mark], run.scene.workers, title).rstrip())
    sizes = [re.findall(r'(?:width|height)="(\d+)"', chart)[:2] for chart in charts]
    wide = max(int(width) for width, _ in sizes)
    tops = list(accumulate((int(height) for _, height in sizes), initial=0))
    placed = [
        chart.replace("<svg ", f'<svg y="{top}" ', 1) for chart, top in zip(charts, tops[:-1], strict=True)
    ]
    size = f'viewBox="0 0 {wide} {tops[-1]}" width="{wide}" height="{tops[-1]}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *placed, "</svg>"]) + "\n"
