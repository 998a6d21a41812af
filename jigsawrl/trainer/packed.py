"""Causal attention inside packed sequences.

The model sees one flat row of tokens without padding. Where there is a kernel for sequences of several lengths, it
sees the same row. Elsewhere, and only for attention, sequences of about equal length are laid side by side, padded to
the longest of their group: with a causal mask the padding, which stands at the end, is never looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsawrl.trainer.batch import onto

SPREAD = 1.3
"""Within a group the longest sequence is at most this many times the shortest (or SHORT tokens)."""
SHORT = 32


@dataclass(slots=True)
class Group:
    """Sequences laid side by side: `pad` takes flat rows to [count * width], `unpad` brings the real ones back."""

    pad: Tensor
    unpad: Tensor
    count: int
    width: int


class FlashAttention:
    """Attention over flat sequences of these lengths, in this order, by one call of torch's flash attention.

    Through the operator itself: the function around it takes other arguments in every release of torch.
    """

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.longest = max(lengths)
        bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        self.bounds = onto(device, bounds)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, self.bounds, self.bounds, self.longest, self.longest, 0.0, True, False
        )[0]


class PackedAttention:
    """Attention over flat sequences of these lengths, in this order."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        counts = torch.tensor(lengths)
        starts = counts.cumsum(0) - counts
        members = [torch.tensor(group) for group in group_lengths(lengths)]
        self.groups = [_group(starts[group], counts[group], device) for group in members]
        self.order = torch.cat([group.pad[group.unpad] for group in self.groups]).argsort()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs = [_Unpad.apply(self._attend(group, q, k, v), group) for group in self.groups]
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs).index_select(0, self.order)

    def _attend(self, group: Group, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = (group.count, group.width, -1, q.shape[-1])
        laid = [_Pad.apply(x, group).view(shape).transpose(1, 2) for x in (q, k, v)]
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(laid[0], laid[1], laid[2], is_causal=True, enable_gqa=gqa)
        return out.transpose(1, 2).reshape(-1, *q.shape[1:])


def group_lengths(lengths: list[int]) -> list[list[int]]:
    """Indices of sequences grouped by similar length, longest group first."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[groups[-1][0]] <= max(SPREAD * lengths[i], SHORT):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _group(starts: Tensor, lengths: Tensor, device: torch.device) -> Group:
    """The layout of sequences that begin at these flat rows; the first one is the longest."""
    width = int(lengths[0])
    column = torch.arange(width).unsqueeze(0)
    real = column < lengths.unsqueeze(1)
    pad = starts.unsqueeze(1) + column * real
    return Group(pad.flatten().to(device), real.flatten().nonzero().squeeze(1).to(device), len(starts), width)


class _Pad(torch.autograd.Function):
    """Rows copied into a padded layout; the gradient of the padding is zero by causality and is dropped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.rows = group, len(x)
        return x.index_select(0, group.pad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        group = ctx.group
        real = grad.index_select(0, group.unpad)
        rows = group.pad.index_select(0, group.unpad)
        return grad.new_zeros((ctx.rows, *grad.shape[1:])).index_copy_(0, rows, real), None


class _Unpad(torch.autograd.Function):
    """The real rows of a padded layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.rows = group, len(x)
        return x.index_select(0, group.unpad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad.new_zeros((ctx.rows, *grad.shape[1:])).index_copy_(0, ctx.group.unpad, grad), None
