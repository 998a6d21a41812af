"""From run files to jobs that can be simulated, with a word on where every figure comes from.

a workload of a profile   lengths and costs as measured, carried to the workers and hardware asked for
a run file of its own     its shape from the file and the model's config.json. Lengths and costs as measured where
                          the profile has a workload of the pipeline's name; otherwise lengths from a prior, and
                          costs carried over from the workload whose model is nearest in size
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from jigsawrl.config.messages import require
from jigsawrl.config.pipelines import Mix, PipelineConfig, PipelinesConfig, is_profile_file
from jigsawrl.config.settings import RunConfig
from jigsawrl.config.shapes import MEDIAN, SPREAD, model_shape, pipeline_shape, prior_lengths
from jigsawrl.config.tasks import ArithmeticTask, CalculatorTask
from jigsawrl.errors import JigsawError
from jigsawrl.graph.cost import Costs
from jigsawrl.graph.forecast import Floats, Forecast
from jigsawrl.graph.hardware import HARDWARE, Hardware, hardware_named
from jigsawrl.graph.profile import Profile, Workload, builtin_profiles, load_profile
from jigsawrl.graph.shape import ModelShape, PipelineShape, turns_with_waits
from jigsawrl.simulator.jobs import Job, job_of, refuse_jobs, sampled_lengths

STEPS = 10
"""Of a workload, if nothing says more."""
EXPECTED = 256
"""Lengths by which a step is foreseen."""
MOST_STEPS = 1_000_000
NEAR = 4.0
"""Costs carried to a model further in size than this are called a prior."""

Kind = Literal["measured", "carried over", "prior"]


@dataclass(frozen=True, slots=True)
class Figure:
    """How well something is known, and where from."""

    kind: Kind
    source: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a pipeline's figures come from."""

    lengths: Figure
    costs: Figure
    notes: tuple[str, ...] = ()
    """What else was assumed."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that a simulation needs, whatever the policy."""

    config: PipelinesConfig
    hardware: Hardware
    profile: Profile
    jobs: tuple[Job, ...]
    origins: tuple[Origin, ...]
    """Of each job."""

    @property
    def rollout_workers(self) -> int | None:
        """The first ones, that only roll out while the others only train; None: all do both."""
        return self.config.pools.rollout if self.config.pools else None


def scene_of(mix: Mix) -> Scene:
    """The pipelines of a run file as jobs. A JigsawError where a name is unknown or the memory cannot hold them."""
    config = mix.config
    _refuse_too_long(mix)
    profile = _profile(config.profile)
    if config.hardware is not None:
        require("hardware", config.hardware.lower(), list(HARDWARE))
    hardware = profile.hardware if config.hardware is None else hardware_named(config.hardware)
    hardware = hardware.limited(config.memory)
    made = [
        _from_workload(name, entry.workload, entry, profile, hardware, config)
        if entry.workload is not None
        else _from_run(name, mix.runs[name], entry, profile, hardware, config)
        for name, entry in config.pipelines.items()
    ]
    jobs, origins = tuple(job for job, _ in made), tuple(origin for _, origin in made)
    scene = Scene(config, hardware, profile, jobs, origins)
    refuse_jobs(jobs, hardware, config.workers, scene.rollout_workers)
    return scene


def _refuse_too_long(mix: Mix) -> None:
    runs = {name: run.steps for name, run in mix.runs.items()}
    steps = {name: each.steps or runs.get(name, STEPS) for name, each in mix.config.pipelines.items()}
    if sum(steps.values()) > MOST_STEPS:
        name = max(steps, key=lambda each: steps[each])
        raise JigsawError(
            f"pipelines.{name}.steps: {steps[name]:,} are too many to simulate; set fewer, as {MOST_STEPS:,} of all "
            "pipelines together take hours"
        )


def _profile(name: str) -> Profile:
    if not is_profile_file(name) and not Path(name).exists():
        require("profile", name, builtin_profiles())
    return load_profile(name)


def _from_workload(
    name: str,
    workload: str,
    entry: PipelineConfig,
    profile: Profile,
    hardware: Hardware,
    config: PipelinesConfig,
) -> tuple[Job, Origin]:
    require(f"pipelines.{name}.workload", workload, list(profile.workloads))
    job = job_of(
        profile,
        workload,
        hardware,
        name=name,
        steps=entry.steps or STEPS,
        seed=config.seed,
        tp=entry.tp,
        priority=entry.priority,
        max_slowdown=entry.max_slowdown,
        deadline=entry.deadline,
        arrival=entry.arrival,
    )
    known = profile.workload(workload)
    origin = Origin(_measured_lengths(known, profile), _known(job.costs, known, job.shape, config.workers))
    return replace(job, rollout_workers=entry.rollout_workers), origin


