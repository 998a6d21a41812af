"""Jobs of a running cluster: checked when they are submitted, and as its scheduler sees them.

What is not measured yet is foreseen from the run file, as a run of it would. Once phases were measured, the median of
the last ones is typical, and the longest of them stands for the token limit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from jigsawrl.cluster.estimate import resident
from jigsawrl.cluster.from_config import cluster_of, misfit
from jigsawrl.cluster.jobs import Duration, Job
from jigsawrl.cluster.pools import Cluster
from jigsawrl.config.cluster import TermsConfig
from jigsawrl.config.messages import explain, joined
from jigsawrl.config.pipelines import PipelineConfig
from jigsawrl.config.reserved import is_reserved, refusal
from jigsawrl.config.runfile import checked, load_run_file
from jigsawrl.config.settings import RunConfig
from jigsawrl.daemon.ledger import JobEntry, Ledger
from jigsawrl.errors import JigsawError
from jigsawrl.graph.fits import refuse_what_cannot_fit
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.outlook import Outlook
from jigsawrl.runtime.first_outlook import first_outlook

COLD_S = 6.0
"""Seconds until the processes of a small model's job are up; on two cores it was 4 to 8."""
HOUR = 3600.0


def submit(
    folder: Path, file: Path, name: str | None, steps: int | None, terms: dict[str, Any]
) -> tuple[JobEntry, bool]:
    """Adds a job to a cluster, whether it is running or not, and says whether it is new: the same job may be there
    already. A JigsawError where it could never run there."""
    ledger = Ledger(folder)
    run = load_run_file(file)
    given = {"name": name, "steps": steps}
    changed = {key: value for key, value in given.items() if value is not None}
    if run.device == "cuda":
        raise JigsawError(
            f"{file}: device is cuda, and the nodes of {folder} are cores; set device: cpu or auto"
        )
    run = checked({**run.to_dict(), **changed, "device": "cpu"})
    if is_reserved(run.name):
        raise JigsawError(f"{refusal(run.name)} --name")
    from jigsawrl.api import check_task

    check_task(run)
    entry = JobEntry(run.name, run, terms_of(terms), 0.0)
    refuse_misfit(entry, cluster_of(ledger.config))
    new = ledger.submit(run.name, run, entry.terms)
    ledger.close()
    return entry, new


def terms_of(given: dict[str, Any]) -> TermsConfig:
    data = {key: value for key, value in given.items() if value is not None}
    try:
        return TermsConfig.model_validate(data)
    except ValidationError as error:
        raise JigsawError(joined(explain(error, TermsConfig, data))) from None


def refuse_misfit(entry: JobEntry, cluster: Cluster) -> None:
    """A JigsawError with the reason, where it could not run even if it had the whole cluster."""
    if (problem := misfit(job_of(entry, cluster), cluster)) is not None:
        raise JigsawError(f"{entry.name}: can never fit: {problem}")
    worker = next(iter(cluster.pools.values())).kind
    nodes = entry.terms.rollout_nodes + entry.terms.training_nodes
    refuse_what_cannot_fit([_outlook(entry.run, cluster, nodes)], worker, nodes)


def job_of(entry: JobEntry, cluster: Cluster, arrived_hours: float = 0.0) -> Job:
    """With what is left of it to do."""
    terms = entry.terms
    outlook = _outlook(entry.run, cluster, terms.training_nodes)
    keeps = resident(outlook.shape.model.parameters)
    rollout = _measured(entry.rollout) or _foreseen(outlook, "rollout", terms)
    training = _measured(entry.training) or _foreseen(outlook, "training", terms)
    pools = cluster.pools.values()
    return Job(
        entry.name,
        {pool.name: rollout for pool in pools if pool.runs in ("rollout", "both")},
        {pool.name: training for pool in pools if pool.runs in ("training", "both")},
        max_slowdown=terms.max_slowdown,
        steps=max(1, entry.steps - entry.step),
        rollout_nodes=terms.rollout_nodes,
        training_nodes=terms.training_nodes,
        rollout_gb=keeps.rollout_gb,
        training_gb=keeps.training_gb,
        cold_seconds=COLD_S,
        arrival=arrived_hours,
        priority=terms.priority,
        tenant=terms.tenant or "",
        deadline=None if terms.deadline is None else terms.deadline / HOUR,
    )


def _outlook(run: RunConfig, cluster: Cluster, workers: int) -> Outlook:
    worker = next(iter(cluster.pools.values())).kind
    return first_outlook(run.name, run, PipelineConfig(run=run.name), worker, workers, None)


def _foreseen(outlook: Outlook, phase: str, terms: TermsConfig) -> Duration:
    limit = outlook.shape.max_tokens
    longest = replace(outlook, forecast=Forecast.from_prior(np.full(2, float(limit)), limit), _cache={})
    typical, worst = (
        each.rollout_seconds(terms.rollout_nodes, 1)
        if phase == "rollout"
        else each.training_seconds(terms.training_nodes)
        for each in (outlook, longest)
    )
    return Duration(typical, max(typical, worst))


def _measured(seconds: Sequence[float]) -> Duration | None:
    if not seconds:
        return None
    spread = statistics.pstdev([math.log(max(each, 1e-6)) for each in seconds])
    return Duration(statistics.median(seconds), max(seconds), spread)
