"""One pipeline after the other, each with all workers: jobs in a queue."""

from __future__ import annotations

from jigsawrl.policies.starts import start_on
from jigsawrl.policies.state import Action, Event, State


class Serial:
    name = "serial"

    def decide(self, state: State, events: list[Event]) -> list[Action]:
        unfinished = state.unfinished()
        if not unfinished:
            return []
        first = min(unfinished, key=lambda p: (p.arrived, p.name))
        start = start_on(state, first, first.home) if first.status == "ready" else None
        return [start] if start else []
