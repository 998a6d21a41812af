"""What is simulated: pipelines whose true lengths and durations only the simulator knows."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from jigsawrl.graph.cost import Costs
from jigsawrl.graph.fits import refuse_what_cannot_fit
from jigsawrl.graph.forecast import Floats, Forecast
from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.outlook import Outlook
from jigsawrl.graph.profile import Profile
from jigsawrl.graph.shape import PipelineShape
from jigsawrl.policies.starts import refuse_what_cannot_fit_apart


@dataclass(frozen=True, slots=True)
class Job:
    """A pipeline, what its steps will turn out to be, and what is believed of it at first."""

    shape: PipelineShape
    costs: Costs
    lengths: Callable[[int], Floats]
    """Response lengths of a step, the same at every call."""
    forecast: Forecast
    """Of lengths, as a profile has it."""
    rollout_workers: tuple[int, ...] | None = None
    """Of those that only roll out, the ones it uses; None: all."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker dies, and comes back or does not."""

    worker: int
    at: float
    back: float = float("inf")


def job_of(
    profile: Profile,
    workload: str,
    hardware: Hardware,
    *,
    name: str,
    steps: int,
    seed: int,
    tp: int | None = None,
    **others: Any,
) -> Job:
    """A measured workload as a pipeline: its steps' lengths are sampled from the logged ones, in turn.

    `others` are what its shape has otherwise than it was measured.
    """
    measured = profile.workload(workload)
    costs = measured.costs.on(hardware)
    shape = replace(measured.shape(steps, name, tp), reward_seconds=costs.other_seconds, **others)
    lengths = sampled_lengths(shape, seed, lambda step, at: measured.lengths_at(step - 1, at))
    return Job(shape, costs, lengths, Forecast.from_prior(measured.lengths(0), shape.max_tokens))


def sampled_lengths(
    shape: PipelineShape, seed: int, lengths_at: Callable[[int, Floats], Floats]
) -> Callable[[int], Floats]:
    """Lengths of each step, the same at every call: those at quantiles that seed and name choose."""
    key = zlib.crc32(f"{seed} {shape.name}".encode())

    @lru_cache(maxsize=1)
    def lengths(step: int) -> Floats:
        return lengths_at(step, np.random.default_rng((key, step)).random(shape.sequences))

    return lengths


def refuse_jobs(
    jobs: Sequence[Job], hardware: Hardware, workers: int, rollout_workers: int | None = None
) -> None:
    """A JigsawError with the arithmetic where the memory cannot hold them; with `rollout_workers`, in two pools."""
    outlooks = [Outlook(job.shape, job.costs, hardware, job.forecast) for job in jobs]
    refuse_what_cannot_fit(outlooks, hardware, workers)
    if rollout_workers is not None:
        for job, outlook in zip(jobs, outlooks, strict=True):
            own = rollout_workers if job.rollout_workers is None else len(job.rollout_workers)
            refuse_what_cannot_fit_apart(outlook, hardware, own, workers - rollout_workers)