def _from_run(
    name: str,
    run: RunConfig,
    entry: PipelineConfig,
    profile: Profile,
    hardware: Hardware,
    config: PipelinesConfig,
) -> tuple[Job, Origin]:
    model = model_shape(run.model)
    own = profile.workloads.get(name) or profile.workloads.get(run.name)
    workload = own or nearest(model, run.rollout.max_tokens, list(profile.workloads.values()))
    costs = workload.costs.on(hardware).of(model)
    shape = pipeline_shape(name, run, entry)
    if own is not None:
        turns, waits = turns_with_waits(own.turns, own.tool_seconds)
        shape = replace(shape, prompt_tokens=own.prompt_tokens, turns=turns, tool_seconds=waits)
    shape = replace(shape, reward_seconds=costs.other_seconds * shape.sequences / workload.sequences)
    limit = shape.max_tokens

    def lengths_at(step: int, at: Floats) -> Floats:
        return prior_lengths(limit, at) if own is None else np.minimum(own.lengths_at(step - 1, at), limit)

    even = (np.arange(EXPECTED) + 0.5) / EXPECTED
    forecast = own.forecast(limit) if own else Forecast.from_prior(lengths_at(1, even), limit)
    origin = Origin(
        _measured_lengths(own, profile) if own else _prior_of_lengths(run.rollout.max_tokens),
        _known(costs, workload, shape, config.workers),
        tuple(_notes(run, shape, measured=own is not None)),
    )
    lengths = sampled_lengths(shape, config.seed, lengths_at)
    return Job(shape, costs, lengths, forecast, entry.rollout_workers), origin


def nearest(model: ModelShape, max_tokens: int, workloads: Sequence[Workload]) -> Workload:
    """The measured workload that is most like this one: in the model's size, then in how long answers may be."""

    def distance(workload: Workload) -> tuple[float, float, str]:
        size = abs(math.log(workload.model.parameters / model.parameters))
        return round(size, 2), abs(math.log(workload.max_tokens / max_tokens)), workload.name

    return min(workloads, key=distance)


def _notes(run: RunConfig, shape: PipelineShape, *, measured: bool) -> Iterator[str]:
    if not measured and not isinstance(run.task, ArithmeticTask | CalculatorTask):
        yield f"prompts of {shape.prompt_tokens:,.0f} tokens, a quarter of max_prompt_tokens"
    if shape.turns > 1:
        waits = f"{shape.tool_seconds:g} s between them" if shape.tool_seconds else "none of them waited for"
        yield f"{shape.turns} turns, as many as allowed, {waits}"
    if run.model.lora is not None:
        yield "adapters cost as much as training all weights"
    if run.algorithm.dynamic_sampling is not None:
        yield "one round of sampling in each step"


def _measured_lengths(workload: Workload, profile: Profile) -> Figure:
    logged = len(workload.quantiles)
    how = f"{workload.name} in profile {profile.name}, {logged} logged {'step' if logged == 1 else 'steps'}"
    if workload.reconstructed:
        return Figure("carried over", f"{how}, spread made up from the log's means")
    return Figure("measured", how)


def _prior_of_lengths(max_tokens: int) -> Figure:
    median = max(1, round(MEDIAN * max_tokens))
    return Figure(
        "prior",
        f"log-normal, median {median:,} (a quarter of max_tokens), sigma {SPREAD:g}, cut at {max_tokens:,}",
    )


def _known(costs: Costs, workload: Workload, shape: PipelineShape, workers: int) -> Figure:
    """How well costs are known for this model, hardware and width."""
    # The workloads of a profile that was carried to other hardware say themselves where they come from.
    carried_from = workload.costs.source.partition("; carried from ")[2].partition(" ")[0]
    measured_on = carried_from or workload.costs.hardware.name
    measured = f"{workload.name} on {workload.gpus} {measured_on} (tp {workload.tp})"
    target = f"{workers} {costs.hardware.name} (tp {shape.tp})"
    ratio = costs.model.parameters / workload.model.parameters
    if max(ratio, 1 / ratio) > NEAR:
        how = f"{ratio:,.1f} times larger" if ratio > 1 else f"{1 / ratio:,.0f} times smaller"
        return Figure(
            "prior", f"{shape.model.name} is {how} than {workload.model.name}, nearest in {measured}"
        )
    if (workload.gpus, workload.tp) == (workers, shape.tp) and not costs.derived:
        return Figure("measured", measured)
    model = "" if abs(ratio - 1) < 1e-9 else f"{shape.model.name} on "
    return Figure("carried over", f"{measured} to {model}{target}")
