"""Heartbeats: a process shows that it is alive, and its watcher notices when it stops showing it.

A heartbeat comes from a thread of its own, so it says nothing about speed: a process that computes for an hour beats
all the while. A process that is stopped (SIGSTOP), or that the kernel holds in a call for ever, does not beat.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

BEAT_S = 1.0
"""Seconds between two heartbeats of a process."""
SILENT_S = 120.0
"""Seconds without a heartbeat after which a process is taken for dead. Machines under load 25 were seen to be late by
5 s; a process may also be paused on purpose for a moment, and 30 s of that must not end a run."""
LONGEST_LOOK_S = 5.0
"""Seconds that count at most between two looks of a watcher. A longer gap means that the watcher itself was stopped,
as everything is on a laptop that sleeps, and that says nothing about the watched process."""


class Heartbeat:
    """Beats into a file until it is stopped, from a daemon thread. The file is made if it is not there."""

    def __init__(self, path: Path, every_s: float = BEAT_S) -> None:
        self.path = path
        self.every_s = every_s
        self.beats = 0
        self.stopped = threading.Event()
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            self.beats += 1
            with suppress(
                OSError
            ):  # a full disk: the file has its size already, so the next beat may succeed
                os.pwrite(self.descriptor, self.beats.to_bytes(8, "little"), 0)
            if self.stopped.wait(self.every_s):
                return

    def stop(self) -> None:
        """Ends the thread. The file stays."""
        self.stopped.set()
        self.thread.join()
        os.close(self.descriptor)


class Silence:
    """How long nothing was heard of a process, counted only while its watcher was running."""

    def __init__(self, limit_s: float = SILENT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self.clock = clock
        self.seconds = 0.0
        self.looked = clock()

    def heard(self) -> None:
        """The process was heard just now, or is not expected to be heard: it is stopped on purpose."""
        self.seconds = 0.0
        self.looked = self.clock()

    def too_long(self) -> bool:
        """Whether nothing was heard for longer than the limit. Call it again and again, every few seconds."""
        now = self.clock()
        self.seconds += min(now - self.looked, LONGEST_LOOK_S)
        self.looked = now
        return self.seconds > self.limit_s


class Watched:
    """A process that beats into a file, as its watcher sees it. One that has not begun to beat is not silent."""

    def __init__(
        self, path: Path, limit_s: float = SILENT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = path
        self.silence = Silence(limit_s, clock)
        self.last = b""

    def is_silent(self) -> bool:
        """Whether it has not beaten for longer than the limit."""
        beat = self._read()
        if not beat or beat != self.last:
            self.last = beat
            self.silence.heard()
            return False
        return self.silence.too_long()

    def _read(self) -> bytes:
        with suppress(OSError):
            return self.path.read_bytes()
        return b""
