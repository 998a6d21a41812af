"""Whose state is awake, and who must sleep to make room. Pure.

Actors of a pipeline are alike on all workers, so one number speaks for each of them. What runs counts with all that
its phase needs; what only waits, with its state. Those that have waited longest go to sleep first. Workers that run
one phase only have a memory for themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jigsawrl.policies.state import Phase, Place


@dataclass(slots=True)
class Memory:
    limit: float
    """Bytes of a worker."""
    states: dict[str, float] = field(default_factory=dict)
    """Bytes of each pipeline's state, awake."""
    awake: dict[str, float] = field(default_factory=dict)
    """Since when each of those has not run, the longest first."""
    workers: Place = ()
    phase: Phase | None = None
    """That its workers run; None: both."""

    def wakes(self, name: str, now: float) -> None:
        """It runs, or is set up."""
        self.awake.pop(name, None)
        self.awake[name] = now

    def sleeps(self, name: str) -> None:
        self.awake.pop(name, None)

    def to_sleep(self, running: set[str], held: float, needed: float = 0.0) -> list[str] | None:
        """Who of those that do not run must sleep, so that `needed` bytes fit beside what runs and holds `held`.

        None: it does not fit even then.
        """
        idle = [name for name in self.awake if name not in running]
        for count in range(len(idle) + 1):
            if held + needed + sum(self.states[name] for name in idle[count:]) <= self.limit:
                return idle[:count]
        return None
