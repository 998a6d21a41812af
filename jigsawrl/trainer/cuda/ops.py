"""The operators between the matrix products as kernels with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jigsawrl.model.ops import Ops
from jigsawrl.trainer.cuda import kernels

PROGRAMS = 1024
"""That share the rows of a norm's gradient: enough for the largest chip, few enough to add up what each has."""
SWIGLU_TILE = 1024


class _Norm(torch.autograd.Function):
    """The norm of x; with a change, x + change and the norm of that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Tensor | None, weight: Tensor, eps: float) -> Any:
        size = x.shape[-1]
        x = x.contiguous()
        rows = x.numel() // size
        summed = x if change is None else torch.empty_like(x)
        normed, scales = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
        kernels.norm_kernel[(rows,)](
            x,
            x if change is None else change.contiguous(),
            weight,
            summed,
            normed,
            scales,
            eps,
            size,
            HP=_power_of_2(size),
            ADD=change is not None,
            num_warps=_warps(size),
        )
        ctx.save_for_backward(summed, weight, scales)
        ctx.adds = change is not None
        return (summed, normed) if ctx.adds else normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight, scales = ctx.saved_tensors
        d_normed = grads[-1].contiguous()
        size, rows = x.shape[-1], len(scales)
        programs = min(rows, PROGRAMS)
        d_x, d_weight = torch.empty_like(x), x.new_empty((programs, size), dtype=torch.float32)
        kernels.norm_gradient_kernel[(programs,)](
            d_normed,
            grads[0].contiguous(),
            x,
            weight,
            scales,
            d_x,
            d_weight,
            rows,
            size,
            HP=_power_of_2(size),
            ADD=ctx.adds,
            num_warps=_warps(size),
        )
        trained = ctx.needs_input_grad[2]
        return d_x, d_x if ctx.adds else None, d_weight.sum(0).to(weight.dtype) if trained else None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    rows, heads, size = x.shape
    if x.stride()[1:] != (size, 1):
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernels.rotate_kernel[(rows,)](
        x,
        cos,
        sin,
        out,
        x.stride(0),
        heads,
        sign,
        N=_power_of_2(heads),
        HALF=size // 2,
        HALF_P=_power_of_2(size // 2),
    )
    return out


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        kernels.swiglu_kernel[(rows, _tiles(size))](gate_up, out, size, SIZE=SWIGLU_TILE)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        d_gate_up = torch.empty_like(gate_up)
        kernels.swiglu_gradient_kernel[(rows, _tiles(size))](
            grads[0].contiguous(), gate_up, d_gate_up, size, SIZE=SWIGLU_TILE
        )
        return d_gate_up


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x, None, weight, eps)


def _add_norm(x: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _Norm.apply(x, change, weight, eps)


def _power_of_2(size: int) -> int:
    """The next one."""
    return 1 << (size - 1).bit_length()


def _tiles(size: int) -> int:
    return -(-size // SWIGLU_TILE)


def _warps(size: int) -> int:
    """Of a program with a row of this size: 16 numbers or fewer a thread."""
    return max(1, min(16, _power_of_2(size) // 512))


FUSED = Ops(_norm, _add_norm, _Rotate.apply, _Swiglu.apply)
