"""What a layer does between its matrix products, as operators of torch. Where there are kernels that do the same in
fewer passes over memory, they are passed in instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jigsawrl.model.transformer import Layer


@dataclass(frozen=True, slots=True)
class Halves:
    """What a layer does before attention and after it, products and all, where somebody does each as one."""

    before: Callable[[Layer, Tensor, tuple[Tensor, Tensor]], tuple[Tensor, Tensor, Tensor, Tensor]]
    """layer, x [T, H], cos and sin [T, 1, D] -> x, and q, k and v [T, heads, D] of it"""
    after: Callable[[Layer, Tensor, Tensor], Tensor]
    """layer, x [T, H], what attention has made of it [T, heads * D] -> the next layer's x"""


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
    halves: Halves | None = None
    """Instead of a layer's products and of all of the above, but for the last norm."""


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
