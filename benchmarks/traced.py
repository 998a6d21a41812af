"""Pipelines whose samples are as long as a trace says, for benchmarks: imported by the process that all others are
forked from.

Everything is the real thing: drivers, actors, engine, trainer, rewards, environments. Three things differ. A sample
ends after as many tokens as its key draws from the trace's quantiles, whatever the (random) model says. A run leaves
nothing behind: no states in the store after a step, no checkpoint, no model; at 14 bytes a parameter these would be
measured instead. And an actor on a GPU warms up when it is set up (`warm_up.py`), so that no policy is measured with
kernels that are still compiled and graphs that are still captured; of actors in one process the last one does, beside
the adapters of all.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from warm_up import Shapes, warm_up

from jigsawrl.config.settings import RunConfig
from jigsawrl.config.tasks import DataTask, EnvironmentTask
from jigsawrl.engine import shared
from jigsawrl.engine.sequence import Sequence, sequences_of
from jigsawrl.engine.types import Generation, Request, SampleKey, SampleOutput
from jigsawrl.graph.profile import LEVELS, load_profile
from jigsawrl.pipeline import actor as actors
from jigsawrl.pipeline import loop
from jigsawrl.pipeline.actor import Actor
from jigsawrl.pipeline.prompts import keyed
from jigsawrl.pipeline.rollout import Rollout, rollout_of
from jigsawrl.runtime import shared_actor
from jigsawrl.runtime.multiplexed_env import MultiplexedEnv
from jigsawrl.runtime.shared_actor import House, SharingActor
from jigsawrl.store.memory import return_to_system
from jigsawrl.trainer.checkpoint import CheckpointStore

TRACES = "h100-traces"


@dataclass(frozen=True, slots=True)
class Trace:
    """Whose lengths a pipeline's samples have, and in how many turns, all as long as each other."""

    workload: str
    turns: int
    longest: int
    first: bool = False
    """Whether the run does not count: every other decode step is as alone and every other as in company, so that all
    kernels are compiled, and the shapes of steps are written down."""
    confined: bool = False
    """Whether a policy may confine rollouts to half of the GPU."""

    @classmethod
    def of(cls, config: RunConfig) -> Trace:
        """Where user code gets its settings."""
        task = config.task
        assert isinstance(task, DataTask | EnvironmentTask)
        given = task.params if isinstance(task, EnvironmentTask) else task.reward.params
        first, confined = bool(given.get("first")), bool(given.get("confined"))
        return cls(given["trace"], int(given["turns"]), config.rollout.max_tokens, first, confined)

    def turn(self, key: SampleKey) -> int:
        """Tokens of a turn, the same in every run."""
        drawn = keyed("length", key.seed, key.pipeline, key.step, key.prompt, key.sample, bits=32) / 2**32
        length = min(self.longest, round(float(np.interp(drawn, LEVELS, quantiles(self.workload)))))
        return max(1, -(-length // self.turns))


@lru_cache(maxsize=16)
def quantiles(workload: str) -> tuple[float, ...]:
    """Of its lengths at LEVELS, the mean of its steps."""
    return tuple(np.mean(load_profile(TRACES).workload(workload).quantiles, axis=0).tolist())


# In an actor

of_pipeline: dict[str, Trace] = {}


def traced_sequences(request: Request, *given: Any) -> list[Sequence]:
    """A request's samples, each of which ends at its own length."""
    sequences = sequences_of(request, *given)
    for each in sequences:
        if each.key.pipeline in of_pipeline:
            most = min(of_pipeline[each.key.pipeline].turn(each.key), each.params.max_tokens)
            each.params = replace(each.params, max_tokens=most, ignore_eos=True)
    return sequences


def traced_actor(config: RunConfig, base: Path, device: str, rank: int) -> Actor:
    """An actor that has done a little of everything that it will do."""
    of_pipeline[config.name] = Trace.of(config)
    actor = Actor(config, base, device, rank)
    if actor.device.type == "cuda":
        training = in_turn(Path(config.model.path).parent / "training")
        warm_up(actor, samples_of(config), training, *ahead([config]), of_pipeline[config.name].confined)
    return actor


@contextmanager
def in_turn(lock: Path) -> Iterator[None]:
    """Nobody plans this: there may be memory for one training at a time."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        return_to_system(torch.device("cuda"))


class TracedTenant(SharingActor):
    """An actor on a base that pipelines share."""

    def __init__(self, config: RunConfig, house: House, *given: Any) -> None:
        of_pipeline[config.name] = Trace.of(config)
        super().__init__(config, house, *given)
        everybody = house.place.configs
        others = [house.tenants.get(each.name) for each in everybody if each.name != config.name]
        if self.device.type == "cuda" and all(other is not None and other.actor for other in others):
            samples = sum(map(samples_of, everybody))
            warm_up(self, samples, house.training.used(), *ahead(everybody), confined=False)


def ahead(configs: Iterable[RunConfig]) -> tuple[Shapes, bool]:
    """Of the pipelines of a process: what is known of their steps, and whether that is to be found out."""
    folders, names = zip(*sorted((Path(each.model.path).parent, each.name) for each in configs), strict=True)
    shapes = Shapes(folders[0] / f"{'+'.join(names)}.shapes")
    return shapes, any(trace.first for trace in of_pipeline.values())


def samples_of(config: RunConfig) -> int:
    """That decode at once, at most."""
    rollout = config.rollout
    return min(rollout.max_num_seqs, rollout.prompts_per_step * rollout.samples)


# In a driver


class Ended:
    """Engines whose samples have ended of themselves where they came to their length, which is that of the trace."""

    def __init__(self, engine: Generation, trace: Trace) -> None:
        self.engine = engine
        self.trace = trace
        self.add_request = engine.add_request
        self.has_unfinished = engine.has_unfinished
        self.nudge = engine.nudge
        self.close = engine.close

    def step(self) -> list[SampleOutput]:
        outputs = self.engine.step()
        for output in outputs:
            if len(output.generated.token_ids) != self.trace.turn(output.key):
                raise RuntimeError(
                    f"{output.key} is not as long as the trace says: its actor is not a traced one"
                )
        return [replace(output, finish_reason="stop") for output in outputs]


def traced_rollout(config: RunConfig, tokenizer: Any, engine: Generation, longest: int) -> Rollout:
    return rollout_of(config, tokenizer, Ended(engine, Trace.of(config)), longest)


def remember_nothing(
    self: MultiplexedEnv, step: int, workers: Any, state: Any
) -> Callable[[], dict[str, Any]]:
    """The state of a step, which no traced actor has."""
    return dict


shared.sequences_of = traced_sequences  # type: ignore[attr-defined]
actors.Actor = traced_actor  # type: ignore[assignment, misc]
shared_actor.SharingActor = TracedTenant  # type: ignore[misc]
loop.rollout_of = traced_rollout  # type: ignore[attr-defined]
MultiplexedEnv.remember = remember_nothing  # type: ignore[method-assign]
CheckpointStore.save = lambda self, *given: None  # type: ignore[assignment, method-assign]
Actor.export = lambda self, out: None  # type: ignore[method-assign]
