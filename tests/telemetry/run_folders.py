"""Run folders to report on."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
T = 1.7e9
"""When these runs began."""


def at(t: float, event: str, **fields: Any) -> Event:
    """An event, so many seconds into the run."""
    return {"t": T + t, "event": event, **fields}


def ran(substage: str, pipeline: str, worker: int, step: int, t0: float, t1: float, **fields: Any) -> Event:
    where = {"substage": substage, "pipeline": pipeline, "worker": worker, "step": step}
    return at(t1, "substage", **where, t0=T + t0, t1=T + t1, **fields)


def two_pipelines() -> list[Event]:
    """Two workers; `sums` on both, `<search>` beside it, whose process dies and comes back."""
    return [
        at(0, "start", name="night", workers=2, policy="jigsaw"),
        at(0, "start", pipeline="sums", step=0, solo=4.0),
        at(0, "start", pipeline="<search>", step=0),
        at(0, "action", action="start", pipeline="sums"),
        at(0, "predicted", pipeline="sums", phase="rollout", step=1, seconds=4.0),
        ran("decode", "sums", 0, 1, 0, 4, tokens=400),
        ran("decode", "sums", 1, 1, 0, 4, tokens=400),
        at(5, "phase", pipeline="sums", phase="rollout", step=1, t0=T, t1=T + 5),
        ran("tail", "sums", 0, 1, 4, 6, share=0.25, tokens=8),
        ran("grad", "<search>", 0, 1, 4, 6, share=0.75),
        at(6, "died", pipeline="<search>", process="actor of worker 1", reason="signal 9 & no more"),
        ran("tool", "<search>", 1, 1, 6, 8),
        at(7, "recovered", pipeline="<search>", step=1),
        at(8, "step", pipeline="<search>", step=1),
        at(8, "finished", pipeline="<search>", step=1),
        ran("grad", "sums", 0, 1, 6, 10),
        ran("grad", "sums", 1, 1, 8, 10),
        at(10, "step", pipeline="sums", step=1),
        at(10, "finished", pipeline="sums", step=1),
    ]


def run_folder(
    folder: Path, events: Iterable[Event], rewards: Mapping[str, Sequence[float | None]] | None = None
) -> Path:
    """A run folder; `rewards` by pipeline, or under "" those of the only one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for name, values in (rewards or {}).items():
        (folder / name).mkdir(exist_ok=True)
        rows = [{"step": step, "reward/mean": value} for step, value in enumerate(values, 1)]
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
