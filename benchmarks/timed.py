"""A policy whose decisions are timed."""

from __future__ import annotations

import time

from jigsawrl.policies.state import Action, Change, Policy, State


class Timed:
    """A policy, and the milliseconds that each of its decisions took."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name = policy.name
        self.milliseconds: list[float] = []

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        started = time.perf_counter()
        actions = self.policy.decide(state, changes)
        self.milliseconds.append(1000 * (time.perf_counter() - started))
        return actions
