"""Reads a file that a user names: never endless, never one that makes the reader wait, such as a pipe or a device."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jigsawrl.errors import JigsawError

_OTHERS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def read_regular(path: Path, most: int) -> bytes:
    """All of an ordinary file of at most `most` bytes.

    A JigsawError for a larger one and for what is no file; an OSError where it is not there or cannot be read.
    """
    refuse_others(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        size = f"{most / (1 << 20):g} MiB"
        raise JigsawError(f"{path}: is larger than {size}, more than such a file may have")
    return content


def refuse_others(path: Path) -> None:
    """A JigsawError for a pipe, a device or a socket, which could keep its reader waiting for ever.

    An OSError where there is nothing, or where a folder is in the place of a file.
    """
    try:
        mode = os.stat(path).st_mode
    except ValueError:
        raise JigsawError(f"{str(path)!r}: holds a character that no path has") from None
    for is_one, what in _OTHERS:
        if is_one(mode):
            raise JigsawError(f"{path}: is {what}, not a file; give an ordinary file")
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(21, "Is a directory", str(path))
