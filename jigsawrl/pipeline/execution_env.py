"""What a pipeline runs in. A standalone one has its process, its workers and its log to itself.

A multiplexed pipeline has another environment; its loop does not notice.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jigsawrl.phases.ids import PhaseKind
from jigsawrl.pipeline.workers import Workers, start_workers
from jigsawrl.processes import heeded_interrupts
from jigsawrl.telemetry.events import EVENTS_FILE, EventLog, EventSink
from jigsawrl.trainer.checkpoint import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from jigsawrl.config import RunConfig

Tensors = dict[str, dict[str, "Tensor"]]
"""Of each trainer, by name."""


class Stopped(Exception):
    """A phase will not run: whoever runs the pipeline wants it to stop where it is."""


class ExecutionEnv(Protocol):
    def workers(self, config: RunConfig, base: Path, device: str) -> Workers: ...

    def events(self, out: Path) -> EventSink: ...

    def phase(self, phase: PhaseKind, step: int) -> AbstractContextManager[None]:
        """Waits until the phase may run, and says afterwards that it is over. May raise Stopped instead."""

    def stopping(self) -> AbstractContextManager[Callable[[], bool]]:
        """Inside, asks whether to stop after the step."""

    def remember(self, step: int, workers: Workers, state: dict[str, Any]) -> Callable[[], Tensors]:
        """A step is done; what it leaves is kept as far as this environment can. Gives the tensors on demand."""

    def recall(self) -> Checkpoint | None:
        """What was remembered last, if that outlived the process."""


class StandaloneEnv:
    """A pipeline by itself."""

    def workers(self, config: RunConfig, base: Path, device: str) -> Workers:
        return start_workers(config, base, device)

    def events(self, out: Path) -> EventSink:
        return EventLog(out / EVENTS_FILE)

    def phase(self, phase: PhaseKind, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def stopping(self) -> AbstractContextManager[Callable[[], bool]]:
        return finish_step_on_interrupt()

    def remember(self, step: int, workers: Workers, state: dict[str, Any]) -> Callable[[], Tensors]:
        """Checkpoints are all that outlives it."""
        return lambda: workers.first("save_state")

    def recall(self) -> Checkpoint | None:
        return None


@contextmanager
def finish_step_on_interrupt() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM lets the step finish; the second one ends it where it is. So does a terminal that
    closes, but only once, for the kernel and the shell may both send a SIGHUP then."""
    pressed = threading.Event()
    signals = heeded_interrupts()

    def note(number: int, frame: object) -> None:
        for each in signals:
            again = signal.SIG_IGN if each == signal.SIGHUP else signal.default_int_handler
            signal.signal(each, again)
        pressed.set()
        with suppress(OSError, ValueError, RuntimeError):  # the terminal is gone, or is being written to
            print(
                "stopping: the step is finished and saved; press Ctrl-C again to stop at once",
                file=sys.stderr,
            )

    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = [signal.signal(each, note) for each in signals]
    try:
        yield pressed.is_set
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
