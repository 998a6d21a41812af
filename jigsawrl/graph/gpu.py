"""Costs on a GPU before anything was measured: what our engine and trainer were measured to take on an H200, carried
to other models and GPUs by arithmetic and bytes. Followed from the first step on.

    measured                                         0.5B       1.5B       7B
    a decode pass of one sequence, 1,000 tokens      0.63 ms    1.42 ms    3.95 ms
    for each further one                             9.7 us     9.4 us     25 us
    64 and 128 sequences of 8 and 16 prompts begin   7 ms       18 ms
    gradients of 8,192 tokens                        81 ms      180 ms
    an update                                        9 ms       22 ms
"""

from __future__ import annotations

from jigsawrl.graph.cost import UNKNOWN, Costs, DecodeCost, LinearCost
from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.shape import ModelShape

PASS = 0.35e-3
"""Seconds of a decode pass besides moving bytes."""
SEQUENCE = 5e-6
"""Seconds of each of its sequences besides moving bytes."""
READ = 0.85
"""Part of the memory's peak bandwidth at which a pass reads."""
TRAINED = 0.38
"""Part of the peak arithmetic that training reaches."""
ADMITTED = 70e-6
"""Seconds for each sequence that is prefilled, besides its tokens."""
FIXED = 20e-3
"""Seconds of a phase over tokens that no token explains."""
UPDATE = 2.0
"""Times as long as its bytes take that an update of the optimizer takes."""
TRAFFIC = 28
"""Bytes that it reads and writes for a parameter."""


def gpu_costs(model: ModelShape, worker: Hardware, workers: int) -> Costs:
    arithmetic = 1 / (TRAINED * worker.flops)
    token, context = 2 * model.parameters * arithmetic, 4 * model.layers * model.hidden * arithmetic
    read = 1 / (READ * worker.memory_bandwidth)

    def passes(times: float) -> LinearCost:
        return LinearCost(FIXED, times * token / workers, times * context / workers, UNKNOWN)

    return Costs(
        model=model,
        hardware=worker,
        gpus=workers,
        tp=1,
        decoding=DecodeCost(PASS + model.weight_bytes * read, SEQUENCE, model.kv_bytes_per_token * read),
        prefilling=LinearCost(ADMITTED, token, context, UNKNOWN),
        logprob=passes(1),
        ref=passes(1),
        grad=passes(3),
        optim=UPDATE * TRAFFIC * model.parameters / worker.memory_bandwidth,
        sync=FIXED,
        rollout_fixed_seconds=FIXED,
        source="an H200's measurements, carried over by arithmetic and bytes",
        derived=True,
    )
