"""Whose state is awake, and who must sleep to make room. Pure.

Actors of a pipeline are alike on all workers, so one number speaks for each of them. What runs counts with all that
its phase needs; what only waits, with its state. Those that have waited longest go to sleep first. Workers that run
one phase only have a memory for themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jigsawrl.policies.state import Phase, Place

FIRST, AGAIN = 5e9, 40e9
"""Bytes of a state that fall asleep and wake up again in a second: the first time, when the store's pages have to be
made and pinned, and from then on (of a 1.5B model on an H200, 36 GB with its cache, in 7 s and in 0.9 s)."""


@dataclass(slots=True)
class Memory:
    limit: float
    """Bytes of a worker."""
    states: dict[str, float] = field(default_factory=dict)
    """Bytes of each pipeline's state, awake."""
    awake: dict[str, float] = field(default_factory=dict)
    """Since when each of those has not run, the longest first."""
    slept: set[str] = field(default_factory=set)
    """Who has been asleep before."""
    workers: Place = ()
    phase: Phase | None = None
    """That its workers run; None: both."""

    def wakes(self, name: str, now: float) -> None:
        """It runs, or is set up."""
        self.awake.pop(name, None)
        self.awake[name] = now

    def sleeps(self, name: str) -> None:
        self.awake.pop(name, None)
        self.slept.add(name)

    def forget(self, name: str) -> None:
        """Its processes are gone."""
        self.awake.pop(name, None)
        self.slept.discard(name)

    def seconds(self, names: Iterable[str]) -> float:
        """For which these would be on their way to sleep and back."""
        return sum(self.states[name] / (AGAIN if name in self.slept else FIRST) for name in names)

    def to_sleep(self, running: set[str], held: float, needed: float = 0.0) -> list[str] | None:
        """Who of those that do not run must sleep, so that `needed` bytes fit beside what runs and holds `held`.

        None: it does not fit even then.
        """
        idle = [name for name in self.awake if name not in running]
        for count in range(len(idle) + 1):
            if held + needed + sum(self.states[name] for name in idle[count:]) <= self.limit:
                return idle[:count]
        return None
