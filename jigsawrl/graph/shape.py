"""What planning needs to know of a pipeline: its model's size and how much of what one step does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder-only transformer, by its numbers."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    bytes_per_parameter: int = 2

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_parameter

    def flops(self, tokens: float, mean_length: float) -> float:
        """Of a forward pass over `tokens` with this mean context: weights and attention."""
        return 2 * self.parameters * tokens + 2 * self.layers * self.hidden * tokens * mean_length


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """One pipeline's step, as the graph is built from it."""

    name: str
    model: ModelShape
    prompts: int
    samples: int
    prompt_tokens: float
    """Mean of a prompt."""
    max_tokens: int
    """Of a response, all turns together."""
    steps: int = 1
    tp: int = 1
    """Workers that one rollout engine spans."""
    turns: int = 1
    tool_seconds: float = 0.0
    """Wait of a whole batch for its tools, after each turn but the last."""
    reward_seconds: float = 0.0
    old_logprobs: bool = True
    """Whether the trainer computes them anew."""
    reference: bool = False
    """Whether a frozen copy scores every token."""
    critic: bool = False
    epochs: int = 1
    priority: int = 0
    max_slowdown: float | None = None
    deadline: float | None = None
    """Seconds from its arrival until it must be done."""
    arrival: float = 0.0
    cache_tokens: int | None = None
    """That an engine's cache holds, where it is told; else all its sequences may be there at their longest."""
    trained: float | None = None
    """Parameters that are trained, where those are not the model's but adapters'."""
    micro_batch_tokens: int | None = 8192
    """Of one pass of the training; None: as many as suit the device."""
    longest: int = 0
    """Tokens of a sequence, which are trained on in one pass."""
    recomputed: bool = True
    """Whether activations are computed again on the way back; else they are kept."""
    base: str = ""
    """The frozen model that it shares with all others of this name: their sequences decode in one batch."""
    whole: bool = False
    """Whether every worker keeps all of the training state while the pipeline is awake, as our own actors do; else it
    is divided among them, and in host memory during a rollout."""
    ranks_on_each: int = 1
    """Times that a worker has that state: ranks that take turns there have one each."""

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def passes(self) -> int:
        """Times that a step trains on its tokens."""
        return self.epochs * (2 if self.critic else 1)


def turns_with_waits(turns: float, tool_seconds: float) -> tuple[int, float]:
    """How often a batch generates, and its wait after each turn but the last, from means: a wait needs two turns."""
    whole = max(2 if tool_seconds > 0 else 1, round(turns))
    return whole, tool_seconds / max(1, whole - 1)
