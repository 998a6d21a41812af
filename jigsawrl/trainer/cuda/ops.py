"""The operators between the matrix products as kernels, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from jigsawrl.model.ops import Ops
from jigsawrl.trainer.cuda import kernels

PROGRAMS = 1024
"""That share the rows of a norm's gradient: enough for the largest chip, few enough to add up what each has."""
SWIGLU_TILE = 1024


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x, and the scales by which `norm_gradient` knows it again."""
    x = x.contiguous()
    return _norm(x, x, x, weight, eps, False)


def add_norm(x: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x + change, the norm of that, and its scales."""
    x = x.contiguous()
    summed = torch.empty_like(x)
    return summed, *_norm(x, change.contiguous(), summed, weight, eps, True)


def _norm(
    x: Tensor, change: Tensor, summed: Tensor, weight: Tensor, eps: float, add: bool
) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    rows = x.numel() // size
    normed, scales = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    kernels.norm_kernel[(rows,)](
        x,
        change,
        weight,
        summed,
        normed,
        scales,
        eps,
        size,
        HP=_power_of_2(size),
        ADD=add,
        num_warps=_warps(size),
    )
    return normed, scales


def norm_gradient(
    d_normed: Tensor, d_x: Tensor | None, x: Tensor, weight: Tensor, scales: Tensor, trained: bool
) -> tuple[Tensor, Tensor | None]:
    """Of x, with what reaches it from elsewhere added, and of the weight if it is trained."""
    size, rows = x.shape[-1], len(scales)
    programs = min(rows, PROGRAMS)
    out, d_weight = torch.empty_like(x), x.new_empty((programs, size), dtype=torch.float32)
    kernels.norm_gradient_kernel[(programs,)](
        d_normed,
        d_normed if d_x is None else d_x,
        x,
        weight,
        scales,
        out,
        d_weight,
        rows,
        size,
        HP=_power_of_2(size),
        ADD=d_x is not None,
        num_warps=_warps(size),
    )
    return out, d_weight.sum(0).to(weight.dtype) if trained else None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of heads [T, heads, D]."""
    return _rotate(x, cos, sin, torch.empty(x.shape, dtype=x.dtype, device=x.device), 1.0)


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Its gradient, which is the turn back, into heads of `out`."""
    _rotate(x, cos, sin, out, -1.0)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: float) -> Tensor:
    rows, heads, size = x.shape
    if x.stride()[1:] != (size, 1):
        x = x.contiguous()
    kernels.rotate_kernel[(rows,)](
        x,
        cos,
        sin,
        out,
        x.stride(0),
        out.stride(0),
        heads,
        sign,
        N=_power_of_2(heads),
        HALF=size // 2,
        HALF_P=_power_of_2(size // 2),
    )
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    kernels.swiglu_kernel[(rows, _tiles(size))](gate_up, out, size, SIZE=SWIGLU_TILE)
    return out


def swiglu_gradient(d_out: Tensor, gate_up: Tensor) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    d_gate_up = torch.empty_like(gate_up)
    kernels.swiglu_gradient_kernel[(rows, _tiles(size))](d_out, gate_up, d_gate_up, size, SIZE=SWIGLU_TILE)
    return d_gate_up


def _power_of_2(size: int) -> int:
    """The next one."""
    return 1 << (size - 1).bit_length()


def _tiles(size: int) -> int:
    return -(-size // SWIGLU_TILE)


def _warps(size: int) -> int:
    """Of a program with a row of this size: 16 numbers or fewer a thread."""
    return max(1, min(16, _power_of_2(size) // 512))


FUSED = Ops(
    norm=lambda x, weight, eps: norm(x, weight, eps)[0],
    add_norm=lambda x, change, weight, eps: add_norm(x, change, weight, eps)[:2],
    rotate=rotate,
    swiglu=swiglu,
)
"""Without gradients."""
