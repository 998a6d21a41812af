"""By which rule one goes on after a plan: who goes first, and on how many workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jigsawrl.policies.state import Place

Parts = tuple[tuple[str, Place], ...]
Choice = tuple[int, float, float]
"""Workers, or blocks of them, that a phase may take, its seconds alone on so many, and its bytes on each."""


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

    def narrowed(self, choices: Sequence[Choice], now: float, work_left: float) -> Sequence[Choice]:
        """Choices, from few workers to all, up to the one that a pipeline with so many seconds of work left takes."""
        seconds = [each for _, each, _ in choices]
        return choices[: fewest(seconds, self.part * (self.until - now - work_left)) + 1]


def roomiest(
    choices: Sequence[Choice], found: Sequence[int], held: Sequence[float], capacity: float
) -> list[int]:
    """Those of the workers, or blocks, found that have most room, as many as the last choice that fits on them."""
    order = sorted(found, key=lambda each: (held[each], each))
    for count, _, needed in reversed(choices):
        if count <= len(order) and held[order[count - 1]] + needed <= capacity:
            return sorted(order[:count])
    return []


@dataclass(frozen=True, slots=True)
class Rule:
    order: tuple[str, ...] = ()
    """Who goes first; those not named, longest remaining work first."""
    strict: bool = False
    """Whether nobody overtakes one who finds no room."""
    divide: bool = False
    """Whether those who wait together divide what is free by the work they have left, instead of the first taking it
    all."""
    parts: Parts = ()
    """Workers that each rollout keeps to, while trainings take all; none if there are no such parts."""
    sparing: Sparing | None = None
    put_off: tuple[str, float] = ("", 0.0)
    """A pipeline that starts nothing before this time, as long as others run."""

    def rank(self, name: str) -> int:
        """The place of a pipeline in the order."""
        return self.order.index(name) if name in self.order else len(self.order)


def fewest(seconds: Sequence[float], spare: float) -> int:
    """Place in the row, from few workers to all, of the first on which a phase loses no more than that."""
    longest = seconds[-1] + max(0.0, spare)
    return next(number for number, each in enumerate(seconds) if each <= longest)


def part_of(work: Sequence[float]) -> float:
    """The first one's part of what is free, where several divide it by the seconds of work that each has left."""
    return work[0] / sum(work) if work[0] > 0 else 1 / len(work)
