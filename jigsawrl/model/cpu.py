"""bfloat16 on CPUs that promise more than they keep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

LIMIT = "ONEDNN_MAX_CPU_ISA"
PROBE = "import torch; a = torch.ones(64, 64).bfloat16(); torch.nn.functional.linear(a, a)"


@cache
def make_bfloat16_safe() -> None:
    """Call before the first bfloat16 product on a CPU.

    Some virtual machines announce AMX but kill a process that uses it (SIGILL). Where AMX is announced, a child
    process tries; if it dies, oneDNN is kept from AMX in this process.
    """
    flags = Path("/proc/cpuinfo")
    if LIMIT in os.environ or not flags.exists() or " amx_tile" not in flags.read_text():
        return
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, timeout=120, check=False)
    if probe.returncode == -signal.SIGILL:
        os.environ[LIMIT] = "AVX512_CORE_BF16"
