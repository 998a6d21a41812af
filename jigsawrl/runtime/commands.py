"""Commands of users to a live run: checked, remembered on the disk, answered at once, carried out by the scheduler.

Answers are given in threads of their own, so that a scheduler that is busy, or not there yet, keeps nobody waiting.
A command that is repeated is the same command, so whoever heard no answer can ask again.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jigsawrl.config.pipelines import run_of
from jigsawrl.config.reserved import alike
from jigsawrl.config.settings import RunConfig
from jigsawrl.errors import JigsawError
from jigsawrl.phases.turns import ORDERS, OrderName
from jigsawrl.runtime.member import Member
from jigsawrl.runtime.requests import Entry, Requests

Order = tuple[str, Member | OrderName]
"""What is to be done, and with whom: submit, pause, resume, cancel; or in which order pipelines take turns."""
LATER = "accepted; it takes effect once the run is set up"


class Commands:
    def __init__(
        self,
        requests: Requests,
        members: dict[str, Member],
        submitted_runs: Mapping[str, RunConfig],
        admit: Callable[[str, Entry], tuple[Member, RunConfig]],
    ) -> None:
        """`submitted_runs` are the run files of the pipelines that were submitted before; `admit` makes a member of
        a pipeline and reads its run file, or refuses it."""
        self.requests, self.members, self.admit = requests, members, admit
        self.files = {name: run for name, run in submitted_runs.items() if name in requests.submitted}
        """The run files of submitted pipelines, as they were accepted."""
        self.at_work: Callable[[str], bool] = lambda name: False
        """Whether a phase of a pipeline runs now."""
        self.set_up = False
        """Whether the scheduler is there, which carries orders out."""
        self.stopping = False
        self.closed = False
        self.lock = threading.RLock()
        """Held while requests or members change."""
        self.orders: list[Order] = []
        self.wake = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")
        """Can be read while there are orders."""

    @property
    def everyone(self) -> dict[str, Member]:
        """All pipelines, also those that were accepted and that the scheduler does not know yet."""
        return self.members | {each.name: each for _, each in self.orders if isinstance(each, Member)}

    # The scheduler's side

    def take(self) -> list[Order]:
        """All orders since the last time, of which there are some. Pipelines that were submitted are members now."""
        with self.lock:
            os.eventfd_read(self.wake.fileno())
            self.members.update(self.everyone)
            orders, self.orders = self.orders, []
        return orders

    def close(self) -> bool:
        """Takes no more orders; False where there are some still, and nothing is closed."""
        with self.lock:
            self.closed = not self.orders
            return self.closed

    def finished(self, name: str) -> None:
        """A pipeline made all of its steps, so nothing that was asked of it matters any more.

        Where that cannot be written down, the next --resume takes it for cancelled, and makes no step either.
        """
        with self.lock, suppress(OSError):
            self.requests.withdraw(name)

    # The users' side

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """How all pipelines stand after a request, and a line that says more; a JigsawError where it is refused."""
        what = request["do"]
        if what == "submit":
            said = self._submit(request["name"], request["entry"])
        elif what in ("pause", "resume", "cancel"):
            with self.lock:
                said = getattr(self, f"_{what}")(self._named(request["pipeline"]))
        elif what == "order" and request["order"] in ORDERS:
            said = self._order(what, request["order"])
        else:
            raise JigsawError(f"{what}: not understood")
        with self.lock:
            standings = {name: self._standing(member) for name, member in self.everyone.items()}
        return {"pipelines": standings, "said": said or ("" if self.set_up else LATER)}

    def _standing(self, member: Member) -> str:
        if member.ended is not None:
            return member.ended
        if member.cancelled or member.name in self.requests.cancelled:
            return "ends after its step" if member.began else "ends before its first step"
        if self.stopping:
            return "ends after its step"
        if member.name in self.requests.paused:
            return "pauses after its phase" if self.at_work(member.name) else "paused"
        return member.standing

    def _named(self, name: Any) -> Member:
        everyone = self.everyone
        if name not in everyone:
            raise JigsawError(f"there is no pipeline {name}; there are {', '.join(everyone)}")
        return everyone[name]

    def _submit(self, name: str, entry: Entry) -> str:
        there = f"{name} was submitted before, and is there already; nothing is changed"
        if name in self.files and self._is_there(name, entry, run_of(Path(entry["run"]))):
            return there
        with self.lock:
            self._refuse(name)
        member, run = self.admit(name, entry)  # reads data: others are answered meanwhile
        with self.lock:
            if self._is_there(name, entry, run):  # by somebody else, meanwhile
                return there
            self._refuse(name)
            self.requests.submit(name, entry)
            self.files[name] = run
            return self._order("submit", member)

    def _is_there(self, name: str, entry: Entry, run: RunConfig) -> bool:
        """Whether this very pipeline was submitted before."""
        return self.requests.submitted.get(name) == entry and self.files.get(name) == run

    def _refuse(self, name: str) -> None:
        """A JigsawError where no pipeline of this name can come."""
        if name in self.everyone:
            raise JigsawError(f"there is a pipeline {name} already; choose another --name")
        if (other := alike(name, self.everyone)) is not None:
            raise JigsawError(f"there is a pipeline {other} already; choose a --name that differs in more")
        if self.closed:
            raise JigsawError("has ended; start a run of its own for what you submit")
        if self.stopping:
            raise JigsawError("it is stopping; submit it again when it goes on with --resume")

    def _pause(self, member: Member) -> str:
        if member.ended is not None:
            raise JigsawError(f"{member.name} has ended: {member.ended}")
        if member.name in self.requests.cancelled or member.cancelled:
            raise JigsawError(f"{member.name} was cancelled and ends after its step; it cannot be paused")
        if self.stopping:
            raise JigsawError(f"it is stopping, and {member.name} ends after its step; it cannot be paused")
        self.requests.pause(member.name)
        return self._order("pause", member)

    def _resume(self, member: Member) -> str:
        name = member.name
        if name in self.requests.cancelled or member.cancelled:
            self.requests.withdraw(name)
            return f"{name} was cancelled; it goes on when the run has ended and goes on with --resume"
        if member.ended is not None:
            raise JigsawError(f"{name} has ended: {member.ended}")
        self.requests.withdraw(name)
        return self._order("resume", member)

    def _cancel(self, member: Member) -> str:
        if member.ended == "finished":
            raise JigsawError(f"{member.name} has ended: finished")
        self.requests.cancel(member.name)
        if member.ended is None:
            return self._order("cancel", member)
        was = "was cancelled before" if member.ended == "cancelled" else f"has ended: {member.ended}"
        return f"{member.name} {was}; it does not go on with --resume"

    def _order(self, what: str, whom: Member | OrderName) -> str:
        """The scheduler carries it out soon; there is nothing more to say."""
        with self.lock:
            self.orders.append((what, whom))
            os.eventfd_write(self.wake.fileno(), 1)
        return ""
