"""What a pipeline keeps on its workers and in their hosts' memory, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from jigsawrl.graph.shape import ModelShape

OPTIMIZER_BYTES = 12
"""A parameter's float32 copy and Adam's two moments."""
GRADIENT_BYTES = 4
MICRO_BATCH_TOKENS = 8192
ACTIVATIONS_PER_LAYER = 2
"""Bytes kept per token, layer and hidden unit when activations are recomputed."""
ACTIVATIONS_NOW = 64
"""Bytes per token and hidden unit inside the layer that is at work."""
KV_SHARE = 0.2
"""Most of a worker's memory that one engine's cache takes."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Per worker."""

    rollout: float
    training: float
    host: float
    """While the pipeline exists, asleep or awake."""


def memory(
    model: ModelShape,
    *,
    sequences: float,
    tokens: float,
    cache_tokens: int | None = None,
    tp: int,
    workers: int,
    device_bytes: float,
    trained: float | None = None,
    whole: bool = False,
) -> Memory:
    """Of engines that span `tp` workers with `sequences` of up to `tokens` each, and training over `workers`.

    `cache_tokens` are all that an engine keeps of them, where that is told. `trained` parameters are adapters', or
    else all of the model's. `whole`: each worker has all of the training state, all the time.
    """
    cached = sequences * tokens if cache_tokens is None else min(sequences * tokens, cache_tokens)
    cache = min(cached * model.kv_bytes_per_token / tp, KV_SHARE * device_bytes)
    activations = MICRO_BATCH_TOKENS * model.hidden * (ACTIVATIONS_PER_LAYER * model.layers + ACTIVATIONS_NOW)
    parameters = model.parameters if trained is None else trained
    state = parameters * (model.bytes_per_parameter + GRADIENT_BYTES + OPTIMIZER_BYTES)
    state += model.weight_bytes if trained is not None else 0.0
    state /= 1 if whole else workers
    return Memory(
        rollout=(state if whole else model.weight_bytes / tp) + cache,
        training=state + activations,
        host=state,
    )
