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
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jigsawrl.engine.cuda.linear import DEPENDENT, LAUNCH, Beside
from jigsawrl.engine.cuda.shrink import ROWS, pieces, prefetch_a, shrink_tile, whose
from jigsawrl.engine.cuda.tilings import MOST_ADAPTED_ROWS, TALLEST, rounds_of_adapters, rows_in_bands
from jigsawrl.engine.mixed import Adapters
from jigsawrl.model.lora import Lora

PROGRAMS = 132
"""Of the first product, from which on K is not cut in pieces."""
TILE = 128
"""Outputs of a program of the second product, where it is one of its own."""
GATE_TILE = 64
"""Likewise where the gate follows."""
WARPS = 4
"""Of a program of either."""


@dataclass(slots=True)
class Matrices:
    """All slots' adapters beside one matrix of the base."""

    parts: dict[str, int]
    a: Tensor
    b: Tensor
    scales: Tensor
    index: int
    """Of this matrix among those that have any."""

    @property
    def width(self) -> int:
        """Columns of the first product's result."""
        return len(self.a)

    def clean(self, slot: int, rank: int, lora: Lora | None) -> list[Tensor]:
        """Zeros in a slot, and where in it someone's adapters go, `a` and `b` of each part."""
        slots = len(self.scales)
        a = self.a.view(len(self.parts), slots, rank, -1)[:, slot]
        b = self.b.view(-1, slots, rank)[:, slot]
        a.zero_()
        b.zero_()
        if lora is None:
            return []
        self.scales[slot] = lora.scale
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for part, ones, others in zip(self.parts, a, b.split(list(self.parts.values())), strict=True):
            if part in lora.a:
                rank = len(lora.a[part])
                found[part] = ones[:rank], others[:, :rank]
        return [target for part in lora.a for target in found[part]]


@dataclass(slots=True)
class Place:
    """Where an owner's adapters go, which has to be found but once for those of one form."""

    form: list[tuple[int, float, list[tuple[str, int]]]]
    """Of each adapter its matrix's id, its scale, its parts and their ranks."""
    targets: list[Tensor]


