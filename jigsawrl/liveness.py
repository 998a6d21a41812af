"""Heartbeats: a process shows that it is alive, and its watcher ends it when it stops showing it.

    driver, actor, scheduler: Heartbeat --file--> Guard of the process that looks after it --SIGKILL--> a death

A heartbeat comes from a thread of its own, so it says nothing about speed: a process that computes for an hour beats
all the while. A process that is stopped (SIGSTOP), or that the kernel holds in a call for ever, does not beat.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jigsawrl.errors import JigsawError

BEAT_S = 1.0
"""Seconds between two heartbeats of a process, and between two looks of a guard."""
SILENT_S = 120.0
"""Seconds without a heartbeat after which a process is taken for dead. Machines under load 25 were seen to be late by
5 s; a process may also be paused on purpose for a moment, and 30 s of that must not end a run."""
STOP_S = 5.0
"""Patience with a beat on a disk that does not answer."""
SETTING = "JIGSAWRL_SILENT_S"
"""Environment variable that sets another limit."""
LEAST_SILENT_S = 3.0
LONGEST_LOOK_S = 5.0
"""Seconds that count at most between two looks of a watcher. A longer gap means that the watcher itself was stopped,
as everything is on a laptop that sleeps, and that says nothing about the watched process."""


def silent_s() -> float:
    """Seconds of silence that end a process; a JigsawError where the environment has no such number."""
    text = os.environ.get(SETTING)
    if text is None:
        return SILENT_S
    with suppress(ValueError):
        if LEAST_SILENT_S <= (seconds := float(text)) < float("inf"):
            return seconds
    raise JigsawError(f"{SETTING}: {text!r} is not allowed; set it to {LEAST_SILENT_S:g} seconds or more")


def was_silent(name: str, limit_s: float) -> str:
    """The reason of a death by silence."""
    return f"{name} did not show that it was alive for {limit_s:g} s, and was ended"


class Heartbeat:
    """Beats into a file until it is stopped, from a daemon thread. The file is made if it is not there.

    `look` is called after every beat, from the same thread.
    """

    def __init__(self, path: Path, every_s: float = BEAT_S, look: Callable[[], None] | None = None) -> None:
        self.path = path
        self.every_s = every_s
        self.look = look
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
            if self.look is not None:
                self.look()
            if self.stopped.wait(self.every_s):
                return

    def stop(self) -> None:
        """Ends the thread. The file stays."""
        self.stopped.set()
        self.thread.join(STOP_S)
        if not self.thread.is_alive():
            os.close(self.descriptor)


class Silence:
    """How long nothing was heard of a process, counted only while its watcher was running."""

    def __init__(self, limit_s: float = SILENT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self.clock = clock
        self.longest_look_s = min(LONGEST_LOOK_S, limit_s / 4)
        self.seconds = 0.0
        self.looked = clock()

    def heard(self) -> None:
        """The process was heard just now, or is not expected to be heard: it is stopped on purpose."""
        self.seconds = 0.0
        self.looked = self.clock()

    def too_long(self) -> bool:
        """Whether nothing was heard for longer than the limit. Call it again and again, every few seconds."""
        now = self.clock()
        self.seconds += min(now - self.looked, self.longest_look_s)
        self.looked = now
        return self.seconds > self.limit_s


class Watched:
    """A process that beats into a file, as its watcher sees it.

    `path` is None where it is not known yet. One that has not begun to beat may be starting, which takes as long as
    it takes: it is silent only where `pid` is given and the kernel says that it is stopped.
    """

    def __init__(
        self,
        path: Path | None,
        limit_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
        pid: int | None = None,
    ) -> None:
        self.path = path
        self.pid = pid
        self.silence = Silence(limit_s, clock)
        self.last = b""

    def is_silent(self) -> bool:
        """Whether it has not beaten for longer than the limit."""
        beat = self._read()
        silent = beat == self.last if beat else self.pid is not None and is_stopped(self.pid)
        self.last = beat
        if silent:
            return self.silence.too_long()
        self.silence.heard()
        return False

    def _read(self) -> bytes:
        if self.path is not None:
            with suppress(OSError):
                return self.path.read_bytes()
        return b""


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, or by a debugger."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False


@dataclass(slots=True)
class Guarded:
    """A process under guard."""

    watched: Watched
    handle: int
    """Its pidfd: a number of a process may be another's by the time it is used, this is not."""
    paused: bool = False
    """Whether it stands still on purpose."""


class Guard:
    """Watches processes from a thread, and kills those that do not show that they are alive.

    From a thread, so that it also ends the one that its own process waits for at that moment. Whoever looks after the
    process notices its death as any other, and can ask here for the reason.
    """

    def __init__(self) -> None:
        self.guarded: dict[int, Guarded] = {}
        self.silent: dict[int, float] = {}
        """Processes that were ended, and after how many seconds of silence."""
        self.changing = threading.Lock()
        self.thread: threading.Thread | None = None

    def watch(self, pid: int, beat: Path | None, limit_s: float) -> None:
        """From now on, until it is forgotten. `beat` is the file of its heartbeat; None: it has none, and is silent
        only while it is stopped."""
        with suppress(ProcessLookupError), self.changing:
            handle = os.pidfd_open(pid)
            self._drop(pid)
            self.silent.pop(pid, None)
            self.guarded[pid] = Guarded(Watched(beat, limit_s, pid=pid), handle)
            if self.thread is None:
                thread = threading.Thread(target=self._run, name="guard", daemon=True)
                thread.start()  # the next one tries it again where that is not possible now
                self.thread = thread

    def pause(self, pid: int, paused: bool) -> None:
        """Whether it stands still on purpose: then it counts as heard."""
        with self.changing:
            if (guarded := self.guarded.get(pid)) is not None:
                guarded.paused = paused
                guarded.watched.silence.heard()

    def ended(self, pid: int | None) -> float | None:
        """The seconds of silence for which this guard has ended the process, if it has."""
        with self.changing:
            return self.silent.get(pid or 0)

    def forget(self, pid: int | None) -> None:
        """It has ended, one way or another; why is still known."""
        with self.changing:
            self._drop(pid or 0)

    def _drop(self, pid: int) -> None:
        if (guarded := self.guarded.pop(pid, None)) is not None:
            os.close(guarded.handle)

    def _run(self) -> None:
        while True:
            with self.changing:
                if not self.guarded:
                    self.thread = None
                    return
                for pid, guarded in self.guarded.items():
                    self._look(pid, guarded)
            time.sleep(BEAT_S)

    def _look(self, pid: int, guarded: Guarded) -> None:
        if guarded.paused:
            guarded.watched.silence.heard()
        elif pid not in self.silent and guarded.watched.is_silent():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(guarded.handle, signal.SIGKILL)
                self.silent[pid] = guarded.watched.silence.limit_s


GUARD = Guard()
"""This process's."""
