"""The two folders of a store: how they are made, found by other processes, and removed, also after everybody died.

Every process that has a store says so with a kernel lock on its folders. A store that no living process has is
abandoned: pids come again and differ between containers, locks do neither.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from jigsawrl.errors import JigsawError
from jigsawrl.store import locks
from jigsawrl.store.shelf import Shelf

LOCK = "lock"
SPILLING = "spilling"
LOCK_TIMEOUT_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
_RECORD = "store.json"
_NEW_RECORD = ".store.json"
_FORMAT = 1
_MEETING = "meeting-"


@dataclass(frozen=True, slots=True)
class Record:
    """What a store's folder says about it. The pid and its start are there for whoever finds the folder."""

    format: int
    spill: str
    budget_bytes: int
    pid: int
    started: str


def make(root: Path | None, spill: Path, budget_bytes: int, kept: Collection[str] = ()) -> Path:
    """Makes both folders and returns the one in memory. What a dead run left in either of them goes.

    But what it has spilled of the pipelines in `kept` stays.
    """
    spill = spill.absolute()
    try:
        root = _make_default_root() if root is None else _make_given_root(root.absolute())
        try:
            _check_budget(root, budget_bytes)
            started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            record = Record(_FORMAT, str(spill), budget_bytes, os.getpid(), started)
            for name in (LOCK, SPILLING):
                (root / name).touch(mode=0o600)
            (root / _NEW_RECORD).write_text(json.dumps(asdict(record)))
            _make_spill(spill, kept)
            (root / _NEW_RECORD).rename(root / _RECORD)
        except BaseException:
            _empty(root)
            raise
    except OSError as error:
        raise JigsawError(
            f"a store that spills to {spill} cannot be made: {error.filename}: {error.strerror}\n"
            "Give it folders that this user may write to"
        ) from error
    return root


def read(root: Path) -> Record:
    """The record of a store that this process uses from now on."""
    try:
        record = Record(**json.loads((root / _RECORD).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise JigsawError(f"there is no store in {root}: its run has ended, or the path is wrong") from error
    if record.format != _FORMAT:
        raise JigsawError(
            f"the store in {root} has format {record.format}, this jigsawrl has {_FORMAT}\n"
            "All processes of a run need the same version"
        )
    if not locks.use(root) or not locks.use(Path(record.spill)):
        raise JigsawError(f"the store in {root} is being removed: its run has ended")
    return record


def meeting(root: Path) -> Path:
    """A new folder for processes to meet in; it goes with the store, if nobody removes it before."""
    return Path(tempfile.mkdtemp(prefix=_MEETING, dir=root))


def remove(root: Path) -> None:
    """Removes a store, whoever uses it. What they have mapped stays theirs; all else they ask for is an error."""
    root = root.absolute()
    with suppress(FileNotFoundError), lock_of(root):
        spill = _spill_of(root)
        if spill is not None:
            _empty(spill)
        _empty(root)
    locks.stop_using(root)


def remove_abandoned(parent: Path = SHARED_MEMORY) -> list[Path]:
    """Removes this user's stores that no living process uses, and says which."""
    return [root for root in _roots(parent) if remove_if_abandoned(root)]


def stores(parent: Path = SHARED_MEMORY) -> Iterator[tuple[Path, Record]]:
    """All of this user's, in use or not."""
    for root in _roots(parent):
        if (record := record_of(root)) is not None:
            yield root, record


def _roots(parent: Path) -> list[Path]:
    return sorted(parent.glob(f"{_prefix()}*")) if parent.is_dir() else []


def remove_if_abandoned(root: Path) -> bool:
    with suppress(OSError), locks.if_unused(root) as unused:
        if unused:
            spill = _spill_of(root)
            if spill is not None:
                _clear_if_unused(spill)  # a newer store may have it by now
            _empty(root)
        return unused
    return False


def _clear_if_unused(spill: Path, kept: Collection[str] = ()) -> bool:
    with suppress(FileNotFoundError), locks.if_unused(spill) as unused:
        if unused:
            _empty(spill, kept)
        return unused
    return True


def _make_default_root() -> Path:
    if not SHARED_MEMORY.is_dir():
        raise JigsawError(
            f"there is no {SHARED_MEMORY} here: give the store a folder (root), best one in memory"
        )
    while True:
        root = SHARED_MEMORY / f"{_prefix()}{secrets.token_hex(6)}"
        root.mkdir(mode=0o700)
        if locks.use(root):  # else it was taken for an abandoned one in this very moment
            return root


def _make_given_root(root: Path) -> Path:
    found = record_of(root)
    if found is not None and not remove_if_abandoned(root):
        raise JigsawError(
            f"{root} is the store of a run that goes on (process {found.pid}, started {found.started})\n"
            "Choose another folder, or end that run first"
        )
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.listdir(root) or not locks.use(root):
        raise JigsawError(
            f"{root} is neither an empty folder nor a store that is left over: choose another one"
        )
    return root


def _make_spill(spill: Path, kept: Collection[str]) -> None:
    free = _clear_if_unused(spill, kept)
    if free:
        spill.mkdir(parents=True, exist_ok=True)
    if not free or not locks.use(spill):
        raise JigsawError(f"another store spills to {spill}: each needs a folder of its own")
    if not os.access(spill, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(spill))


def _check_budget(root: Path, budget_bytes: int) -> None:
    total = shutil.disk_usage(root).total
    if budget_bytes > total:
        raise JigsawError(
            f"the store's budget is {budget_bytes:,} bytes, and {root.parent} has {total:,} in all\n"
            "Lower the budget, or enlarge it (Docker: --shm-size)"
        )


def _empty(folder: Path, kept: Collection[str] = ()) -> None:
    """Deletes what is a store's, and the folder too where nothing else is in it."""
    Shelf(folder).clear(kept)
    for place in folder.glob(f"{_MEETING}*"):
        shutil.rmtree(place, ignore_errors=True)
    for name in (_RECORD, _NEW_RECORD, SPILLING, LOCK):
        (folder / name).unlink(missing_ok=True)
    locks.stop_using(folder)
    with suppress(OSError):
        folder.rmdir()


def lock_of(root: Path) -> AbstractContextManager[None]:
    if (root / LOCK).exists():
        return locks.locked(root / LOCK, LOCK_TIMEOUT_S)
    return nullcontext()


def _spill_of(root: Path) -> Path | None:
    record = record_of(root)
    return None if record is None else Path(record.spill)


def record_of(root: Path) -> Record | None:
    try:
        return Record(**json.loads((root / _RECORD).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _prefix() -> str:
    return f"jigsawrl-{os.getuid()}-"
