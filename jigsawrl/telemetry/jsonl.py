"""Files with one JSON object a line, which a process may be killed over at any moment.

Whole lines go out in one write, so only the last line can be torn. Opening such a file to append drops a torn
last line and nothing else; readers ignore it.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jigsawrl import durable
from jigsawrl.errors import JigsawError


def _scalar(value: Any) -> Any:
    """Numbers of numpy and torch as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r} does not go into JSON")


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_scalar).encode


def encode(record: dict[str, Any]) -> bytes:
    """One line. NaN and infinities become null, and the field "non_finite" says which value each of them was."""
    try:
        return _encode(record).encode() + b"\n"
    except ValueError:
        non_finite: dict[str, str] = {}
        record = _without_non_finite(record, "", non_finite)
        return _encode({**record, "non_finite": non_finite}).encode() + b"\n"


def _without_non_finite(value: Any, where: str, found: dict[str, str]) -> Any:
    if isinstance(value, dict):
        prefix = f"{where}." if where else ""
        return {key: _without_non_finite(item, f"{prefix}{key}", found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(item, f"{where}[{i}]", found) for i, item in enumerate(value)]
    if not isinstance(value, str | int | float | None):
        value = _scalar(value)
    if isinstance(value, float) and not math.isfinite(value):
        found[where] = str(value)
        return None
    return value


def decode(line: bytes) -> dict[str, Any] | None:
    """The object on a line; None where it is torn: no proper prefix of an object is an object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each whole line, newline included, with its object. The file may be one that is being written."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            record = decode(line)
            if record is not None:
                yield line if line.endswith(b"\n") else line + b"\n", record
            elif line.endswith(b"\n"):
                raise JigsawError(f"{path}, line {number} is not a JSON object; remove that line")


class LineFile:
    """A file that grows by whole lines. One process writes it at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._mend()

    def _mend(self) -> None:
        """Cuts off a torn last line; a line that lacks only its newline gets it."""
        size = os.fstat(self._file).st_size
        start, tail = size, b""
        while start > 0 and b"\n" not in tail:
            start = max(0, start - 65536)
            tail = os.pread(self._file, size - start, start)
        last = tail.rpartition(b"\n")[2]
        if last and decode(last) is not None:
            self.append(b"\n")
        elif last:
            os.ftruncate(self._file, size - len(last))

    def append(self, lines: bytes) -> None:
        """Writes whole lines, or, when the disk is full, nothing."""
        durable.append(self._file, lines, self._path)

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
