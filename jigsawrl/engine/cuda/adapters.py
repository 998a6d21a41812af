"""Adapters of many owners in one decode step, stacked so that they ride along with the base's products.

    y[m] = w x[m] + b_s a_s x[m]      for row m's slot s

All slots' matrices of one product stand side by side, `a` as [parts, slots, rank, inputs] and `b` as [outputs, slots,
rank]. The first product, with `a`, leaves zeros in the columns of slots that are not the row's own, so that the
second one is no more than some further columns of K for the base's product: [x, low] [w, b]^T.
"""

# mypy: ignore-errors
# (A kernel's body is Triton's language, not Python's.)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jigsawrl.engine.cuda.linear import DEPENDENT, LAUNCH, Low, prefetch_l2
from jigsawrl.engine.cuda.tilings import MOST_ROWS, rows_padded
from jigsawrl.engine.mixed import Adapters
from jigsawrl.model.lora import Lora

MOST_RANK = 64
COLUMNS = 128
"""Of K that a program of the first product takes in a round."""
REACH = 768
"""Columns of K for one program: the longer K is, the more of them."""
TILE = 128
"""Outputs of a program of the second product, where it is one of its own."""


def fits(adapters: Adapters) -> bool:
    """Whether the kernels can take them."""
    return all(
        a.shape[0] <= MOST_RANK and a.dtype == torch.bfloat16 and a.is_cuda
        for lora in adapters.values()
        for a in lora.a.values()
    )


@dataclass(slots=True)
class Matrices:
    """All slots' adapters beside one matrix of the base."""

    parts: dict[str, int]
    a: Tensor
    b: Tensor
    scales: Tensor

    @property
    def width(self) -> int:
        """Columns of the first product's result."""
        return len(self.a)

    def fill(self, slot: int, rank: int, lora: Lora | None) -> None:
        """Copies someone's adapters into a slot, with zeros where there are none."""
        slots = len(self.scales)
        a = self.a.view(len(self.parts), slots, rank, -1)[:, slot]
        b = self.b.view(-1, slots, rank)[:, slot]
        a.zero_()
        b.zero_()
        if lora is None:
            return
        self.scales[slot] = lora.scale
        for i, (part, rows) in enumerate(zip(self.parts, b.split(list(self.parts.values())), strict=True)):
            if part in lora.a:
                own = lora.a[part]
                a[i, : len(own)] = own
                rows[:, : len(own)] = lora.b[part]


class Stack:
    """Everybody's adapters; owners keep their slot for as long as they have any."""

    def __init__(self, everybody: dict[int, Adapters]) -> None:
        loras = [lora for adapters in everybody.values() for lora in adapters.values()]
        highest = max(len(a) for lora in loras for a in lora.a.values())
        self.rank = max(16, triton.next_power_of_2(highest))
        slots = triton.next_power_of_2(len(everybody))
        self.free = list(range(slots))
        self.slots: dict[int, int] = {}
        self.matrices: dict[Tensor, Matrices] = {}
        for adapters in everybody.values():
            for weight, lora in adapters.items():
                if weight not in self.matrices:
                    self.matrices[weight] = self._empty(weight, lora.parts, slots)
        for owner, adapters in everybody.items():
            self.fill(owner, adapters)

    def _empty(self, weight: Tensor, parts: dict[str, int], slots: int) -> Matrices:
        outputs, inputs = weight.shape
        return Matrices(
            parts,
            weight.new_zeros(len(parts) * slots * self.rank, inputs),
            weight.new_zeros(outputs, slots * self.rank),
            torch.zeros(slots, dtype=torch.float32, device=weight.device),
        )

    def takes(self, owner: int, adapters: Adapters) -> bool:
        """Whether there is a place for these, without making new ones."""
        ranks = [len(a) for lora in adapters.values() for a in lora.a.values()]
        return (
            (owner in self.slots or bool(self.free))
            and adapters.keys() <= self.matrices.keys()
            and max(ranks, default=0) <= self.rank
        )

    @torch.no_grad()
    def fill(self, owner: int, adapters: Adapters) -> None:
        """Copies an owner's adapters into its slot; without any, the slot is free again."""
        if not adapters:
            self.free.append(self.slots.pop(owner))
            return
        if owner not in self.slots:
            self.slots[owner] = self.free.pop(0)
        for weight, matrices in self.matrices.items():
            matrices.fill(self.slots[owner], self.rank, adapters.get(weight))


