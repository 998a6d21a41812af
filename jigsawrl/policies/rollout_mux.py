"""Only rollouts share workers: pipelines roll out together and train one by one (as MuxServe would)."""

from __future__ import annotations

from jigsawrl.policies.concurrent import start_all
from jigsawrl.policies.shares import best, shared
from jigsawrl.policies.starts import start_on
from jigsawrl.policies.state import Action, Change, State


class RolloutMux:
    name = "rollout-mux"

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        running = state.running()
        trainings = [phase for phase in state.ready() if not phase.generates]
        if any(not phase.generates for phase in running):
            return []
        if trainings:  # no new rollouts, so that those that run come to an end
            start = None if running else start_on(state, trainings[0], trainings[0].home)
            return shared(state, [start] if start else [], best(state))
        return shared(state, start_all(state), best(state))
