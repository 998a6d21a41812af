"""Where the command writes to, and what it answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FAILED, INTERRUPTED = 1, 130
"""Exit codes."""


@contextmanager
def stdout_on_stderr(wanted: bool) -> Iterator[None]:
    """Sends whatever is written to stdout meanwhile, by child processes too, to stderr."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
