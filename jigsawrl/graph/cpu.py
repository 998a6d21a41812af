"""Costs on a CPU before anything was measured: good to about a factor of two, and followed from the first step on."""

from __future__ import annotations

import os

from jigsawrl.graph.cost import UNKNOWN, Costs, DecodeCost, LinearCost
from jigsawrl.graph.hardware import CPU, Hardware
from jigsawrl.graph.shape import ModelShape

FLOPS = 3e10
"""Of one core, float32, as PyTorch reaches them with small matrices."""
BANDWIDTH = 8e9
"""Bytes a second that one core reads."""
PASS = 1.2e-3
"""Seconds of Python and dispatch in a decode pass of a small model."""
FIXED = 5e-3
"""Likewise, of a pass over tokens."""
MEMORY = 0.8
"""Part of the machine's memory that pipelines may fill."""


def cpu_worker(cores: int, workers: int) -> Hardware:
    """A set of cores, with its part of the memory."""
    memory = MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / workers
    return Hardware(
        CPU,
        flops=FLOPS * cores,
        memory_bandwidth=BANDWIDTH * cores,
        device_bytes=memory,
        host_bytes=memory,
        link_bandwidth=BANDWIDTH,
        host_bandwidth=BANDWIDTH,
        network_bandwidth=1e9,
        price=0.0,
        source="typical of one core; the memory is this machine's",
    )


def cpu_costs(model: ModelShape, worker: Hardware, workers: int) -> Costs:
    """By arithmetic and bytes, with the overheads of small models."""
    flops, layers = 2 * model.parameters / worker.flops, 4 * model.layers * model.hidden / worker.flops
    reading = model.weight_bytes / worker.memory_bandwidth

    def passes(times: float) -> LinearCost:
        return LinearCost(FIXED, times * flops / workers, times * layers / workers, UNKNOWN)

    return Costs(
        model=model,
        hardware=worker,
        gpus=workers,
        tp=1,
        decoding=DecodeCost(PASS + reading, flops, model.kv_bytes_per_token / worker.memory_bandwidth),
        prefilling=LinearCost(0.0, flops, layers, UNKNOWN),
        logprob=passes(1),
        ref=passes(1),
        grad=passes(3),
        optim=FIXED + 28 * model.parameters / worker.memory_bandwidth,
        sync=FIXED,
        rollout_fixed_seconds=FIXED,
        source="arithmetic and bytes, nothing measured",
        derived=True,
    )
