"""How the products of a decode step are cut into programs: measured where they were, a rule for the rest.

What was found: the chip should be filled with programs about once or twice over; small rounds of 64 columns leave
room for the next kernel's programs beside this one's; with many rows of x, narrow tiles that read all of K win over
parts of K whose sums have to be written and added up. A few hundred columns of weights that are read before a kernel
waits for its inputs save time; more of them leave too little room for other programs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PLAIN, RESIDUAL, SWIGLU, HEAD = 0, 1, 2, 3
"""What follows a product: nothing; add to the residual stream; gate with silu; statistics for the sampler."""
TALLEST = 64
"""Rows of x that a program takes; where there are more, they are cut into bands."""
MOST_ROWS = 64
"""Of x. Beyond it a library's product is as good."""
MOST_ADAPTED_ROWS, MOST_ADAPTED_HIDDEN = 192, 2048
"""Likewise with adapters, which take two more launches beside a library's product: as long as all of a small matrix,
and little beside a large one."""
HEAD_TILE = 128
"""Logits that share a maximum and a sum."""
PROCESSORS = 132
"""Of the chips that the tilings were measured on."""
HALF_MEMORY = 112 << 10
"""Bytes of a processor's shared memory for each of two programs."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Outputs a program, columns of w a round, parts of K, rounds in flight, warps.

    `swap` computes w x^T, so that w is on the tensor cores' tall side. `early` are the columns of w that are
    read before the inputs are there: whole rounds, a power of two.
    """

    reach: int
    columns: int
    split: int
    stages: int
    warps: int
    swap: bool = True
    early: int = 0


@dataclass(frozen=True, slots=True)
class Ring:
    """Likewise of a product that fills a ring of rounds with weights before its inputs are there.

    `group` uses the tensor cores of four warps at once.
    """

    reach: int
    columns: int
    split: int
    stages: int
    warps: int
    group: bool = False

    def block(self, epilogue: int) -> int:
        """Rows of a matrix that a program is compiled for; with a gate they are pairs."""
        lines = self.reach * (2 if epilogue == SWIGLU else 1)
        return max(16, 1 << (lines - 1).bit_length())


RINGS: dict[tuple[int, int], dict[int, Ring]] = {
    # Qwen2.5 1.5B: o, gate_up, down.
    (1536, 1536): {8: Ring(64, 64, 6, 4, 4)},
    (17920, 1536): {
        8: Ring(16, 128, 1, 4, 2),
        16: Ring(24, 64, 1, 6, 4),
        32: Ring(32, 64, 1, 6, 4, group=True),
        64: Ring(24, 64, 1, 4, 4, group=True),
    },
    (1536, 8960): {
        8: Ring(64, 128, 5, 7, 4),
        16: Ring(60, 128, 5, 7, 4),
        32: Ring(64, 128, 5, 5, 4, group=True),
    },
    # Qwen2.5 7B: qkv, gate_up.
    (4608, 3584): {64: Ring(64, 128, 1, 5, 4, group=True)},
    (37888, 3584): {32: Ring(72, 64, 1, 5, 8, group=True), 64: Ring(48, 64, 1, 5, 4, group=True)},
    # Qwen2.5 0.5B: qkv, o, gate_up, down.
    (1152, 896): {8: Ring(16, 128, 1, 7, 1), 16: Ring(16, 128, 1, 7, 1)},
    (896, 896): {8: Ring(32, 128, 4, 2, 2), 16: Ring(16, 128, 1, 7, 1)},
    (9728, 896): {16: Ring(32, 64, 1, 8, 4), 64: Ring(32, 64, 1, 6, 4, group=True)},
    (896, 4864): {16: Ring(48, 128, 6, 5, 4), 64: Ring(48, 128, 6, 4, 4, group=True)},
}
"""Where rings were measured to be faster, without adapters: by matrix and by the rows of x as above."""
MEASURED: dict[tuple[int, int], dict[int, Tiling]] = {
    # Qwen2.5 1.5B: qkv, o, gate_up, down.
    (2048, 1536): {
        8: Tiling(16, 128, 1, 4, 1, early=512),
        16: Tiling(64, 64, 4, 4, 4, early=256),
        32: Tiling(64, 64, 4, 3, 4, early=256),
        64: Tiling(16, 128, 1, 4, 4, swap=False, early=256),
    },
    (1536, 1536): {
        8: Tiling(64, 64, 5, 3, 4, early=256),
        16: Tiling(64, 64, 6, 3, 4, early=256),
        32: Tiling(64, 64, 6, 2, 4, early=256),
        64: Tiling(16, 128, 1, 4, 4, swap=False, early=512),
    },
    (17920, 1536): {
        8: Tiling(16, 64, 1, 4, 2, early=128),
        16: Tiling(24, 64, 1, 4, 4, early=128),
        32: Tiling(24, 64, 1, 4, 4, early=128),
    },
    (1536, 8960): {
        8: Tiling(60, 128, 5, 5, 4),
        16: Tiling(60, 128, 5, 6, 4),
        32: Tiling(60, 128, 5, 6, 4),
        64: Tiling(60, 128, 5, 5, 4),
    },
    # Qwen2.5 7B: qkv, o, gate_up, down.
    (4608, 3584): {
        8: Tiling(12, 256, 1, 5, 1),
        16: Tiling(64, 128, 2, 4, 4),
        32: Tiling(64, 128, 1, 5, 4),
        64: Tiling(64, 128, 1, 5, 4),
    },
    (3584, 3584): {
        8: Tiling(28, 256, 1, 6, 2),
        16: Tiling(56, 256, 2, 3, 4),
        32: Tiling(64, 128, 2, 5, 4),
        64: Tiling(64, 128, 2, 5, 4),
    },
    (37888, 3584): {
        8: Tiling(32, 128, 1, 6, 4),
        16: Tiling(32, 128, 1, 4, 4),
        32: Tiling(32, 64, 1, 6, 4),
        64: Tiling(32, 64, 1, 4, 4),
    },
    (3584, 18944): {
        8: Tiling(48, 128, 4, 5, 4),
        16: Tiling(56, 128, 2, 6, 4),
        32: Tiling(56, 128, 2, 5, 4),
        64: Tiling(64, 128, 2, 5, 4),
    },
    # Qwen2.5 0.5B: qkv, o, down.
    (1152, 896): {16: Tiling(16, 128, 1, 6, 1)},
    (896, 896): {16: Tiling(32, 128, 4, 4, 4, swap=False)},
    (896, 4864): {16: Tiling(48, 128, 4, 5, 4)},
}
"""By the matrix's rows and columns, then by the rows of x that the kernel is compiled for."""
BESIDE_ADAPTERS: dict[tuple[int, int], dict[int, Tiling]] = {
    (2048, 1536): {16: Tiling(16, 128, 1, 4, 2, early=256)},
    (1536, 1536): {
        8: Tiling(16, 128, 1, 4, 2, early=256),
        16: Tiling(16, 128, 1, 4, 2, early=256),
        32: Tiling(16, 128, 1, 4, 2, early=256),
    },
    (1536, 8960): {8: Tiling(60, 128, 5, 6, 4), 64: Tiling(64, 128, 5, 3, 4)},
}
"""Others that are better there: the sums of K's parts would have to wait for the adapters' products as well."""


