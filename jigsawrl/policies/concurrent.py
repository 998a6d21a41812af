"""Everything at once: every phase starts when it is ready, and the hardware divides itself."""

from __future__ import annotations

from jigsawrl.policies.shares import equal, shared
from jigsawrl.policies.starts import going_on, needs, start_on
from jigsawrl.policies.state import Action, Change, Start, State


class Concurrent:
    name = "concurrent"

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        return shared(state, going_on(state, start_all(state)), equal)


def start_all(state: State) -> list[Start]:
    """Every ready phase on its whole home, as long as memory lasts, longest waiting first."""
    starts, held = [], list(state.held)
    for phase in state.ready():
        start = start_on(state, phase, phase.home, held)
        if start is not None:
            for worker in start.workers:
                held[worker] += needs(phase, start.places)
            starts.append(start)
    return starts