class Stack:
    """Everybody's adapters; owners keep their slot for as long as they have any."""

    def __init__(self, everybody: dict[int, Adapters]) -> None:
        loras = [lora for adapters in everybody.values() for lora in adapters.values()]
        highest = max(len(a) for lora in loras for a in lora.a.values())
        self.rank = max(16, triton.next_power_of_2(highest))
        slots = triton.next_power_of_2(len(everybody))
        self.free = list(range(slots))
        self.slots: dict[int, int] = {}
        self.places: dict[int, Place] = {}
        """By owner."""
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
            len(self.matrices),
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
            del self.places[owner]
            return
        if owner not in self.slots:
            self.slots[owner] = self.free.pop(0)
        form = [
            (id(weight), lora.scale, [(part, len(a)) for part, a in lora.a.items()])
            for weight, lora in adapters.items()
        ]
        if owner not in self.places or self.places[owner].form != form:
            self.places[owner] = Place(form, self._clean(self.slots[owner], adapters))
        sources = [x for lora in adapters.values() for part in lora.a for x in (lora.a[part], lora.b[part])]
        torch._foreach_copy_(self.places[owner].targets, sources)

    def _clean(self, slot: int, adapters: Adapters) -> list[Tensor]:
        targets = {w: m.clean(slot, self.rank, adapters.get(w)) for w, m in self.matrices.items()}
        return [target for weight in adapters for target in targets[weight]]


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
    PIECES: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first product as a kernel of its own."""
    column, piece, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        prefetch_a(a, column, piece, K, RANK, PIECES, BK)
        gdc_wait()
    mine = whose(rows, slot_of, column, chunk, M, SLOTS, BM)
    scale = tl.load(scales + column % SLOTS)
    shrink_tile(
        x, a, mine, scale, low, partials, counters, counters, column, piece, chunk,
        M, K, WIDTH, RANK, BM, BK, PIECES, DEPTH, SLICES, False,
    )  # fmt: skip


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


@triton.jit(do_not_specialize=["M"])
def expand_swiglu_kernel(
    low,
    b,
    gate_up,
    out,
    M,
    F,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """The second product of gate and up, and the gate: what the base's product has left is read once."""
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    c = tl.arange(0, CHUNK)
    there, ours = m < M, n < F
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    line = gate_up + m.to(tl.int64)[:, None] * (2 * F) + n[None, :]
    inside = there[:, None] & ours[None, :]
    gate = tl.load(line, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(line + F, mask=inside, other=0.0).to(tl.float32)
    for at in range(0, RANKS, CHUNK):
        lows = low + m[:, None] * (2 * RANKS) + (at + c)[None, :]
        weights = b + n.to(tl.int64)[:, None] * RANKS + (at + c)[None, :]
        opening = tl.load(weights, mask=ours[:, None], other=0.0)
        gate = tl.dot(tl.load(lows, mask=there[:, None], other=0.0), tl.trans(opening), gate)
        passing = tl.load(weights + F * RANKS, mask=ours[:, None], other=0.0)
        up = tl.dot(tl.load(lows + RANKS, mask=there[:, None], other=0.0), tl.trans(passing), up)
    gate = gate.to(tl.bfloat16).to(tl.float32)
    up = up.to(tl.bfloat16).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
    tl.store(out + m.to(tl.int64)[:, None] * F + n[None, :], (opened * up).to(tl.bfloat16), mask=inside)


@dataclass(slots=True)
class AdapterScratch:
    """What the first product's programs hand to each other and to the second."""

    low: Tensor
    partials: Tensor
    counters: Tensor
    flags: Tensor
    """For each matrix how much of its first product is done in this step; a step begins with zeros."""

    @classmethod
    def of(cls, stack: Stack, slots: int) -> AdapterScratch:
        everything = stack.matrices.values()
        width = max(matrices.width for matrices in everything)
        rows = rows_in_bands(min(slots, MOST_ADAPTED_ROWS))
        tiles = max(PROGRAMS, width // stack.rank * triton.cdiv(rows, ROWS))
        cuts = max(pieces(matrices.a.shape[1]) for matrices in everything)
        device = next(iter(everything)).a.device
        return cls(
            torch.empty(slots * width, dtype=torch.bfloat16, device=device),
            torch.empty(tiles * cuts * stack.rank * ROWS, dtype=torch.float32, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
            torch.zeros(triton.next_power_of_2(len(everything)), dtype=torch.int32, device=device),
        )


def beside(matrices: Matrices, rank: int, rows: Tensor, slot_of: Tensor, scratch: AdapterScratch) -> Beside:
    """What a product needs to know of the adapters beside its matrix."""
    return Beside(
        a=matrices.a,
        b=matrices.b,
        scales=matrices.scales,
        parts=list(matrices.parts.values()),
        rank=rank,
        rows=rows,
        slot_of=slot_of,
        low=scratch.low,
        partials=scratch.partials,
        counters=scratch.counters,
        flags=scratch.flags,
        index=matrices.index,
    )


def shrink(x: Tensor, adapters: Beside, count: int) -> None:
    """Launches the first product over the first `count` rows of x."""
    inputs, chunks = adapters.a.shape[1], triton.cdiv(count, ROWS)
    cuts = pieces(inputs) if adapters.columns * chunks <= PROGRAMS else 1
    columns, in_flight, slices = rounds_of_adapters(ROWS, adapters.rank, WARPS)
    shrink_kernel[(adapters.columns, cuts, chunks)](
        x,
        adapters.a,
        adapters.rows,
        adapters.slot_of,
        adapters.scales,
        adapters.low,
        adapters.partials,
        adapters.counters,
        count,
        inputs,
        WIDTH=len(adapters.a),
        SLOTS=len(adapters.scales),
        RANK=adapters.rank,
        BM=ROWS,
        BK=columns,
        PIECES=cuts,
        DEPTH=in_flight,
        SLICES=slices,
        PDL=DEPENDENT,
        num_warps=WARPS,
        **LAUNCH,
    )


def expand(y: Tensor, adapters: Beside, count: int) -> None:
    """Launches the second product, onto what is in y."""
    outputs, ranks = adapters.b.shape
    expand_kernel[(triton.cdiv(outputs, TILE), triton.cdiv(count, TALLEST))](
        adapters.low,
        adapters.b,
        y,
        count,
        outputs,
        RANKS=ranks,
        CHUNK=adapters.chunk,
        PARTS=len(adapters.parts),
        FIRST=adapters.ends[0],
        SECOND=adapters.ends[1],
        BM=TALLEST,
        BN=TILE,
        PDL=DEPENDENT,
        num_warps=WARPS,
        num_stages=2,
        **LAUNCH,
    )


def expand_swiglu(gate_up: Tensor, out: Tensor, adapters: Beside, count: int) -> None:
    """Launches the second product and the gate, from what is in gate_up."""
    inner, ranks = out.shape[1], adapters.b.shape[1]
    expand_swiglu_kernel[(triton.cdiv(inner, GATE_TILE), triton.cdiv(count, TALLEST))](
        adapters.low,
        adapters.b,
        gate_up,
        out,
        count,
        inner,
        RANKS=ranks,
        CHUNK=adapters.chunk,
        BM=TALLEST,
        BN=GATE_TILE,
        PDL=DEPENDENT,
        num_warps=WARPS,
        num_stages=2,
        **LAUNCH,
    )


class StackedLinear:
    """Products of a pass in which row m has the adapters in slot `slot_of[m]` (-1: none)."""

    def __init__(self, stack: Stack, slot_of: Tensor) -> None:
        self.stack, self.slot_of = stack, slot_of
        self.rows = torch.arange(len(slot_of), dtype=torch.int32, device=slot_of.device)
        self.scratch = AdapterScratch.of(stack, len(slot_of))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y, count = F.linear(x, weight, bias), len(x)
        matrices = self.stack.matrices.get(weight)
        if matrices is not None:
            adapters = beside(matrices, self.stack.rank, self.rows, self.slot_of, self.scratch)
            shrink(x, adapters, count)
            expand(y, adapters, count)
        return y
