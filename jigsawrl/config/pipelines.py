"""Run files with several pipelines: which, on what workers, under which policy.

An ordinary run file counts as one pipeline, so that whatever plans takes either kind of file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from jigsawrl.config.fields import (
    MOST,
    Count,
    Name,
    NotNegative,
    Place,
    Positive,
    Priority,
    Settings,
    Text,
    at_most,
    refuse,
)
from jigsawrl.config.messages import explain, joined
from jigsawrl.config.reserved import alike, is_reserved, refusal
from jigsawrl.config.runfile import absolute, anchor_paths, overridden, read_run_file, validated
from jigsawrl.config.settings import RunConfig
from jigsawrl.errors import JigsawError
from jigsawrl.phases.turns import OrderName

PolicyName = Literal["jigsaw", "serial", "concurrent", "rollout-mux", "rollmux", "rlix", "greedy"]
AtLeastOne = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=1), at_most(MOST)]


def _not_reserved(name: str) -> str:
    if is_reserved(name):
        raise refuse(refusal(name))
    return name


PipelineName = Annotated[Name, AfterValidator(_not_reserved)]
"""The pipeline's folder in the run folder has this name."""


class PipelineConfig(Settings):
    """One pipeline among several: a workload of a profile, or a run file of its own."""

    workload: Text | None = None
    """A workload of the profile; such a pipeline can only be simulated."""
    run: Place | None = None
    """A run file with one pipeline."""
    steps: Count | None = None
    """Steps to make; null: as the run file says, or 10."""
    tp: Count | None = None
    """Workers that one engine spans; null: as measured, or 1."""
    priority: Priority = 0
    """Higher goes first."""
    max_slowdown: AtLeastOne | None = None
    """Times as long as alone, at most; null: no limit."""
    deadline: Positive | None = None
    """Seconds after its arrival at which it should be done; null: none."""
    arrival: NotNegative = 0.0
    """Seconds after the start at which it comes."""
    rollout_workers: tuple[Annotated[int, Field(strict=True)], ...] | None = None
    """Where there are pools, those of the rollout pool that it rolls out on, by number; null: all of them."""

    @model_validator(mode="after")
    def _one_of_two(self) -> PipelineConfig:
        if (self.workload is None) == (self.run is None):
            raise refuse("needs one of workload (of a profile) and run (a run file)")
        return self


@dataclass(frozen=True, slots=True)
class Homes:
    """Actors of each phase of a pipeline, numbered as their workers, and the Gbit/s between the two."""

    rollout: tuple[int, ...]
    training: tuple[int, ...]
    link: float | None
    more: tuple[int, ...] = ()
    """Where there are more ranks than workers to train on: the worker of each actor that has none to itself. Those
    actors have the numbers after the last worker's."""


class PoolsConfig(Settings):
    """Workers that run one phase only, as if they were two kinds of machine with a link between them."""

    rollout: Count
    """Workers that run rollouts: the first ones."""
    training: Count
    """Workers that train: the others."""
    link: Positive | None = None
    """Gbit/s between the two; new weights cross it once a step. null: as fast as memory."""

    def homes(self, entry: PipelineConfig, ranks: int) -> Homes:
        rollout = entry.rollout_workers or tuple(range(self.rollout))
        training = tuple(range(self.rollout, self.rollout + ranks))
        more = tuple(self.rollout + rank % self.training for rank in range(self.training, ranks))
        return Homes(tuple(sorted(rollout)), training, self.link, more)


