"""Attention of a decode step where each part of a context has a processor to itself.

As in `attention.py`, but the cache goes through a ring in shared memory that is filled by hand: as much of it as
there is room for is on its way before the kernel waits for the new token's query, key and value.
"""

# mypy: ignore-errors
# (A kernel's body is Triton's language, not Python's.)

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jigsawrl.engine.cuda.streamed import barrier

MOST_HEADS = 16
"""Query heads of a key head that it can take: the tall side of a product on the tensor cores."""
_MOST_HEADS = gl.constexpr(MOST_HEADS)


@gluon.jit
def streamed_attention_kernel(
    qkv,
    keys,
    values,
    tables,
    rows,
    positions,
    cos,
    sin,
    q_norm,
    k_norm,
    out,
    part_out,
    part_max,
    part_sum,
    counters,
    scale,
    eps,
    width,
    least,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    SPLITS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    QK_NORM: gl.constexpr,
    YIELDS: gl.constexpr,
    WARPS: gl.constexpr,
):
    HEADS: gl.constexpr = _MOST_HEADS
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8]
    )
    RING: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    TOKENS: gl.constexpr = gl.SliceLayout(1, COPY)
    LANES: gl.constexpr = gl.SliceLayout(0, COPY)
    part = gl.program_id(0)
    kv = gl.program_id(1)
    slot = gl.program_id(2)
    row = gl.load(rows + slot)
    position = gl.load(positions + row)
    length = gl.maximum(gl.cdiv(gl.cdiv(position, SPLITS), TILE) * TILE, least)
    start = part * length
    if (part > 0) & (start >= position):
        return
    end = gl.minimum(start + length, position)
    table = tables + row.to(gl.int64) * width
    here = gl.load(table + position // BLOCK).to(gl.int64) * BLOCK + position % BLOCK

    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, D], RING)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, D], RING)
    there_yet = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(there_yet.index(stage), count=32 * WARPS)
    barrier()
    # All that is read up to the wait, the cache of earlier tokens too, is older than the kernel before.
    if not YIELDS:
        gdc_launch_dependents()
    place = gl.arange(0, TILE, layout=TOKENS)
    lane = gl.arange(0, D, layout=LANES)
    for stage in gl.static_range(STAGES):
        at = start + stage * TILE
        if at < end:
            t = at + place
            block = gl.load(table + t // BLOCK, mask=t < end, other=0).to(gl.int64)
            token = ((block * BLOCK + t % BLOCK) * KV_HEADS + kv) * D
            inside = gl.expand_dims(t < end, 1)
            async_copy.async_copy_global_to_shared(
                k_ring.index(stage), keys + token[:, None] + lane[None, :], mask=inside
            )
            async_copy.async_copy_global_to_shared(
                v_ring.index(stage), values + token[:, None] + lane[None, :], mask=inside
            )
            async_copy.mbarrier_arrive(there_yet.index(stage), increment_count=False)
    t = start + STAGES * TILE + place
    next_block = gl.load(table + t // BLOCK, mask=t < end, other=0)

    Q: gl.constexpr = COPY
    g = gl.arange(0, HEADS, layout=gl.SliceLayout(1, Q))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, Q))
    other = (d + D // 2) % D
    angle_cos = gl.load(cos + position * D + d)
    angle_sin = gl.load(sin + position * D + d)
    gdc_wait()
    if YIELDS:
        gdc_launch_dependents()

    real = gl.expand_dims(g < GROUP, 1)
    line = qkv + slot.to(gl.int64) * (KV_HEADS * (GROUP + 2) * D)
    q_line = line + (kv * GROUP + g)[:, None] * D
    q = gl.load(q_line + d[None, :], mask=real, other=0.0).to(gl.float32)
    q_turned = gl.load(q_line + other[None, :], mask=real, other=0.0).to(gl.float32)
    k_line = line + (KV_HEADS * GROUP + kv) * D
    k = gl.load(k_line + d).to(gl.float32)
    k_turned = gl.load(k_line + other).to(gl.float32)
    v_line = line + (KV_HEADS * (GROUP + 1) + kv) * D
    v = gl.load(v_line + d)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, MMA))
    v_wide = gl.load(v_line + column).to(gl.float32)
    if QK_NORM:
        q_size = gl.expand_dims(gl.rsqrt(gl.sum(q * q, axis=1) / D + eps), 1)
        q = (q * q_size * gl.expand_dims(gl.load(q_norm + d), 0)).to(gl.bfloat16).to(gl.float32)
        turned_norm = gl.expand_dims(gl.load(q_norm + other), 0)
        q_turned = (q_turned * q_size * turned_norm).to(gl.bfloat16).to(gl.float32)
        k_size = gl.rsqrt(gl.sum(k * k, axis=0) / D + eps)
        k = (k * k_size * gl.load(k_norm + d)).to(gl.bfloat16).to(gl.float32)
        k_turned = (k_turned * k_size * gl.load(k_norm + other)).to(gl.bfloat16).to(gl.float32)
    q = (q * gl.expand_dims(angle_cos, 0) + q_turned * gl.expand_dims(angle_sin, 0)).to(gl.bfloat16)
    k_new = (k * angle_cos + k_turned * angle_sin).to(gl.bfloat16)
    new = part == 0
    here = (here * KV_HEADS + kv) * D + d
    gl.store(keys + here, k_new, mask=(d < D) & new)
    gl.store(values + here, v, mask=(d < D) & new)

    score = gl.sum(q.to(gl.float32) * gl.expand_dims(k_new.to(gl.float32), 0), axis=1) * scale
    score = gl.convert_layout(score, gl.SliceLayout(1, MMA))
    nothing = gl.full([HEADS], -float("inf"), gl.float32, gl.SliceLayout(1, MMA))
    top = gl.where(new, score, nothing)
    total = gl.where(new, gl.full_like(score, 1.0), gl.zeros_like(score))
    acc = gl.zeros([HEADS, D], gl.float32, MMA) + gl.expand_dims(
        gl.where(new, v_wide, gl.zeros_like(v_wide)), 0
    )
    query = gl.convert_layout(q, gl.DotOperandLayout(0, MMA, 2))
    index = 0
    phase = 0
    for at in range(start, end, TILE):
        mbarrier.wait(there_yet.index(index), phase)
        k_tile = k_ring.index(index)
        v_tile = v_ring.index(index)
        cached = k_tile.permute([1, 0]).load(gl.DotOperandLayout(1, MMA, 2))
        scores = mma_v2(query, cached, gl.zeros([HEADS, TILE], gl.float32, MMA)) * scale
        valid = at + gl.arange(0, TILE, layout=gl.SliceLayout(0, MMA)) < end
        scores = gl.where(gl.expand_dims(valid, 0), scores, -float("inf"))
        higher = gl.maximum(top, gl.max(scores, axis=1))
        fade = gl.exp2(top - higher)
        weights = gl.exp2(scores - gl.expand_dims(higher, 1))
        total = total * fade + gl.sum(weights, axis=1)
        top = higher
        held = v_tile.load(gl.DotOperandLayout(1, MMA, 2))
        weights = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, MMA, 2))
        acc = mma_v2(weights, held, acc * gl.expand_dims(fade, 1))
        ahead = at + STAGES * TILE
        if ahead < end:
            t = ahead + place
            token = ((next_block.to(gl.int64) * BLOCK + t % BLOCK) * KV_HEADS + kv) * D
            inside = gl.expand_dims(t < end, 1)
            barrier()  # nobody reads this tile any more
            async_copy.async_copy_global_to_shared(k_tile, keys + token[:, None] + lane[None, :], mask=inside)
            async_copy.async_copy_global_to_shared(
                v_tile, values + token[:, None] + lane[None, :], mask=inside
            )
            async_copy.mbarrier_arrive(there_yet.index(index), increment_count=False)
            t += TILE
            next_block = gl.load(table + t // BLOCK, mask=t < end, other=0)
        index += 1
        if index == STAGES:
            index = 0
            phase = phase ^ 1

    spot = slot * KV_HEADS + kv
    h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, MMA))
    mine = gl.expand_dims(h < GROUP, 1)
    head = spot * GROUP + h
    if SPLITS == 1:
        merged = (acc / gl.expand_dims(total, 1)).to(gl.bfloat16)
        gl.store(out + head[:, None] * D + column[None, :], merged, mask=mine)
    else:
        number = head.to(gl.int64) * SPLITS + part
        gl.store(part_out + number[:, None] * D + column[None, :], acc, mask=mine)
        gl.store(part_max + number, top, mask=h < GROUP)
        gl.store(part_sum + number, total, mask=h < GROUP)
        barrier()
        parts = gl.maximum(gl.cdiv(position, length), 1)
        if gl.atomic_add(counters + spot, 1, sem="acq_rel") == parts - 1:
            merge(part_out, part_max, part_sum, out, spot, parts, GROUP, D, SPLITS, WARPS)
            gl.store(counters + spot, 0)


