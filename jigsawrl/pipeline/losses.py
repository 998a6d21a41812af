"""What a micro-batch adds to the loss of its batch.

Tensors are flat: the trained tokens of whole sequences one after the other. Every loss and every metric is a
sum over tokens with the weights of the whole batch. So losses, gradients and metrics of micro-batches and
workers are added, never averaged, and the total does not depend on how the batch was cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from jigsawrl.pipeline.algorithms import Aggregation, KLEstimator, Loss, OldLogprobs

MAX_LOG_RATIO = 20.0
"""Beyond this a ratio of probabilities says only that something is far off; it keeps exp() finite."""


@dataclass(slots=True)
class LossInputs:
    """One micro-batch of t tokens in whole sequences; gradients flow into `logprobs` and `entropy` only.

    What is optional is needed where its coefficient is not 0, and measured wherever it is given.
    """

    logprobs: Tensor
    """[t] of the policy being trained"""
    old_logprobs: Tensor
    """[t] of the policy that the ratio is taken to"""
    advantages: Tensor
    """[t]"""
    weights: Tensor
    """[t] from `aggregation_weights` of the whole batch"""
    sequence: Tensor
    """[t] int64: the sequence in this micro-batch, from 0"""
    ref_logprobs: Tensor | None = None
    """[t] of the frozen reference"""
    entropy: Tensor | None = None
    """[t] of the policy's distributions"""
    engine_logprobs: Tensor | None = None
    """[t] as the engine sampled"""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Which loss, with which coefficients; clips as in `default_clip`."""

    loss: Loss
    clip_low: float
    clip_high: float
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0
    tis_clip: float | None = None
    old_logprobs: OldLogprobs = "recompute"


def aggregation_weights(kind: Aggregation, lengths: Tensor, max_tokens: int) -> Tensor:
    """[T] float64 weight of every token of a whole batch; sequences without tokens count in N.

    token_mean 1/T (DAPO, arXiv 2503.14476), sequence_mean 1/(N len) (GRPO, arXiv 2402.03300),
    constant 1/(N max_tokens) (Dr. GRPO, arXiv 2503.20783).
    """
    match kind:
        case "token_mean":
            tokens = lengths.sum().clamp(min=1).expand_as(lengths)
        case "sequence_mean":
            tokens = len(lengths) * lengths.clamp(min=1)
        case "constant":
            tokens = torch.full_like(lengths, len(lengths) * max_tokens)
        case _:
            assert_never(kind)
    return tokens.double().reciprocal().repeat_interleave(lengths)


def policy_loss(inputs: LossInputs, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of: policy terms + kl_coef KL(policy, reference) - entropy_coef entropy.

    The metrics are sums with the same weights: add them up over the batch, then take `mean_metrics`.
    """
    terms, metrics = policy_terms(inputs, settings)
    if inputs.ref_logprobs is not None:
        metrics["kl_ref"] = kl_estimate(settings.kl_estimator, inputs.logprobs, inputs.ref_logprobs)
    if inputs.entropy is not None:
        metrics["entropy"] = inputs.entropy
    if settings.kl_coef:
        terms = terms + settings.kl_coef * metrics["kl_ref"]
    if settings.entropy_coef:
        terms = terms - settings.entropy_coef * metrics["entropy"]
    sums = {name: (inputs.weights * each.detach()).sum() for name, each in metrics.items()}
    return (inputs.weights * terms).sum(), {**sums, "weight": inputs.weights.sum()}


