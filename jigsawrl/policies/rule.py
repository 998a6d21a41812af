"""By which rule one goes on after a plan: who goes first, and on how many workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jigsawrl.policies.state import Place

Parts = tuple[tuple[str, Place], ...]


@dataclass(frozen=True, slots=True)
class Sparing:
    """Pipelines with time to spare keep to fewer workers, and leave more to those that have none.

    A phase takes the fewest workers on which it loses no more than a part of the time that its pipeline may lose and
    still be done when all work should end. Where it does not fit on so many it takes as many as it fits on.
    """

    until: float
    """When all work should end."""
    part: float
    """Of the time to spare that a phase may lose."""
    trainings: bool
    """Whether trainings keep to few workers too, or only rollouts."""


@dataclass(frozen=True, slots=True)
class Rule:
    order: tuple[str, ...] = ()
    """Who goes first; those not named, longest remaining work first."""
    strict: bool = False
    """Whether nobody overtakes one who finds no room."""
    divide: bool = False
    """Whether those who wait together divide what is free, instead of the first taking it all."""
    parts: Parts = ()
    """Workers that each rollout keeps to, while trainings take all; none if there are no such parts."""
    sparing: Sparing | None = None
    put_off: tuple[str, float] = ("", 0.0)
    """A pipeline that starts nothing before this time, as long as others run."""

    def puts_off(self, name: str, now: float) -> bool:
        return name == self.put_off[0] and now < self.put_off[1]


def fewest(seconds: Sequence[float], spare: float) -> int:
    """Place in the row, from few workers to all, of the first on which a phase loses no more than that."""
    longest = seconds[-1] + max(0.0, spare)
    return next(number for number, each in enumerate(seconds) if each <= longest)
