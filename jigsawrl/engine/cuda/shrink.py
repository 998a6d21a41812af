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

COLUMNS = 128
"""Of K in a round."""
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
def shrink_tile(
    x,
    a,
    rows,
    slot_of,
    scales,
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
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PIECES: tl.constexpr,
    TELL: tl.constexpr,
):
    """A column is one slot's ranks for one part of the outputs; its rows with other slots get zeros. With TELL,
    `done` counts the columns of chunks that are complete."""
    r = tl.arange(0, RANK)
    k = tl.arange(0, BK)
    i = tl.arange(0, BM)
    m = chunk * BM + i
    there = m < M
    slot = column % SLOTS
    row = tl.load(rows + m, mask=there, other=0)
    mine = (tl.load(slot_of + row, mask=there, other=-1) == slot) & there
    scale = tl.load(scales + slot)
    each = tl.cdiv(tl.cdiv(K, BK), PIECES) * BK
    start = piece * each
    end = tl.minimum(start + each, K)
    line = a + (column * RANK + r).to(tl.int64)[:, None] * K
    acc = tl.zeros((RANK, BM), dtype=tl.float32)
    if tl.max(mine.to(tl.int32), axis=0) > 0:
        for at in range(start, end, BK):
            inside = (at + k < end)[None, :]
            weights = tl.load(line + (at + k)[None, :], mask=inside, other=0.0)
            inputs = tl.load(x + m[:, None] * K + (at + k)[None, :], mask=mine[:, None] & inside, other=0.0)
            acc = tl.dot(weights, tl.trans(inputs), acc)
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
