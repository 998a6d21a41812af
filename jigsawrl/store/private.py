"""Folders and files that only their owner may read and write, whatever the umask and the folder around them say.

A mode that is given to `mkdir` or `open` is cut by the umask, and a folder with a group (setgid) or an access list
hands those on; a mode that is set afterwards is neither. Nothing is ever opened through a link, and nothing that
belongs to another user is opened at all.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# A pipe that somebody has put there must not make its reader wait.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_OURS_TO_BLAME = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def make_folder(path: Path) -> None:
    """Makes a new folder; a FileExistsError where there is anything already."""
    os.mkdir(path, FOLDER_MODE)
    with suppress(PermissionError):  # file systems without modes refuse
        close_to_others(path)


def close_to_others(folder: Path) -> None:
    """Takes every right to a folder of this user from all others."""
    descriptor = os.open(folder, _FOLDER)
    try:
        os.fchmod(descriptor, FOLDER_MODE)
    finally:
        os.close(descriptor)


def new_file(path: Path) -> int:
    """A descriptor, to read and write, of a new file; a FileExistsError where there is anything already."""
    descriptor = os.open(path, _NEW, FILE_MODE)
    with suppress(PermissionError):
        os.fchmod(descriptor, FILE_MODE)
    return descriptor


def owner_in(folder: Path) -> int:
    """The number under which the file system shows this user: some network drives show one for all."""
    probe = folder / f".writing-{os.getpid()}-{time.monotonic_ns()}@0"  # so that it is cleared away as one
    descriptor = new_file(probe)
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)


def write_file(path: Path, data: bytes = b"") -> None:
    """Writes a new file."""
    descriptor = new_file(path)
    with open(descriptor, "wb") as file:
        file.write(data)


def open_file(path: Path, flags: int = os.O_RDONLY, owner: int | None = None) -> int:
    """A descriptor of an ordinary file of this user, in a folder of this user; a FileNotFoundError for whatever else
    is there. `owner`: the number under which the file system shows this user, if it is not the usual one."""
    owner = os.geteuid() if owner is None else owner
    try:
        descriptor = os.open(path, flags | _FILE)
    except OSError as error:
        if error.errno in _OURS_TO_BLAME:
            raise
        raise FileNotFoundError(errno.ENOENT, "no file of this user", str(path)) from error
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.lstat(path.parent).st_uid == owner:
        return descriptor
    os.close(descriptor)
    raise FileNotFoundError(errno.ENOENT, "no file of this user", str(path))


def is_own_folder(path: Path) -> bool:
    """Whether this is a folder of this user, and not a link to one."""
    with suppress(OSError):
        found = os.lstat(path)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def is_private_folder(path: Path) -> bool:
    """Whether it is, besides, one that no other user may have put anything into."""
    return is_own_folder(path) and not os.lstat(path).st_mode & _OTHERS_WRITE
