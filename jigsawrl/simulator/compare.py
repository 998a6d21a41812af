"""A scene under one policy, or under several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from jigsawrl.graph.profile import table_on
from jigsawrl.policies.named import policy_of
from jigsawrl.simulator.from_config import Scene
from jigsawrl.simulator.jobs import Job
from jigsawrl.simulator.simulation import Outcome, Simulation
from jigsawrl.telemetry.comparison import Comparison, Fate, Side
from jigsawrl.telemetry.logreader import log_of
from jigsawrl.telemetry.runreport import report_on


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
            "figures": asdict(origin),
        }
        for job, origin in zip(scene.jobs, scene.origins, strict=True)
    }
    return {
        "name": scene.config.name,
        "simulated": True,
        "seed": scene.config.seed,
        "workers": scene.config.workers,
        "hardware": scene.hardware.name,
        "profile": scene.profile.name,
        "scene": pipelines,
    }


def alone_seconds(scene: Scene) -> dict[str, float]:
    """How long each pipeline takes with all workers for itself."""
    at_once = [replace(job, shape=replace(job.shape, arrival=0.0)) for job in scene.jobs]
    return {job.shape.name: _run(scene, "serial", [job]).seconds for job in at_once}


def simulate(scene: Scene, policy: str, alone: Mapping[str, float]) -> Side:
    outcome = _run(scene, policy, scene.jobs)
    events = _events(scene, policy, outcome)
    log = log_of(events, scene.config.name)
    fates = {
        shape.name: Fate(
            ended="finished",
            reason="",
            steps=shape.steps,
            seconds=outcome.finished[shape.name],
            alone=alone[shape.name],
            tokens=log.summaries[shape.name].tokens,
            max_slowdown=shape.max_slowdown,
            deadline=shape.deadline,
        )
        for shape in (job.shape for job in scene.jobs)
    }
    return Side(policy, log, report_on(log), fates, events)


def _events(scene: Scene, policy: str, outcome: Outcome) -> list[dict[str, Any]]:
    """The event log that a real run would have left."""
    start = {"t": 0.0, "event": "start", **described(scene), "policy": policy}
    ends = [
        {
            "t": shape.arrival + outcome.finished[shape.name],
            "event": "finished",
            "pipeline": shape.name,
            "step": shape.steps,
        }
        for shape in (job.shape for job in scene.jobs)
    ]
    return [start, *outcome.log, *ends]


def _run(scene: Scene, policy: str, jobs: Sequence[Job]) -> Outcome:
    config, first = scene.config, scene.rollout_workers
    under, table = policy_of(policy, config.order), table_on(scene.hardware, scene.profile)
    return Simulation(
        under, jobs, scene.hardware, config.workers, table, seed=config.seed, rollout_workers=first
    ).run()


def compared(
    scene: Scene, policies: Sequence[str], say: Callable[[str], None] = lambda text: None
) -> Comparison:
    """The scene under each policy, held against `serial`, whether or not that is among them."""
    say("each pipeline alone")
    alone = alone_seconds(scene)
    runs = {}
    for policy in dict.fromkeys((*policies, "serial")):
        say(policy)
        runs[policy] = simulate(scene, policy, alone)
    return Comparison(
        scene.config.name, scene.config.workers, runs["serial"], [runs[policy] for policy in policies]
    )
