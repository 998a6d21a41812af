"""What the name of an entry's file says: everything there is to know about the entry without opening it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

MAX_ENTRIES = 65_536  # more than that is a leak, and would make every look at the folder slow
MAX_NAME = 180  # with the numbers behind it, a file's name stays below the 255 bytes that file systems allow
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_FILE = re.compile(r"([A-Za-z0-9_.+-]+)@([0-9]+)@([0-9]+)@([0-9]+)(?:@([0-9a-f]{8}))?\.safetensors")


class Key(NamedTuple):
    """One content under a name and version. Publishing a version again gives a later edition, so a key never lies."""

    name: str
    version: int
    edition: int
    size: int
    checksum: str = ""
    """Of the file's content (`shelf.Checksum`); empty for what is in memory and too large to be read for it."""

    @property
    def file_name(self) -> str:
        checked = f"@{self.checksum}" if self.checksum else ""
        return f"{file_prefix(self.name)}{self.version}@{self.edition}@{self.size}{checked}.safetensors"


def file_prefix(name: str) -> str:
    """What the names of all files of an entry's name begin with, and no others."""
    return name.replace("/", "+") + "@"


@lru_cache(maxsize=MAX_ENTRIES)
def key_of(file_name: str) -> Key | None:
    match = _FILE.fullmatch(file_name)
    if match is None:
        return None
    key = Key(match[1].replace("+", "/"), int(match[2]), int(match[3]), int(match[4]), match[5] or "")
    return key if key.file_name == file_name and key.version < 2**63 and key.size < 2**63 else None


def pipeline_of(key: Key) -> str:
    """Whose it is: what its name begins with."""
    return key.name.partition("/")[0]


def check(name: str, version: int) -> None:
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be an entry's name: letters, digits, '_', '-' and '.', in parts separated by '/', "
            f"at most {MAX_NAME} characters"
        )
    if not 0 <= version < 2**63:
        raise ValueError(f"version {version} of {name} is not a number from 0 to 2**63 - 1")
