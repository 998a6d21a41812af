"""Whether a living process runs what is in a run folder: it holds a lock, which the kernel takes from the dead."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOOKS = 5
_PAUSE_S = 0.002


@contextmanager
def under_way(out: Path) -> Iterator[None]:
    """Inside, `is_under_way(out)` holds for every process. Where the file system knows no locks, it does not."""
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits at most for a process that looks, for microseconds
        yield
    finally:
        os.close(descriptor)


def is_under_way(out: Path) -> bool:
    """Looks again where it seems so: that may have been another process that looked at the same moment."""
    try:
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        for _ in range(_LOOKS):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_PAUSE_S)
            except OSError:
                return False
            else:
                return False
        return True
    finally:
        os.close(descriptor)