def policy_terms(inputs: LossInputs, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """[t] what each token adds for its advantage, and metrics [t].

    `tis_clip` bounds the ratio itself where the old log-probs are the engine's. Where they are recomputed it
    bounds pi_old / pi_engine, which then weighs each term.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    if settings.loss == "gspo":
        log_ratio = sequence_log_ratio(log_ratio, inputs.sequence)
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    metrics = {"ratio": ratio}
    if settings.tis_clip is not None and settings.old_logprobs == "engine":
        ratio = metrics["tis_weight"] = ratio.clamp(max=settings.tis_clip)

    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    above, below = metrics["ratio"] > high, metrics["ratio"] < low
    match settings.loss:
        case "ppo" | "dapo" | "gspo":
            terms = clipped_surrogate(ratio, low, high, inputs.advantages)
            metrics["clip_fraction"] = (above & (inputs.advantages > 0)) | (below & (inputs.advantages < 0))
        case "cispo":
            terms = cispo(ratio, low, high, inputs.advantages, inputs.logprobs)
            metrics["clip_fraction"] = above | below
        case _:
            assert_never(settings.loss)

    if settings.tis_clip is not None and settings.old_logprobs == "recompute":
        assert inputs.engine_logprobs is not None
        tis_weight = truncated_ratio(inputs.old_logprobs, inputs.engine_logprobs, settings.tis_clip)
        metrics["tis_weight"] = tis_weight
        terms = terms * tis_weight
    metrics["approx_kl"] = kl_estimate("k3", inputs.old_logprobs, inputs.logprobs.detach())
    return terms, metrics


def mean_metrics(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Weighted means from the metrics of all micro-batches of all workers, added up."""
    weight = float(sums["weight"])
    return {name: float(each) / weight if weight else 0.0 for name, each in sums.items() if name != "weight"}


def clipped_surrogate(ratio: Tensor, low: float, high: float, advantages: Tensor) -> Tensor:
    """-min(ratio A, clip(ratio) A). PPO, arXiv 1707.06347; with a higher `high`, DAPO, arXiv 2503.14476."""
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def cispo(ratio: Tensor, low: float, high: float, advantages: Tensor, logprobs: Tensor) -> Tensor:
    """-sg(clip(ratio)) A log pi: every token keeps its gradient. CISPO, MiniMax-M1, arXiv 2506.13585."""
    return -ratio.clamp(low, high).detach() * advantages * logprobs


def sequence_log_ratio(log_ratio: Tensor, sequence: Tensor) -> Tensor:
    """log of s_i, the geometric mean of a sequence's ratios, at each of its tokens. GSPO, arXiv 2507.18071.

    The gradient is the token's own, as in the paper's GSPO-token: the same as GSPO's where the tokens of a
    sequence have one advantage and one weight, and defined where they have not.
    """
    lengths = torch.bincount(sequence)
    sums = log_ratio.new_zeros(len(lengths)).index_add(0, sequence, log_ratio.detach())
    return (sums / lengths.clamp(min=1))[sequence] + log_ratio - log_ratio.detach()


def truncated_ratio(old_logprobs: Tensor, engine_logprobs: Tensor, clip: float) -> Tensor:
    """min(pi_old / pi_engine, clip). Truncated importance sampling: Ionides 2008, for RL engines Yao 2025."""
    return (old_logprobs - engine_logprobs).clamp(max=MAX_LOG_RATIO).exp().clamp(max=clip).detach()


def kl_estimate(kind: KLEstimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[t] estimates of KL(pi, ref) from tokens of pi. Schulman, "Approximating KL divergence", 2020.

    With d = log pi - log ref, k1 = d and k3 = exp(-d) - 1 + d have the right mean, and k2 = d^2 / 2 nearly.
    In a loss only the gradient counts. That of k1 is grad log pi, of mean 0: it holds nothing back. That of
    k2 is d grad log pi, the gradient of KL(pi, ref). That of k3 is (1 - exp(-d)) grad log pi, of KL(ref, pi).
    """
    difference = logprobs - ref_logprobs
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            difference = difference.clamp(min=-MAX_LOG_RATIO)
            return torch.exp(-difference) - 1 + difference
        case _:
            assert_never(kind)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float | None
) -> Tensor:
    """max((V - R)^2, (V_old + clip(V - V_old) - R)^2) / 2. PPO's critic as first coded, arXiv 1707.06347."""
    errors = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        errors = torch.maximum(errors, (near - returns).square())
    return (weights * errors).sum() / 2
