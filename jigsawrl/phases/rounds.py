"""Round-robin in closed form: how long a round of a group of jobs takes.

A round takes as long as the longest job alone (`cycle`), or as the busiest node is busy (`load`), whichever is more,
and every job makes one step in it. A group with load below its cycle is unsaturated; then no other cyclic schedule
makes more use of both pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLACK = 1e-9
"""Relative; what rounding may add to a time."""
Places = Sequence[tuple[int, ...]]
"""The rollout nodes of the group that each job uses. All jobs share its training nodes."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One job in a group, in planned seconds where it is; switches between jobs included where there are others."""

    name: str
    rollout: float
    hold: float
    """The part of a rollout for which it needs its nodes; its tail goes on beside the next one."""
    training: float
    warm: float
    """Seconds of switches, part of these."""
    alone: float
    """Seconds of a step alone, where that is best."""
    limit: float
    """Seconds that a step may take."""

    @property
    def step(self) -> float:
        """Seconds of a step without waiting."""
        return self.rollout + self.training


def cycle(turns: Sequence[Turn]) -> float:
    """Seconds of the longest job by itself."""
    return max(each.step for each in turns)


def load(turns: Sequence[Turn], places: Places, shared: bool) -> float:
    """Seconds for which the busiest node is busy in a round; `shared`: both phases use the same nodes."""
    training = sum([each.training for each in turns])
    busy: dict[int, float] = {}
    for turn, nodes in zip(turns, places, strict=True):
        for node in nodes:
            busy[node] = busy.get(node, 0.0) + turn.hold
    longest = max(busy.values())
    return training + longest if shared else max(training, longest)


def unsaturated(turns: Sequence[Turn], places: Places, shared: bool) -> bool:
    """The condition of the theorem: round-robin then makes the best use of both pools."""
    return load(turns, places, shared) <= cycle(turns) * (1 + SLACK)


def round_seconds(turns: Sequence[Turn], places: Places, shared: bool) -> float:
    """Seconds of a round in which every job makes one step."""
    return max(cycle(turns), load(turns, places, shared))
