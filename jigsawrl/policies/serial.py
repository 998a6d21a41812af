"""One pipeline after the other, each with all workers: jobs in a queue."""

from __future__ import annotations

from jigsawrl.policies.starts import start_on
from jigsawrl.policies.state import Action, Change, State


class Serial:
    name = "serial"

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        unfinished = state.unfinished()
        if not unfinished or state.running():
            return []
        first = min(unfinished, key=lambda p: (p.arrived, p.name))
        waiting = [phase for phase in state.ready() if phase.pipeline is first]
        starts = (start_on(state, phase, phase.home) for phase in waiting[:1])
        return [start for start in starts if start]
