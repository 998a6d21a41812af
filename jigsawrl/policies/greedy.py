"""The best pair now: starts what adds most to the speed of this moment, with no thought of what follows."""

from __future__ import annotations

from jigsawrl.graph.interference import SIGNATURES, Occupant, Signature, best_shares
from jigsawrl.policies.shares import at_first, best, shared
from jigsawrl.policies.starts import needs, start_on
from jigsawrl.policies.state import Action, Event, Start, State

CROWD = 2
"""Lanes side by side on a worker."""


class Greedy:
    name = "greedy"

    def decide(self, state: State, events: list[Event]) -> list[Action]:
        crowds: dict[int, list[Signature]] = {
            worker: [SIGNATURES[lane.segment.kind] for lane in state.lanes.occupants(worker)]
            for worker in range(len(state.alive))
        }
        held = list(state.held)
        starts: list[Start] = []
        ready = state.ready()
        while ready:
            gains = [(self._gain(state, crowds, held, start_on(state, p, p.home)), p) for p in ready]
            (gain, start), pipeline = max(gains, key=lambda found: (found[0][0], found[1].name))
            if start is None or gain <= 0:
                break
            starts.append(start)
            ready.remove(pipeline)
            for place in start.places:
                for worker in place:
                    crowds[worker].append(at_first(state, start))
                    held[worker] += needs(pipeline, start.places)
        return shared(state, starts, best(state))

    def _gain(
        self, state: State, crowds: dict[int, list[Signature]], held: list[float], start: Start | None
    ) -> tuple[float, Start | None]:
        """What the workers' summed speeds gain by this start, and the start if it is possible."""
        if start is None:
            return 0.0, None
        needed = needs(state.pipelines[start.pipeline], start.places)
        workers = [worker for place in start.places for worker in place]
        if any(held[worker] + needed > state.device_bytes for worker in workers):
            return 0.0, None
        if any(len(crowds[worker]) >= CROWD for worker in workers):
            return 0.0, None
        signature = at_first(state, start)
        gain = sum(
            total_speed(state, (*crowds[worker], signature)) - total_speed(state, tuple(crowds[worker]))
            for worker in workers
        )
        return gain, start


def total_speed(state: State, kinds: tuple[Signature, ...]) -> float:
    """Of everything on a worker that is divided as well as can be."""
    shares = best_shares(state.table, kinds, (1.0,) * len(kinds))
    crowd = [Occupant(kind, share) for kind, share in zip(kinds, shares, strict=True)]
    return sum(state.table.speed(one, crowd[:i] + crowd[i + 1 :]) for i, one in enumerate(crowd))
