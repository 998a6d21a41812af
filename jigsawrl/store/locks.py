"""Kernel locks on files and folders. Whoever dies lets go of them, however it dies."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jigsawrl.errors import JigsawError
from jigsawrl.liveness import Silence
from jigsawrl.store import private

_FIRST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.002
_in_use: dict[Path, int] = {}  # folders that this process uses, with the descriptor whose lock says so


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """One process, and one thread of it, at a time: each use opens the file anew, so threads exclude each other."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        _wait(descriptor, path, timeout_s)
        try:
            yield
        finally:
            unlock(descriptor)  # a forked child may still have the descriptor
    finally:
        os.close(descriptor)


def _wait(descriptor: int, path: Path, timeout_s: float) -> None:
    """The kernel knows no deadline for this lock, so it is asked again and again. Time in which this process itself
    was stopped does not count."""
    waited = Silence(timeout_s)
    pause = _FIRST_PAUSE_S
    while not try_lock(descriptor):
        if waited.too_long():
            known = ", ".join(f"{pid} ({_name_of(pid)})" for pid in holders(path))
            raise JigsawError(
                f"{path} has been locked by another process for {timeout_s:g} s"
                f"{f': process {known}' if known else ''}\n"
                f"A dead process holds no lock: one of this run is stopped or hangs (`lsof {path}` names it); "
                "let it go on, or kill it"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def holders(path: Path) -> list[int]:
    """Processes that have locked this file, as far as the kernel says."""
    try:
        found = os.stat(path)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    where = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    fields = [line.split() for line in lines]
    # 1: FLOCK  ADVISORY  WRITE 7630 00:1b:36 0 EOF; one that waits has an arrow before the kind.
    return [int(each[4]) for each in fields if each[1:2] == ["FLOCK"] and each[5:6] == [where]]


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def locked_mapping(path: Path, size: int, owner: int | None = None) -> mmap.mmap:
    """A file's first bytes, which nobody writes over while they are mapped. Changes to them are private.

    A FileNotFoundError where there is no file of this user, a ValueError where it is shorter than that.
    """
    descriptor = private.open_file(path, owner=owner)
    try:
        try_lock(descriptor, fcntl.LOCK_SH)
        return mmap.mmap(
            descriptor, size, access=mmap.ACCESS_COPY
        )  # has a descriptor of its own, with the lock
    finally:
        os.close(descriptor)


def use(folder: Path) -> bool:
    """Says, until this process ends, that it uses the folder. False: the folder is gone, or being removed."""
    if folder in _in_use and is_still(folder, _in_use[folder]):
        return True
    stop_using(folder)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    if not try_lock(descriptor, fcntl.LOCK_SH) or not is_still(folder, descriptor):
        os.close(descriptor)
        return False
    _in_use[folder] = descriptor
    return True


def stop_using(folder: Path) -> None:
    descriptor = _in_use.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


@contextmanager
def if_unused(folder: Path) -> Iterator[bool]:
    """Whether no living process uses the folder; while the answer is yes, none can begin to."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


def is_still(folder: Path, descriptor: int) -> bool:
    """Whether the folder under this path is the one that was opened, and not another in its place."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except FileNotFoundError:
        return False
