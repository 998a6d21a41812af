"""What a rollout yields: tokens, who chose them, and what they earned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from jigsawrl.trainer.batch import Batch


@dataclass(slots=True)
class Trajectory:
    """One sample of one prompt, all turns. `trained` are the positions of the tokens that the policy chose."""

    prompt: int
    sample: int
    tokens: list[int]
    prompt_length: int
    trained: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reward: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    truncated: bool = False
    turns: int = 0

    def add_turn(self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Tokens of the policy."""
        self.trained += range(len(self.tokens), len(self.tokens) + len(tokens))
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += versions
        self.turns += 1


def make_batch(trajectories: list[Trajectory]) -> Batch:
    """Trajectories as the trainer takes them, with the engine's log-probs."""
    logprobs = [logprob for t in trajectories for logprob in t.logprobs]
    return Batch(
        tokens=[torch.tensor(t.tokens) for t in trajectories],
        trained=[torch.tensor(t.trained, dtype=torch.int64) for t in trajectories],
        values={"engine_logprobs": torch.tensor(logprobs, dtype=torch.float32)},
    )
