"""The first of an adapter's two products: rows of x with one slot's `a`, which has few outputs.

What counts is how soon it is done, so a program takes few rows, and as much of K as it can read in the time that
others would need to hand it their sums. Where K is longer, whoever is last adds the pieces up, always in the same
order.
"""

# mypy: ignore-errors
# (A kernel's body is Triton's language, not Python's.)

from __future__ import annotations

import triton
import triton.language as tl

from jigsawrl.engine.cuda.prefetch import prefetch_l2

REACH = 2048
"""Columns of K in a piece."""
ROWS = 16
"""Of x, at most, that a program takes."""
MANY_ROWS = 64
"""Likewise where rows come in bands: by then there are programs enough."""


def pieces(inputs: int) -> int:
    """That K is cut in."""
    return triton.cdiv(inputs, REACH)


@triton.jit
def prefetch_a(a, column, piece, K, RANK: tl.constexpr, PIECES: tl.constexpr, BK: tl.constexpr):
    """Asks for the beginning of what a program is going to read of `a`."""
    each = tl.cdiv(tl.cdiv(K, BK), PIECES) * BK
    line = a + (column * RANK + tl.arange(0, RANK)).to(tl.int64)[:, None] * K
    prefetch_l2(line + tl.minimum(piece * each + tl.arange(0, 16) * 64, tl.maximum(K, 64) - 64)[None, :])


@triton.jit
def whose(rows, slot_of, column, chunk, M, SLOTS: tl.constexpr, BM: tl.constexpr):
    """Which rows of a chunk have a column's slot. Inside a step that is known before a kernel's inputs are there."""
    m = chunk * BM + tl.arange(0, BM)
    row = tl.load(rows + m, mask=m < M, other=0)
    return (tl.load(slot_of + row, mask=m < M, other=-1) == column % SLOTS) & (m < M)


@triton.jit
def shrink_tile(
    x,
    a,
    mine,
    scale,
    low,
    partials,
    counters,
    done,
    column,
    piece,
    chunk,
    M,
    K,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PIECES: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,
    TELL: tl.constexpr,
):
    """A column is one slot's ranks for one part of the outputs; rows that are not `mine` get zeros. With TELL,
    `done` counts the columns of chunks that are complete."""
    r = tl.arange(0, RANK)
    k = tl.arange(0, BK)
    i = tl.arange(0, BM)
    m = chunk * BM + i
    there = m < M
    each = tl.cdiv(tl.cdiv(K, BK), PIECES) * BK
    start = piece * each
    end = tl.minimum(start + each, K)
    line = a + (column * RANK + r).to(tl.int64)[:, None] * K
    any_mine = tl.max(mine.to(tl.int32), axis=0) > 0
    if SLICES == 1:
        acc = tl.zeros((RANK, BM), dtype=tl.float32)
        if any_mine:
            for at in tl.range(start, end, BK, num_stages=DEPTH):
                inside = (at + k < end)[None, :]
                weights = tl.load(line + (at + k)[None, :], mask=inside, other=0.0)
                inputs = tl.load(
                    x + m[:, None] * K + (at + k)[None, :], mask=mine[:, None] & inside, other=0.0
                )
                acc = tl.dot(weights, tl.trans(inputs), acc)
    else:
        # A warp for each slice of the columns: none waits for another before the end.
        EACH: tl.constexpr = BK // SLICES
        k3 = tl.arange(0, SLICES)[:, None, None] * EACH + tl.arange(0, EACH)[None, None, :]
        line3, x3, mine3 = line[None, :, :], (x + m[:, None] * K)[None, :, :], mine[None, :, None]
        sums = tl.zeros((SLICES, RANK, BM), dtype=tl.float32)
        if any_mine:
            for at in tl.range(start, end, BK, num_stages=DEPTH):
                inside = at + k3 < end
                weights = tl.load(line3 + (at + k3), mask=inside, other=0.0)
                inputs = tl.load(x3 + (at + k3), mask=mine3 & inside, other=0.0)
                sums = tl.dot(weights, tl.permute(inputs, (0, 2, 1)), sums)
        acc = tl.sum(sums, axis=0)
    out = low + m[None, :] * WIDTH + (column * RANK + r)[:, None]
    if PIECES == 1:
        tl.store(out, (acc * scale).to(tl.bfloat16), mask=there[None, :])
        if TELL:
            tl.debug_barrier()
            tl.atomic_add(done, 1, sem="release")
    else:
        tile = chunk * (WIDTH // RANK) + column
        place = partials + tile * PIECES * RANK * BM + r[:, None] * BM + i[None, :]
        tl.store(place + piece * RANK * BM, acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if arrived == PIECES - 1:
            total = tl.load(place, cache_modifier=".cg")
            for other in tl.static_range(1, PIECES):
                total += tl.load(place + other * RANK * BM, cache_modifier=".cg")
            tl.store(counters + tile, 0)
            tl.store(out, (total * scale).to(tl.bfloat16), mask=there[None, :])
            if TELL:
                tl.debug_barrier()
                tl.atomic_add(done, 1, sem="release")
