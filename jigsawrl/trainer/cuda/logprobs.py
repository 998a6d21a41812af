"""Log-probs and entropies straight from hidden states: logits are there for some rows at a time, and again on the way
back, where their gradients take their place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsawrl.trainer.cuda import kernels

CHUNK_ELEMENTS = 1 << 29
"""Logits held at a time, two bytes each: enough rows for products at full speed."""
ROWS = 128
"""Chunks are multiples of this many rows, but for the last."""
TILE = 4096


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, normalisers = hidden.new_empty(3, len(hidden), dtype=torch.float32).unbind()
        for rows in _chunks(len(hidden), len(head)):
            logits = F.linear(hidden[rows], head)
            kernels.distribution_kernel[(len(logits),)](
                logits,
                targets[rows],
                logprobs[rows],
                entropies[rows],
                normalisers[rows],
                1 / temperature,
                len(head),
                TILE=TILE,
                num_warps=8,
            )
            del logits
        ctx.save_for_backward(hidden, head, targets, entropies, normalisers)
        ctx.temperature = temperature
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, head, targets, entropies, normalisers = ctx.saved_tensors
        d_logprobs, d_entropies = (grad.float().contiguous() for grad in grads)
        d_hidden = torch.empty_like(hidden)
        d_head = head.new_zeros(head.shape, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in _chunks(len(hidden), len(head)):
            logits = F.linear(hidden[rows], head)
            kernels.distribution_gradient_kernel[(len(logits), -(-len(head) // TILE))](
                logits,
                targets[rows],
                normalisers[rows],
                entropies[rows],
                d_logprobs[rows],
                d_entropies[rows],
                1 / ctx.temperature,
                len(head),
                TILE=TILE,
                num_warps=8,
            )
            torch.mm(logits, head, out=d_hidden[rows])
            if d_head is not None:
                torch.addmm(d_head, logits.T, hidden[rows], out_dtype=torch.float32, out=d_head)
            del logits
        return d_hidden, None if d_head is None else d_head.to(head.dtype), None, None


def token_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs [t] of `targets` and entropies [t] at a temperature, from hidden states [t, H]."""
    logprobs, entropies = _TokenLogprobs.apply(hidden.contiguous(), head, targets, temperature)
    return logprobs, entropies if entropy_gradient else entropies.detach()


def _chunks(count: int, vocabulary: int) -> list[slice]:
    """Rows of about equal chunks."""
    most = max(ROWS, CHUNK_ELEMENTS // vocabulary // ROWS * ROWS)
    pieces = max(1, -(-count // most))
    size = max(1, -(-count // pieces // ROWS) * ROWS)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
