"""Reads files that somebody else has put there: only regular ones, so that no pipe or device can hang a run."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from jigsawrl.errors import JigsawError

MAX_JSON_BYTES = 64 << 20
MAX_DEPTH = 100
"""Levels of nesting that JSON may have: far below where Python's recursion ends, at whatever depth it is read."""
_OTHERS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path) -> BinaryIO:
    """The file, opened for reading; OSError for a pipe, a socket, a device or a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """All bytes of a file; OSError where there are more than `limit`."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit >> 20} MiB", str(path))
    return content


def read_named(path: Path, most: int) -> bytes:
    """All of an ordinary file that a user names, of at most `most` bytes.

    A JigsawError for a larger one and for what is no file; an OSError where it is not there or cannot be read.
    """
    refuse_others(path)
    with open_regular(path) as file:
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


def read_json_object(path: Path, key: str, missing: str = "") -> dict[str, Any]:
    """The JSON object in a file; any other content is a JigsawError that names `key`, the setting that led here.

    `missing` ends the message where there is no such file.
    """
    try:
        content = json.loads(read_regular(path, MAX_JSON_BYTES).decode())
    except FileNotFoundError:
        raise JigsawError(f"{key}: {path.parent} has no {path.name}, {missing}".rstrip(", ")) from None
    except OSError as error:
        raise JigsawError(f"{key}: {path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise JigsawError(f"{key}: {path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise JigsawError(f"{key}: {path} is not a JSON object")
    if too_deep(content):
        raise JigsawError(f"{key}: {path} nests more than {MAX_DEPTH} levels of JSON")
    return content


def too_deep(value: Any, limit: int = MAX_DEPTH) -> bool:
    """Whether lists and objects stand inside of each other in more than `limit` levels."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            item
            for each in level
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True