class PipelinesConfig(Settings):
    """Several pipelines on shared workers."""

    name: Name = "pipelines"
    """By default the name of the run file."""
    seed: Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)] = 0
    """Everything random follows from it."""
    policy: PolicyName = "jigsaw"
    """Who runs where, and when."""
    order: OrderName | None = None
    """Under rollmux with pools, whose phase starts next: as-ready (first come, first served), round-robin (one
    rollout and one training of each in turn) or by-need (the one due first; a worker is kept free for one that
    cannot wait). A cluster writes here what its plan promises. null: as is predicted to end all work first."""
    workers: Annotated[int, Field(strict=True, ge=1, le=4096)] = 4
    """Accelerators."""
    ranks: Annotated[int, Field(strict=True, ge=1, le=4096)] | None = None
    """Data-parallel ranks of each pipeline, on which results depend; null: as many as workers that it trains on when
    the run begins, and so for good."""
    pools: PoolsConfig | None = None
    """Workers for rollouts and workers for training, apart; null: all of them run both."""
    hardware: Text | None = None
    """Their kind; null: the profile's."""
    memory: Positive | None = None
    """GB of each worker that pipelines may fill, asleep ones not counted; null: what it has."""
    profile: Place = "h100-traces"
    """Measured workloads and costs: a built-in profile, or a file of `jigsaw fit` (NAME.json)."""
    pipelines: Annotated[dict[PipelineName, PipelineConfig], Field(min_length=1, max_length=256)]
    """By name."""

    @property
    def gang(self) -> int:
        """Ranks that sum their gradients, of a pipeline whose run file does not say; on fewer workers they take
        turns."""
        return self.ranks or (self.pools.training if self.pools else self.workers)

    @model_validator(mode="after")
    def _pools_are_all_workers(self) -> PipelinesConfig:
        pools = self.pools
        if pools is not None and pools.rollout + pools.training != self.workers:
            both = f"{pools.rollout} for rollouts and {pools.training} for training"
            fix = f"set workers to {pools.rollout + pools.training}"
            raise refuse(f"pools: {both} are not all of the {self.workers} workers; {fix}")
        if pools is not None and self.policy == "rlix":
            raise refuse(
                "pools: rlix lets both phases share one pool; leave them out, or choose policy: rollmux"
            )
        return self

    @model_validator(mode="after")
    def _an_order_is_for_turns_in_pools(self) -> PipelinesConfig:
        if self.order is not None and (self.policy != "rollmux" or self.pools is None):
            raise refuse(
                f"order: only under policy: rollmux with pools do pipelines take turns; leave out order: {self.order}"
            )
        return self

    @model_validator(mode="after")
    def _names_differ_in_more_than_case(self) -> PipelinesConfig:
        for name in self.pipelines:
            if (other := alike(name, self.pipelines)) is not None:
                raise refuse(f"pipelines: {other} and {name} differ in case only; rename one")
        return self

    @model_validator(mode="after")
    def _rollout_workers_are_in_their_pool(self) -> PipelinesConfig:
        for name, entry in self.pipelines.items():
            chosen, count = entry.rollout_workers, self.pools.rollout if self.pools else 0
            if chosen is None:
                continue
            key, which = f"pipelines.{name}.rollout_workers", f"workers 0 to {count - 1}"
            if not count:
                raise refuse(f"{key}: there is no rollout pool; set pools, or leave it out")
            if not chosen:
                raise refuse(f"{key}: [] is nowhere to roll out; name some of {which}, or leave it out")
            if len(set(chosen)) < len(chosen):
                raise refuse(f"{key}: {list(chosen)} names a worker twice")
            if wrong := [worker for worker in chosen if not 0 <= worker < count]:
                raise refuse(f"{key}: {wrong[0]} is not in the rollout pool, which has {which}")
        return self


@dataclass(frozen=True, slots=True)
class Mix:
    """Pipelines, and the run files of those that have one."""

    config: PipelinesConfig
    runs: Mapping[str, RunConfig]


def holds_pipelines(path: Path) -> bool:
    """Whether a run file has several pipelines."""
    return "pipelines" in read_run_file(path)


def load_mix(path: Path, overrides: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> Mix:
    """The pipelines of a run file of either kind, with `a.b=c` overrides and settings from the command line.

    Values are checked. Of what they point to, only run files are read: planning needs no weights, no data and no
    packages.
    """
    given = {key: value for key, value in (options or {}).items() if value is not None}
    data = overridden(path, overrides, _anchor)
    if "pipelines" in data:
        config = checked_mix({**data, **given})
        runs = {name: run_of(Path(entry.run)) for name, entry in config.pipelines.items() if entry.run}
        return Mix(config, runs)
    run = validated(data)
    shared = {"name": run.name, "seed": run.seed, "workers": run.workers, **given}
    return Mix(checked_mix({**shared, "pipelines": {run.name: {"run": str(path)}}}), {run.name: run})


def run_of(path: Path) -> RunConfig:
    data = overridden(path, (), anchor_paths)
    if "pipelines" in data:
        raise JigsawError(f"{path}: holds several pipelines itself; a pipeline's run file holds one")
    try:
        return validated(data)
    except JigsawError as error:
        raise JigsawError(f"{path}: {error}") from None


def checked_mix(data: dict[str, Any]) -> PipelinesConfig:
    try:
        return PipelinesConfig.model_validate(data)
    except ValidationError as error:
        raise JigsawError(joined(explain(error, PipelinesConfig, data))) from None


def _anchor(data: dict[str, Any], folder: Path) -> None:
    """Makes relative paths absolute, in place: those of a run, of run files, of a profile that is a file."""
    anchor_paths(data, folder)
    if is_profile_file(data.get("profile")):
        data["profile"] = absolute(data["profile"], folder)
    pipelines = data.get("pipelines")
    for entry in pipelines.values() if isinstance(pipelines, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("run"), str) and entry["run"]:
            entry["run"] = absolute(entry["run"], folder)


def is_profile_file(profile: Any) -> bool:
    """Whether it names a file and not a built-in profile."""
    return isinstance(profile, str) and (profile.endswith(".json") or os.sep in profile)
