"""How good each trained token was: the advantage estimators, and the shaping of rewards before them.

Tensors are flat: the trained tokens of all N sequences one after the other, T = lengths.sum() in all.
Estimators see the whole batch of a step, never a part of it, because groups and whitening span it; they work
in float64 and answer in the dtype of the rewards. A sequence without tokens counts in its group only.
"""

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from jigsawrl.pipeline.algorithms import Advantage

GRPO_EPSILON = 1e-4
WHITEN_EPSILON = 1e-8


@dataclass(slots=True)
class AdvantageInputs:
    """A batch as the estimators see it: `rewards` fall on the last token, `token_rewards` come on top."""

    rewards: Tensor
    """[N] one reward a sequence"""
    groups: Tensor
    """[N] int64: the prompt it answers; any numbers, in any order"""
    lengths: Tensor
    """[N] int64: trained tokens"""
    token_rewards: Tensor | None = None
    """[T] e.g. the KL penalty"""
    values: Tensor | None = None
    """[T] the critic's values, for gae"""
    gamma: float = 1.0
    lam: float = 1.0


@dataclass(frozen=True, slots=True)
class Advantages:
    """What the policy is trained on [T] and, with a critic, what the critic is trained on [T]."""

    advantages: Tensor
    returns: Tensor | None = None


@torch.no_grad()
def compute_advantages(kind: Advantage, inputs: AdvantageInputs) -> Advantages:
    """Advantages of all trained tokens of a batch."""
    dtype, lengths = inputs.rewards.dtype, inputs.lengths
    match kind:
        case "grpo":
            result = grpo(_sequence_rewards(inputs), inputs.groups).repeat_interleave(lengths)
        case "dr_grpo":
            result = dr_grpo(_sequence_rewards(inputs), inputs.groups).repeat_interleave(lengths)
        case "rloo":
            result = rloo(_sequence_rewards(inputs), inputs.groups).repeat_interleave(lengths)
        case "reinforce_pp":
            result = reinforce_pp(_token_rewards(inputs), lengths, inputs.gamma)
        case "reinforce_pp_baseline":
            result = reinforce_pp_baseline(_sequence_rewards(inputs), inputs.groups, lengths)
        case "gae":
            if inputs.values is None:
                raise ValueError("gae needs the values of a critic")
            values = inputs.values.double()
            raw = gae(_token_rewards(inputs), values, lengths, inputs.gamma, inputs.lam)
            return Advantages(_cast(whiten(raw), dtype), _cast(raw + values, dtype))
        case _:
            assert_never(kind)
    return Advantages(_cast(result, dtype))


def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = (r - mean(group)) / (std(group) + 1e-4), unbiased std. GRPO, DeepSeekMath, arXiv 2402.03300."""
    deviations, group, counts = _deviations(rewards, groups)
    variances = _sums(deviations.square(), group, len(counts)) / (counts - 1).clamp(min=1)
    return deviations / (variances.sqrt() + GRPO_EPSILON)[group]


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = r - mean(group). Dr. GRPO, arXiv 2503.20783."""
    return _deviations(rewards, groups)[0]


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = r - mean(the others of the group), 0 for a sequence alone. RLOO, arXiv 2402.14740."""
    deviations, group, counts = _deviations(rewards, groups)
    return deviations * (counts / (counts - 1).clamp(min=1))[group]


def reinforce_pp(token_rewards: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """A_t = whiten(sum_k gamma^k r_{t+k}), the KL penalty within r. REINFORCE++, arXiv 2501.03262."""
    return whiten(discounted_sums(token_rewards, lengths, gamma))


def reinforce_pp_baseline(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """A = whiten(r - mean(group)) over all tokens. REINFORCE++ with baseline, arXiv 2501.03262."""
    return whiten(dr_grpo(rewards, groups).repeat_interleave(lengths))


def gae(token_rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t. GAE, arXiv 1506.02438."""
    next_values = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    next_values[_last_tokens(lengths)] = 0
    return discounted_sums(token_rewards + gamma * next_values - values, lengths, gamma * lam)


def whiten(values: Tensor) -> Tensor:
    """Values of mean 0 and (unbiased) variance 1; a single value, or equal ones, become 0."""
    if len(values) < 2:
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.var() + WHITEN_EPSILON).sqrt()


def discounted_sums(values: Tensor, lengths: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount * y_{t+1} within each sequence."""
    longest = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(longest, device=lengths.device) < lengths[:, None]
    padded = values.new_zeros(mask.shape)
    padded[mask] = values
    for t in reversed(range(longest - 1)):
        padded[:, t] += discount * padded[:, t + 1]
    return padded[mask]


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int, penalty: float) -> Tensor:
    """[N] 0 up to max_tokens - buffer, then down to -penalty at max_tokens. DAPO, arXiv 2503.14476."""
    return -penalty * ((lengths - (max_tokens - buffer)) / buffer).clamp(0, 1)


def zero_variance_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """[N] bool: all rewards of its group are equal, so that it teaches nothing. DAPO, arXiv 2503.14476."""
    group, counts = _index(groups)
    highest = rewards.new_zeros(len(counts)).scatter_reduce(0, group, rewards, "amax", include_self=False)
    lowest = rewards.new_zeros(len(counts)).scatter_reduce(0, group, rewards, "amin", include_self=False)
    return (highest == lowest)[group]


def _sequence_rewards(inputs: AdvantageInputs) -> Tensor:
    rewards = inputs.rewards.double()
    if inputs.token_rewards is None:
        return rewards
    sequence = torch.arange(len(rewards), device=rewards.device).repeat_interleave(inputs.lengths)
    return rewards + _sums(inputs.token_rewards.double(), sequence, len(rewards))


def _token_rewards(inputs: AdvantageInputs) -> Tensor:
    rewards = inputs.rewards.double()
    result = rewards.new_zeros(int(inputs.lengths.sum()))
    result[_last_tokens(inputs.lengths)] = rewards[inputs.lengths > 0]
    return result if inputs.token_rewards is None else result + inputs.token_rewards.double()


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rewards near the end of float32 have differences beyond it, which become its largest number, not infinity."""
    limits = torch.finfo(dtype)
    return values.clamp(limits.min, limits.max).to(dtype)


def _last_tokens(lengths: Tensor) -> Tensor:
    return (lengths.cumsum(0) - 1)[lengths > 0]


def _deviations(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each reward less the mean of its group, each sequence's group index, and the size of every group."""
    group, counts = _index(groups)
    return rewards - (_sums(rewards, group, len(counts)) / counts)[group], group, counts


def _index(groups: Tensor) -> tuple[Tensor, Tensor]:
    _, group, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    return group, counts


def _sums(values: Tensor, index: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).index_add(0, index, values)
