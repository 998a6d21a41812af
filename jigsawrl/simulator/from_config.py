"""From run files to jobs that can be simulated, with a word on where every figure comes from.

a workload of a profile   lengths and costs as measured, carried to the workers and hardware asked for
a run file of its own     its shape from the file and the model's config.json. Lengths and costs as measured where
                          the profile has a workload of the pipeline's name; otherwise lengths from a prior, and
                          costs carried over from the workload whose model is nearest in size
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jigsawrl.config.messages import require
from jigsawrl.config.pipelines import Mix, PipelineConfig, PipelinesConfig, is_profile_file
from jigsawrl.config.settings import RunConfig
from jigsawrl.config.shapes import MEDIAN, SPREAD, model_shape, pipeline_shape, prior_lengths
from jigsawrl.config.tasks import ArithmeticTask, CalculatorTask
from jigsawrl.errors import JigsawError
from jigsawrl.graph.cost import Costs
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.hardware import HARDWARE, Hardware, hardware_named
from jigsawrl.graph.interference import Interference
from jigsawrl.graph.profile import LEVELS, Profile, Workload, builtin_profiles, load_profile, table_on
from jigsawrl.graph.shape import ModelShape, PipelineShape
from jigsawrl.simulator.jobs import Floats, Job
from jigsawrl.simulator.setup import job_of, refuse_jobs

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

    def __str__(self) -> str:
        return f"{self.kind}: {self.source}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a pipeline's figures come from."""

    lengths: Figure
    costs: Figure
    notes: tuple[str, ...] = ()
    """What else was assumed."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that a simulation needs, whatever the policy."""

    name: str
    seed: int
    hardware: Hardware
    workers: int
    table: Interference
    """How those who share a worker get along."""
    profile: str
    jobs: tuple[Job, ...]
    origins: tuple[Origin, ...]
    """Of each job."""
    rollout_workers: int | None = None
    """The first ones, that only roll out while the others only train; None: all do both."""


def scene_of(mix: Mix) -> Scene:
    """The pipelines of a run file as jobs. A JigsawError where a name is unknown or the memory cannot hold them."""
    config = mix.config
    _refuse_too_long(mix)
    profile = _profile(config.profile)
    if config.hardware is not None:
        require("hardware", config.hardware.lower(), list(HARDWARE))
    hardware = profile.hardware if config.hardware is None else hardware_named(config.hardware)
    hardware = hardware.limited(config.memory)
    jobs, origins = [], []
    for name, entry in config.pipelines.items():
        if entry.workload is not None:
            job, origin = _from_workload(name, entry, profile, hardware, config.workers, config.seed)
        else:
            job, origin = _from_run(name, mix.runs[name], entry, profile, hardware, config)
        jobs.append(_with_wishes(job, entry))
        origins.append(origin)
    first = config.pools.rollout if config.pools else None
    refuse_jobs(jobs, hardware, config.workers, first)
    return Scene(
        config.name,
        config.seed,
        hardware,
        config.workers,
        table_on(hardware, profile),
        profile.name,
        tuple(jobs),
        tuple(origins),
        first,
    )


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


def _with_wishes(job: Job, entry: PipelineConfig) -> Job:
    wishes = replace(
        job.shape,
        priority=entry.priority,
        max_slowdown=entry.max_slowdown,
        deadline=entry.deadline,
        arrival=entry.arrival,
    )
    return replace(job, shape=wishes, rollout_workers=entry.rollout_workers)


