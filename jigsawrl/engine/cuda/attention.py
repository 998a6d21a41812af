"""Attention of one new token per sequence over the paged cache, long contexts cut in parts (`cuts.py` says how).

The kernel also does what comes before: q and k norm, rope, and writing the new key and value. The new token is
attended from registers by the part that writes it, so no program reads what another one writes. The part of a context
that is done last puts all of them together, always in the same order.
"""

# mypy: ignore-errors
# (A kernel's body is Triton's language, not Python's.)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jigsawrl.engine.cuda.prefetch import prefetch_l2


@triton.jit
def part_length(position, least, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Cached tokens in each part of a context: whole tiles, all parts but the last alike."""
    return tl.maximum(tl.cdiv(tl.cdiv(position, SPLITS), TILE) * TILE, least)


@triton.jit
def attention_kernel(
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    QK_NORM: tl.constexpr,
    YIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    slot = tl.program_id(2)
    kv = tl.program_id(1)
    part = tl.program_id(0)
    row = tl.load(rows + slot)
    position = tl.load(positions + row)
    length = part_length(position, least, SPLITS, TILE)
    start = part * length
    if (part > 0) & (start >= position):
        return
    end = tl.minimum(start + length, position)
    table = tables + row.to(tl.int64) * width
    d = tl.arange(0, D)
    angle_cos = tl.load(cos + position * D + d)
    angle_sin = tl.load(sin + position * D + d)
    here = tl.load(table + position // BLOCK).to(tl.int64) * BLOCK + position % BLOCK
    if PDL:  # all that is read up to here, and the cache of earlier tokens, is older than the kernel before
        if not YIELDS:
            gdc_launch_dependents()
        lane = tl.arange(0, D // 64) * 64
        for at in range(start, tl.minimum(end, start + AHEAD * TILE), TILE):
            t = tl.minimum(at + tl.arange(0, TILE), end - 1)
            block = tl.load(table + t // BLOCK).to(tl.int64)
            token = ((block * BLOCK + t % BLOCK) * KV_HEADS + kv) * D
            prefetch_l2(keys + token[:, None] + lane[None, :])
            prefetch_l2(values + token[:, None] + lane[None, :])
        gdc_wait()
        if YIELDS:
            gdc_launch_dependents()

    g = tl.arange(0, PADDED)
    other = (d + D // 2) % D
    line = qkv + slot.to(tl.int64) * (KV_HEADS * (GROUP + 2) * D)
    q_line = line + (kv * GROUP + g)[:, None] * D
    q = tl.load(q_line + d[None, :], mask=(g < GROUP)[:, None], other=0.0).to(tl.float32)
    q_turned = tl.load(q_line + other[None, :], mask=(g < GROUP)[:, None], other=0.0).to(tl.float32)
    k_line = line + (KV_HEADS * GROUP + kv) * D
    k = tl.load(k_line + d).to(tl.float32)
    k_turned = tl.load(k_line + other).to(tl.float32)
    v = tl.load(line + (KV_HEADS * (GROUP + 1) + kv) * D + d)
    if QK_NORM:
        q_size = tl.rsqrt(tl.sum(q * q, axis=1) / D + eps)[:, None]
        q = (q * q_size * tl.load(q_norm + d)[None, :]).to(tl.bfloat16).to(tl.float32)
        q_turned = (q_turned * q_size * tl.load(q_norm + other)[None, :]).to(tl.bfloat16).to(tl.float32)
        k_size = tl.rsqrt(tl.sum(k * k) / D + eps)
        k = (k * k_size * tl.load(k_norm + d)).to(tl.bfloat16).to(tl.float32)
        k_turned = (k_turned * k_size * tl.load(k_norm + other)).to(tl.bfloat16).to(tl.float32)
    q = (q * angle_cos[None, :] + q_turned * angle_sin[None, :]).to(tl.bfloat16)
    k_new = (k * angle_cos + k_turned * angle_sin).to(tl.bfloat16)
    new = part == 0
    here = (here * KV_HEADS + kv) * D + d
    tl.store(keys + here, k_new, mask=(d < D) & new)
    tl.store(values + here, v, mask=(d < D) & new)

    score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1) * scale
    top = tl.where(new, score, -float("inf"))
    total = tl.where(new, tl.full((PADDED,), 1.0, tl.float32), 0.0)
    acc = tl.where(new, tl.zeros((PADDED, D), tl.float32) + v.to(tl.float32)[None, :], 0.0)
    for at in range(start, end, TILE):
        t = at + tl.arange(0, TILE)
        there = t < end
        block = tl.load(table + t // BLOCK, mask=there, other=0).to(tl.int64)
        token = ((block * BLOCK + t % BLOCK) * KV_HEADS + kv) * D
        cached = tl.load(keys + token[:, None] + d[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(cached)) * scale
        scores = tl.where(there[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        held = tl.load(values + token[:, None] + d[None, :], mask=there[:, None], other=0.0)
        total = total * fade + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(tl.bfloat16), held, acc * fade[:, None])
        top = higher

    real = g < GROUP
    place = slot * KV_HEADS + kv
    head = place * GROUP + g
    if SPLITS == 1:
        merged = (acc / total[:, None]).to(tl.bfloat16)
        tl.store(out + head[:, None] * D + d[None, :], merged, mask=real[:, None])
    else:
        mine = head.to(tl.int64) * SPLITS + part
        tl.store(part_out + mine[:, None] * D + d[None, :], acc, mask=real[:, None])
        tl.store(part_max + mine, top, mask=real)
        tl.store(part_sum + mine, total, mask=real)
        tl.debug_barrier()
        parts = tl.maximum(tl.cdiv(position, length), 1)
        if tl.atomic_add(counters + place, 1, sem="acq_rel") == parts - 1:
            merge(part_out, part_max, part_sum, out, place, parts, GROUP, D, SPLITS)
            tl.store(counters + place, 0)


@triton.jit
def merge(
    part_out,
    part_max,
    part_sum,
    out,
    place,
    parts,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The parts of a group of heads' attention, weighed by their sums."""
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    CHUNK: tl.constexpr = min(SPLITS, max(1, 64 // HEADS))
    g = tl.arange(0, HEADS)
    p = tl.arange(0, SPLITS)
    d = tl.arange(0, D)
    real = g < GROUP
    head = place * GROUP + g
    first = head.to(tl.int64)[:, None] * SPLITS
    known = real[:, None] & (p < parts)[None, :]
    tops = tl.load(part_max + first + p[None, :], mask=known, other=-float("inf"), cache_modifier=".cg")
    sums = tl.load(part_sum + first + p[None, :], mask=known, other=0.0, cache_modifier=".cg")
    highest = tl.where(real, tl.max(tops, axis=1), 0.0)[:, None]
    total = tl.where(real, tl.sum(sums * tl.exp2(tops - highest), axis=1), 1.0)
    acc = tl.zeros((HEADS, D), tl.float32)
    for at in range(0, parts, CHUNK):
        c = at + tl.arange(0, CHUNK)
        there = real[:, None] & (c < parts)[None, :]
        mine = first + c[None, :]
        top = tl.load(part_max + mine, mask=there, other=-float("inf"), cache_modifier=".cg")
        each = part_out + mine[:, :, None] * D + d[None, None, :]
        held = tl.load(each, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        acc += tl.sum(held * tl.exp2(top - highest)[:, :, None], axis=1)
    merged = (acc / total[:, None]).to(tl.bfloat16)
    tl.store(out + head[:, None] * D + d[None, :], merged, mask=real[:, None])
