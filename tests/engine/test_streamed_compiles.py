"""Kernels in Gluon compile for Hopper wherever Triton is, GPU or not: Gluon's names change between releases."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("triton") is None:
    pytest.skip("needs Triton, which comes with torch's builds for CUDA", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from jigsawrl.engine.cuda.cuts import LIGHT, STREAMED
from jigsawrl.engine.cuda.streamed import streamed_kernel
from jigsawrl.engine.cuda.streamed_attention import streamed_attention_kernel
from jigsawrl.engine.cuda.tilings import PLAIN, RESIDUAL, RINGS, SWIGLU

SHARED_MEMORY = 227 << 10
NUMBERS = {"squares", "partials", "cos", "sin", "part_out", "part_max", "part_sum"}
INTEGERS = {"counters", "tables", "rows", "positions"}
SCALARS = {"eps": "fp32", "scale": "fp32", "norm_tiles": "i32", "M": "i32", "N": "i32", "K": "i32"}
SCALARS |= {"width": "i32", "least": "i32"}


def compiled(kernel: Any, warps: int, **constants: Any) -> Any:
    """For a Hopper GPU."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in SCALARS:
            return SCALARS[name]
        return "*fp32" if name in NUMBERS else "*i32" if name in INTEGERS else "*bf16"

    names = kernel.arg_names
    signature = {name: kind(name) for name in names}
    aligned = [n for n in names if signature[n].startswith("*") or n in ("N", "K")]
    source = GluonASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def lets_the_next_one_start_before_it_waits(kernel: Any) -> bool:
    lines = kernel.asm["ptx"].splitlines()
    (lets,) = (number for number, line in enumerate(lines) if "griddepcontrol.launch_dependents" in line)
    (waits,) = (number for number, line in enumerate(lines) if "griddepcontrol.wait" in line)
    return lets < waits


@pytest.mark.parametrize(
    ("matrix", "rows"), [(matrix, rows) for matrix, known in RINGS.items() for rows in known], ids=str
)
@pytest.mark.parametrize("yields", [False, True])
def test_products_from_a_ring(matrix, rows, yields):
    how, (outputs, inputs) = RINGS[matrix][rows], matrix
    epilogue = SWIGLU if outputs > 4 * inputs else RESIDUAL if outputs == min(matrix) else PLAIN
    kernel = compiled(
        streamed_kernel,
        how.warps,
        SLOTS=64,
        NORM_TILES=0 if epilogue == RESIDUAL else 32,
        BIAS=epilogue == PLAIN,
        EPILOGUE=epilogue,
        BM=rows,
        BN=how.block(epilogue),
        BK=how.columns,
        REACH=how.reach,
        SPLIT=how.split,
        STAGES=how.stages,
        GROUP=how.group,
        YIELDS=yields,
        WARPS=how.warps,
    )
    assert kernel.metadata.shared <= SHARED_MEMORY
    at_once = not yields and epilogue != PLAIN
    assert lets_the_next_one_start_before_it_waits(kernel) == at_once


@pytest.mark.parametrize(
    ("kv_heads", "group", "size", "splits", "normed"),
    [
        (2, 6, 128, 8, False),
        (2, 6, 128, 3, False),
        (2, 7, 64, 1, False),
        (8, 16, 128, 32, True),
        (4, 1, 64, 2, True),
    ],
)
@pytest.mark.parametrize(("light", "yields"), [(False, False), (True, False), (True, True)])
def test_attention_through_a_ring(kv_heads, group, size, splits, normed, light, yields):
    tile, rounds = LIGHT if light else (STREAMED[0], STREAMED[1] * 128 // size)
    kernel = compiled(
        streamed_attention_kernel,
        4,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=size,
        BLOCK=16,
        SPLITS=splits,
        TILE=tile,
        STAGES=rounds,
        QK_NORM=normed,
        YIELDS=yields,
        WARPS=4,
    )
    assert lets_the_next_one_start_before_it_waits(kernel) != yields
    assert kernel.metadata.shared <= (SHARED_MEMORY // 2 if light else SHARED_MEMORY)
