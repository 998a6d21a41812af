"""The two folders of a store: how they are made, found by other processes, and removed, also after everybody died.

Every process that has a store says so with a kernel lock on its folders. A store that no living process has is
abandoned: pids come again and differ between containers, locks do neither.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from jigsawrl.errors import JigsawError
from jigsawrl.liveness import silent_s
from jigsawrl.store import locks, private
from jigsawrl.store.shelf import Shelf

LOCK = "lock"
SPILLING = "spilling"
BEAT = "beat"
"""The heartbeat of the process that has made the store."""
SHARED_MEMORY = Path("/dev/shm")
STORE_FOLDER = "JIGSAWRL_STORE_FOLDER"
"""In the environment: the folder in which runs make their stores, where it is not to be shared memory."""
FORMAT = 2
_RECORD = "store.json"
_NEW_RECORD = ".store.json"
_MOST_RECORD_BYTES = 1 << 16
_MEETING = "meeting-"
_MEETING_FILE = "gang"


@dataclass(frozen=True, slots=True)
class Record:
    """What a store's folder says about it. The pid and its start are there for whoever finds the folder."""

    format: int
    spill: str
    budget_bytes: int
    pid: int
    started: str
    boot: str = ""
    """Since when the machine that made it was on, as its kernel says it."""
    spill_owner: int = -1
    """The number under which this user is shown there."""


def place_for_stores() -> Path:
    """The folder in which this process makes its stores."""
    chosen = os.environ.get(STORE_FOLDER, "")
    return Path(chosen).absolute() if chosen else SHARED_MEMORY


def this_boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


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
            for name in (LOCK, SPILLING):
                private.write_file(root / name)
            _make_spill(spill, kept)
            about = FORMAT, str(spill), budget_bytes, os.getpid(), started, this_boot()
            record = Record(*about, private.owner_in(spill))
            private.write_file(root / _NEW_RECORD, json.dumps(asdict(record)).encode())
            (root / _NEW_RECORD).rename(root / _RECORD)
        except BaseException:
            _empty(root)
            raise
    except OSError as error:
        raise JigsawError(
            f"a store that spills to {spill} cannot be made: {error.filename}: {error.strerror}\n"
            f"Give it folders that this user may write to and that have room; {STORE_FOLDER} in the environment "
            "names another one than /dev/shm"
        ) from error
    return root


def read(root: Path) -> Record:
    """The record of a store that this process uses from now on."""
    record = record_of(root)
    if record is None:
        raise JigsawError(f"there is no store in {root}: its run has ended, or the path is wrong")
    if record.format != FORMAT:
        raise JigsawError(
            f"the store in {root} has format {record.format}, this jigsawrl has {FORMAT}\n"
            "All processes of a run need the same version"
        )
    if not locks.use(root) or not locks.use(Path(record.spill)):
        raise JigsawError(f"the store in {root} is being removed: its run has ended")
    return record


def meeting(root: Path) -> Path:
    """A new folder for processes to meet in, by its file `gang`; it goes with the store, or before."""
    folder = root / f"{_MEETING}{secrets.token_hex(6)}"
    private.make_folder(folder)
    private.write_file(folder / _MEETING_FILE)
    return folder


def remove(root: Path) -> None:
    """Removes a store, whoever uses it. What they have mapped stays theirs; all else they ask for is an error."""
    root = root.absolute()
    with suppress(FileNotFoundError), lock_of(root):
        spill = _spill_of(root)
        if spill is not None:
            _empty(spill)
        _empty(root)
    locks.stop_using(root)


def remove_abandoned(parent: Path | None = None) -> list[Path]:
    """Removes this user's stores that no living process uses, and says which."""
    return [root for root in _roots(parent) if remove_if_abandoned(root)]


def stores(parent: Path | None = None) -> Iterator[tuple[Path, Record]]:
    """All of this user's, in use or not: in a folder, or wherever they are made."""
    for root in _roots(parent):
        if (record := record_of(root)) is not None:
            yield root, record


def _roots(parent: Path | None) -> list[Path]:
    """What is called like a store of this user and belongs to another is none."""
    parents = {SHARED_MEMORY, place_for_stores()} if parent is None else {parent}
    found = (root for each in parents if each.is_dir() for root in each.glob(f"{_prefix()}*"))
    return sorted(root for root in found if private.is_own_folder(root))


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
    if spill.is_symlink():
        return True
    with suppress(FileNotFoundError, PermissionError), locks.if_unused(spill) as unused:
        if unused:
            _empty(spill, kept)
        return unused
    return True


