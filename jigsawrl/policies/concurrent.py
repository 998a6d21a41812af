"""Everything at once: every phase starts when it is ready, and the hardware divides itself."""

from __future__ import annotations

from jigsawrl.policies.onward import going_on
from jigsawrl.policies.shares import equal, shared
from jigsawrl.policies.starts import needs, start_on
from jigsawrl.policies.state import Action, Event, Start, State


class Concurrent:
    name = "concurrent"

    def decide(self, state: State, events: list[Event]) -> list[Action]:
        return shared(state, going_on(state, start_all(state)), equal)


def start_all(state: State) -> list[Start]:
    """Every ready phase on its whole home, as long as memory lasts, longest waiting first."""
    starts: list[Start] = []
    held = list(state.held)
    for pipeline in state.ready():
        start = start_on(state, pipeline, pipeline.home)
        if start is None:
            continue
        needed = needs(pipeline, start.places)
        workers = [worker for place in start.places for worker in place]
        if all(held[worker] + needed <= state.device_bytes for worker in workers):
            for worker in workers:
                held[worker] += needed
            starts.append(start)
    return starts
