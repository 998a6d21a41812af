"""What a rollout yields: tokens, who chose them, and what they earned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from jigsawrl.pipeline.rewards import MAX_EXTRAS
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
    reward: float | None = None
    """None where no reward applies to it: then nothing is learned from it."""
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


def rollout_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Figures of a rollout; those of the reward are of the samples that have one, and are absent if none has."""
    usable = rewarded(trajectories)
    rewards = rewards_of(usable).double()
    lengths = torch.tensor([len(t.trained) for t in trajectories], dtype=torch.float64)
    count = len(trajectories)
    values = (
        {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std(correction=0))}
        if usable
        else {}
    )
    values |= {
        "reward/errors": float(sum(t.error is not None for t in trajectories)),
        "reward/none": float(count - len(usable)),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/clip_ratio": sum(t.truncated for t in trajectories) / count,
        "turns/mean": sum(t.turns for t in trajectories) / count,
        "perf/tokens": float(lengths.sum()),
    }
    for name in sorted({name for t in trajectories for name in t.extra})[:MAX_EXTRAS]:
        found = [t.extra[name] for t in trajectories if name in t.extra]
        values.setdefault(f"reward/{name}", math.fsum(found) / len(found))
    return values


def rewarded(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Those that a reward applies to."""
    return [t for t in trajectories if t.reward is not None]


def of_first_prompts(trajectories: list[Trajectory], count: int) -> list[Trajectory]:
    """All trajectories of the prompts that come first, `count` of them."""
    first = set(list(dict.fromkeys(t.prompt for t in trajectories))[:count])
    return [t for t in trajectories if t.prompt in first]


def rewards_of(trajectories: list[Trajectory]) -> torch.Tensor:
    return torch.tensor([t.reward for t in trajectories], dtype=torch.float32)


def groups_of(trajectories: list[Trajectory]) -> torch.Tensor:
    return torch.tensor([t.prompt for t in trajectories])