def _make_default_root() -> Path:
    parent = place_for_stores()
    while True:
        root = parent / f"{_prefix()}{secrets.token_hex(6)}"
        try:
            private.make_folder(root)
            if not private.is_own_folder(root):
                raise OSError(errno.EACCES, "what this user makes there is shown as another's")
            if locks.use(root):  # else it was taken for an abandoned one in this very moment
                return root
        except OSError as error:
            with suppress(OSError):
                root.rmdir()
            raise JigsawError(
                f"the run's store cannot be made in {parent}: {error.strerror}\n"
                f"Set {STORE_FOLDER} in the environment to a folder that you may write to, best one in memory; "
                "a disk is slower"
            ) from error


def _make_given_root(root: Path) -> Path:
    found = record_of(root)
    if found is not None and not remove_if_abandoned(root):
        raise JigsawError(
            f"{root} is the store of a run that goes on (process {found.pid}, started {found.started})\n"
            "Choose another folder, or end that run first"
        )
    root.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        private.make_folder(root)
    if not private.is_own_folder(root) or os.listdir(root) or not locks.use(root):
        raise JigsawError(
            f"{root} is neither an empty folder nor a store that is left over: choose another one"
        )
    private.close_to_others(root)
    return root


def _make_spill(spill: Path, kept: Collection[str]) -> None:
    kept = kept if private.is_private_folder(spill) else ()
    free = _clear_if_unused(spill, kept)
    if free:
        _make_or_close(spill)
    if not free or not locks.use(spill):
        raise JigsawError(f"another store spills to {spill}: each needs a folder of its own")
    if not os.access(spill, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(spill))


def _make_or_close(spill: Path) -> None:
    """One that is there, for foreign files are in it, is used if it is this user's; else it gets another name."""
    if private.is_own_folder(spill):
        private.close_to_others(spill)
        return
    if os.path.lexists(spill):
        try:
            spill.rename(_free_name(spill))
        except OSError:
            raise JigsawError(
                f"{spill} is a link, or belongs to another user: nothing that a run remembers is put there\n"
                "Remove it, or choose another run folder"
            ) from None
    spill.parent.mkdir(parents=True, exist_ok=True)
    private.make_folder(spill)


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.not-ours-{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def _check_budget(root: Path, budget_bytes: int) -> None:
    total = shutil.disk_usage(root).total
    if budget_bytes > total:
        raise JigsawError(
            f"the store's budget is {budget_bytes:,} bytes, and {root.parent} has {total:,} in all\n"
            f"Lower the budget, or enlarge it (Docker: --shm-size), or set {STORE_FOLDER} to another folder"
        )


def _empty(folder: Path, kept: Collection[str] = ()) -> None:
    """Deletes what is a store's, and the folder too where nothing else is in it."""
    if folder.is_symlink():
        return  # what it leads to is nothing of ours
    Shelf(folder).clear(kept)
    for place in folder.glob(f"{_MEETING}*"):
        shutil.rmtree(place, ignore_errors=True)
    for name in (_RECORD, _NEW_RECORD, SPILLING, BEAT, LOCK):
        (folder / name).unlink(missing_ok=True)
    locks.stop_using(folder)
    with suppress(OSError):
        folder.rmdir()


def lock_timeout_s() -> float:
    """Longer than it takes until a process that is stopped, and may hold the lock, is taken for dead and ended."""
    return 2 * silent_s() + 60.0


def lock_of(root: Path) -> AbstractContextManager[None]:
    if (root / LOCK).exists():
        return locks.locked(root / LOCK, lock_timeout_s())
    return nullcontext()


def _spill_of(root: Path) -> Path | None:
    record = record_of(root)
    return None if record is None else Path(record.spill)


def record_of(root: Path) -> Record | None:
    """None where there is no store of this user."""
    try:
        with open(private.open_file(root / _RECORD), "rb") as file:
            fields = json.loads(file.read(_MOST_RECORD_BYTES))
        record = Record(**fields)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    numbers = record.format, record.budget_bytes, record.pid, record.spill_owner
    texts = record.started, record.boot
    sound = all(type(each) is int for each in numbers) and all(type(each) is str for each in texts)
    return record if sound and type(record.spill) is str and os.path.isabs(record.spill) else None


def _prefix() -> str:
    return f"jigsawrl-{os.getuid()}-"
