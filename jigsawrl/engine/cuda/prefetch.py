"""Reading ahead."""

# mypy: ignore-errors
# (A kernel's body is Triton's language, not Python's.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch_l2(pointers):
    """Asks for the lines at these addresses and goes on."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