def rows_padded(count: int) -> int:
    """Rows of x that a kernel is compiled for."""
    return min(TALLEST, max(8, 1 << (count - 1).bit_length()))


def rows_in_bands(count: int) -> int:
    """Rows of x that are computed, with those that pad them."""
    rows = rows_padded(count)
    return -(-count // rows) * rows


def ring(count: int, outputs: int, inputs: int) -> Ring | None:
    """The ring for the product of `count` rows of x with such a matrix, where one was measured to be faster."""
    return RINGS.get((outputs, inputs), {}).get(rows_padded(count)) if count <= TALLEST else None


def tiling(count: int, outputs: int, inputs: int, epilogue: int) -> Tiling:
    """How to cut the product of `count` rows of x with a matrix of so many outputs and inputs."""
    rows = rows_padded(count)
    if count > TALLEST:
        return _in_bands(outputs, inputs, epilogue)
    measured = MEASURED.get((outputs, inputs), {})
    if rows in measured:
        return measured[rows]
    if epilogue == HEAD:
        return Tiling(HEAD_TILE, 128 if inputs % 128 == 0 and rows < 64 else 64, 1, 4, 4)
    if epilogue == SWIGLU:
        return Tiling(32, 64, 1, {16: 6, 64: 4}.get(rows, 5), 4)
    if rows >= 32 and inputs <= 2 * outputs <= 64 * PROCESSORS:
        return Tiling(16, 64, 1, 6, 4, swap=False)
    tiles = -(-outputs // 64)
    return Tiling(64, 64, max(1, min(PROCESSORS // tiles, inputs // 128, 10)), 5, 4)


def _in_bands(outputs: int, inputs: int, epilogue: int) -> Tiling:
    """What was best for Qwen2.5 1.5B with the adapters of four."""
    if epilogue == SWIGLU:
        return Tiling(64, 64, 1, 4, 8)
    if inputs <= 2 * outputs:
        return Tiling(32, 64, 1, 6, 4, swap=False)
    return Tiling(64, 128 if inputs % 128 == 0 else 64, 3, 4, 4)


def tiling_beside_adapters(count: int, outputs: int, inputs: int, epilogue: int) -> Tiling:
    """Likewise, with nothing read early and then with fewer rounds in flight where two programs would not fit into a
    processor otherwise: what adapters add is done by further programs, and the chip was full."""
    rows = rows_padded(count)
    better = BESIDE_ADAPTERS.get((outputs, inputs), {}) if count <= TALLEST else {}
    how = better.get(rows) or tiling(count, outputs, inputs, epilogue)
    block = max(16, 1 << (how.reach - 1).bit_length()) * (2 if epilogue == SWIGLU else 1)
    columns = HALF_MEMORY // (2 * (block + rows))
    if how.early + how.stages * how.columns <= columns:
        return how
    return replace(how, early=0, stages=max(2, min(how.stages, columns // how.columns)))


def rounds_of_adapters(rows: int, rank: int, warps: int) -> tuple[int, int, int]:
    """Of an adapter's first product, for few rows: columns of K in a round, rounds in flight, and slices of a round,
    one for each warp. Almost all that a program reads is on its way at once, as far as two fit into a processor."""
    columns, most = (256, 5) if rows > 8 and rank <= 32 else (128, 8)
    return columns, min(most, HALF_MEMORY // (2 * columns * (rank + rows))), warps
