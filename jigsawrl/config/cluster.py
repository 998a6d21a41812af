"""Cluster files (pools of nodes, and what they cost) and jobs files (what is to run on them, and since when)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from jigsawrl.config.fields import Name, Place, Priority, Settings, Text, refuse
from jigsawrl.config.messages import explain, joined
from jigsawrl.config.pipelines import AtLeastOne, is_profile_file
from jigsawrl.config.runfile import MOST_BYTES, absolute, overridden, read_run_file
from jigsawrl.errors import JigsawError
from jigsawrl.graph.hardware import CPU

Config = TypeVar("Config", bound=BaseModel)
# Bounds far from anything real, so that no sum of times or prices, and no simulation, gets out of hand.
Figure = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=1e-6, le=1_000_000_000)]
Price = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1_000_000)]
Seconds = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=10_000_000)]
Hours = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=1_000_000)]
Since = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1_000_000)]
Memory = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1_000_000_000)]
Number = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Tokens = Annotated[int, Field(strict=True, ge=1, le=100_000_000)]


class KindConfig(Settings):
    """A kind of accelerator of one's own, beside the built-in ones."""

    flops: Figure
    """TFLOP/s of dense 16-bit arithmetic."""
    memory_bandwidth: Figure
    """TB/s of its memory."""
    device_memory: Figure
    """GB."""
    host_memory: Figure = 256.0
    """GB of host memory for each accelerator."""
    link: Figure = 200.0
    """GB/s to the others of its node."""
    host_link: Figure = 24.0
    """GB/s between host and device."""
    network: Figure = 25.0
    """GB/s to other nodes."""
    price: Price
    """Dollars an hour."""


class PoolConfig(Settings):
    """Nodes of one kind."""

    kind: Text
    """h100, h200, a100, h20, h800, cpu (cores of this machine), or one of `kinds`."""
    runs: Literal["rollout", "training", "both"]
    """Which phases its nodes may run."""
    nodes: Number | None = None
    """How many there are; null: as many as are asked for."""
    gpus: Annotated[int, Field(strict=True, ge=1, le=64)] | None = None
    """In each node; null: 8, or none where its kind is cpu."""
    cores: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = None
    """In each node of kind cpu; null: 1."""
    host_memory: Figure | None = None
    """GB of each node that resident jobs may fill; null: what its kind has for each accelerator."""
    price: Price | None = None
    """Dollars an hour for each accelerator, or core; null: its kind's."""

    @model_validator(mode="after")
    def _gpus_or_cores(self) -> PoolConfig:
        if self.is_cpu and self.gpus is not None:
            raise refuse("gpus are given, and a node of kind cpu has none; set cores")
        if self.is_cpu and self.nodes is None:
            raise refuse("needs nodes: a machine has only so many cores")
        if not self.is_cpu and self.cores is not None:
            raise refuse(f"cores are given, and its kind is {self.kind!r}; set gpus, or kind: {CPU}")
        return self

    @property
    def is_cpu(self) -> bool:
        """Whether its nodes are cores of this machine."""
        return self.kind.lower() == CPU

    @property
    def size(self) -> int:
        """GPUs, or cores, of a node."""
        return (self.cores or 1) if self.is_cpu else (self.gpus or 8)


class ClusterConfig(Settings):
    """Pools to rent nodes of, and how to plan."""

    name: Name = "cluster"
    """By default the name of the file."""
    quantile: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    """Of phase durations to plan with; 1: every response at the token limit."""
    max_group: Annotated[int, Field(strict=True, ge=1, le=8)] = 5
    """Jobs in a group, at most."""
    link: Figure = 20.0
    """Gbit/s between pools; new weights cross it once a step."""
    profile: Place = "h100-traces"
    """Measured workloads that durations of models are carried over from: built in, or a file of `jigsaw fit`."""
    kinds: dict[Name, KindConfig] = Field(default_factory=dict)
    """Accelerators of one's own, by name."""
    pools: Annotated[dict[Name, PoolConfig], Field(min_length=1, max_length=32)]
    """By name."""

    @model_validator(mode="after")
    def _cpu_is_built_in(self) -> ClusterConfig:
        if any(name.lower() == CPU for name in self.kinds):
            raise refuse("kinds: cpu is built in; choose another name")
        return self


