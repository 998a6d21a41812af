"""The scheduler's end of a driver's line: neither reading nor sending ever waits for the driver.

The driver's end is a `multiprocessing.connection.Connection`; both write messages as that does, with their length in
front. A driver that is stopped in the middle of a message, or that reads nothing, costs the others nothing.
"""

from __future__ import annotations

import os
import pickle
import socket
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from jigsawrl import frames

if TYPE_CHECKING:
    from jigsawrl.runtime.messages import FromDriver, ToDriver

_PIECE = 1 << 16
MOST_READ = 1 << 20
"""Bytes that are read at once: whoever says more has to let others be heard in between."""
MOST_MESSAGE = 64 << 20
"""Bytes of one message; those of the longest traceback or the most events are far less."""
MOST_UNSENT = 4 << 20
"""Bytes that wait until the driver reads them. A message has a few hundred, and few are sent in a phase."""


class Broken(Exception):
    """What comes over a line makes no sense, or nothing more goes into it: its driver is of no use any more."""


class Channel:
    def __init__(self, connection: Connection) -> None:
        self.socket = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        self.read = bytearray()
        """The beginning of a message whose rest has not come yet."""
        self.unsent = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def receive(self) -> list[FromDriver]:
        """Messages that are there as a whole; none: nothing more can be read now. EOFError: the other end is closed,
        and all was read."""
        messages: list[FromDriver] = []
        read = 0
        while read < MOST_READ or not messages:
            try:
                data = self.socket.recv(_PIECE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            if not data:
                if messages:
                    break
                raise EOFError
            self.read += data
            read += len(data)
            while (content := self._next()) is not None:
                messages += understood(content)
        return messages

    def _next(self) -> bytes | None:
        """The content of the first message, if all of it is there."""
        if (found := frames.first(self.read)) is None:
            return None
        start, size = found
        if not 0 <= size <= MOST_MESSAGE:
            raise Broken(f"it began a message of {size:,} bytes")
        if len(self.read) < start + size:
            return None
        content = bytes(self.read[start : start + size])
        del self.read[: start + size]
        return content

    def send(self, message: ToDriver) -> None:
        """At once as far as there is room, the rest with `flush`. OSError: nobody reads it any more."""
        content = pickle.dumps(message)
        self.unsent += frames.header(len(content)) + content
        self.flush()

    def flush(self) -> None:
        while self.unsent:
            try:
                sent = self.socket.send(self.unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                if len(self.unsent) > MOST_UNSENT:
                    raise Broken("it does not read what it is told") from None
                return
            del self.unsent[:sent]

    def close(self) -> None:
        self.socket.close()


def understood(content: bytes) -> tuple[FromDriver, ...]:
    """What a driver said at once."""
    try:
        messages: tuple[FromDriver, ...] = pickle.loads(content)
    except Exception as error:
        raise Broken(f"it said what cannot be understood ({type(error).__name__})") from None
    return messages