@gluon.jit
def merge(
    part_out,
    part_max,
    part_sum,
    out,
    spot,
    parts,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    SPLITS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The parts of a group of heads' attention, weighed by their sums."""
    HEADS: gl.constexpr = 8 if GROUP <= 8 else 16
    AT_ONCE: gl.constexpr = 8 if SPLITS > 8 else SPLITS
    FEW: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [WARPS, 1], [1, 0])
    g = gl.arange(0, HEADS, layout=gl.SliceLayout(1, FEW))
    p = gl.arange(0, triton.next_power_of_2(SPLITS), layout=gl.SliceLayout(0, FEW))
    known = gl.expand_dims(g < GROUP, 1) & gl.expand_dims(p < parts, 0)
    number = (spot * GROUP + g).to(gl.int64)[:, None] * SPLITS + p[None, :]
    tops = gl.load(part_max + number, mask=known, other=-float("inf"), cache_modifier=".cg")
    sums = gl.load(part_sum + number, mask=known, other=0.0, cache_modifier=".cg")
    highest = gl.where(g < GROUP, gl.max(tops, axis=1), 0.0)
    total = gl.sum(sums * gl.exp2(tops - gl.expand_dims(highest, 1)), axis=1)
    total = gl.where(g < GROUP, total, 1.0)
    highest = gl.convert_layout(highest, gl.SliceLayout(1, WIDE))
    total = gl.convert_layout(total, gl.SliceLayout(1, WIDE))

    h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, WIDE))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    real = h < GROUP
    first = (spot * GROUP + h).to(gl.int64) * SPLITS
    acc = gl.zeros([HEADS, D], gl.float32, WIDE)
    for at in range(0, parts, AT_ONCE):
        for each in gl.static_range(AT_ONCE):
            there = real & (at + each < parts)
            top = gl.load(part_max + first + at + each, mask=there, other=-float("inf"), cache_modifier=".cg")
            held = gl.load(
                part_out + (first + at + each)[:, None] * D + d[None, :],
                mask=gl.expand_dims(there, 1),
                other=0.0,
                cache_modifier=".cg",
            )
            acc += held * gl.expand_dims(gl.exp2(top - highest), 1)
    merged = (acc / gl.expand_dims(total, 1)).to(gl.bfloat16)
    gl.store(out + (spot * GROUP + h)[:, None] * D + d[None, :], merged, mask=gl.expand_dims(real, 1))
