"""A plan: all jobs of a file placed as if they were there at once, the most important first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jigsawrl.cluster.from_config import Scene
from jigsawrl.cluster.groups import Decision, Group, How
from jigsawrl.cluster.jobs import Job
from jigsawrl.cluster.scheduler import Scheduler
from jigsawrl.cluster.shapes import Shapes, widths
from jigsawrl.cluster.simulation import Outcome
from jigsawrl.phases.rounds import unsaturated


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups as they would be, and the last word on each job."""

    scene: Scene
    scheduler: Scheduler
    decisions: Mapping[str, Decision]
    alone: float
    """Dollars an hour with every job that has a place on nodes of its own, if there were as many."""
    too_late: Mapping[str, float]
    """Hours that those take alone who cannot be done by their deadline."""

    def as_dict(self) -> dict[str, Any]:
        groups = [
            {
                "group": group.number,
                "jobs": list(group.standings),
                "rollout_pool": group.shape.pair[0],
                "training_pool": group.shape.pair[1],
                "rollout_nodes": list(group.rollout_nodes),
                "training_nodes": list(group.training_nodes),
                "order": group.shape.verdict.order,
                "unsaturated": unsaturated(group.shape.turns, group.shape.places, group.shape.shared),
                "dollars_per_hour": round(group.shape.price, 4),
            }
            for group in self.scheduler.groups.values()
        ]
        jobs = {
            job.name: {
                "how": decision.how,
                "group": decision.group,
                "rollout_nodes": list(decision.rollout_nodes),
                "training_nodes": list(decision.training_nodes),
                "slowdown": None if (slow := self.slowdown(job.name)) is None else round(slow, 4),
                "max_slowdown": job.max_slowdown,
                "why": decision.why,
                "passed_over": dict(decision.passed_over),
            }
            for job in self.scene.jobs
            if (decision := self.decisions[job.name])
        }
        return {
            "cluster": self.scene.config.name,
            "quantile": self.scene.config.quantile,
            "dollars_per_hour": round(self.scheduler.price, 4),
            "alone_dollars_per_hour": round(self.alone, 4),
            "groups": groups,
            "jobs": jobs,
            "waiting": list(self.scheduler.waiting),
            "too_late_hours": {name: round(hours, 4) for name, hours in self.too_late.items()},
        }

    def slowdown(self, name: str) -> float | None:
        """As planned in the end; None for a job that waits."""
        number = self.scheduler.home.get(name)
        return None if number is None else self.scheduler.groups[number].shape.slowdown(name)


def plan(scene: Scene) -> Plan:
    """Where everyone would go."""
    scheduler = scheduler_of(scene)
    decisions: dict[str, Decision] = {}
    for job in sorted(scene.jobs, key=lambda job: (-job.priority, job.arrival)):
        allowed = None if job.deadline is None else job.deadline * 3600
        for decision in scheduler.arrive(job, allowed):
            decisions[decision.job] = decision
    shapes = scheduler.shapes
    alone = {job.name: _price_alone(shapes, job) for job in scene.jobs}
    for group in scheduler.groups.values():
        for name in group.standings:
            placed = decisions[name]
            if placed.how == "moved" or {name, *placed.beside} != group.standings.keys():
                decisions[name] = _as_it_ends(placed, group, sum(alone[each] for each in group.standings))
    for job in scene.jobs:
        placed = decisions[job.name]
        if job.name in scheduler.home and len(placed.training_nodes) != job.training_nodes:
            nodes = f"it trains on {len(placed.training_nodes)} nodes instead of {job.training_nodes}"
            decisions[job.name] = replace(placed, why=f"{placed.why}; {nodes}")
    placed_alone = sum(price for name, price in alone.items() if name in scheduler.home)
    hours = {job.name: job.steps * shapes.standing(job).alone / 3600 for job in scene.jobs}
    late = {job.name: hours[job.name] for job in scene.jobs if hours[job.name] > (job.deadline or math.inf)}
    return Plan(scene, scheduler, decisions, placed_alone, late)


def _price_alone(shapes: Shapes, job: Job) -> float:
    """Dollars an hour of its cheapest group of its own; where none keeps its promise, of the place where a step costs
    least."""
    standing = shapes.standing(job)
    alone = next(shapes.isolated(standing), None)
    return alone.price if alone else shapes.price(standing.pair, *widths(job, standing.pair))


def _as_it_ends(decision: Decision, group: Group, alone: float) -> Decision:
    """Of a job whose group became another one as others were placed: nobody moves, as nothing has begun."""
    name = decision.job
    rollout, training = group.nodes_of(name)
    beside = [each for each in group.standings if each != name]
    costs = f"${group.shape.price:,.2f}/h"
    how: How = "packed"
    if not beside:
        how, why = "new group", f"a group of its own, {costs}: beside others it all would cost more"
    else:
        names, saves = ", ".join(beside), f"{costs} together, ${alone:,.2f}/h if each were alone"
        if not any(rollout & group.nodes_of(each)[0] for each in beside):
            how, names = "scaled", f"{names} with rollout nodes of its own"
        why = f"beside {names}: {saves}"
    return replace(
        decision,
        how=how,
        group=group.number,
        rollout_nodes=tuple(sorted(rollout)),
        training_nodes=tuple(sorted(training)),
        why=why,
        beside=tuple(beside),
    )


def scheduler_of(scene: Scene) -> Scheduler:
    return Scheduler(scene.cluster, level=scene.config.quantile, largest=scene.config.max_group)


def outcome_document(scene: Scene, outcome: Outcome, alone: Outcome) -> dict[str, Any]:
    """A simulated trace, against every job on nodes of its own."""
    jobs = {
        name: {
            "arrival_hours": round(record.arrived / 3600, 4),
            "hours": None if record.finished is None else round((record.finished - record.arrived) / 3600, 4),
            "waited_hours": round(record.waited / 3600, 4),
            "slowdown": None if record.finished is None else round(record.slowdown, 4),
            "max_slowdown": record.job.max_slowdown,
            "kept": record.kept,
            "in_time": record.in_time,
            "moves": record.moves,
            "preempted": record.preempted,
        }
        for name, record in outcome.records.items()
    }
    return {
        "cluster": scene.config.name,
        "quantile": scene.config.quantile,
        "hours": round(outcome.seconds / 3600, 4),
        "dollars": round(outcome.dollars, 2),
        "dollars_per_hour": round(outcome.dollars_per_hour, 4),
        "alone_dollars": round(alone.dollars, 2),
        "slo_attainment": round(outcome.slo_attainment, 4),
        "peak_nodes": outcome.peak_nodes,
        "busy": {pool: round(part, 4) for pool, part in outcome.busy.items()},
        "jobs": jobs,
    }
