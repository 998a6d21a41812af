"""A policy that does whatever it may: more of what a core can be asked to do than any that makes sense."""

from __future__ import annotations

import random
from collections.abc import Iterator

from jigsawrl.policies.shares import equal, shared
from jigsawrl.policies.starts import needs, start_on
from jigsawrl.policies.state import (
    Action,
    Change,
    Confine,
    Migrate,
    Pause,
    Phase,
    Resume,
    Start,
    State,
    Wait,
)
from jigsawrl.policies.tails import moved_bytes


class Anything:
    name = "anything"

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.until = float("-inf")
        """When it asked to be asked again."""

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        draw, held = self.draw, list(state.held)
        moves = list(self._moves(state, held))
        moved = {lane for move in moves for lane in move.lanes}
        starts = list(self._starts(state, held))
        stay = [lane for lane in state.lanes.lanes.values() if lane.id not in moved]
        turned = [lane for lane in stay if draw.random() < (0.7 if lane.paused else 0.03)]
        still = {lane.id for lane in stay if lane.paused != (lane in turned)}
        all_stand = len(still) == len(stay)
        asked = state.now < self.until and not all_stand
        waits = [] if asked else self._waits(state, bool(still), all_stand)
        pauses = [Resume(lane.id) if lane.paused else Pause(lane.id) for lane in turned]
        leaving = moved | {action.lane for action in pauses if isinstance(action, Pause)}
        returning = {action.lane for action in pauses if isinstance(action, Resume)}
        confined = [Confine(lane.id, draw.random() < 0.5) for lane in stay if draw.random() < 0.02]
        divided = shared(state, starts, equal, leaving, returning)
        return [*moves, *pauses, *divided, *confined, *waits]

    def _starts(self, state: State, held: list[float]) -> Iterator[Start]:
        ready = state.ready()
        self.draw.shuffle(ready)
        for number, phase in enumerate(ready):
            if self.draw.random() < 0.8 or (number == 0 and not state.lanes.lanes):
                start = start_on(state, phase, self._some(phase))
                if start is None or not _take(state, held, start.workers, needs(phase, start.places)):
                    continue
                auto = phase.generates and self.draw.random() < 0.3
                yield Start(start.phase, start.places, auto_continue=auto)

    def _waits(self, state: State, some: bool, all_stand: bool) -> list[Wait]:
        if not some and not all_stand and self.draw.random() < 0.95:
            return []
        self.until = state.now + self.draw.uniform(5, 600)
        return [Wait(self.until)]

    def _some(self, phase: Phase) -> list[int]:
        home, tp = phase.home, phase.pipeline.tp if phase.generates else 1
        count = tp * self.draw.randint(1, max(1, len(home) // tp)) if self.draw.random() < 0.5 else len(home)
        return sorted(self.draw.sample(home, min(count, len(home))))

    def _moves(self, state: State, held: list[float]) -> Iterator[Migrate]:
        for phase in state.running():
            lanes = [state.lanes.lanes[key] for key in phase.lanes]
            if (
                phase.pipeline.hidden
                or not phase.generates
                or any(key not in state.survivors for key in phase.lanes)
            ):
                continue
            left = sum(state.survivors[key].sequences for key in phase.lanes)
            if len(lanes) < 2 or left < 1 or self.draw.random() < 0.5:
                continue
            count = self.draw.randint(1, min(left, len(lanes) - 1))
            places = tuple(lane.workers for lane in self.draw.sample(lanes, count))
            move = Migrate(phase.id.pipeline, tuple(phase.lanes), places, 1 / 8)
            if _take(state, held, move.workers, moved_bytes(state, move)):
                yield move


def _take(state: State, held: list[float], workers: list[int], needed: float) -> bool:
    """Whether there is room for this; it is taken then."""
    if any(held[worker] + needed > state.device_bytes for worker in workers):
        return False
    for worker in workers:
        held[worker] += needed
    return True
