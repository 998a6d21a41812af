"""Kernels of the training step; each reads and writes every number once. Sums are in float32 and in a fixed order."""

# mypy: ignore-errors
# (A kernel's body is Triton's language, not Python's.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(x, change, weight, summed, normed, scales, eps, H, HP: tl.constexpr, ADD: tl.constexpr):
    """The norm of a row, or of its sum with a change of it; `scales` is kept for the way back."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    there = h < H
    value = tl.load(x + row * H + h, mask=there, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(change + row * H + h, mask=there, other=0.0).to(tl.float32)
        rounded = value.to(summed.dtype.element_ty)
        tl.store(summed + row * H + h, rounded, mask=there)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / H + eps)
    w = tl.load(weight + h, mask=there, other=0.0).to(tl.float32)
    tl.store(normed + row * H + h, (value * scale * w).to(normed.dtype.element_ty), mask=there)
    tl.store(scales + row, scale)


@triton.jit
def norm_gradient_kernel(
    d_normed, d_summed, x, weight, scales, d_x, d_weight, T, H, HP: tl.constexpr, ADD: tl.constexpr
):
    """Gradients of rows, and each program's part of the weight's; with ADD what reaches the sum itself is added."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    h = tl.arange(0, HP)
    there = h < H
    w = tl.load(weight + h, mask=there, other=0.0).to(tl.float32)
    part = tl.zeros([HP], dtype=tl.float32)
    for number in range(program, T, programs):
        row = tl.cast(number, tl.int64)
        scale = tl.load(scales + row)
        unit = tl.load(x + row * H + h, mask=there, other=0.0).to(tl.float32) * scale
        d = tl.load(d_normed + row * H + h, mask=there, other=0.0).to(tl.float32)
        part += d * unit
        d *= w
        d = (d - unit * (tl.sum(d * unit, axis=0) / H)) * scale
        if ADD:
            d += tl.load(d_summed + row * H + h, mask=there, other=0.0).to(tl.float32)
        tl.store(d_x + row * H + h, d.to(d_x.dtype.element_ty), mask=there)
    tl.store(d_weight + program * H + h, part, mask=there)


@triton.jit
def rotate_kernel(
    x,
    cos,
    sin,
    out,
    stride,
    out_stride,
    HEADS,
    sign,
    N: tl.constexpr,
    HALF: tl.constexpr,
    HALF_P: tl.constexpr,
):
    """All heads of a token; with `sign` -1 it turns back, which is the gradient."""
    row = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, N)[:, None], tl.arange(0, HALF_P)[None, :]
    there = (head < HEADS) & (d < HALF)
    at = head * 2 * HALF + d
    first = tl.load(x + row * stride + at, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x + row * stride + at + HALF, mask=there, other=0.0).to(tl.float32)
    c = tl.load(cos + row * 2 * HALF + d, mask=d < HALF, other=0.0)
    s = tl.load(sin + row * 2 * HALF + d, mask=d < HALF, other=0.0) * sign  # the other half has its negative
    place = out + row * out_stride + at
    tl.store(place, (first * c + second * s).to(out.dtype.element_ty), mask=there)
    tl.store(place + HALF, (second * c - first * s).to(out.dtype.element_ty), mask=there)


@triton.jit
def swiglu_kernel(gate_up, out, F, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = f < F
    gate = tl.load(gate_up + row * 2 * F + f, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + f, mask=there, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * F + f, (opened * up).to(out.dtype.element_ty), mask=there)


@triton.jit
def swiglu_gradient_kernel(d_out, gate_up, d_gate_up, F, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = f < F
    d = tl.load(d_out + row * F + f, mask=there, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + row * 2 * F + f, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + f, mask=there, other=0.0).to(tl.float32)
    open_part = 1.0 / (1.0 + tl.exp(-gate))
    d_gate = d * up * open_part * (1.0 + gate * (1.0 - open_part))
    tl.store(d_gate_up + row * 2 * F + f, d_gate.to(d_gate_up.dtype.element_ty), mask=there)
    d_up = d * gate * open_part
    tl.store(d_gate_up + row * 2 * F + F + f, d_up.to(d_gate_up.dtype.element_ty), mask=there)


@triton.jit
def distribution_kernel(
    logits, targets, logprobs, entropies, normalisers, inverse_temperature, V, TILE: tl.constexpr
):
    """Of one row: the log-prob of its target, the entropy and the logarithm of the sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    most, total, weighted = -1e30, 0.0, 0.0  # `weighted`: sum of exp(x - most) (x - most)
    for start in range(0, V, TILE):
        v = start + tl.arange(0, TILE)
        x = tl.load(logits + row * V + v, mask=v < V, other=-1e30).to(tl.float32) * inverse_temperature
        higher = tl.maximum(most, tl.max(x, axis=0))
        shrink = tl.exp(most - higher)
        weighted = shrink * (weighted + (most - higher) * total)
        below = tl.where(v < V, x - higher, 0.0)
        e = tl.where(v < V, tl.exp(below), 0.0)
        total = shrink * total + tl.sum(e, axis=0)
        weighted += tl.sum(e * below, axis=0)
        most = higher
    normaliser = most + tl.log(total)
    target = tl.load(logits + row * V + tl.load(targets + row)).to(tl.float32) * inverse_temperature
    tl.store(logprobs + row, target - normaliser)
    tl.store(entropies + row, tl.log(total) - weighted / total)
    tl.store(normalisers + row, normaliser)


@triton.jit
def distribution_gradient_kernel(
    logits,
    targets,
    normalisers,
    entropies,
    d_logprobs,
    d_entropies,
    inverse_temperature,
    V,
    TILE: tl.constexpr,
):
    """Logits become their gradients, in place."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * V + v, mask=v < V, other=0.0).to(tl.float32) * inverse_temperature
    logprob = x - tl.load(normalisers + row)
    d_logprob, d_entropy = tl.load(d_logprobs + row), tl.load(d_entropies + row)
    d = -tl.exp(logprob) * (d_logprob + d_entropy * (logprob + tl.load(entropies + row)))
    d += tl.where(v == tl.load(targets + row), d_logprob, 0.0)
    tl.store(logits + row * V + v, (d * inverse_temperature).to(logits.dtype.element_ty), mask=v < V)


@triton.jit
def accumulate_kernel(addresses, sizes, tensors, starts, SIZE: tl.constexpr, FIRST: tl.constexpr):
    """A block of one of many pairs of tensors: what is in bfloat16 is added to what is in float32, or takes its place
    if it is the FIRST."""
    block = tl.program_id(0)
    which = tl.load(tensors + block)
    start, size = tl.multiple_of(tl.load(starts + block), SIZE), tl.load(sizes + which)
    i = start + tl.arange(0, SIZE)
    total = tl.multiple_of(tl.load(addresses + 2 * which).to(tl.pointer_type(tl.float32)), 16)
    part = tl.multiple_of(tl.load(addresses + 2 * which + 1).to(tl.pointer_type(tl.bfloat16)), 16)
    if start + SIZE <= size:  # without a mask, in wide reads
        value = tl.load(part + i).to(tl.float32)
        if not FIRST:
            value += tl.load(total + i)
        tl.store(total + i, value)
    else:
        there = i < size
        value = tl.load(part + i, mask=there, other=0.0).to(tl.float32)
        if not FIRST:
            value += tl.load(total + i, mask=there, other=0.0)
        tl.store(total + i, value, mask=there)
