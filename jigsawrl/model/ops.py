"""What a layer does between its matrix products, as operators of torch. Where there are kernels that do the same in
fewer passes over memory, they are passed in instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ops:
    """One way to do them; all ways compute the same."""

    norm: Callable[[Tensor, Tensor, float], Tensor]
    """x [..., n], weight [n], eps -> the root-mean-square norm"""
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """x, change, weight, eps -> x + change, and the norm of that"""
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    """x [T, heads, D], cos and sin [T, 1, D] -> the rotary position embedding"""
    swiglu: Callable[[Tensor], Tensor]
    """gate and up side by side [T, 2 n] -> silu(gate) * up [T, n]"""


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_norm(x: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x + change
    return x, norm(x, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In the half-split layout of Hugging Face's Llama; the sign of the rotation is folded into sin."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


PLAIN = Ops(norm, add_norm, rotate, swiglu)
