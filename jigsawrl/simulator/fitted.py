"""How well a fitted profile tells the logs that it was fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from jigsawrl.graph.predict import stage_seconds
from jigsawrl.graph.profile import Profile, Workload
from jigsawrl.graph.traces import Trace
from jigsawrl.simulator.plausible import doubts

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
    read: str
    """What was believed of the log."""
    warnings: tuple[str, ...]
    """What in it or in its fit is hard to believe."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(profile: Profile, traces: Sequence[Trace], hardware_told: bool) -> list[Fitted]:
    """Each workload against the log that it was fitted to; and whether the user said what hardware that was."""
    return [_judge(trace, profile.workload(trace.name), hardware_told) for trace in traces]


def believed(trace: Trace, hardware: str, hardware_told: bool) -> str:
    """What was read of a log, and what was assumed where it does not tell."""

    def unsure(text: str, key: str) -> str:
        return f"{text} assumed" if key in trace.assumed else text

    steps, found = len(trace.steps), max(trace.found, len(trace.steps))
    told = hardware_told or trace.hardware is not None
    gpus = f"{trace.gpus:,} GPU{'s' * (trace.gpus > 1)}"
    return ", ".join(
        (
            f"read {steps:,} of {found:,} step{'s' * (found > 1)}",
            f"{trace.sequences:,} sequence{'s' * (trace.sequences > 1)}",
            unsure(f"tp {trace.tp}", "tp"),
            unsure(gpus, "gpus"),
            hardware if told else f"{hardware} assumed",
        )
    )


def _judge(trace: Trace, workload: Workload, hardware_told: bool) -> Fitted:
    pairs: dict[str, list[tuple[float, float]]] = {}
    for step in trace.steps:
        fitted = stage_seconds(workload.costs, trace, step)
        for stage, parts in STAGES.items():
            told = [part for part in parts if getattr(step, part) is not None]
            logged = sum(getattr(step, part) for part in told)
            if logged > 0:
                pairs.setdefault(stage, []).append((sum(fitted[part] for part in told), logged))
    stages = {
        stage: StageFit(
            fmean(fitted for fitted, _ in each),
            fmean(logged for _, logged in each),
            fmean(abs(fitted - logged) / logged for fitted, logged in each),
        )
        for stage, each in pairs.items()
    }
    hardware = workload.costs.hardware
    return Fitted(
        trace.name,
        workload.model.name,
        len(trace.steps),
        fmean(float(step.lengths.mean()) for step in trace.steps),
        workload.reconstructed,
        stages,
        believed(trace, hardware.name, hardware_told),
        doubts(trace, hardware, {stage: each.error for stage, each in stages.items()}),
    )
