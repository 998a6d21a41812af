"""Child processes that never outlive their parent, and those that are forked from one with everything loaded."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from weakref import WeakSet

from jigsawrl import limits, temporary
from jigsawrl.errors import JigsawError
from jigsawrl.liveness import GUARD, Heartbeat, silent_s

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext
    from multiprocessing.process import BaseProcess

PR_SET_PDEATHSIG = 1
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run: Ctrl-C, `kill`, and the closing of its terminal."""
SPIN = "GOMP_SPINCOUNT"
SPINS = "2000"
"""How often a thread that waits for the others of its team looks whether they are done before it lets go of its core.
Left to itself libgomp, to which torch's threads belong, looks for milliseconds. Small layers, two threads, two cores:
1, 11 and 5 ms alone either way; beside two other processes 4 to 420, 41 to 610 and 27 to 34 ms, with this 7, 29 and
19 ms."""
TOKENIZERS = "transformers.models.auto.tokenization_auto"
"""Takes seconds to import; tiny models do without it."""
_started: WeakSet[BaseProcess] = WeakSet()


def die_with_parent() -> None:
    """Linux kills this process as soon as the thread that started it ends, however it ends."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent != os.getppid():  # it ended before we asked
        os._exit(1)


def show_alive(beat: Path, look: Callable[[], None] = lambda: None) -> None:
    """Beats into this file from now on, and calls `look` in between. Ends this process soon after the one that has
    started it has ended, whatever it is at: the fork server, whose child it is, lives as long as it does."""
    starter = multiprocessing.parent_process()

    def between() -> None:
        if starter is not None and not starter.is_alive():
            os._exit(1)
        look()

    Heartbeat(beat, look=between)


def needed_for(models: Iterable[str]) -> list[str]:
    """What processes that read them import."""
    return [TOKENIZERS] if any(model != "tiny" for model in models) else []


def spin_briefly() -> None:
    """Call before torch is imported, here or in a process that this one starts; a user's own choice stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN, SPINS)


def fork_server(preloaded: Iterable[str]) -> ForkServerContext:
    """Where processes are started from; the first call says what is imported there, once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    spin_briefly()
    with deaf_children(), temporary.used_for_children():
        try:
            forkserver.ensure_running()
        except (OSError, EOFError) as error:
            raise JigsawError(limits.cannot_start(error)) from error
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    GUARD.watch(pid, None, silent_s())  # stopped, it would start nothing, and tell of no death
    return context


def start(process: BaseProcess) -> None:
    """Starts it. A JigsawError where the machine has no process to give; the one that forks may have ended of it."""
    try:
        process.start()
    except (OSError, EOFError) as error:
        raise JigsawError(limits.cannot_start(error)) from error
    if not _started:
        util.Finalize(None, _kill_started, exitpriority=0)
    _started.add(process)


def _kill_started() -> None:
    """At the end of this process, where those that it started are still there: an interrupt may have come while they
    were being ended. Left to itself multiprocessing would wait for them, and they ignore SIGTERM."""
    for process in list(_started):
        if process.is_alive():
            process.kill()


def heeded_interrupts() -> list[signal.Signals]:
    """All of them, but for SIGHUP where it was ignored before: under `nohup` a run outlives its terminal."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [each for each in INTERRUPTS if not (ignored and each == signal.SIGHUP)]


def ignore_interrupts() -> None:
    """For processes whose parent decides when they stop."""
    for each in INTERRUPTS:
        signal.signal(each, signal.SIG_IGN)


@contextmanager
def raised_interrupts() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise a KeyboardInterrupt as Ctrl-C does, so that what was begun is cleared away.

    SIGHUP does so once: the kernel and the shell may both send one when a terminal closes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.default_int_handler(number, frame)

    before = {each: signal.signal(each, interrupt) for each in heeded_interrupts() if each != signal.SIGINT}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Who is started inside hears no Ctrl-C; this process hears it afterwards, and decides what becomes of all."""
    resource_tracker.ensure_running()  # would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay_deaf() -> None:
    """For whoever was started so: blocked signals would stay blocked in all that it starts itself."""
    ignore_interrupts()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)


def show_as(name: str) -> None:
    """The name under which `ps` and `top` show this process; the kernel keeps the first 15 bytes."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="utf-8", errors="replace")
