"""The best pair now: starts what adds most to the speed of this moment, with no thought of what follows."""

from __future__ import annotations

from jigsawrl.graph.interference import Occupant, Signature, best_shares
from jigsawrl.policies.shares import at_first, best, shared
from jigsawrl.policies.starts import needs, start_on
from jigsawrl.policies.state import Action, Change, Start, State

CROWD = 2
"""Lanes side by side on a worker."""


class Greedy:
    name = "greedy"

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        crowds = [
            [lane.signature for lane in state.lanes.occupants(worker)] for worker in range(len(state.alive))
        ]
        ready, held = state.ready(), list(state.held)
        starts: list[Start] = []
        while True:
            possible = [start for p in ready if (start := start_on(state, p, p.home, held))]
            start = max(possible, key=lambda each: (gain(state, crowds, each), each.phase), default=None)
            if start is None or gain(state, crowds, start) <= 0:
                return shared(state, starts, best(state))
            starts.append(start)
            phase = state.phase(start.phase)
            ready.remove(phase)
            for worker in start.workers:
                crowds[worker].append(at_first(state, start))
                held[worker] += needs(phase, start.places)


def gain(state: State, crowds: list[list[Signature]], start: Start) -> float:
    """What the workers' summed speeds gain by this start; nothing where one of them has a crowd already."""
    if any(len(crowds[worker]) >= CROWD for worker in start.workers):
        return 0.0
    signature = at_first(state, start)
    return sum(
        total_speed(state, (*crowds[worker], signature)) - total_speed(state, tuple(crowds[worker]))
        for worker in start.workers
    )


def total_speed(state: State, kinds: tuple[Signature, ...]) -> float:
    """Of everything on a worker that is divided as well as can be."""
    shares = best_shares(state.table, kinds, (1.0,) * len(kinds))
    crowd = [Occupant(kind, share) for kind, share in zip(kinds, shares, strict=True)]
    return sum(state.table.speeds(crowd))
