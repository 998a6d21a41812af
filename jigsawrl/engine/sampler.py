"""Draws tokens from logits with randomness that depends on nothing but the sample's key and the position."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jigsawrl.engine.types import SamplingParams
from jigsawrl.trainer.batch import onto

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def keyed_uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """One number in [0, 1) for each (key, position): splitmix64 seeded by the key, jumped to the position.

    23 bits, so that a float32 product with a total stays below that total.
    """
    z = keys + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN
    z = (z ^ (z >> np.uint64(30))) * MIX_1
    z = (z ^ (z >> np.uint64(27))) * MIX_2
    z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(41)).astype(np.float64) * 2.0**-23).astype(np.float32)


def sample(logits: Tensor, params: list[SamplingParams], uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probs [B] for logits [B, V]; `uniforms` [B] decide by inverse CDF.

    The log-prob is that of the full softmax at the sampling temperature (see `Generated`). Waits for no device.
    """
    logits = logits.float()
    kinds = [params[0]] if all(p is params[0] for p in params) else params
    if any(p.temperature not in (0.0, 1.0) for p in kinds):
        logits = logits / _column([p.temperature or 1.0 for p in kinds], logits.device)
    logprobs = logits.log_softmax(dim=-1)
    probabilities = _truncate(logprobs.exp(), kinds)
    cumulative = probabilities.cumsum(dim=-1)
    thresholds = onto(logits.device, uniforms).unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, thresholds, right=True).clamp_(max=logits.shape[1] - 1)
    if any(p.temperature == 0 for p in kinds):
        greedy = _column([p.temperature == 0 for p in kinds], logits.device)
        tokens = torch.where(greedy, logprobs.argmax(dim=-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def _truncate(probabilities: Tensor, params: list[SamplingParams]) -> Tensor:
    """Cuts by min-p, then top-k, then top-p of what is left, as vLLM does. Not renormalised.

    `params` are one for each row, or one for all.
    """
    device, vocabulary = probabilities.device, probabilities.shape[1]
    if any(p.min_p > 0 for p in params):
        floor = _column([p.min_p for p in params], device)
        keep = probabilities >= floor * probabilities.amax(dim=1, keepdim=True)
        probabilities = probabilities * keep
    if all(p.top_k == 0 and p.top_p >= 1.0 for p in params):
        return probabilities
    ordered, order = probabilities.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(vocabulary, device=device)
    top_k = _column([p.top_k or vocabulary for p in params], device)
    ordered = ordered * (ranks < top_k)
    top_p = _column([p.top_p for p in params], device)
    before = ordered.cumsum(dim=1) - ordered
    ordered = ordered * ((before < top_p * ordered.sum(dim=1, keepdim=True)) | (top_p >= 1.0))
    return torch.zeros_like(probabilities).scatter_(1, order, ordered)


def _column(values: list[float] | list[int] | list[bool], device: torch.device) -> Tensor:
    """One for each row, or one for all."""
    return onto(device, torch.tensor(values)).unsqueeze(1)
