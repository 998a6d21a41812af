"""What some CPUs need: no AMX for bfloat16 where it is announced and missing, oneDNN for float32 on those of AMD."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CPUINFO = Path("/proc/cpuinfo")
LARGE_PRODUCT = 4_000_000
"""Multiplications from which oneDNN's product is faster, with what it costs to call it."""
LIMIT = "ONEDNN_MAX_CPU_ISA"
PROBE = "import torch; a = torch.ones(64, 64).bfloat16(); torch.nn.functional.linear(a, a)"


@cache
def make_bfloat16_safe() -> None:
    """Call before the first bfloat16 product on a CPU.

    Some virtual machines announce AMX but kill a process that uses it (SIGILL). Where AMX is announced, a child
    process tries; if it dies, oneDNN is kept from AMX in this process.
    """
    if LIMIT in os.environ or not CPUINFO.exists() or " amx_tile" not in CPUINFO.read_text():
        return
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, timeout=120, check=False)
    if probe.returncode == -signal.SIGILL:
        os.environ[LIMIT] = "AVX512_CORE_BF16"


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL, which torch takes for them.

    On AMD's processors MKL leaves AVX-512 unused: on one core of an EPYC it reached 95 GFLOP/s with 64 rows and
    oneDNN 170; with 24 rows 75 and 120.
    """
    import torch

    amd = CPUINFO.exists() and "AuthenticAMD" in CPUINFO.read_text()
    return amd and torch.backends.mkldnn.is_available() and "avx512f" in CPUINFO.read_text()


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of float32 rows without gradients, by oneDNN where the product is large; copies no weight."""
    import torch

    if len(x) * weight.numel() < LARGE_PRODUCT:
        return torch.nn.functional.linear(x, weight, bias)
    return torch.ops.aten.mkldnn_linear(x.to_mkldnn(), weight, bias).to_dense()
