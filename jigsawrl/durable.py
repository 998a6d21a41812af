"""Files and folders that a kill, a power cut or a full disk finds either before a change or after it."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jigsawrl.errors import JigsawError


def sync(path: Path) -> None:
    """Returns when the file's content, or the folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes) -> None:
    """Writes a new file and syncs it; its name is durable once its folder is synced too."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Gives a file new content at once: whoever looks, even after a kill, sees all of the old or all of the new."""
    aside = path.with_name(f".{path.name}.tmp")
    write(aside, data)
    os.replace(aside, path)
    sync(path.parent)


@contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """A file that is written inside has the mode that the umask gives. safetensors writes one aside that is its
    owner's alone, and renames it: another user could not load the model."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    with suppress(PermissionError):  # file systems without modes refuse
        path.chmod(mode)


def append(descriptor: int, data: bytes, path: Path) -> None:
    """Adds to a file that only this process writes: all of the data, or, when the disk is full, none of it."""
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError as error:
        if written:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise JigsawError(f"cannot write {path}: {error.strerror}") from error
