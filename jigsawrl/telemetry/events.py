"""The event log: what happened when, one JSON object a line in events.jsonl.

    {"t": 1763.2, "event": "step", "pipeline": "arithmetic", "step": 3}
    {"t": 1763.9, "event": "substage", "substage": "decode", "pipeline": "arithmetic", "worker": 0, "step": 4,
     "t0": 1763.3, "t1": 1763.9, "tokens": 512, "sequences": 64}

Times are unix seconds of a clock that never runs backwards. Sub-stages are many and are buffered; every other event
goes to the file at once and takes the buffered ones along, so nothing of a finished step is lost to a kill.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from jigsawrl.telemetry.jsonl import LineFile, encode

Substage = Literal["prefill", "decode", "tail", "tool", "reward", "logprob", "grad", "optim", "sync", "swap"]
SUBSTAGES: tuple[Substage, ...] = get_args(Substage)

_KNOWN = frozenset(SUBSTAGES)
_EPOCH = time.time() - time.perf_counter()
_MAX_BUFFERED_S = 1.0
_MAX_BUFFERED_LINES = 256
_MAX_GAP_S = 0.05
EVENTS_FILE = "events.jsonl"
"""In a run folder."""


def now() -> float:
    """Unix seconds, monotonic within a process; the clock of every time in the log."""
    return _EPOCH + time.perf_counter()


class EventSink(ABC):
    """Takes events: writes them to a file, or passes them on to who does."""

    @abstractmethod
    def emit(self, event: str, **fields: Any) -> None:
        """An event that must not be lost."""

    @abstractmethod
    def record(
        self,
        substage: Substage,
        *,
        pipeline: str,
        step: int,
        t0: float,
        t1: float,
        worker: int = 0,
        **fields: Any,
    ) -> None:
        """A sub-stage that was timed elsewhere, for instance in a worker process."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""

    @contextmanager
    def span(
        self, substage: Substage, *, pipeline: str, step: int, worker: int = 0, **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """Times its body as a sub-stage. Fields known only at the end go into the dict that it yields.

        A body that raises is logged too, with "error": the time was spent.
        """
        t0 = now()
        try:
            yield fields
        except BaseException as error:
            fields["error"] = type(error).__name__
            raise
        finally:
            self.record(substage, pipeline=pipeline, step=step, worker=worker, t0=t0, t1=now(), **fields)


class EventLog(EventSink):
    """Appends to events.jsonl. Threads may share it; one process writes the file at a time."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)
        self._lock = threading.Lock()
        self._buffer: list[bytes] = []
        self._flushed = now()

    def emit(self, event: str, **fields: Any) -> None:
        """Writes an event at once."""
        line = encode({"t": round(now(), 6), "event": event, **fields})
        with self._lock:
            self._buffer.append(line)
            self._flush()

    def keep(self, event: str, **fields: Any) -> None:
        """Takes an event that is written with the next flush."""
        line = encode({"t": round(now(), 6), "event": event, **fields})
        with self._lock:
            self._buffer.append(line)

    def take(self, lines: bytes) -> None:
        """Lines that somebody else has encoded; they are written with the next flush."""
        with self._lock:
            self._buffer.append(lines)

    def record(
        self,
        substage: Substage,
        *,
        pipeline: str,
        step: int,
        t0: float,
        t1: float,
        worker: int = 0,
        **fields: Any,
    ) -> None:
        """Logs a sub-stage that was timed elsewhere, for instance in a worker process."""
        if substage not in _KNOWN:
            raise ValueError(f"{substage!r} is not a sub-stage; they are {', '.join(SUBSTAGES)}")
        time_now = now()
        line = encode(
            {
                "t": round(time_now, 6),
                "event": "substage",
                "substage": substage,
                "pipeline": pipeline,
                "worker": worker,
                "step": step,
                "t0": round(t0, 6),
                "t1": round(t1, 6),
                **fields,
            }
        )
        with self._lock:
            self._buffer.append(line)
            if len(self._buffer) >= _MAX_BUFFERED_LINES or time_now - self._flushed > _MAX_BUFFERED_S:
                self._flush()

    def flush(self) -> None:
        """Hands everything so far to the operating system: a kill cannot lose it any more."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        self._flushed = now()
        if self._buffer:
            self._file.append(b"".join(self._buffer))
            self._buffer.clear()

    def close(self) -> None:
        """Idempotent."""
        self.flush()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class PassSpan:
    """Consecutive engine passes of one kind: tokens add up, sequences is the most that ran in one pass."""

    substage: Substage
    t0: float
    t1: float
    tokens: int
    sequences: int
    passes: int


class PassRecorder:
    """Turns an engine's passes, milliseconds each, into spans that are worth a line in the log.

    A span ends when the next pass is of another kind, when it comes more than 50 ms later, or at flush().
    Every pass is in exactly one span, and spans are emitted in the order of their passes.
    """

    def __init__(self, emit: Callable[[PassSpan], None]) -> None:
        self._emit = emit
        self._open: PassSpan | None = None

    def add(self, substage: Substage, t0: float, t1: float, *, tokens: int, sequences: int) -> None:
        """Adds the pass that ran from t0 to t1."""
        span = self._open
        if span is None or span.substage != substage or t0 - span.t1 > _MAX_GAP_S:
            self.flush()
            self._open = PassSpan(substage, t0, t1, tokens, sequences, 1)
        else:
            self._open = PassSpan(
                substage,
                span.t0,
                max(span.t1, t1),
                span.tokens + tokens,
                max(span.sequences, sequences),
                span.passes + 1,
            )

    def flush(self) -> None:
        """Ends the open span, if there is one: at the end of a step, and before waiting for anything."""
        if self._open is not None:
            span, self._open = self._open, None
            self._emit(span)
