"""The small kernels of a decode step: its start, and what stands between a library's products."""

# mypy: ignore-errors
# (A kernel's body is Triton's language, not Python's.)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin_kernel(
    rows,
    tokens,
    embedding,
    norm,
    x,
    scaled,
    squares,
    flags,
    turn,
    H,
    HP: tl.constexpr,
    FLAGS: tl.constexpr,
    TURNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Embeds the last token of a slot's sequence; none of the adapters' products is done yet, and it is the turn of
    the next place for results."""
    slot = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    if slot == 0:
        tl.store(turn, (tl.load(turn) + 1) % TURNS)
    if FLAGS > 0:  # noqa: SIM102 - one is known when this is compiled, the other is not
        if slot == 0:
            f = tl.arange(0, FLAGS)
            tl.store(flags + f, tl.zeros((FLAGS,), tl.int32))
    h = tl.arange(0, HP)
    there = h < H
    token = tl.load(tokens + tl.load(rows + slot)).to(tl.int64)
    value = tl.load(embedding + token * H + h, mask=there, other=0.0)
    tl.store(x + slot * H + h, value, mask=there)
    wide = value.to(tl.float32)
    weight = tl.load(norm + h, mask=there, other=0.0).to(tl.float32)
    tl.store(scaled + slot * H + h, (wide * weight).to(tl.bfloat16), mask=there)
    tl.store(squares + slot, tl.sum(wide * wide, axis=0))


@triton.jit
def add_norm_kernel(
    x, change, weight, normed, eps, H, HP: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):
    """x += change, and the norm of what comes out."""
    row = tl.program_id(0)
    h = tl.arange(0, HP)
    there = h < H
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = row * H + h
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(change + at, mask=there, other=0.0).to(tl.float32)
        value = value.to(tl.bfloat16)
        tl.store(x + at, value, mask=there)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / H + eps)
    w = tl.load(weight + h, mask=there, other=0.0).to(tl.float32)
    tl.store(normed + at, (value * scale * w).to(tl.bfloat16), mask=there)


@triton.jit
def swiglu_kernel(gate_up, out, F, SIZE: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = f < F
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(gate_up + row * 2 * F + f, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + f, mask=there, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
    tl.store(out + row * F + f, (opened * up).to(tl.bfloat16), mask=there)
