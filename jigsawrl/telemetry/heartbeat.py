"""A line now and then where nothing else is printed: what is under way, for how long, and how far it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jigsawrl.telemetry.text import clock

BETWEEN_S = 30.0
"""Seconds without a line after which there is one."""
MOST_NAMED = 4
"""Pipelines of one line."""


@dataclass(frozen=True, slots=True)
class Doing:
    """What a pipeline is at since when, and how many of its samples are done; `of` 0: there are none to count."""

    name: str
    step: int
    what: str
    since: float
    done: int = 0
    of: int = 0

    def line(self, now: float) -> str:
        counted = f", {self.done:,} of {self.of:,} samples done" if self.of else ""
        if self.of and self.done == self.of:
            counted = f", all {self.of:,} samples done but for their rewards"
        step = f"step {self.step}, " if self.step else ""
        return f"{self.name}: {step}{self.what} for {clock(now - self.since)}{counted}"


class Heartbeat:
    """Remembers what pipelines are at and when something was last printed. It has no clock and prints nothing."""

    def __init__(self, now: float) -> None:
        self._doing: dict[str, Doing] = {}
        self._printed = now

    def printed(self, now: float) -> None:
        self._printed = now

    def doing(self, name: str, step: int, what: str, now: float, done: int, of: int) -> None:
        """A pipeline is at this; nothing (`what` is empty): it waits, or has ended."""
        if not what:
            self._doing.pop(name, None)
            return
        before = self._doing.get(name)
        same = before is not None and (before.step, before.what) == (step, what)
        self._doing[name] = Doing(name, step, what, before.since if before and same else now, done, of)

    def line(self, now: float) -> str | None:
        """What is to be printed now, if anything: those that are at something longest come first."""
        if now - self._printed < BETWEEN_S or not self._doing:
            return None
        doing = list(self._doing.values())  # at once: another thread may change it
        doing.sort(key=lambda each: each.since)
        lines = [each.line(now) for each in doing[:MOST_NAMED]]
        if len(doing) > MOST_NAMED:
            lines.append(f"and {len(doing) - MOST_NAMED} more")
        return "; ".join(lines)


@contextmanager
def beating(beat: Callable[[], None], every: float = 1.0) -> Iterator[None]:
    """Calls `beat` again and again, from a thread of its own, while something else keeps this one busy."""
    stop = threading.Event()

    def go_on() -> None:
        while not stop.wait(every):
            beat()

    thread = threading.Thread(target=go_on, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
