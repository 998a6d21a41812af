"""Output that nobody may be able to read: a closed terminal, a full disk, a reader that has gone or has stopped.

What a run prints while it trains is a log, and a log that cannot be written never ends training.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Errors after which nothing that is written arrives any more: no reader, no terminal, no file."""
PATIENCE_S = 30.0
"""With a reader of a log who does not read, as one that is stopped. Lines are lost then, until he reads again."""
PIECE = 400
"""Characters that fit where the kernel says that there is room: into 4096 bytes, escaped as they may be."""


class Forgiving:
    """A text stream that never raises: `error` is why something was last not written.

    A character that the stream cannot encode is written as an escape.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None
        self.is_log = False
        """Whether what is written may be lost: nothing waits for ever until it is read."""
        self.stuck = False
        """Whether the reader was waited for in vain, and has not read since."""
        with suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]

    def write(self, text: str) -> int:
        if self.is_log:
            for start in range(0, len(text), PIECE):
                if self._has_room():
                    self._write(text[start : start + PIECE])
                    self.flush()
        else:
            self._write(text)
        return len(text)

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
        except (OSError, ValueError, RuntimeError) as error:
            self._note(error)

    def _has_room(self) -> bool:
        """Whether a piece can be written, as far as the kernel knows. Waits for that, but only once in a row."""
        try:
            room = select.poll()
            room.register(self.stream.fileno(), select.POLLOUT)
            self.stuck = not room.poll(0 if self.stuck else PATIENCE_S * 1000)
        except (AttributeError, ValueError, OSError):  # it is closed, or no file: writing says so
            self.stuck = False
        return not self.stuck

    def flush(self) -> None:
        try:
            self.stream.flush()
        except (OSError, ValueError, RuntimeError) as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        """A full disk may have room again later; what is gone for good is written nowhere from now on."""
        if not isinstance(
            error, OSError
        ):  # closed, or a signal handler came while something was being written
            return
        self.error = error
        if error.errno in GONE:
            self.discard()

    def discard(self) -> None:
        """Whatever is still in a buffer, and whatever comes, goes nowhere."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def forgiving(stream: TextIO | None) -> TextIO:
    """The stream as one that never raises; itself if it is one already. None is what Python has for a closed one."""
    if stream is None:
        closed = Forgiving(open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        closed.error = OSError(errno.EBADF, "it is closed")
        return cast("TextIO", closed)
    return stream if isinstance(stream, Forgiving) else cast("TextIO", Forgiving(stream))


def stand_in_for_closed() -> None:
    """Descriptors 0 to 2 where this process was started without them: the next file would be taken for them."""
    for descriptor, way in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, way)  # gets the lowest number that is free
            os.set_inheritable(descriptor, True)


def make_usual_streams_forgiving() -> None:
    """stdout and stderr of this process, which are there afterwards even if it was started without them."""
    stand_in_for_closed()
    for name in ("stdout", "stderr"):
        setattr(sys, name, forgiving(getattr(sys, name)))
    if isinstance(sys.stderr, Forgiving):
        sys.stderr.is_log = True


def restart_in_utf8() -> None:
    """Runs this command again in Python's UTF-8 mode where the locale has names for few characters: folders and
    pipelines may be called anything, and run files say it in UTF-8. The terminal gets what it can show."""
    if sys.flags.utf8_mode or sys.getfilesystemencoding() == "utf-8" or os.environ.get("PYTHONUTF8") == "1":
        return
    os.environ["PYTHONUTF8"] = "1"
    shown = getattr(sys.stdout, "encoding", None) or "ascii"
    os.environ.setdefault("PYTHONIOENCODING", f"{shown}:backslashreplace")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def stdout_is_a_log() -> None:
    """Of what this process prints nothing is an answer that a script may wait for: the exit code says how it went."""
    if isinstance(sys.stdout, Forgiving):
        sys.stdout.is_log = True


def unwritten_output() -> OSError | None:
    """Why an answer that went to stdout did not arrive; None where it did. Call it at the end: afterwards nothing
    more may be written."""
    stream = sys.stdout
    if not isinstance(stream, Forgiving):
        return None
    stream.flush()
    if stream.error is not None:
        stream.discard()
    return None if stream.is_log else stream.error