class JobConfig(Settings):
    """One job: a model and its lengths, or measured seconds, or both."""

    model: Text | None = None
    """A known one, such as Qwen3-8B; null: seconds and memory are given."""
    sequences: Number = 1024
    """In a step: prompts times samples."""
    max_tokens: Tokens = 8192
    """Of a response."""
    prompt_tokens: Tokens = 512
    """Of a prompt, on the mean."""
    turns: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 1
    """Generations of a sequence."""
    tool_seconds: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=10_000_000)] = 0.0
    """Wait of the whole batch for tools, after each turn but the last."""
    rollout: Seconds | None = None
    """Seconds, typically, on the first pool that runs rollouts; null: estimated from the model."""
    training: Seconds | None = None
    """The same on the first pool that runs training."""
    rollout_worst: Seconds | None = None
    """Seconds with every response at the token limit; null: estimated, or the typical ones."""
    training_worst: Seconds | None = None
    """The same of the training."""
    spread: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)] | None = None
    """Of durations from step to step, standard deviation of their logarithm; null: estimated, or none."""
    rollout_nodes: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """Nodes that a rollout takes."""
    training_nodes: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """Nodes that a training takes."""
    rollout_memory: Memory | None = None
    """GB of host memory that it keeps on each rollout node; null: what models of its size keep, or none."""
    training_memory: Memory | None = None
    """The same on each training node."""
    max_slowdown: AtLeastOne = 1.5
    """Times as long as alone, at most: its SLO."""
    steps: Number = 100
    """To make."""
    arrival: Since = 0.0
    """Hours after the start at which it comes."""
    priority: Priority = 0
    """Higher goes first."""
    tenant: Name | None = None
    """Whose it is; nodes that become free go to the tenant who has least."""
    deadline: Hours | None = None
    """Hours after its arrival at which it should be done; null: none."""
    drift: Annotated[float, Field(strict=True, allow_inf_nan=False, gt=-1, le=10)] = 0.0
    """Part by which its phases are longer in the end than in the beginning."""

    @model_validator(mode="after")
    def _known(self) -> JobConfig:
        if self.model is None and (self.rollout is None or self.training is None):
            raise refuse("needs a model, or seconds of both rollout and training")
        for phase in ("rollout", "training"):
            typical, worst = getattr(self, phase), getattr(self, f"{phase}_worst")
            if worst is not None and typical is None:
                raise refuse(f"{phase}_worst needs {phase} beside it")
            if worst is not None and worst < typical:
                raise refuse(f"{phase}_worst is {worst:g}, less than {phase} ({typical:g})")
        return self


class TermsConfig(Settings):
    """What a job that is submitted to a running cluster asks for."""

    max_slowdown: AtLeastOne = 1.5
    """Times as long as alone, at most: its SLO."""
    priority: Priority = 0
    """Higher goes first."""
    tenant: Name | None = None
    """Whose it is; nodes that become free go to the tenant who has least."""
    deadline: Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=1_000_000_000)] | None = None
    """Seconds after its submission at which it should be done; null: none."""
    rollout_nodes: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """Nodes that a rollout takes."""
    training_nodes: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """Nodes that a training takes."""


class FailureConfig(Settings):
    """A node that breaks."""

    node: Text
    """Its pool and number, such as rollout-0."""
    at: Since
    """Hours after the start."""
    hours: Hours
    """Until it works again."""


class JobsConfig(Settings):
    """Jobs, for a plan or, as they arrive, for a simulation."""

    name: Name = "jobs"
    """By default the name of the file."""
    jobs: Annotated[dict[Name, JobConfig], Field(min_length=1, max_length=20_000)]
    """By name."""
    failures: dict[Name, FailureConfig] = Field(default_factory=dict)
    """Broken nodes, by any name."""


def holds_pools(path: Path) -> bool:
    """Whether it is a cluster file; one with pipelines is a run file, whose workers may be in pools too."""
    data = read_run_file(path)
    return "pools" in data and "pipelines" not in data


def load_cluster_file(path: Path, overrides: Sequence[str] = ()) -> ClusterConfig:
    """The pools of a cluster file, with `a.b=c` overrides. A profile's path is relative to the file."""
    return _loaded(ClusterConfig, path, overrides, "cluster file")


def load_jobs_file(path: Path) -> JobsConfig:
    """The jobs of a jobs file."""
    return _loaded(JobsConfig, path, (), "jobs file")


MOST_JOBS_BYTES = 8 << 20
"""Of a file with the 20,000 jobs that it may have at most."""
EXAMPLES = {
    "cluster file": "pools: {all: {kind: h100, runs: both}}",
    "jobs file": "jobs: {a: {rollout: 100, training: 50}}",
}


def _loaded(model: type[Config], path: Path, overrides: Sequence[str], what: str) -> Config:
    try:
        data = overridden(path, overrides, _anchor, MOST_JOBS_BYTES if what == "jobs file" else MOST_BYTES)
    except JigsawError as error:
        text = str(error).replace("run file", what).replace("task: {kind: arithmetic}", EXAMPLES[what])
        raise JigsawError(text) from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = joined(explain(error, model, data)).replace("run file", what)
        raise JigsawError(f"{path}: {lines}") from None


def _anchor(data: dict[str, Any], folder: Path) -> None:
    if is_profile_file(data.get("profile")):
        data["profile"] = absolute(data["profile"], folder)
