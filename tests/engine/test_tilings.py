"""However a decode step's products are cut, kernels stay within the chip's memory and within their scratch space."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.engine.cuda.tilings import (
    BESIDE_ADAPTERS,
    HALF_MEMORY,
    HEAD,
    HEAD_TILE,
    MEASURED,
    MOST_ADAPTED_ROWS,
    MOST_ROWS,
    PLAIN,
    RESIDUAL,
    RINGS,
    SWIGLU,
    TALLEST,
    Tiling,
    ring,
    rounds_of_adapters,
    rows_in_bands,
    rows_padded,
    tiling,
    tiling_beside_adapters,
)

SHARED_MEMORY = 227 << 10
"""Bytes that a program may have on a Hopper chip."""


@dataclass(frozen=True)
class Shape:
    hidden: int
    head_dim: int
    heads: int
    kv_heads: int
    inner: int

    @property
    def widest(self) -> int:
        """As the step's scratch space counts it."""
        return max(self.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim) + 128

    @property
    def products(self) -> dict[str, tuple[int, int, int]]:
        """Rows and columns of each matrix, and what follows its product."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.hidden, PLAIN),
            "o": (self.hidden, q, RESIDUAL),
            "gate_up": (2 * self.inner, self.hidden, SWIGLU),
            "down": (self.hidden, self.inner, RESIDUAL),
            "head": (151_936, self.hidden, HEAD),
        }


KNOWN = [
    Shape(896, 64, 14, 2, 4864),
    Shape(1536, 128, 12, 2, 8960),
    Shape(3584, 128, 28, 4, 18944),
    Shape(576, 64, 9, 3, 1536),
    Shape(2048, 64, 32, 8, 8192),
]
"""Qwen2.5 0.5B, 1.5B and 7B, SmolLM2 135M, Llama 3.2 1B."""


@st.composite
def any_shape(draw: st.DrawFn) -> Shape:
    head_dim, group = draw(st.sampled_from([64, 128])), draw(st.integers(1, 8))
    kv_heads = draw(st.integers(1, 8))
    sizes = st.integers(1, 64).map(lambda times: 64 * times)
    return Shape(draw(sizes), head_dim, group * kv_heads, kv_heads, draw(sizes) * 3)


def outputs_in(how: Tiling, epilogue: int) -> int:
    """Rows of a matrix that a program is compiled for."""
    return max(16, 1 << (how.reach - 1).bit_length()) * (2 if epilogue == SWIGLU else 1)


def check(shape: Shape, count: int, name: str, adapted: bool) -> None:
    outputs, inputs, epilogue = shape.products[name]
    cut, rows = tiling_beside_adapters if adapted else tiling, rows_padded(count)
    how = cut(count, outputs, inputs, epilogue)
    block, rows = outputs_in(how, epilogue), max(rows, 8 if how.swap else 16)
    assert inputs % how.columns == 0, "K is read in whole rounds"
    assert how.early % how.columns == 0
    assert how.early & (how.early - 1) == 0, "Triton's tensors are powers of two"
    assert how.stages >= 2
    assert 2 * (block + rows) * ((how.stages - 1) * how.columns + how.early) <= SHARED_MEMORY
    if epilogue == HEAD:
        assert how.reach == HEAD_TILE
        return
    tiles = -(-(outputs // 2 if epilogue == SWIGLU else outputs) // how.reach)
    bands = rows_in_bands(count) // rows_padded(count)
    if epilogue == RESIDUAL:
        assert tiles <= -(-shape.hidden // 16), "each tile leaves a sum of squares"
    parts = how.split + adapted if how.split > 1 else 1
    if parts > 1:
        most = MOST_ADAPTED_ROWS if adapted else MOST_ROWS
        assert bands * tiles <= shape.widest, "a counter for each"
        assert bands * tiles * parts * rows * block <= 16 * rows_in_bands(most) * shape.widest


@given(st.one_of(st.sampled_from(KNOWN), any_shape()), st.integers(1, MOST_ROWS))
def test_products_keep_within_what_there_is(shape: Shape, count: int) -> None:
    for name in shape.products:
        check(shape, count, name, adapted=False)


@given(st.one_of(st.sampled_from(KNOWN), any_shape()), st.integers(1, MOST_ADAPTED_ROWS))
def test_and_so_do_those_with_adapters(shape: Shape, count: int) -> None:
    for name in ("qkv", "o", "gate_up", "down"):
        check(shape, count, name, adapted=True)


@given(st.sampled_from(KNOWN), st.integers(1, MOST_ROWS))
def test_rings_keep_within_what_there_is(shape: Shape, count: int) -> None:
    rows = rows_padded(count)
    for outputs, inputs, epilogue in shape.products.values():
        how = ring(count, outputs, inputs)
        if how is None:
            continue
        assert epilogue != HEAD, "whose statistics rings do not leave"
        block, pairs = how.block(epilogue), 2 if epilogue == SWIGLU else 1
        assert block >= pairs * how.reach
        assert block & (block - 1) == 0, "Triton's tensors are powers of two"
        tiles = -(-(outputs // 2 if epilogue == SWIGLU else outputs) // how.reach)
        assert inputs % how.columns == 0, "K is read in whole rounds"
        assert 2 * how.stages * (block + rows) * how.columns + 8 * how.stages <= SHARED_MEMORY
        assert block % (16 * how.warps) == 0, "each warp has rows of its own"
        assert not how.group or how.warps % 4 == 0
        if epilogue == RESIDUAL:
            assert tiles <= -(-shape.hidden // 16), "each tile leaves a sum of squares"
        if how.split > 1:
            assert tiles <= shape.widest, "a counter for each"
            assert tiles * how.split * rows * block <= 16 * rows_in_bands(MOST_ROWS) * shape.widest


def test_what_was_measured_is_of_rows_that_kernels_are_compiled_for() -> None:
    sizes = {rows_padded(count) for count in range(1, TALLEST + 1)}
    assert all(
        set(known) <= sizes for known in (*MEASURED.values(), *BESIDE_ADAPTERS.values(), *RINGS.values())
    )


@given(st.sampled_from([8, 16]), st.sampled_from([16, 32, 64]), st.sampled_from([1, 2, 4, 8]))
def test_two_programs_of_an_adapters_first_product_fit_into_a_processor(
    rows: int, rank: int, warps: int
) -> None:
    columns, in_flight, slices = rounds_of_adapters(rows, rank, warps)
    assert in_flight >= 2
    assert 2 * in_flight * columns * (rank + rows) <= HALF_MEMORY
    assert columns // slices >= 16, "tensor cores take no fewer columns"
