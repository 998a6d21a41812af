"""How the processes of a run know of each other that they are alive.

The scheduler guards drivers and actors (`liveness.Guard`). Each driver watches the scheduler: where that stands still
for ever, nothing else would end the run.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jigsawrl.liveness import Watched, was_silent
from jigsawrl.processes import show_alive

SCHEDULER = "the scheduler"
"""What begins the line with which a driver ends it."""


@dataclass(frozen=True, slots=True)
class Alive:
    """Where a driver shows that it is alive, and where the scheduler does."""

    beat: Path
    scheduler: int
    """Its pid."""
    scheduler_beat: Path
    limit_s: float

    def begin(self) -> None:
        """The driver beats from now on, and watches the scheduler."""
        try:
            handle = os.pidfd_open(self.scheduler)
        except ProcessLookupError:
            os._exit(1)
        watched = Watched(self.scheduler_beat, self.limit_s, pid=self.scheduler)

        def look() -> None:
            if watched.is_silent():
                said = was_silent(f"{SCHEDULER} (process {self.scheduler})", self.limit_s)
                with suppress(OSError, ValueError):
                    print(f"jigsaw: {said}; go on with --resume", file=sys.stderr, flush=True)
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                os._exit(1)

        show_alive(self.beat, look)
