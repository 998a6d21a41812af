"""Matrix products of a decode step, for so few rows that reading the weights is what takes the time.

    y[M, N] = x[M, K] w[N, K]^T, and what follows it, in one kernel

A norm costs no pass of its own. Whoever writes the residual stream x also writes `scaled`, which is x times the
next norm's weight, and its tile's sums of x^2; the product of `scaled` is then divided by each row's root mean
square at its end. Where a tile's rows of w are too few to keep the memory busy, K is cut in parts; the part that
arrives last adds them up, always in the same order.

Adapters cost no launch of their own: the first programs of a product do the narrow first half of what they add, and
the others wait for it once they have read their weights. Programs begin in the order of their numbers and the first
ones wait for nobody, so this comes to an end however many of them run at a time.

Each kernel is launched while the one before it runs (programmatic dependent launch). It reads its first weights into
shared memory and pulls the next ones into L2, for nothing in a step writes any, and only then waits for its inputs.
"""

# mypy: ignore-errors
# (A kernel's body is Triton's language, not Python's.)

from __future__ import annotations

import os
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jigsawrl.engine.cuda.prefetch import prefetch_l2
from jigsawrl.engine.cuda.shrink import MANY_ROWS, pieces, prefetch_a, shrink_tile, whose
from jigsawrl.engine.cuda.shrink import ROWS as LOW_ROWS
from jigsawrl.engine.cuda.tilings import (
    HEAD,
    PLAIN,
    RESIDUAL,
    SWIGLU,
    Tiling,
    rounds_of_adapters,
    rows_padded,
)

DEPENDENT = os.environ.get("TRITON_INTERPRET") != "1"
"""Triton's interpreter, which runs kernels on a CPU, knows no dependent launch."""
LAUNCH = {"launch_pdl": True} if DEPENDENT else {}
_PLAIN, _RESIDUAL = tl.constexpr(PLAIN), tl.constexpr(RESIDUAL)
_SWIGLU, _HEAD = tl.constexpr(SWIGLU), tl.constexpr(HEAD)


