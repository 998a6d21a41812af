"""Who may run now inside a group: each phase asks for its nodes, runs when they are permitted, and gives them back.

Three orders. `as-ready`: first come, first served; a short job may go round several times while a long one goes once.
`round-robin`: RollMux's meta-iteration; on every node the jobs run in turn, one rollout and one training each, and a
node rather waits than lets someone overtake. `by-need`: whose step must be done first goes first (`need`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from jigsawrl.cluster.need import ROLLOUT, TRAINING, Runner, starting

Order = Literal["as-ready", "round-robin", "by-need"]
Phase = Literal["rollout", "training"]
Nodes = frozenset[str]


@dataclass(slots=True)
class Seat:
    """One job's nodes, and its next turn on them."""

    rollout: Nodes
    training: Nodes
    place: int = 0
    """In the order of a round."""
    rounds: dict[Phase, int] = field(default_factory=lambda: {"rollout": 0, "training": 0})

    def nodes(self, phase: Phase) -> Nodes:
        return self.rollout if phase == "rollout" else self.training


@dataclass(slots=True)
class Permits:
    """The permits of one group. A job asks for one phase at a time and releases it before it asks again."""

    order: Order = "as-ready"
    seats: dict[str, Seat] = field(default_factory=dict)
    waiting: dict[str, Phase] = field(default_factory=dict)
    """In the order in which they asked."""
    running: dict[str, Phase] = field(default_factory=dict)
    tails: set[str] = field(default_factory=set)
    """Jobs whose rollout goes on beside the next one's."""
    runners: dict[str, Runner] = field(default_factory=dict)
    """By need only."""

    def seated(
        self, order: Order, seats: Mapping[str, tuple[Nodes, Nodes]], runners: Iterable[Runner] = ()
    ) -> None:
        """Takes these jobs and nodes; who runs or waits goes on doing so, who is not among them is gone.

        Rounds go on: however often this is called, whose turn it is does not change. Newcomers join the round that is
        being trained. By need, steps that have begun stay due when they were.
        """
        known = self.seats if order == self.order == "round-robin" else {}
        latest = max((known[name].rounds["training"] for name in seats if name in known), default=0)
        self.order = order
        self.waiting = {name: phase for name, phase in self.waiting.items() if name in seats}
        self.running = {name: phase for name, phase in self.running.items() if name in seats}
        self.tails &= seats.keys()
        begun = self.tails | {name for name, phase in self.waiting.items() if phase == "training"}
        begun |= {name for name, phase in self.running.items() if phase == "rollout"}
        self.seats = {name: Seat(*nodes, place) for place, (name, nodes) in enumerate(seats.items())}
        for name, seat in self.seats.items():
            if name in known:
                seat.rounds = known[name].rounds
            else:  # who has begun has had its rollout of this round
                seat.rounds = {"rollout": latest + (name in begun), "training": latest}
        self._take({each.name: each for each in runners if each.name in seats} if order == "by-need" else {})

    def _take(self, runners: dict[str, Runner]) -> None:
        """Those that run go on; how far they are is not known of those that did not go by need before."""
        for name, runner in runners.items():
            phase = self.running.get(name) or self.waiting.get(name) or "rollout"
            runner.phase = ROLLOUT if phase == "rollout" else TRAINING
            if name in self.running or name in self.tails:
                runner.begin(runner.due - runner.limit)
            if name in self.tails:
                runner.held = 0
            if (old := self.runners.get(name)) is not None:
                runner.due, runner.ends = old.due, old.ends
        self.runners = runners

    def ask(self, name: str, phase: Phase) -> None:
        self.waiting[name] = phase

    def release(self, name: str, now: float) -> None:
        """Its phase is over."""
        self.running.pop(name, None)
        self.tails.discard(name)
        if name in self.runners:
            self.runners[name].end(now)

    def allow(self, name: str, seconds: float) -> None:
        """What its steps may take from now on."""
        if name in self.runners:
            self.runners[name].limit = seconds

    def tail(self, name: str) -> None:
        """Its rollout needs its nodes no more, and goes on."""
        self.running.pop(name, None)
        self.tails.add(name)
        if name in self.runners:
            self.runners[name].held = 0

    def leave(self, name: str) -> None:
        """Whatever it does, it does no longer."""
        self.tails.discard(name)
        for there in (self.running, self.waiting, self.seats, self.runners):
            there.pop(name, None)

    def granted(self, now: float) -> list[tuple[str, Phase]]:
        """Those that start now."""
        if self.order == "by-need":
            return self._most_needed(now)
        taken: set[str] = set()
        for name, phase in self.running.items():
            taken |= self.seats[name].nodes(phase)
        starts: list[tuple[str, Phase]] = []
        for name, phase in list(self.waiting.items()):
            nodes = self.seats[name].nodes(phase)
            if taken.isdisjoint(nodes) and self._in_turn(name, phase):
                starts.append((name, phase))
                del self.waiting[name]
                self.running[name] = phase
                self.seats[name].rounds[phase] += 1
            elif self.order == "round-robin":
                continue  # its turn does not depend on when it asked
            taken |= nodes  # nobody overtakes on the nodes that it waits for
        return starts

    def _most_needed(self, now: float) -> list[tuple[str, Phase]]:
        waiting = [self.runners[name] for name in self.waiting]
        busy = [each for each in self.runners.values() if each.ends is not None]
        starts: list[tuple[str, Phase]] = []
        for runner in starting(waiting, busy, now):
            phase = self.running[runner.name] = self.waiting.pop(runner.name)
            starts.append((runner.name, phase))
            runner.begin(now)
        return starts

    def _in_turn(self, name: str, phase: Phase) -> bool:
        if self.order == "as-ready":
            return True
        mine = self.seats[name]
        turn = (mine.rounds[phase], mine.place)
        return all(
            turn < (other.rounds[phase], other.place)
            for other_name, other in self.seats.items()
            if other_name != name and not mine.nodes(phase).isdisjoint(other.nodes(phase))
        )
