"""From workloads of a profile to jobs that can be simulated."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from jigsawrl.graph.fits import refuse_what_cannot_fit
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.outlook import Outlook
from jigsawrl.graph.profile import LEVELS, Profile
from jigsawrl.policies.starts import refuse_what_cannot_fit_apart
from jigsawrl.simulator.jobs import Job


def job_of(
    profile: Profile,
    workload: str,
    hardware: Hardware,
    *,
    name: str,
    steps: int,
    seed: int,
    tp: int | None = None,
    prompts: int | None = None,
) -> Job:
    """A measured workload as a pipeline: its steps' lengths are drawn from the logged ones, in turn."""
    measured = profile.workload(workload)
    costs = profile.costs(workload, hardware)
    shape = replace(measured.shape(steps, name, tp), reward_seconds=costs.other_seconds)
    if prompts is not None:
        shape = replace(shape, prompts=prompts)
    key = zlib.crc32(f"{seed} {name}".encode())

    @lru_cache(maxsize=1)
    def lengths(step: int) -> NDArray[np.float64]:
        rng = np.random.default_rng((key, step))
        kept = measured.quantiles[(step - 1) % len(measured.quantiles)]
        drawn = np.rint(np.interp(rng.random(shape.sequences), LEVELS, kept))
        return np.maximum(drawn, 1.0)

    return Job(shape, costs, lengths, Forecast.from_prior(measured.lengths(0), shape.max_tokens))


def refuse_jobs(
    jobs: list[Job], hardware: Hardware, workers: int, rollout_workers: int | None = None
) -> None:
    """A JigsawError with the arithmetic where the memory cannot hold them; with `rollout_workers`, in two pools."""
    outlooks = [Outlook(job.shape, job.costs, hardware, job.forecast) for job in jobs]
    refuse_what_cannot_fit(outlooks, hardware, workers)
    if rollout_workers is not None:
        for job, outlook in zip(jobs, outlooks, strict=True):
            own = rollout_workers if job.rollout_workers is None else len(job.rollout_workers)
            refuse_what_cannot_fit_apart(outlook, hardware, own, workers - rollout_workers)
