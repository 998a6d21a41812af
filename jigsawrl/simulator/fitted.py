"""How well a fitted profile tells the logs that it was fitted to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from jigsawrl.graph.fit import read_runs, work_of
from jigsawrl.graph.predict import stage_seconds
from jigsawrl.graph.profile import Profile, Workload
from jigsawrl.graph.traces import Trace

STAGES: Mapping[str, tuple[str, ...]] = {
    "rollout": ("gen",),
    "log-probs": ("old_log_prob", "ref"),
    "update": ("update_actor",),
}
"""Stages, and what verl's logs call their parts."""


@dataclass(frozen=True, slots=True)
class StageFit:
    """Mean seconds of a step's stage, and the mean of its relative error without sign."""

    fitted: float
    logged: float
    error: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """One workload. A stage that was never logged is missing."""

    name: str
    model: str
    steps: int
    mean_length: float
    """Generated tokens of a sequence."""
    reconstructed: bool
    stages: Mapping[str, StageFit]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(profile: Profile, source: Path) -> list[Fitted]:
    """Each workload against its log, in a folder or file that has been fitted."""
    return [_judge(trace, profile.workload(trace.name)) for trace in read_runs(source)]


def _judge(trace: Trace, workload: Workload) -> Fitted:
    pairs: dict[str, list[tuple[float, float]]] = {}
    for step in trace.steps:
        fitted = stage_seconds(workload.costs, work_of(trace, step))
        for stage, parts in STAGES.items():
            told = [part for part in parts if getattr(step, part) is not None]
            logged = sum(getattr(step, part) for part in told)
            if logged > 0:
                pairs.setdefault(stage, []).append((sum(fitted[part] for part in told), logged))
    return Fitted(
        trace.name,
        workload.model.name,
        len(trace.steps),
        fmean(float(step.lengths.mean()) for step in trace.steps),
        workload.reconstructed,
        {
            stage: StageFit(
                fmean(fitted for fitted, _ in each),
                fmean(logged for _, logged in each),
                fmean(abs(fitted - logged) / logged for fitted, logged in each),
            )
            for stage, each in pairs.items()
        },
    )
