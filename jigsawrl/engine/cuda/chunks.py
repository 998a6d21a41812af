"""Attention of runs of new tokens over the paged cache, which holds the tokens before them and, once they are
written, these too: all sequences of a pass in one launch.

A program has some tokens of one sequence and all query heads that share a key head, as the rows of one tile: keys and
values are read once for all of them. It looks at the cache up to its own last token.
"""

# mypy: ignore-errors
# (A kernel's body is Triton's language, not Python's.)

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from jigsawrl.engine.attention import KVCache
from jigsawrl.model.spec import ModelSpec

FEW = 256
"""Tokens of a pass that is small: it cannot fill the chip, so its programs are small and quick."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a program: tokens times query heads, cached tokens a round, rounds in flight; measured on an H200."""

    rows: int
    keys: int
    stages: int


SMALL, LARGE = Shape(16, 128, 2), Shape(64, 64, 3)
LOG2_E = 1.4426950408889634


@triton.jit
def write_kernel(k, v, slots, keys, values, k_stride, v_stride, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """A token's keys and values into its place in the cache."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    there = i < SIZE
    place = tl.load(slots + token) * SIZE + i
    tl.store(keys + place, tl.load(k + token * k_stride + i, mask=there), mask=there)
    tl.store(values + place, tl.load(v + token * v_stride + i, mask=there), mask=there)


@triton.jit
def chunk_kernel(
    q,
    keys,
    values,
    tables,
    tiles,
    positions,
    out,
    scale,
    q_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    kv = tl.program_id(1)
    tile = tiles + tl.program_id(0) * 4
    first = tl.load(tile)
    count = tl.load(tile + 1)
    end = tl.load(tile + 2).to(tl.int32)
    table = tables + tl.load(tile + 3)
    if count == 0:
        return
    i = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    there = i // GROUP < count
    token = first + i // GROUP
    head = kv * GROUP + i % GROUP
    # A row beyond the last attends the first key: what it computes is finite, and not stored.
    position = tl.load(positions + token, mask=there, other=0).to(tl.int32)
    mine = token[:, None] * q_stride + head[:, None] * D + d[None, :]
    queries = tl.load(q + mine, mask=there[:, None], other=0.0)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for at in range(0, end, KEYS):
        t = at + tl.arange(0, KEYS)
        known = t < end
        block = tl.load(table + t // BLOCK, mask=known, other=0)
        place = ((block * BLOCK + t % BLOCK) * KV_HEADS + kv) * D
        cached = tl.load(keys + place[:, None] + d[None, :], mask=known[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(cached)) * scale
        scores = tl.where(t[None, :] <= position[:, None], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        held = tl.load(values + place[:, None] + d[None, :], mask=known[:, None], other=0.0)
        total = total * fade + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(queries.dtype), held, acc * fade[:, None])
        top = higher
    place = (token[:, None] * (KV_HEADS * GROUP) + head[:, None]) * D + d[None, :]
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=there[:, None])


def shape_for(spec: ModelSpec, tokens: int) -> Shape:
    """In a pass of so many tokens; a program has whole tokens."""
    shape = SMALL if tokens <= FEW else LARGE
    return replace(shape, rows=max(shape.rows, triton.next_power_of_2(spec.heads // spec.kv_heads)))


@dataclass(slots=True)
class ChunkAttention:
    """One pass's attention, on the device but for the number of tiles. Numbers are 64 bits wide."""

    spec: ModelSpec
    cache: KVCache
    positions: Tensor
    slots: Tensor
    """Each token's place in the cache."""
    tiles: Tensor
    """Of each tile its first token, how many there are, cached tokens to look at and where its table begins; a tile
    without tokens is skipped."""
    tables: Tensor
    """Block ids, one sequence's after the other's."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec, (keys, values) = self.spec, self.cache.blocks[layer]
        write_kernel[(len(k),)](
            k,
            v,
            self.slots,
            keys,
            values,
            k.stride(0),
            v.stride(0),
            SIZE=spec.kv_size,
            PADDED=triton.next_power_of_2(spec.kv_size),
            num_warps=1,
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        shape = shape_for(spec, len(q))
        chunk_kernel[(len(self.tiles), spec.kv_heads)](
            q,
            keys,
            values,
            self.tables,
            self.tiles,
            self.positions,
            out,
            LOG2_E / math.sqrt(spec.head_dim),
            q.stride(0),
            KV_HEADS=spec.kv_heads,
            GROUP=spec.heads // spec.kv_heads,
            D=spec.head_dim,
            BLOCK=self.cache.block_size,
            ROWS=shape.rows,
            KEYS=shape.keys,
            num_warps=4,
            num_stages=shape.stages,
        )
        return out
