"""Dividing workers among the lanes on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from jigsawrl.graph.interference import SIGNATURES, Signature, best_shares
from jigsawrl.graph.lanes import Segment
from jigsawrl.policies.state import Action, Resize, Start, State

Rule = Callable[[tuple[Signature, ...]], tuple[float, ...]]
"""From what runs on a worker to the share of each."""
BRIEF = 0.2
"""Seconds of a sub-stage that is over before others have made room for it."""


def equal(signatures: tuple[Signature, ...]) -> tuple[float, ...]:
    """Everyone as much as everyone else: what a GPU does without control."""
    return (1 / len(signatures),) * len(signatures)


def best(state: State) -> Rule:
    """As the interference table says that the sum of their speeds is largest."""
    return lambda signatures: best_shares(state.table, signatures, (1.0,) * len(signatures))


def at_first(state: State, start: Start) -> Signature:
    """What binds a phase when it starts."""
    phase, width = state.phase(start.phase), len(start.places[0])
    outlook = phase.outlook
    return lasting(
        outlook.engine(len(start.places), width).segments if phase.generates else outlook.training(width)
    )


def lasting(segments: Sequence[Segment]) -> Signature:
    """What binds these, brief ones left out: prompts are often read in no time, and over before this is heard of."""
    taking = [segment for segment in segments if SIGNATURES[segment.kind] not in ("host", "link")]
    long = [segment for segment in taking if segment.seconds > BRIEF]
    first = long[0] if long else max(taking, key=lambda segment: segment.seconds, default=None)
    return "compute" if first is None else SIGNATURES[first.kind]


def shared(
    state: State,
    starts: list[Start],
    rule: Rule,
    leaving: Collection[int] = frozenset(),
    returning: Collection[int] = frozenset(),
) -> list[Action]:
    """The starts, and new shares for lanes that stay, so that every worker is divided by the rule.

    A lane that spans workers has one share: the smallest that one of them leaves it. `leaving` are moved or paused,
    `returning` were paused.
    """
    staying = [lane for lane in state.lanes.lanes.values() if lane.id not in leaving]
    taking = [
        (lane.id, lane.workers, lasting(lane.segments[lane.index :]))
        for lane in staying
        if lane.signature not in ("host", "link") and (not lane.paused or lane.id in returning)
    ]
    begun = [(-1 - number, each.workers, at_first(state, each)) for number, each in enumerate(starts)]
    crowds: dict[int, list[tuple[int, Signature]]] = defaultdict(list)
    for who, workers, signature in (*taking, *begun):
        for worker in workers:
            crowds[worker].append((who, signature))
    shares = _smallest(crowds, rule)
    resized = [
        Resize(each.id, shares[each.id]) for each in staying if shares.get(each.id, each.share) != each.share
    ]
    return [*resized, *(replace(each, share=shares.get(-1 - n, 1.0)) for n, each in enumerate(starts))]


def _smallest(crowds: dict[int, list[tuple[int, Signature]]], rule: Rule) -> dict[int, float]:
    shares: dict[int, float] = {}
    for crowd in {tuple(crowd) for crowd in crowds.values()}:
        divided = rule(tuple(signature for _, signature in crowd))
        for (who, _), share in zip(crowd, divided, strict=True):
            shares[who] = min(share, shares.get(who, 1.0))
    return shares
