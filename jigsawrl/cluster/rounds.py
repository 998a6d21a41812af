"""How long the jobs of a group take for a step each, and so whether every one keeps its promise.

Round-robin: a round takes as long as the longest job alone (`cycle`), or as the busiest node is busy (`load`),
whichever is more, and everyone makes one step in it. A group with load below its cycle is unsaturated; then no other
cyclic schedule makes more use of both pools.

As ready: a job waits, whenever it asks, at most for one phase of every other job on those nodes, and for another
job's phases not more often than that job comes round, which is not faster than alone. So its step takes at most

    T = alone + sum over others j sharing a node of phase_j * min(1, T / alone_j)

The right side is concave in T, so that T keeps a limit if and only if the right side does so at the limit. That is
what it takes at most; what it likely takes is much less.

By need: whose step must be done first goes first, and nodes are kept free for who cannot wait (`need`). Plans that
are not to hold surely go by what that is foreseen to take, or by rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jigsawrl.cluster.need import Runner, foreseen
from jigsawrl.cluster.permits import Order

SLACK = 1e-9
"""Relative; what rounding may add to a time."""
Places = Sequence[tuple[int, ...]]
"""Of each job: which of the group's rollout nodes. All of them share its training nodes."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One job in a group, in planned seconds where it is; switches between jobs included where there are others."""

    name: str
    rollout: float
    hold: float
    """The part of a rollout for which it needs its nodes; its tail goes on beside the next one."""
    training: float
    warm: float
    """Switches, part of these."""
    alone: float
    """A step alone, where that is best."""
    limit: float
    """What a step may take."""

    @property
    def step(self) -> float:
        """Without waiting."""
        return self.rollout + self.training


@dataclass(frozen=True, slots=True)
class Verdict:
    """An order, and the planned seconds of everyone's step."""

    order: Order
    seconds: tuple[float, ...]


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
    """Of a round in which everyone makes one step."""
    return max(cycle(turns), load(turns, places, shared))


def ready_seconds(turns: Sequence[Turn], places: Places, shared: bool) -> tuple[float, ...]:
    """The most that each one's step takes on the mean, first come, first served."""
    meets = _meetings(places)
    found = []
    for k, mine in enumerate(turns):
        seconds = most = mine.step + sum(_met(turns, meets, shared, k, float("inf")))
        for _ in range(100):  # from above, so that whatever is reached is a bound
            shorter = mine.step + sum(_met(turns, meets, shared, k, seconds))
            if shorter >= seconds * (1 - SLACK):
                break
            seconds = shorter
        found.append(min(seconds, most))
    return tuple(found)


def runners_of(turns: Sequence[Turn], places: Places, shared: bool, now: float) -> list[Runner]:
    """The jobs as they go by need, from now on."""
    taken = [sum([1 << node for node in nodes]) for nodes in places]
    every = 0
    for nodes in taken:
        every |= nodes
    training = every if shared else 1 << every.bit_length()
    return [
        Runner(
            each.name,
            (nodes, training),
            (each.rollout, each.training),
            (each.hold, each.training),
            each.limit,
            now + each.limit,
        )
        for each, nodes in zip(turns, taken, strict=True)
    ]


def _met(turns: Sequence[Turn], meets: Sequence[int], shared: bool, k: int, seconds: float) -> list[float]:
    """What job k waits for each of the others in a step that takes so long."""
    return [
        (other.training + other.hold if shared or meets[j] == meets[k] else other.training)
        * (1.0 if seconds >= other.step else seconds / other.step)
        for j, other in enumerate(turns)
        if j != k
    ]


def _meetings(places: Places) -> list[int]:
    """A number for each job, the same for those whose rollouts may wait for each other, be it through others."""
    label = list(range(len(places)))
    first: dict[int, int] = {}
    for k, nodes in enumerate(places):
        for node in nodes:
            mine, theirs = label[k], label[first.setdefault(node, k)]
            if mine != theirs:
                label = [theirs if each == mine else each for each in label]
    return label


def keeps(turns: Sequence[Turn], places: Places, shared: bool) -> bool:
    """Whether there is an order in which all keep their limits."""
    if round_seconds(turns, places, shared) <= min([each.limit for each in turns]) * (1 + SLACK):
        return True
    return _ready(turns, places, shared)


def _ready(turns: Sequence[Turn], places: Places, shared: bool) -> bool:
    meets = _meetings(places)
    return all(
        mine.step + sum(_met(turns, meets, shared, k, mine.limit)) <= mine.limit * (1 + SLACK)
        for k, mine in enumerate(turns)
    )


def judged(turns: Sequence[Turn], places: Places, shared: bool) -> Verdict:
    """As ready where all keep their limits so, since it never idles; else in rounds if all keep their limits so.

    If neither is the case, the one in which the worst is least beyond its limit.
    """
    ready = Verdict("as-ready", ready_seconds(turns, places, shared))
    if len(turns) == 1 or _ready(turns, places, shared):
        return ready
    rounds = Verdict("round-robin", (round_seconds(turns, places, shared),) * len(turns))
    return min(rounds, ready, key=lambda verdict: lateness(turns, verdict))


def likely(turns: Sequence[Turn], places: Places, shared: bool) -> Verdict:
    """The order in which all likely keep their limits, and go on fastest if they do so in both."""
    rounds = Verdict("round-robin", (round_seconds(turns, places, shared),) * len(turns))
    by_need = Verdict("by-need", tuple(foreseen(runners_of(turns, places, shared, 0.0))))
    return min(
        by_need,
        rounds,
        key=lambda verdict: (
            max(1 + SLACK, lateness(turns, verdict)),
            -sum([turn.alone / s for turn, s in zip(turns, verdict.seconds, strict=True)]),
        ),
    )


def lateness(turns: Sequence[Turn], verdict: Verdict) -> float:
    """Of the worst: its planned seconds over its limit."""
    return max([s / t.limit for s, t in zip(verdict.seconds, turns, strict=True)])
