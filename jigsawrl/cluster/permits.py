"""Who may run now inside a group: each phase asks for its nodes, runs when they are permitted, and gives them back.

Two orders. `as-ready`: first come, first served; a short job may go round several times while a long one goes once.
`round-robin`: RollMux's meta-iteration; on every node the jobs run in turn, one rollout and one training each, and a
node rather waits than lets someone overtake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Order = Literal["as-ready", "round-robin"]
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

    def seated(self, order: Order, seats: Mapping[str, tuple[Nodes, Nodes]]) -> None:
        """Takes these jobs and nodes; who runs or waits goes on doing so, who is not among them is gone.

        Rounds go on: however often this is called, whose turn it is does not change. Newcomers join the round that is
        being trained.
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

    def ask(self, name: str, phase: Phase) -> None:
        self.waiting[name] = phase

    def release(self, name: str) -> None:
        """Its phase is over."""
        self.running.pop(name, None)
        self.tails.discard(name)

    def tail(self, name: str) -> None:
        """Its rollout needs its nodes no more, and goes on."""
        self.running.pop(name, None)
        self.tails.add(name)

    def leave(self, name: str) -> None:
        """Whatever it does, it does no longer."""
        self.release(name)
        self.waiting.pop(name, None)
        self.seats.pop(name, None)

    def granted(self) -> list[tuple[str, Phase]]:
        """Those that start now."""
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
