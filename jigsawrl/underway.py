"""One process at a time runs what is in a folder: it holds the folder's lock, which the kernel takes from the dead.

The lock is on a file in the folder, `.lock`, which says who holds it. Runs of one pipeline, runs of several,
comparisons and clusters all take it, and so does each pipeline of a mix in its own folder inside the mix's.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from jigsawrl.config.runfolder import writable_part
from jigsawrl.errors import JigsawError
from jigsawrl.store import locks
from jigsawrl.surface import option

LOCK = ".lock"
PATIENCE_S = 1.0
"""A process that only looks has the lock for microseconds; one that was killed may have it for some milliseconds."""
GONE_S = 30.0
"""Patience with processes of a run that was killed; they end by themselves."""
_PAUSE_S = 0.005
_LEVELS = 3
"""Folders above a run's that may be another run's: `mix/pipeline`, `cluster/jobs/job`, `cluster/runs/number/job`."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that runs what is in a folder."""

    pid: int
    host: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid}" + ("" if self.is_here else f" on {self.host}")

    @property
    def how_to_stop(self) -> str:
        return f"stop it with 'kill {self.pid}'" + ("" if self.is_here else f" on {self.host}")


@contextmanager
def under_way(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; a JigsawError where another process holds it. Makes the folder if it is not there.

    Where nothing was put into a folder that was made for it, it is gone again afterwards.
    """
    there = writable_part(folder)
    made = [path for path in (folder, *folder.parents) if there != folder and not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(folder)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            (folder / LOCK).unlink()
        os.close(descriptor)
        with suppress(OSError):  # it holds a run
            for path in made:
                path.rmdir()


def is_under_way(folder: Path) -> bool:
    """Whether a living process holds the folder's lock. Where the file system knows no locks, none does."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _try(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def refuse_if_under_way(folders: Iterable[Path]) -> None:
    """A JigsawError where another process runs what is in one of these folders."""
    for folder in folders:
        deadline = time.monotonic() + PATIENCE_S
        while is_under_way(folder):
            if time.monotonic() > deadline:
                raise _in_use(folder)
            time.sleep(_PAUSE_S)


def refuse_inside_another(folder: Path) -> None:
    """A JigsawError where the folder belongs to a mix or a cluster that another process runs.

    A cluster's daemon starts the runs inside its folder itself, and so does a comparison.
    """
    for above in folder.resolve().parents[:_LEVELS]:
        if is_under_way(above) and not _is_ours(holder := holder_of(above)):
            raise JigsawError(
                f"{folder}: belongs to {above}, which {holder or 'another process'} runs; let that end"
                f"{f', {holder.how_to_stop}' if holder else ''}, or choose another folder with {option('out')}"
            )


def holder_of(folder: Path) -> Holder | None:
    """Who says in the lock that it holds it. None where nobody does, as in the moment before it is written."""
    try:
        data = json.loads((folder / LOCK).read_bytes())
        return Holder(int(data["pid"]), str(data["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def wait_until_gone(run: Path, patience_s: float = GONE_S) -> None:
    """Waits for whatever a killed run has left behind; a JigsawError if that does not end."""
    store = run / "store"
    deadline = time.monotonic() + patience_s
    while _is_used(store):
        if time.monotonic() > deadline:
            raise JigsawError(
                f"{run}: processes of it are still there (`lsof {store}` names them); kill them"
            )
        time.sleep(0.05)


def _lock(folder: Path) -> int:
    """A descriptor of the folder's lock file, with the lock; the file says that this process has it."""
    deadline = time.monotonic() + PATIENCE_S
    while (descriptor := _locked_once(folder)) is None:
        if time.monotonic() > deadline:
            raise _in_use(folder)
        time.sleep(_PAUSE_S)
    with suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(descriptor, 0)
        who = {"pid": os.getpid(), "host": socket.gethostname()}
        os.pwrite(descriptor, json.dumps(who).encode(), 0)
    return descriptor


def _locked_once(folder: Path) -> int | None:
    """None where another process has it, or has had it until now."""
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        _remove_if_free(path)
        return None
    except OSError as error:
        why = error.strerror or error
        raise JigsawError(
            f"{folder}: cannot be written ({why}); choose another with {option('out')}"
        ) from None
    if _try(descriptor, fcntl.LOCK_EX) and locks.is_still(path, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _remove_if_free(path: Path) -> None:
    """For a lock file that another user's run has left in a folder of both."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if _try(descriptor, fcntl.LOCK_EX):
                path.unlink()
        finally:
            os.close(descriptor)


def _try(descriptor: int, kind: int) -> bool:
    try:
        return locks.try_lock(descriptor, kind)
    except OSError:  # this file system knows no locks
        return True


def _in_use(folder: Path) -> JigsawError:
    holder = holder_of(folder)
    stop = f", {holder.how_to_stop}" if holder else ""
    return JigsawError(
        f"{folder}: {holder or 'another process'} runs what is in it; let it end{stop}, "
        f"or choose another folder with {option('out')}"
    )


def _is_ours(holder: Holder | None) -> bool:
    return holder is not None and holder.is_here and holder.pid in (os.getpid(), os.getppid())


def _is_used(store: Path) -> bool:
    with suppress(FileNotFoundError, PermissionError, NotADirectoryError), locks.if_unused(store) as unused:
        return not unused
    return False  # another user's is none of this run's
