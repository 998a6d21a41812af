"""From workloads of a profile to jobs that can be simulated."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from jigsawrl.errors import JigsawError
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.outlook import Outlook
from jigsawrl.graph.profile import LEVELS, Profile
from jigsawrl.simulator.jobs import Job

GB = 1e9


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

    def lengths(step: int) -> NDArray[np.float64]:
        rng = np.random.default_rng((key, step))
        kept = measured.quantiles[(step - 1) % len(measured.quantiles)]
        drawn = np.rint(np.interp(rng.random(shape.sequences), LEVELS, kept))
        return np.maximum(drawn, 1.0)

    return Job(shape, costs, lengths, measured.lengths(0))


def refuse_what_cannot_fit(jobs: list[Job], hardware: Hardware, workers: int) -> None:
    """A JigsawError with the arithmetic if a phase alone, or all pipelines' resident state, exceeds the memory."""
    host = 0.0
    for job in jobs:
        shape = job.shape
        if shape.tp > workers:
            raise JigsawError(f"{shape.name}: an engine spans {shape.tp} workers and there are {workers}")
        outlook = Outlook(shape, job.costs, hardware, Forecast.from_prior(job.expected, shape.max_tokens))
        width = workers // shape.tp * shape.tp
        sizes = outlook.memory(width // shape.tp, shape.tp, width)
        for phase, needed in (("rollout", sizes.rollout), ("training", sizes.training)):
            if needed > hardware.device_bytes:
                raise JigsawError(
                    f"{shape.name}: {phase} needs {needed / GB:.0f} GB on each of {width} workers, and a "
                    f"{hardware.name} has {hardware.device_bytes / GB:.0f} GB; use more workers"
                )
        host += sizes.host
    if host > hardware.host_bytes:
        raise JigsawError(
            f"{len(jobs)} pipelines keep {host / GB:.0f} GB in host memory for each worker, and there are "
            f"{hardware.host_bytes / GB:.0f} GB; run fewer at a time, or use more workers"
        )
