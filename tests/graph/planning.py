"""Small models and pipelines for planning, with costs made up to be easy to reckon with."""

from __future__ import annotations

import numpy as np

from jigsawrl.graph.cost import Costs, DecodeCost, LinearCost
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.hardware import GIB, Hardware
from jigsawrl.graph.shape import ModelShape, PipelineShape
from jigsawrl.simulator.jobs import Job

UNSEEN = 10_000
"""A step like those that come, by which a pipeline is foreseen."""
MODEL = ModelShape("small", parameters=1e9, layers=20, hidden=2048, kv_heads=4, head_dim=128)
WORKER = Hardware(
    "worker",
    flops=1e15,
    memory_bandwidth=3e12,
    device_bytes=80 * GIB,
    host_bytes=200 * GIB,
    link_bandwidth=400e9,
    host_bandwidth=50e9,
    network_bandwidth=50e9,
    price=1.0,
    source="made up",
)


def costs(slow: float = 1.0) -> Costs:
    """A pass 4 ms and something for each sequence; 10 s of training for 100,000 tokens on four workers."""
    return Costs(
        model=MODEL,
        hardware=WORKER,
        gpus=4,
        tp=1,
        decoding=DecodeCost(4e-3 * slow, 2e-5 * slow, 1e-8 * slow, error=0.1),
        prefilling=LinearCost(0.0, 1e-6, 0.0, error=0.1),
        logprob=LinearCost(0.5, 2e-5 * slow, 0.0, error=0.1),
        ref=LinearCost(0.5, 2e-5 * slow, 0.0, error=0.1),
        grad=LinearCost(1.0, 6e-5 * slow, 0.0, error=0.1),
        optim=0.5,
        sync=0.5,
        rollout_fixed_seconds=0.5,
    )


def job(
    name: str,
    *,
    prompts: int = 32,
    samples: int = 4,
    median: float = 200.0,
    sigma: float = 1.0,
    steps: int = 2,
    seed: int = 0,
    tp: int = 1,
    turns: int = 1,
    tool_seconds: float = 0.0,
    arrival: float = 0.0,
    slow: float = 1.0,
    parameters: float = 1e9,
    priority: int = 0,
    max_slowdown: float | None = None,
    deadline: float | None = None,
    base: str = "",
) -> Job:
    limit = 4096
    shape = PipelineShape(
        name=name,
        model=MODEL if parameters == 1e9 else ModelShape("other", parameters, 20, 2048, 4, 128),
        prompts=prompts,
        samples=samples,
        prompt_tokens=100.0,
        max_tokens=limit,
        steps=steps,
        tp=tp,
        turns=turns,
        tool_seconds=tool_seconds,
        arrival=arrival,
        priority=priority,
        max_slowdown=max_slowdown,
        deadline=deadline,
        base=base,
    )

    def lengths(step: int) -> np.ndarray:
        rng = np.random.default_rng((seed, step))
        return np.clip(np.ceil(median * rng.lognormal(0, sigma, prompts * samples)), 1, limit)

    return Job(shape, costs(slow), lengths, Forecast.from_prior(lengths(UNSEEN), limit))
