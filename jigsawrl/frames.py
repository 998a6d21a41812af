"""Messages on a stream of bytes as `multiprocessing.connection.Connection` writes them: their length, then they."""

from __future__ import annotations

import struct

_SHORT = struct.Struct("!i")
_LONG = struct.Struct("!Q")
_MOST_SHORT = 0x7FFFFFFF


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