def _from_workload(
    name: str, entry: PipelineConfig, profile: Profile, hardware: Hardware, workers: int, seed: int
) -> tuple[Job, Origin]:
    assert entry.workload is not None
    require(f"pipelines.{name}.workload", entry.workload, list(profile.workloads))
    workload = profile.workload(entry.workload)
    steps = entry.steps or STEPS
    job = job_of(profile, entry.workload, hardware, name=name, steps=steps, seed=seed, tp=entry.tp)
    return job, Origin(_measured_lengths(workload, profile), _known(job.costs, workload, job.shape, workers))


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
    costs = profile.costs(workload.name, hardware).of(model)
    shape = pipeline_shape(name, run, entry)
    if own is not None:
        turns = max(1, round(own.turns))
        waits = own.tool_seconds / max(1, turns - 1)
        shape = replace(shape, prompt_tokens=own.prompt_tokens, turns=turns, tool_seconds=waits)
    shape = replace(
        shape,
        reward_seconds=costs.other_seconds * shape.sequences / workload.sequences,
    )
    key = zlib.crc32(f"{config.seed} {name}".encode())

    def lengths(step: int) -> Floats:
        at = np.random.default_rng((key, step)).random(shape.sequences)
        if own is None:
            return prior_lengths(shape.max_tokens, at)
        logged = own.quantiles[(step - 1) % len(own.quantiles)]
        return np.clip(np.rint(np.interp(at, LEVELS, logged)), 1.0, shape.max_tokens)

    if own is None:
        even = (np.arange(EXPECTED) + 0.5) / EXPECTED
        forecast = Forecast.from_prior(prior_lengths(shape.max_tokens, even), shape.max_tokens)
    else:
        forecast = own.forecast(shape.max_tokens)
    origin = Origin(
        _measured_lengths(own, profile) if own else _prior_of_lengths(run.rollout.max_tokens),
        _known(costs, workload, shape, config.workers),
        tuple(_notes(run, shape, measured=own is not None)),
    )
    return Job(shape, costs, lengths, forecast), origin


def nearest(model: ModelShape, max_tokens: int, workloads: Sequence[Workload]) -> Workload:
    """The measured workload that is most like this one: in the model's size, then in how long answers may be."""

    def distance(workload: Workload) -> tuple[float, float, str]:
        size = abs(math.log(workload.model.parameters / model.parameters))
        return round(size, 2), abs(math.log(workload.max_tokens / max_tokens)), workload.name

    return min(workloads, key=distance)


def _notes(run: RunConfig, shape: PipelineShape, *, measured: bool) -> list[str]:
    notes = []
    if not measured and not isinstance(run.task, ArithmeticTask | CalculatorTask):
        notes.append(f"prompts of {shape.prompt_tokens:,.0f} tokens, a quarter of max_prompt_tokens")
    if shape.turns > 1:
        waits = f"{shape.tool_seconds:g} s between them" if shape.tool_seconds else "none of them waited for"
        notes.append(f"{shape.turns} turns, as many as allowed, {waits}")
    if run.model.lora is not None:
        notes.append("adapters cost as much as training all weights")
    if run.algorithm.dynamic_sampling is not None:
        notes.append("one round of sampling in each step")
    return notes


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
    measured = f"{workload.name} on {workload.gpus} {_measured_on(workload)} (tp {workload.tp})"
    target = f"{workers} {costs.hardware.name} (tp {shape.tp})"
    ratio = costs.model.parameters / workload.model.parameters
    if max(ratio, 1 / ratio) > NEAR:
        how = f"{ratio:,.1f} times larger" if ratio > 1 else f"{1 / ratio:,.0f} times smaller"
        return Figure(
            "prior", f"{shape.model.name} is {how} than {workload.model.name}, nearest in {measured}"
        )
    same_width = (workload.gpus, workload.tp) == (workers, shape.tp)
    if same_width and not costs.derived:
        return Figure("measured", measured)
    model = "" if abs(ratio - 1) < 1e-9 else f"{shape.model.name} on "
    return Figure("carried over", f"{measured} to {model}{target}")


def _measured_on(workload: Workload) -> str:
    """A carried profile's workloads say themselves where they come from."""
    return (
        workload.costs.source.partition("; carried from ")[2].partition(" ")[0]
        or workload.costs.hardware.name
    )
