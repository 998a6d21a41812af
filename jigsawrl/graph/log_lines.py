"""Splits a console log into what single processes printed.

Ray puts `(TaskRunner pid=3125)` before each line, terminals colour it, and progress bars end in a carriage return
instead of a line feed; so one line of the file may hold the output of several processes. Logs may be gzipped, and
may break off anywhere. Never more than `MOST_LINE` characters are held.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

from jigsawrl.errors import JigsawError

MOST_LINE = 2**20
"""Characters of a line; the rest of a longer one is left out."""
MOST_LOG = 4 * 2**30
"""Characters of a log, uncompressed; what follows is left out."""
SUFFIXES = (".log", ".txt", ".out", ".jsonl")
"""What the names of logs end in, before `.gz` if they are gzipped."""

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|(?:\^\[)?\[\d{1,3}(?:;\d{1,3})*m")
"""With the escape character, and without, as copied text has it."""
_PREFIX = re.compile(r"\s?\(((?:[\w.:-]+ )?pid=\d+(?:, [^()]*)?)\) ?")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\](?:.*[\])])?$")
"""Ray prints lines that several processes have in common once, with their number."""
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
"""What reading a gzipped file raises where it is torn."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """What one process printed on one line."""

    number: int
    """Of the line in the file, from 1 on."""
    source: str
    """The process as Ray names it, such as `TaskRunner pid=3125`; empty where nothing names it."""
    text: str
    """Without colours; spaces at the front are kept, as a settings block means something by them."""
    ended: bool
    """False for the last line of a log that does not end in a line feed: its end may be missing."""


@dataclass(slots=True)
class LogLines:
    """The lines of a log, in order. Once they are read, `damage` says why the log breaks off, if it does."""

    path: Path
    damage: str | None = None

    def __iter__(self) -> Iterator[LogLine]:
        try:
            with open_text(self.path) as file:
                number, read, too_long = 1, 0, False
                while piece := file.readline(MOST_LINE):
                    read += len(piece)
                    if read > MOST_LOG:
                        self.damage = f"it is longer than {MOST_LOG // 2**30} GiB"
                        return
                    ended = piece[-1] in "\r\n"
                    if not too_long:
                        yield from _printed(number, piece, ended or len(piece) == MOST_LINE)
                    too_long = not ended
                    number += piece.endswith("\n")
        except DAMAGED:
            self.damage = "its compression breaks off or is damaged"
        except FileNotFoundError:
            raise JigsawError(f"{self.path}: there is no such log") from None
        except OSError as error:
            raise JigsawError(f"{self.path}: cannot be read ({error.strerror or error})") from None


def open_text(path: Path, encoding: str = "utf-8", errors: str = "replace") -> TextIO:
    """The text of a log or table, gzipped or not. Lines end as they do in the file."""
    with open(path, "rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    opening = gzip.open if zipped else open
    return cast(TextIO, opening(path, "rt", encoding=encoding, errors=errors, newline=""))


def log_name(path: Path) -> str:
    """What a run is called after its log."""
    name = path.name.removesuffix(".gz")
    return name.split(".log")[0].removesuffix(Path(name).suffix) or name


def is_log(path: Path) -> bool:
    """Whether a file's name is that of a log."""
    return Path(path.name.removesuffix(".gz")).suffix in SUFFIXES and path.is_file()


def _printed(number: int, piece: str, ended: bool) -> Iterator[LogLine]:
    text = (_COLOUR.sub("", piece) if "\x1b" in piece or "[0m" in piece else piece).rstrip()
    pieces = ["", *(_PREFIX.split(text) if "pid=" in text else [text])]
    """A source, what it printed, the next source, and so on."""
    for at in range(0, len(pieces), 2):
        printed = pieces[at + 1].rstrip()
        if "[repeated" in printed:
            printed = _REPEATED.sub("", printed)
        if printed:
            yield LogLine(number, pieces[at], printed, ended or at + 2 < len(pieces))
