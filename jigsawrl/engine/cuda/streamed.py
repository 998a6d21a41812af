"""Matrix products of a decode step whose weights are on their way into shared memory before their inputs are there.

    y[M, N] = x[M, K] w[N, K]^T, and what follows it, in one kernel

As in `linear.py`, but with a ring of rounds in shared memory that is filled by hand: a kernel is launched while the
one before it runs, fills its whole ring with weights, which nothing in a step writes, and only then waits for its
inputs. So memory is read while kernels hand over to each other. It is written in Gluon, the layer below Triton where
shared memory has names; for what it has no ring for (`tilings.py`), and for adapters, there is `linear.py`.
"""

# mypy: ignore-errors
# (A kernel's body is Triton's language, not Python's.)

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jigsawrl.engine.cuda.linear import LAUNCH, Scratch
from jigsawrl.engine.cuda.tilings import PLAIN, RESIDUAL, SWIGLU, Ring, rows_padded

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""As Triton calls it now, and as it did before 3.7."""
_PLAIN, _RESIDUAL, _SWIGLU = gl.constexpr(PLAIN), gl.constexpr(RESIDUAL), gl.constexpr(SWIGLU)


@gluon.jit(do_not_specialize=["M", "norm_tiles"])
def streamed_kernel(
    x,
    w,
    bias,
    out,
    residual,
    next_norm,
    scaled,
    squares,
    norm_tiles,
    partials,
    counters,
    eps,
    M,
    N,
    K,
    SLOTS: gl.constexpr,
    NORM_TILES: gl.constexpr,
    BIAS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    REACH: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    YIELDS: gl.constexpr,
    WARPS: gl.constexpr,
):
    AT_ONCE: gl.constexpr = (not YIELDS) & (EPILOGUE != _PLAIN)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [WARPS, 1], [1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    RING: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if GROUP:
        MMA: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BM, 16]
        )
    else:
        MMA: gl.constexpr = gl.NVMMADistributedLayout(
            version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8]
        )
    tiles = gl.cdiv(N, REACH)
    tile = gl.program_id(0) % tiles
    part = gl.program_id(0) // tiles
    rounds = gl.cdiv(K, BK)
    each = gl.cdiv(rounds, SPLIT)
    first = part * each
    last = gl.minimum(first + each, rounds)

    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], RING)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], RING)
    there_yet = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(there_yet.index(stage), count=32 * WARPS)
    barrier()

    i = gl.arange(0, BN, layout=gl.SliceLayout(1, COPY))
    k = gl.arange(0, BK, layout=gl.SliceLayout(0, COPY))
    if EPILOGUE == _SWIGLU:  # eight rows of the gate, the same eight of up, and so on: a thread has both
        inside = i // 16 * 8 + i % 8
        ours = (inside < REACH) & (tile * REACH + inside < N)
        line = gl.where(ours, tile * REACH + inside + i // 8 % 2 * N, 0)
    else:
        ours = (i < REACH) & (tile * REACH + i < N)
        line = gl.where(ours, tile * REACH + i, 0)
    j = gl.arange(0, BM, layout=gl.SliceLayout(1, COPY))
    w_tile = w + line.to(gl.int64)[:, None] * K + (first * BK + k)[None, :]
    x_tile = x + j[:, None] * K + (first * BK + k)[None, :]
    wanted = gl.expand_dims(ours, 1)
    present = gl.expand_dims(j < M, 1)

    if AT_ONCE:
        # Behind a plain product comes attention, which reads ahead of its own wait what the kernels before the
        # product wrote: it may start once these have ended. The others read nothing ahead but weights.
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES):
        if first + stage < last:
            async_copy.async_copy_global_to_shared(w_ring.index(stage), w_tile + stage * BK, mask=wanted)

    # What the end needs is loaded before the loop, but looked at only behind it, so that nothing waits for it.
    HALF: gl.constexpr = BN // 2 if EPILOGUE == _SWIGLU else BN
    m = gl.arange(0, BM, layout=gl.SliceLayout(1, OUT))
    c = gl.arange(0, HALF, layout=gl.SliceLayout(0, OUT))
    n = tile * REACH + c
    there = m < M
    mine = (c < REACH) & (n < N)
    within = gl.expand_dims(there, 1) & gl.expand_dims(mine, 0)
    if BIAS:
        offset = gl.load(bias + n, mask=mine, other=0.0)
    if EPILOGUE == _RESIDUAL:
        weight = gl.load(next_norm + n, mask=mine, other=0.0)
    gdc_wait()
    if not AT_ONCE:
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES):
        if first + stage < last:
            async_copy.async_copy_global_to_shared(x_ring.index(stage), x_tile + stage * BK, mask=present)
            async_copy.mbarrier_arrive(there_yet.index(stage), increment_count=False)
    if (EPILOGUE == _RESIDUAL) & (BM <= 16):  # where there are registers to keep it in
        old = gl.load(residual + m[:, None] * N + n[None, :], mask=within, other=0.0)
    if NORM_TILES > 0:
        SQUARES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
        t = gl.arange(0, NORM_TILES, layout=gl.SliceLayout(1, SQUARES))
        s = gl.arange(0, BM, layout=gl.SliceLayout(0, SQUARES))
        known = gl.expand_dims(t < norm_tiles, 1) & gl.expand_dims(s < M, 0)
        square = gl.load(squares + t[:, None] * SLOTS + s[None, :], mask=known, other=0.0)

    acc = gl.zeros([BN, BM], gl.float32, MMA)
    slot = 0
    phase = 0
    for at in range(first, last):
        mbarrier.wait(there_yet.index(slot), phase)
        weights = w_ring.index(slot)
        inputs = x_ring.index(slot)
        if GROUP:
            fence_async_shared()
            acc = warpgroup_mma(weights, inputs.permute([1, 0]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
        else:
            tall = weights.load(gl.DotOperandLayout(0, MMA, 2))
            acc = mma_v2(tall, inputs.permute([1, 0]).load(gl.DotOperandLayout(1, MMA, 2)), acc)
        if at + STAGES < last:
            barrier()  # nobody reads this round's place any more
            ahead = (at - first + STAGES) * BK
            async_copy.async_copy_global_to_shared(weights, w_tile + ahead, mask=wanted)
            async_copy.async_copy_global_to_shared(inputs, x_tile + ahead, mask=present)
            async_copy.mbarrier_arrive(there_yet.index(slot), increment_count=False)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase = phase ^ 1

    if SPLIT > 1:
        tall = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
        flat = gl.arange(0, BM, layout=gl.SliceLayout(0, MMA))
        corner = partials + tile * SPLIT * BM * BN + tall[:, None] * BM + flat[None, :]
        gl.store(corner + part * BM * BN, acc)
        barrier()
        arrived = gl.atomic_add(counters + tile, 1, sem="acq_rel")
        if arrived != SPLIT - 1:
            return
        acc = gl.load(corner, cache_modifier=".cg")
        for other in gl.static_range(1, SPLIT):
            acc += gl.load(corner + other * BM * BN, cache_modifier=".cg")
        gl.store(counters + tile, 0)

    if NORM_TILES > 0:
        scale = gl.rsqrt(gl.sum(square, axis=0) / K + eps)
        acc *= gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(0, MMA)), 0)
    if EPILOGUE == _SWIGLU:
        gate, up = acc.reshape([BN // 16, 2, 8, BM]).permute([0, 2, 3, 1]).split()
        gate = gate.to(gl.bfloat16).to(gl.float32)
        up = up.to(gl.bfloat16).to(gl.float32)
        opened = (gate / (1.0 + gl.exp(-gate))).to(gl.bfloat16).to(gl.float32)
        y = (opened * up).to(gl.bfloat16).reshape([HALF, BM]).permute([1, 0])
        gl.store(out + m[:, None] * N + n[None, :], gl.convert_layout(y, OUT), mask=within)
    else:
        acc = gl.convert_layout(acc.permute([1, 0]), OUT)
        if BIAS:
            acc += gl.expand_dims(offset.to(gl.float32), 0)
        y = acc.to(gl.bfloat16)
        if EPILOGUE == _RESIDUAL:
            stream = residual + m[:, None] * N + n[None, :]
            if BM > 16:
                old = gl.load(stream, mask=within, other=0.0)
            new = (old.to(gl.float32) + y.to(gl.float32)).to(gl.bfloat16)
            gl.store(stream, new, mask=within)
            wider = new.to(gl.float32)
            fresh = (wider * gl.expand_dims(weight.to(gl.float32), 0)).to(gl.bfloat16)
            gl.store(scaled + m[:, None] * N + n[None, :], fresh, mask=within)
            mass = gl.sum(gl.where(within, wider * wider, 0.0), axis=1)
            gl.store(squares + tile * SLOTS + m, mass, mask=there)
        else:
            gl.store(out + m[:, None] * N + n[None, :], y, mask=within)


def streamed(
    x: Tensor,
    w: Tensor,
    count: int,
    epilogue: int,
    how: Ring,
    scratch: Scratch,
    *,
    eps: float = 0.0,
    norm_tiles: int = 0,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    residual: Tensor | None = None,
    next_norm: Tensor | None = None,
    yields: bool = False,
) -> int:
    """Launches one product over the first `count` rows of x; returns how many tiles it was cut into."""
    outputs, inputs = w.shape
    if epilogue == SWIGLU:
        outputs //= 2
    tiles = triton.cdiv(outputs, how.reach)
    streamed_kernel[(tiles * how.split,)](
        x,
        w,
        w if bias is None else bias,
        x if out is None else out,
        x if residual is None else residual,
        w if next_norm is None else next_norm,
        scratch.scaled,
        scratch.squares,
        norm_tiles,
        scratch.partials,
        scratch.counters,
        eps,
        count,
        outputs,
        inputs,
        SLOTS=scratch.slots,
        NORM_TILES=triton.next_power_of_2(norm_tiles) if norm_tiles else 0,
        BIAS=bias is not None,
        EPILOGUE=epilogue,
        BM=rows_padded(count),
        BN=how.block(epilogue),
        BK=how.columns,
        REACH=how.reach,
        SPLIT=how.split,
        STAGES=how.stages,
        GROUP=how.group,
        YIELDS=yields,
        WARPS=how.warps,
        num_warps=how.warps,
        **LAUNCH,
    )
    return tiles
