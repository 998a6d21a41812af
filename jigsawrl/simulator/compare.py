"""A scene under one policy, or under several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from jigsawrl.policies.named import POLICIES
from jigsawrl.simulator.from_config import Scene
from jigsawrl.simulator.jobs import Job
from jigsawrl.simulator.simulation import Outcome, Simulation
from jigsawrl.telemetry.figures import Life, summarize
from jigsawrl.telemetry.report import Report, report
from jigsawrl.telemetry.timeline import Span, read_spans


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one pipeline."""

    seconds: float
    """From its arrival until it was done."""
    alone: float
    """The same with all workers for itself."""
    tokens: float
    max_slowdown: float | None
    deadline: float | None

    @property
    def slowdown(self) -> float:
        return self.seconds / self.alone if self.alone > 0 else 1.0

    @property
    def kept(self) -> bool | None:
        """Whether what was asked for it was held; None where nothing was asked."""
        if self.max_slowdown is None and self.deadline is None:
            return None
        in_time = self.deadline is None or self.seconds <= self.deadline
        return in_time and (self.max_slowdown is None or self.slowdown <= self.max_slowdown)

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "alone_seconds": self.alone,
            "slowdown": self.slowdown,
            "tokens": self.tokens,
            "max_slowdown": self.max_slowdown,
            "deadline": self.deadline,
            "kept": self.kept,
        }


@dataclass(frozen=True, slots=True)
class Simulated:
    """A scene under one policy."""

    scene: Scene
    policy: str
    outcome: Outcome
    spans: list[Span]
    report: Report
    fates: Mapping[str, Fate]

    @property
    def seconds(self) -> float:
        return self.outcome.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.report.tokens_per_second or 0.0

    @property
    def mean_slowdown(self) -> float:
        return fmean(fate.slowdown for fate in self.fates.values())

    @property
    def worst_slowdown(self) -> float:
        return max(fate.slowdown for fate in self.fates.values())

    def bubbles(self) -> dict[str, float]:
        """Parts of all worker time, by cause."""
        whole = self.report.worker_seconds
        return {cause: lost / whole if whole else 0.0 for cause, lost in self.report.bubbles.items()}

    def summary(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "busy_fraction": self.report.busy_fraction,
            "mean_slowdown": self.mean_slowdown,
            "worst_slowdown": self.worst_slowdown,
            "bubbles": self.bubbles(),
            "pipelines": {name: fate.as_dict() for name, fate in self.fates.items()},
        }


def alone_seconds(scene: Scene) -> dict[str, float]:
    """How long each pipeline takes with all workers for itself."""
    times = {}
    for job in scene.jobs:
        early = replace(job, shape=replace(job.shape, arrival=0.0))
        times[job.shape.name] = _run(scene, "serial", [early]).seconds
    return times


def vs_serial(run: Simulated, serial: float) -> float:
    """Throughput: the work is the same, so it is the ratio of the times."""
    return serial / run.seconds if run.seconds > 0 else 1.0


def simulate(scene: Scene, policy: str, alone: Mapping[str, float]) -> Simulated:
    outcome = _run(scene, policy, scene.jobs)
    spans = read_spans(outcome.log)
    lives = {
        job.shape.name: Life(job.shape.arrival, job.shape.arrival + outcome.finished[job.shape.name])
        for job in scene.jobs
    }
    fates = {
        job.shape.name: Fate(
            outcome.finished[job.shape.name],
            alone[job.shape.name],
            outcome.tokens[job.shape.name],
            job.shape.max_slowdown,
            job.shape.deadline,
        )
        for job in scene.jobs
    }
    steps = [event for event in outcome.log if event["event"] == "step"]
    tokens = {name: [e["tokens"] for e in steps if e["pipeline"] == name] for name in lives}
    summaries = {
        name: summarize([{"perf/tokens": of_step} for of_step in tokens[name]], life.seconds)
        for name, life in lives.items()
    }
    figures = report(spans, scene.workers, start=0.0, end=outcome.seconds, lives=lives, summaries=summaries)
    return Simulated(scene, policy, outcome, spans, figures, fates)


def _run(scene: Scene, policy: str, jobs: Sequence[Job]) -> Outcome:
    hardware, workers, table = scene.hardware, scene.workers, scene.table
    first = scene.rollout_workers
    return Simulation(
        POLICIES[policy], jobs, hardware, workers, table, seed=scene.seed, rollout_workers=first
    ).run()


def compared(
    scene: Scene, policies: Sequence[str], say: Callable[[str], None] = lambda text: None
) -> tuple[list[Simulated], float]:
    """The scene under each policy, and how long it takes under `serial`, which everything is held against."""
    say("each pipeline alone")
    alone = alone_seconds(scene)
    runs = []
    for policy in policies:
        say(policy)
        runs.append(simulate(scene, policy, alone))
    serial = next((run.seconds for run in runs if run.policy == "serial"), None)
    if serial is None:
        say("serial")
        serial = _run(scene, "serial", scene.jobs).seconds
    return runs, serial


def best_of(runs: Sequence[Simulated]) -> Simulated:
    """The one that is done first; of those, the one that is fairest."""
    return min(runs, key=lambda run: (round(run.seconds, 6), run.mean_slowdown))
