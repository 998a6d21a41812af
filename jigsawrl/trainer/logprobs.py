"""Log-probs and entropies of given tokens, without ever holding the logits of a whole batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 24
"""Logits held at a time; beyond it they are computed again in the backward pass."""


def token_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs [t] of `targets` and entropies [t] at a temperature, from hidden states [t, H]."""
    if hidden.is_cuda and hidden.dtype == head.dtype == torch.bfloat16:
        from jigsawrl.trainer.cuda import logprobs as fused

        return fused.token_logprobs(hidden, head, targets, temperature, entropy_gradient)
    return chunked_logprobs(hidden, head, targets, temperature, entropy_gradient)


def chunked_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """The same by operators of torch, in any precision on any device."""
    rows = max(1, CHUNK_ELEMENTS // head.shape[0])
    if len(hidden) <= rows:
        return _chunk(hidden, head, targets, temperature, entropy_gradient)
    pieces = [
        checkpoint(_chunk, h, head, t, temperature, entropy_gradient, use_reentrant=False)
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, head)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs = logits.log_softmax(dim=-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        entropies = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropies
