"""What a job would take and keep on a pool, from its model and its lengths, where nobody has measured it.

Phases come from the cost model: measured workloads carried to this model, hardware and width. What stays resident in
host memory, and how long warm and cold starts take, was measured by RollMux for models of 3B to 32B on nodes of 8
GPUs, and is carried to other sizes between and beyond these points.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from jigsawrl.cluster.jobs import Duration
from jigsawrl.cluster.pools import Pool
from jigsawrl.config.shapes import prior_lengths
from jigsawrl.graph.cost import Costs
from jigsawrl.graph.profile import Profile
from jigsawrl.graph.rollout import rollout_seconds
from jigsawrl.graph.shape import ModelShape
from jigsawrl.simulator.from_config import nearest

ENGINE_SHARE = 0.4
"""Of a device's memory that weights take in an engine, at most; beyond that it spans two devices, then four."""
DONE = 0.8
"""Part of the responses that are done when a rollout is in its tail."""
DRAWS = 9
"""Steps whose lengths are drawn to see how much durations vary."""


@dataclass(frozen=True, slots=True)
class Resident:
    """What a job keeps in the host memory of a node, and how long it takes to start from there or from nothing."""

    rollout_gb: float
    training_gb: float
    warm_rollout: float
    warm_training: float
    cold_seconds: float
    """Of the slower phase: both start at once."""


MEASURED = {
    3e9: Resident(113.4, 156.2, 0.8, 1.9, 26.7),
    7e9: Resident(275.7, 240.0, 0.9, 4.1, 38.8),
    14e9: Resident(445.4, 456.1, 1.8, 4.7, 60.4),
    32e9: Resident(490.3, 520.4, 1.7, 5.9, 81.7),
}
"""By parameters."""


def resident(parameters: float) -> Resident:
    """Of a model of this size: straight between the measured ones; in proportion to the size beyond them."""
    sizes, measured = list(MEASURED), zip(*map(astuple, MEASURED.values()), strict=True)
    figures = [float(np.interp(parameters, sizes, each)) for each in measured]
    if not sizes[0] < parameters < sizes[-1]:
        end = sizes[0] if parameters <= sizes[0] else sizes[-1]
        figures = [each * parameters / end for each in figures]
    return Resident(*figures)


@dataclass(frozen=True, slots=True)
class Work:
    """One step."""

    model: ModelShape
    sequences: int
    max_tokens: int
    prompt_tokens: float
    turns: int = 1
    tool_seconds: float = 0.0
    """Wait of the whole batch after each turn but the last."""


@dataclass(frozen=True, slots=True)
class Phases:
    """Of one step on nodes of one pool."""

    rollout: Duration
    training: Duration
    tail: float
    """The part of a rollout in which less than a fifth of its responses is still going."""


def phases(
    work: Work, pool: Pool, rollout_nodes: int, training_nodes: int, profile: Profile, link_bandwidth: float
) -> Phases:
    """Of this work; new weights cross the link once, in the training phase."""
    measured = nearest(work.model, work.max_tokens, list(profile.workloads.values()))
    costs = measured.costs.on(pool.kind).of(work.model)
    engine = tp(work.model, pool)
    engines = max(1, rollout_nodes * pool.gpus // engine)
    gpus = training_nodes * pool.gpus
    sync = work.model.weight_bytes / link_bandwidth
    rng = np.random.default_rng(zlib.crc32(f"{work.model.name} {work.max_tokens} {work.sequences}".encode()))
    draws = [prior_lengths(work.max_tokens, rng.random(work.sequences)) for _ in range(DRAWS)]
    trainings = [_training(costs, work, lengths, gpus) + sync for lengths in draws]
    mine = [lengths[::engines] for lengths in draws]
    rollouts = [_rollout(costs, work, each, engine) for each in mine]
    until_done = [_rollout(costs, work, np.minimum(each, np.quantile(each, DONE)), engine) for each in mine]
    tails = [1 - part / whole for part, whole in zip(until_done, rollouts, strict=True)]
    limit = np.full(work.sequences, float(work.max_tokens))
    worst = _rollout(costs, work, limit[::engines], engine), _training(costs, work, limit, gpus) + sync
    return Phases(_duration(rollouts, worst[0]), _duration(trainings, worst[1]), statistics.median(tails))


def tp(model: ModelShape, pool: Pool) -> int:
    """Devices that one engine spans."""
    wanted = model.weight_bytes / (ENGINE_SHARE * pool.kind.device_bytes)
    return min(pool.gpus, 2 ** max(0, math.ceil(math.log2(wanted))))


def _rollout(costs: Costs, work: Work, lengths: np.ndarray, tp: int) -> float:
    """The engine that has these sequences; all engines have about the same."""
    waits = work.tool_seconds if work.turns > 1 else 0.0
    return rollout_seconds(costs, lengths, work.prompt_tokens, tp, work.max_tokens, work.turns, waits)


def _training(costs: Costs, work: Work, lengths: np.ndarray, gpus: int) -> float:
    tokens = float(lengths.sum()) + work.sequences * work.prompt_tokens
    mean = tokens / work.sequences
    return (
        costs.token_pass_seconds("logprob", tokens, mean, gpus)
        + costs.token_pass_seconds("grad", tokens, mean, gpus)
        + costs.optim_seconds(gpus)
    )


def _duration(seconds: Sequence[float], worst: float) -> Duration:
    typical = statistics.median(seconds)
    spread = statistics.pstdev([math.log(each) for each in seconds])
    return Duration(min(typical, worst), worst, spread)
