"""A driver's line, and its two ends: `Channel` is the scheduler's, `SchedulerChannel` the driver's.

At the scheduler's end neither reading nor sending ever waits for the driver: one that is stopped in the middle of a
message, or that reads nothing, costs the others nothing. A driver whose scheduler is gone ends.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection

from jigsawrl.frames import Nonsense, Stream
from jigsawrl.phases.ids import PhaseKind
from jigsawrl.runtime.messages import FromDriver, PhasePermit, Seats, Sleep, Stop, ToDriver
from jigsawrl.telemetry.events import now

MOST_MESSAGE = 64 << 20
"""Bytes of one message; those of the longest traceback or the most events are far less."""
MOST_UNSENT = 4 << 20
"""Bytes that wait until the driver reads them. A message has a few hundred, and few are sent in a phase."""
SOON_S = 1.5
"""Longest time a message is held back for batching, in seconds."""
MOST_KEPT = 64
"""Messages that are held back, at most."""


class Broken(Exception):
    """What comes over a line makes no sense, or nothing more goes into it: its driver is of no use any more."""


class Channel(Stream):
    """The scheduler's end."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, MOST_MESSAGE)

    def receive(self) -> list[FromDriver]:
        """Messages that are there as a whole. EOFError: the driver's end is closed, and all was read."""
        try:
            contents = self.contents()
        except Nonsense as nonsense:
            raise Broken(str(nonsense)) from None
        try:
            return [message for content in contents for message in pickle.loads(content)]
        except Exception as error:
            raise Broken(f"it said what cannot be understood ({type(error).__name__})") from None

    def send(self, message: ToDriver) -> None:
        """At once as far as there is room, the rest with `flush`. OSError: nobody reads it any more."""
        self.put(pickle.dumps(message))
        if self.unsent_bytes > MOST_UNSENT:
            raise Broken("it does not read what it is told")


class SchedulerChannel:
    """The driver's end: messages to the scheduler and back."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.stopping = False
        self.sleepy: set[PhaseKind | None] = set()
        """Phases whose actors were told to sleep, which they do between phases; None: those of all."""
        self.on_sleep: Callable[[], None] = lambda: None
        """Called when some are told to sleep."""
        self.permit: PhasePermit | None = None
        """The last permit that came."""
        self.permitted = 0.0
        """When it came."""
        self.seats: Seats | None = None
        """Where the next phase may run; None: it has to wait for a permit."""
        self.kept: list[FromDriver] = []
        self.sent = now()

    def send(self, message: FromDriver) -> None:
        """Sends a message at once, with those that were held back."""
        messages = (*self.kept, message)
        self.kept.clear()
        self.sent = now()
        try:
            self.pipe.send(messages)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)

    def later(self, message: FromDriver) -> None:
        """Sends a message that nobody waits for: with the next one, or soon."""
        self.kept.append(message)
        self.catch_up()

    def catch_up(self) -> None:
        """Sends what was held back, if it was for long or there is much of it."""
        if self.kept and (now() - self.sent > SOON_S or len(self.kept) > MOST_KEPT):
            self.send(self.kept.pop())

    def receive(self) -> ToDriver:
        try:
            message: ToDriver = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            os._exit(1)
        self.stopping = self.stopping or isinstance(message, Stop)
        if isinstance(message, PhasePermit):
            self.permit, self.permitted, self.seats = message, now(), message.seats
        if isinstance(message, Sleep):
            self.sleepy.add(message.phase)
            self.on_sleep()
        return message

    def waiting(self) -> bool:
        return self.pipe.poll(0)