@triton.jit(do_not_specialize=["M", "norm_tiles", "flag", "bands"])
def linear_kernel(
    x,
    w,
    bias,
    out,
    residual,
    next_norm,
    scaled,
    squares,
    norm_tiles,
    rows,
    temperatures,
    maxima,
    sums,
    partials,
    counters,
    a,
    b,
    scales,
    slot_of,
    low,
    low_partials,
    low_counters,
    flags,
    flag,
    eps,
    bands,
    M,
    N,
    K,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    PIECES: tl.constexpr,
    LOW_BM: tl.constexpr,
    LOW_BK: tl.constexpr,
    LOW_DEPTH: tl.constexpr,
    LOW_SLICES: tl.constexpr,
    SLOTS: tl.constexpr,
    NORM_TILES: tl.constexpr,
    BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    REACH: tl.constexpr,
    SPLIT: tl.constexpr,
    SWAP: tl.constexpr,
    EARLY: tl.constexpr,
    YIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    AT_ONCE: tl.constexpr = PDL & (not YIELDS) & (EPILOGUE != _PLAIN)
    ONCE_READY: tl.constexpr = PDL & (YIELDS | (EPILOGUE == _PLAIN))
    if RANKS > 0:
        NARROW: tl.constexpr = PARTS * RANKS // RANK
        chunks = bands * BM // LOW_BM
        narrow_tiles = NARROW * chunks
        number = tl.program_id(0)
        if number < narrow_tiles * PIECES:
            column = number % NARROW
            chunk = number // NARROW % chunks
            piece = number // narrow_tiles
            if AT_ONCE:
                gdc_launch_dependents()
            if PDL:
                prefetch_a(a, column, piece, K, RANK, PIECES, LOW_BK)
            mine = whose(rows, slot_of, column, chunk, M, RANKS // RANK, LOW_BM)
            scale = tl.load(scales + column % (RANKS // RANK))
            if PDL:
                gdc_wait()
            if ONCE_READY:
                gdc_launch_dependents()
            shrink_tile(
                x, a, mine, scale, low, low_partials, low_counters, flags + flag, column, piece, chunk,
                M, K, PARTS * RANKS, RANK, LOW_BM, LOW_BK, PIECES, LOW_DEPTH, LOW_SLICES, True,
            )  # fmt: skip
            return
        number -= narrow_tiles * PIECES
    else:
        number = tl.program_id(0)
    # Bands of rows are neighbours, so that what one reads of w the others find in L2.
    place = number % (bands * tl.cdiv(N, REACH))
    part = number // (bands * tl.cdiv(N, REACH))
    tile = place // bands
    j = tl.arange(0, BM)
    m = place % bands * BM + j
    i = tl.arange(0, BN)
    k = tl.arange(0, BK)
    if EPILOGUE == _SWIGLU:  # half of a tile are rows of the gate, half the same rows of up
        HALF: tl.constexpr = BN // 2
        n = tile * REACH + i % HALF
        ours = (i % HALF < REACH) & (n < N)
        line = tl.where(ours, n + (i // HALF) * N, 0)
    else:
        n = tile * REACH + i
        ours = (i < REACH) & (n < N)
        line = tl.where(ours, n, 0)
    PARTS_OF_K: tl.constexpr = SPLIT + 1 if (RANKS > 0) & (SPLIT > 1) else SPLIT
    rounds = tl.cdiv(K, BK)
    each = tl.cdiv(rounds, SPLIT)
    first = part * each
    last = tl.minimum(first + each, rounds)
    w_tile = w + line.to(tl.int64)[:, None] * K + (first * BK + EARLY + k)[None, :]
    x_tile = x + m[:, None] * K + (first * BK + EARLY + k)[None, :]
    # What the end needs is loaded before the loop, but looked at only behind it, so that nothing waits for it.
    if BIAS:
        offset = tl.load(bias + n, mask=ours, other=0.0)
    if EPILOGUE == _RESIDUAL:
        weight = tl.load(next_norm + n, mask=ours, other=0.0)
    if AT_ONCE:
        # Behind a plain product comes attention, which reads ahead of its own wait what the kernels before the
        # product wrote: it may start once these have ended. The others read nothing ahead but weights.
        gdc_launch_dependents()
    if EARLY > 0:  # whose turn comes behind the loop, so that it begins at once
        e = first * BK + tl.arange(0, EARLY)
        ready = e < last * BK
        early_w = tl.load(
            w + line.to(tl.int64)[:, None] * K + e[None, :], mask=ours[:, None] & ready[None, :], other=0.0
        )
    if PDL:
        LINES: tl.constexpr = 2 if BM == 8 else 4
        start = tl.minimum(first * BK + EARLY + tl.arange(0, LINES) * 64, tl.maximum(last * BK, 64) - 64)
        prefetch_l2(w + line.to(tl.int64)[:, None] * K + start[None, :])
        if RANKS > 0:
            lead = tl.arange(0, (RANKS + 63) // 64) * 64
            prefetch_l2(b + line.to(tl.int64)[:, None] * RANKS + lead[None, :])
        gdc_wait()
    if ONCE_READY:
        gdc_launch_dependents()

    there = m < M
    if (EPILOGUE == _RESIDUAL) & (BM <= 16):  # where there are registers to keep it in
        mask = there[:, None] & ours[None, :]
        old = tl.load(residual + m[:, None] * N + n[None, :], mask=mask, other=0.0)
    if NORM_TILES > 0:
        t = tl.arange(0, NORM_TILES)
        known = (t < norm_tiles)[:, None] & there[None, :]
        square = tl.load(squares + t[:, None] * SLOTS + m[None, :], mask=known, other=0.0)
    if EARLY > 0:
        early_x = tl.load(x + m[:, None] * K + e[None, :], mask=there[:, None] & ready[None, :], other=0.0)
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), dtype=tl.float32)
    for _ in range(first + EARLY // BK, last):
        weights = tl.load(w_tile, mask=ours[:, None], other=0.0)
        inputs = tl.load(x_tile, mask=there[:, None], other=0.0)
        acc = tl.dot(weights, tl.trans(inputs), acc) if SWAP else tl.dot(inputs, tl.trans(weights), acc)
        w_tile += BK
        x_tile += BK
    if EARLY > 0:
        acc = tl.dot(early_w, tl.trans(early_x), acc) if SWAP else tl.dot(early_x, tl.trans(early_w), acc)

    if RANKS > 0:  # noqa: SIM102 - one is known when this is compiled, the other is not
        # The second half: some further columns of K, and where K is cut in parts, one more part.
        if part == PARTS_OF_K - 1:
            while tl.atomic_add(flags + flag, 0, sem="acquire") < narrow_tiles:
                pass
            c = tl.arange(0, CHUNK)
            kind = (line >= FIRST).to(tl.int32) + (line >= SECOND).to(tl.int32)
            for p in tl.static_range(PARTS):
                begin = 0 if p == 0 else (FIRST if p == 1 else SECOND)
                finish = FIRST if p == 0 else (SECOND if p == 1 else N)
                here = (tile * REACH < finish) & (tile * REACH + REACH > begin)
                if here | (EPILOGUE == _SWIGLU):
                    for at in range(0, RANKS, CHUNK):
                        high = tl.load(
                            b + line.to(tl.int64)[:, None] * RANKS + (at + c)[None, :],
                            mask=(ours & (kind == p))[:, None],
                            other=0.0,
                        )
                        lows = tl.load(
                            low + m[:, None] * (PARTS * RANKS) + (p * RANKS + at + c)[None, :],
                            mask=there[:, None],
                            other=0.0,
                            cache_modifier=".cg",
                        )
                        acc = tl.dot(high, tl.trans(lows), acc) if SWAP else tl.dot(lows, tl.trans(high), acc)

    if PARTS_OF_K > 1:
        corner = i[:, None] * BM + j[None, :] if SWAP else j[:, None] * BN + i[None, :]
        mine = partials + place * PARTS_OF_K * BM * BN + corner
        tl.store(mine + part * BM * BN, acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + place, 1, sem="acq_rel")
        if arrived != PARTS_OF_K - 1:
            return
        acc = tl.load(mine, cache_modifier=".cg")
        for other in tl.static_range(1, PARTS_OF_K):
            acc += tl.load(mine + other * BM * BN, cache_modifier=".cg")
        tl.store(counters + place, 0)

    if SWAP:
        acc = tl.trans(acc)
    if NORM_TILES > 0:
        acc *= tl.rsqrt(tl.sum(square, axis=0) / K + eps)[:, None]
    if EPILOGUE == _SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BM, 2, HALF)), (0, 2, 1)))
        gate = gate.to(tl.bfloat16).to(tl.float32)
        up = up.to(tl.bfloat16).to(tl.float32)
        opened = (gate / (1.0 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
        half = tl.arange(0, HALF)
        column = tile * REACH + half
        within = there[:, None] & ((half < REACH) & (column < N))[None, :]
        tl.store(out + m[:, None] * N + column[None, :], (opened * up).to(tl.bfloat16), mask=within)
    else:
        inside = there[:, None] & ours[None, :]
        if BIAS:
            acc += offset.to(tl.float32)[None, :]
        y = acc.to(tl.bfloat16)
        if EPILOGUE == _RESIDUAL:
            stream = residual + m[:, None] * N + n[None, :]
            if BM > 16:
                old = tl.load(stream, mask=inside, other=0.0)
            new = (old.to(tl.float32) + y.to(tl.float32)).to(tl.bfloat16)
            tl.store(stream, new, mask=inside)
            wide = new.to(tl.float32)
            fresh = (wide * weight.to(tl.float32)[None, :]).to(tl.bfloat16)
            tl.store(scaled + m[:, None] * N + n[None, :], fresh, mask=inside)
            mass = tl.sum(tl.where(inside, wide * wide, 0.0), axis=1)
            tl.store(squares + tile * SLOTS + m, mass, mask=there)
        else:
            tl.store(out + m[:, None] * N + n[None, :], y, mask=inside)
            if EPILOGUE == _HEAD:
                row = tl.load(rows + m, mask=there, other=0)
                heat = tl.load(temperatures + row)
                logits = y.to(tl.float32) / tl.where(heat == 0.0, 1.0, heat)[:, None]
                logits = tl.where(ours[None, :], logits, -float("inf"))
                highest = tl.max(logits, axis=1)
                mass = tl.sum(tl.exp(logits - highest[:, None]), axis=1)
                tl.store(maxima + tile * SLOTS + m, highest, mask=there)
                tl.store(sums + tile * SLOTS + m, mass, mask=there)


def linear(
    x: Tensor,
    w: Tensor,
    count: int,
    epilogue: int,
    how: Tiling,
    scratch: Scratch,
    *,
    eps: float = 0.0,
    norm_tiles: int = 0,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    residual: Tensor | None = None,
    next_norm: Tensor | None = None,
    rows: Tensor | None = None,
    temperatures: Tensor | None = None,
    adapters: Beside | None = None,
    yields: bool = False,
) -> int:
    """Launches one product over the first `count` rows of x; returns how many tiles it was cut into. `yields`: it
    leaves room to others (see `DecodeStep`)."""
    outputs, inputs = w.shape
    block = max(16, triton.next_power_of_2(how.reach))
    if epilogue == SWIGLU:
        outputs, block = outputs // 2, 2 * block
    tiles = triton.cdiv(outputs, how.reach)
    rows_in = max(rows_padded(count), 8 if how.swap else 16)
    bands = triton.cdiv(count, rows_in)
    low_rows, cuts = min(rows_in, LOW_ROWS if bands == 1 else MANY_ROWS), pieces(inputs)
    rank = 16 if adapters is None else adapters.rank
    few = low_rows <= LOW_ROWS  # in bands there are programs enough, and small rounds leave them room
    columns, in_flight, slices = (
        rounds_of_adapters(low_rows, rank, how.warps) if few else (128, how.stages, 1)
    )
    programs = bands * tiles * how.split
    if adapters is not None:
        rows = adapters.rows
        narrow = adapters.columns * cuts * (bands * rows_in // low_rows)
        programs = narrow + bands * tiles * (how.split + 1 if how.split > 1 else 1)
    linear_kernel[(programs,)](
        x,
        w,
        w if bias is None else bias,
        x if out is None else out,
        x if residual is None else residual,
        w if next_norm is None else next_norm,
        scratch.scaled,
        scratch.squares,
        norm_tiles,
        scratch.counters if rows is None else rows,
        scratch.squares if temperatures is None else temperatures,
        scratch.maxima,
        scratch.sums,
        scratch.partials,
        scratch.counters,
        w if adapters is None else adapters.a,
        w if adapters is None else adapters.b,
        scratch.sums if adapters is None else adapters.scales,
        scratch.counters if adapters is None else adapters.slot_of,
        x if adapters is None else adapters.low,
        scratch.partials if adapters is None else adapters.partials,
        scratch.counters if adapters is None else adapters.counters,
        scratch.counters if adapters is None else adapters.flags,
        0 if adapters is None else adapters.index,
        eps,
        bands,
        count,
        outputs,
        inputs,
        RANKS=0 if adapters is None else adapters.b.shape[1],
        RANK=rank,
        CHUNK=16 if adapters is None else adapters.chunk,
        PARTS=0 if adapters is None else len(adapters.parts),
        FIRST=0 if adapters is None else adapters.ends[0],
        SECOND=0 if adapters is None else adapters.ends[1],
        PIECES=cuts,
        LOW_BM=low_rows,
        LOW_BK=columns,
        LOW_DEPTH=in_flight,
        LOW_SLICES=slices,
        SLOTS=scratch.slots,
        NORM_TILES=triton.next_power_of_2(norm_tiles) if norm_tiles else 0,
        BIAS=bias is not None,
        EPILOGUE=epilogue,
        BM=rows_in,
        BN=block,
        BK=how.columns,
        REACH=how.reach,
        SPLIT=how.split,
        SWAP=how.swap,
        EARLY=how.early,
        YIELDS=yields,
        PDL=DEPENDENT,
        num_warps=how.warps,
        num_stages=how.stages,
        **LAUNCH,
    )
    return tiles


@dataclass(slots=True)
class Scratch:
    """What the kernels of a step hand to each other."""

    slots: int
    scaled: Tensor
    squares: Tensor
    maxima: Tensor
    sums: Tensor
    partials: Tensor
    counters: Tensor


@dataclass(slots=True)
class Beside:
    """The adapters of all slots beside one matrix: a [parts * slots * rank, K], b [N, slots * rank]; and what the
    programs of a product hand to each other. `low` is x a^T, with zeros in the columns of slots that are not the
    row's own."""

    a: Tensor
    b: Tensor
    scales: Tensor
    parts: list[int]
    """Outputs of each part of the matrix."""
    rank: int
    rows: Tensor
    """Of each row of x."""
    slot_of: Tensor
    """By row; -1: none."""
    low: Tensor
    partials: Tensor
    counters: Tensor
    flags: Tensor
    index: int
    """Of this matrix's flag."""

    @property
    def columns(self) -> int:
        """Parts times slots."""
        return len(self.a) // self.rank

    @property
    def chunk(self) -> int:
        """Columns of `b` in a round."""
        return min(self.b.shape[1], 128)

    @property
    def ends(self) -> tuple[int, int]:
        """Where the first part ends and where the second one does."""
        return self.parts[0], sum(self.parts[:2])
