"""Messages on a stream of bytes as `multiprocessing.connection.Connection` writes them: their length, then they."""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from multiprocessing.connection import Connection

_SHORT = struct.Struct("!i")
_LONG = struct.Struct("!Q")
_MOST_SHORT = 0x7FFFFFFF
_PIECE = 1 << 16
MOST_READ = 1 << 20
"""Bytes that are read at once: a process that says more has to let others be heard in between."""


class Nonsense(Exception):
    """What comes over a stream cannot be a message."""


class Stream:
    """One end of a connection between two processes. Neither reading nor sending ever waits for the other end, which
    may be a `Connection`."""

    def __init__(self, connection: Connection, most: int = 1 << 62) -> None:
        """`most`: bytes of the largest message that makes sense."""
        self.socket = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        self.most = most
        self.read = bytearray()
        """The beginning of a message whose rest has not come yet."""
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0

    def fileno(self) -> int:
        return self.socket.fileno()

    def contents(self) -> list[bytearray]:
        """Messages that are there as a whole; none: nothing more can be read now. EOFError: the other end is closed,
        and all was read."""
        found: list[bytearray] = []
        read = 0
        while read < MOST_READ or not found:
            try:
                data = self.socket.recv(_PIECE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            if not data:
                if found:
                    break
                raise EOFError
            self.read += data
            read += len(data)
            while (content := self._next()) is not None:
                found.append(content)
            if found and len(data) < _PIECE:
                break  # that was all
        return found

    def _next(self) -> bytearray | None:
        """The content of the first message, if all of it is there."""
        if (begin := first(self.read)) is None:
            return None
        start, size = begin
        if not 0 <= size <= self.most:
            raise Nonsense(f"it began a message of {size:,} bytes")
        if len(self.read) < start + size:
            return None
        content = self.read[start : start + size]
        del self.read[: start + size]
        return content

    def put(self, content: bytes) -> None:
        """At once as far as there is room, the rest with `flush`. OSError: nobody reads it any more."""
        head = header(len(content))
        pieces = (head + content,) if len(content) < _PIECE else (head, content)
        self.unsent += map(memoryview, pieces)
        self.unsent_bytes += len(head) + len(content)
        self.flush()

    def flush(self) -> None:
        while self.unsent:
            try:
                sent = self.socket.send(self.unsent[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            self.unsent_bytes -= sent
            if rest := self.unsent.popleft()[sent:]:
                self.unsent.appendleft(rest)

    def close(self) -> None:
        self.socket.close()


def header(size: int) -> bytes:
    """What stands before a message of so many bytes."""
    return _SHORT.pack(size) if size <= _MOST_SHORT else _SHORT.pack(-1) + _LONG.pack(size)


def first(read: bytearray) -> tuple[int, int] | None:
    """Where the content of the first message begins and how many bytes it has; None: its header is not there yet.
    A negative size makes no sense."""
    if len(read) < _SHORT.size:
        return None
    (size,) = _SHORT.unpack_from(read)
    if size != -1:
        return _SHORT.size, size
    if len(read) < _SHORT.size + _LONG.size:
        return None
    (size,) = _LONG.unpack_from(read, _SHORT.size)
    return _SHORT.size + _LONG.size, size