@triton.jit(do_not_specialize=["M"])
def shrink_kernel(
    x,
    a,
    rows,
    slot_of,
    scales,
    low,
    partials,
    counters,
    M,
    K,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One slot's product with `a`, for one part of the outputs, over one piece of K."""
    column = tl.program_id(0)
    piece = tl.program_id(1)
    chunk = tl.program_id(2)
    slot = column % SLOTS
    r = tl.arange(0, RANK)
    k = tl.arange(0, BK)
    m = chunk * BM + tl.arange(0, BM)
    there = m < M
    each = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    start = piece * each
    end = tl.minimum(start + each, K)
    line = a + (column * RANK + r).to(tl.int64)[:, None] * K
    row = tl.load(rows + m, mask=there, other=0)
    mine = (tl.load(slot_of + row, mask=there, other=-1) == slot) & there
    wanted = tl.max(mine.to(tl.int32), axis=0)
    scale = tl.load(scales + slot)
    if PDL:
        gdc_launch_dependents()
        if wanted > 0:
            lead = tl.minimum(start + tl.arange(0, BK // 16) * 64, tl.maximum(end, 64) - 64)
            prefetch_l2(line + lead[None, :])
        gdc_wait()
    acc = tl.zeros((RANK, BM), dtype=tl.float32)
    if wanted > 0:
        for at in range(start, end, BK):
            inside = (at + k < end)[None, :]
            weights = tl.load(line + (at + k)[None, :], mask=inside, other=0.0)
            inputs = tl.load(x + m[:, None] * K + (at + k)[None, :], mask=mine[:, None] & inside, other=0.0)
            acc = tl.dot(weights, tl.trans(inputs), acc)
    if SPLIT > 1:
        tile = chunk * (WIDTH // RANK) + column
        place = partials + tile * SPLIT * RANK * BM + r[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(place + piece * RANK * BM, acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if arrived != SPLIT - 1:
            return
        acc = tl.load(place, cache_modifier=".cg")
        for other in tl.static_range(1, SPLIT):
            acc += tl.load(place + other * RANK * BM, cache_modifier=".cg")
        tl.store(counters + tile, 0)
    out = low + m[None, :] * WIDTH + (column * RANK + r)[:, None]
    tl.store(out, (acc * scale).to(tl.bfloat16), mask=there[None, :])


@triton.jit(do_not_specialize=["M"])
def expand_kernel(
    low,
    b,
    y,
    M,
    N,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds the product with `b` to what the base's product has left in y."""
    tile = tl.program_id(0)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tile * BN + tl.arange(0, BN)
    c = tl.arange(0, CHUNK)
    there = m < M
    ours = n < N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = y + m.to(tl.int64)[:, None] * N + n[None, :]
    inside = there[:, None] & ours[None, :]
    old = tl.load(at, mask=inside, other=0.0)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    part = (n >= FIRST).to(tl.int32) + (n >= SECOND).to(tl.int32)
    for p in tl.static_range(PARTS):
        begin = 0 if p == 0 else (FIRST if p == 1 else SECOND)
        finish = FIRST if p == 0 else (SECOND if p == 1 else N)
        if (tile * BN < finish) & (tile * BN + BN > begin):
            for at_rank in range(0, RANKS, CHUNK):
                lows = tl.load(
                    low + m[:, None] * (PARTS * RANKS) + (p * RANKS + at_rank + c)[None, :],
                    mask=there[:, None],
                    other=0.0,
                )
                weights = tl.load(
                    b + n.to(tl.int64)[:, None] * RANKS + (at_rank + c)[None, :],
                    mask=(ours & (part == p))[:, None],
                    other=0.0,
                )
                acc = tl.dot(lows, tl.trans(weights), acc)
    tl.store(at, (old.to(tl.float32) + acc).to(tl.bfloat16), mask=inside)


@dataclass(slots=True)
class AdapterScratch:
    """What the first product's programs hand to each other and to the second."""

    low: Tensor
    partials: Tensor
    counters: Tensor

    @classmethod
    def of(cls, stack: Stack, slots: int) -> AdapterScratch:
        width = max(matrices.width for matrices in stack.matrices.values())
        pieces = max(_pieces(matrices.a.shape[1]) for matrices in stack.matrices.values())
        rows = -(-slots // MOST_ROWS) * MOST_ROWS
        device = next(iter(stack.matrices.values())).a.device
        return cls(
            torch.zeros(slots * width, dtype=torch.bfloat16, device=device),
            torch.zeros(rows * width * pieces, dtype=torch.float32, device=device),
            torch.zeros(rows * width, dtype=torch.int32, device=device),
        )


def shrink(
    x: Tensor,
    matrices: Matrices,
    rank: int,
    count: int,
    rows: Tensor,
    slot_of: Tensor,
    scratch: AdapterScratch,
) -> Low:
    """Launches the first product over the first `count` rows of x."""
    inputs, slots = matrices.a.shape[1], len(matrices.scales)
    block = min(rows_padded(count), MOST_ROWS)
    pieces = _pieces(inputs)
    shrink_kernel[(len(matrices.parts) * slots, pieces, triton.cdiv(count, block))](
        x,
        matrices.a,
        rows,
        slot_of,
        matrices.scales,
        scratch.low,
        scratch.partials,
        scratch.counters,
        count,
        inputs,
        WIDTH=matrices.width,
        SLOTS=slots,
        RANK=rank,
        BM=block,
        BK=COLUMNS,
        SPLIT=pieces,
        PDL=DEPENDENT,
        num_warps=4 if block * rank >= 1024 else 2,
        num_stages=4,
        **LAUNCH,
    )
    return Low(scratch.low, matrices.b, list(matrices.parts.values()))


def expand(low: Low, y: Tensor, count: int) -> None:
    """Launches the second product, into what is in y."""
    outputs, ranks = low.b.shape
    expand_kernel[(triton.cdiv(outputs, TILE), triton.cdiv(count, MOST_ROWS))](
        low.values,
        low.b,
        y,
        count,
        outputs,
        RANKS=ranks,
        CHUNK=low.chunk,
        PARTS=len(low.parts),
        FIRST=low.ends[0],
        SECOND=low.ends[1],
        BM=MOST_ROWS,
        BN=TILE,
        PDL=DEPENDENT,
        num_warps=4,
        num_stages=2,
        **LAUNCH,
    )


def _pieces(inputs: int) -> int:
    return triton.cdiv(inputs, REACH)
