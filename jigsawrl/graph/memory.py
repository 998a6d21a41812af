"""What a pipeline keeps on its workers and in their hosts' memory, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from jigsawrl.graph.shape import ModelShape

OPTIMIZER_BYTES = 12
"""A parameter's float32 copy and Adam's two moments."""
GRADIENT_BYTES = 4
ACTIVATIONS_PER_LAYER = 2
"""Bytes kept per token, layer and hidden unit when activations are recomputed."""
ACTIVATIONS_KEPT = 48
"""Likewise when they are not; measured with our kernels, 0.5B and 1.5B."""
ACTIVATIONS_NOW = 80
"""Bytes per token and hidden unit inside the layer at work: what it keeps, and gradients of what is widest."""
LOGITS = 2 << 30
"""Bytes of the logits that our kernels hold at a time, and of what is summed from them."""
KV_SHARE = 0.2
"""Most of a worker's memory that one engine's cache takes."""
FEWEST_TOKENS, MOST_TOKENS, MOST_KEPT = 4096, 16_384, 8192
"""Of one pass of a training where nobody says how many; the last, where activations are kept. Few keep a GPU waiting
for its host (`gpu_train.py`), all the more where activations are computed again: in a probe on an H200, 0.5B trained
on 70,000 tokens a second in passes of 8,192 and on 100,000 in passes of 16,384. With activations kept it was 115,000
and 121,000, for twice the memory."""
AT_ONCE_SHARE = 1 / 6
"""Most of a GPU's memory that activations of so many tokens take, beyond the fewest."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Per worker."""

    rollout: float
    training: float
    awake: float
    """Between phases, until it is put to sleep."""
    host: float
    """While the pipeline exists, asleep or awake."""

    @property
    def training_apart(self) -> float:
        """Of actors that have no engine, and so no cache."""
        return self.training - (self.awake - self.host)


def activation_bytes(layers: int, hidden: int, kept: bool) -> float:
    """Of a token while it is trained on."""
    return hidden * ((ACTIVATIONS_KEPT if kept else ACTIVATIONS_PER_LAYER) * layers + ACTIVATIONS_NOW)


def tokens_at_once(layers: int, hidden: int, kept: bool, gpu_bytes: float | None) -> int:
    """Tokens of one pass of a training, where a run file names none: a power of two. None: it is not on a GPU."""
    tokens, most = FEWEST_TOKENS, MOST_KEPT if kept else MOST_TOKENS
    room = 0.0 if gpu_bytes is None else AT_ONCE_SHARE * gpu_bytes
    while tokens < most and 2 * tokens * activation_bytes(layers, hidden, kept) <= room:
        tokens *= 2
    return tokens


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
    by_kernels: bool = False,
    micro_batch_tokens: int | None = 8192,
    longest: int = 0,
    recomputed: bool = True,
    ranks_on_each: int = 1,
) -> Memory:
    """Of engines that span `tp` workers with `sequences` of up to `tokens` each, and training over `workers`.

    `cache_tokens` are all that an engine keeps of them, where that is told. `trained` parameters are adapters', or
    else all of the model's. `whole`: each worker has all of the training state and the cache, all the time; the state
    once for each of the ranks on it. `by_kernels`: it trains by those for GPUs, and activations are recomputed or
    kept. A pass of it has the tokens of a micro-batch, as many as `tokens_at_once` says if that is None, and of one
    sequence at least.
    """
    cached = sequences * tokens if cache_tokens is None else min(sequences * tokens, cache_tokens)
    cache = min(cached * model.kv_bytes_per_token / tp, KV_SHARE * device_bytes)
    kept = whole and by_kernels and not recomputed
    at_once = micro_batch_tokens or tokens_at_once(
        model.layers, model.hidden, kept, device_bytes if by_kernels else None
    )
    activations = max(at_once, longest) * activation_bytes(model.layers, model.hidden, kept)
    parameters = model.parameters if trained is None else trained
    state = parameters * (model.bytes_per_parameter + GRADIENT_BYTES + OPTIMIZER_BYTES)
    state += model.weight_bytes if trained is not None else 0.0
    if not whole:
        state /= workers
        return Memory(model.weight_bytes / tp + cache, state + activations, awake=state, host=state)
    if by_kernels:
        activations += LOGITS + parameters * model.bytes_per_parameter  # gradients, before they are added up
    state, activations = state * ranks_on_each, activations * ranks_on_each
    awake = state + cache
    return Memory(rollout=awake, training=awake + activations, awake=awake, host=state)
