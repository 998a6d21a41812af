"""The temporary folder of this process and of all that it starts: one, only its user's, gone when the process is.

A kernel lock on the folder says that its process lives, as with stores. Processes that were killed leave theirs; the
next one that makes such a folder removes them. Nothing else in the place for temporary files is ever touched.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path

from jigsawrl.errors import JigsawError
from jigsawrl.store import locks

VARIABLES = ("TMPDIR", "TEMP", "TMP")
PREFIX = "jigsawrl-tmp-"
"""Other than that of stores, one of which may be beside it in /dev/shm."""
USUAL = ("/tmp", "/var/tmp", "/dev/shm")
MOST_BYTES = 107 - len("/pymp-12345678/listener-12345678")
"""Length of a folder's path in which multiprocessing can make its sockets: the kernel allows them 107 bytes."""
LAST = -200
"""At the end of this process multiprocessing removes its own folder first, which is inside."""
_made: dict[int, Path] = {}
"""The folder of this process, by its id: one that was forked from it has none."""


def folder(fallback: Path | None = None) -> Path:
    """This process's temporary folder, or that of the process which started this one.

    It is made at the first call: in `fallback`, or what there is of that path, where no usual place can be written.
    """
    made = _made.get(os.getpid()) or _inherited()
    if made is None or not made.is_dir():
        made = _made[os.getpid()] = _make(fallback)
        util.Finalize(None, _remove_own, (made,), exitpriority=LAST)
    return made


def _inherited() -> Path | None:
    named = Path(os.environ.get("TMPDIR", ""))
    return named if named.name.lstrip(".").startswith(PREFIX) and _is_own(named) else None


def use_for_everything(fallback: Path) -> None:
    """From now on whatever this process and those that it starts keep for a while is in its temporary folder."""
    own = str(folder(fallback))
    tempfile.tempdir = own
    os.environ["TMPDIR"] = own


@contextmanager
def used_for_children() -> Iterator[None]:
    """Processes started inside keep what is temporary in this process's folder; so does multiprocessing itself."""
    own, before = str(folder()), (tempfile.tempdir, os.environ.get("TMPDIR"))
    tempfile.tempdir = os.environ["TMPDIR"] = own
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        os.environ.pop("TMPDIR")
        if before[1] is not None:
            os.environ["TMPDIR"] = before[1]


def environment() -> dict[str, str]:
    """This process's environment for one that it starts."""
    return {**os.environ, "TMPDIR": str(folder())}


def places() -> list[Path]:
    """Where temporary folders are made, the best first."""
    named = [os.environ[name] for name in VARIABLES if os.environ.get(name)]
    return [Path(each).absolute() for each in dict.fromkeys([*named, *USUAL])]


def remove_abandoned(place: Path) -> list[Path]:
    """Removes this user's folders there whose processes have ended, and says which."""
    found = sorted(place.glob(f"{_name('')}*")) + sorted(place.glob(f".{_name('')}*"))
    return [each for each in found if _remove_if_abandoned(each)]


def _name(which: str) -> str:
    return f"{PREFIX}{os.getuid()}-{which}"


def _make(fallback: Path | None) -> Path:
    candidates = [(place, "") for place in places()]
    if fallback is not None:  # hidden: a run's folder with anything else in it holds a run
        there = next(path for path in (fallback.absolute(), *fallback.absolute().parents) if path.is_dir())
        candidates.append((there, "."))
    for place, hidden in candidates:
        with suppress(OSError):
            remove_abandoned(place)
            while True:
                made = place / f"{hidden}{_name(secrets.token_hex(4))}"
                if len(os.fsencode(made)) > MOST_BYTES:
                    break
                made.mkdir(mode=0o700)
                if locks.use(made):  # else it was taken for an abandoned one in this very moment
                    if hidden:  # whatever asks Python for a place would find none
                        tempfile.tempdir = str(made)
                    return made
    raise JigsawError(
        "no folder for temporary files can be written, or its path is too long: "
        f"{', '.join(str(place) for place, _ in candidates)}\n"
        f"set TMPDIR to one that can, of at most {MOST_BYTES - len(_name('12345678')) - 1} bytes"
    )


def _remove_if_abandoned(found: Path) -> bool:
    with suppress(OSError):
        if _is_own(found):
            with locks.if_unused(found) as unused:
                if unused:
                    shutil.rmtree(found, ignore_errors=True)
                return unused
    return False


def _is_own(folder: Path) -> bool:
    """Whether it is a folder, no link to one, that this user has made for himself alone."""
    try:
        state = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o077


def _remove_own(made: Path) -> None:
    shutil.rmtree(made, ignore_errors=True)
    locks.stop_using(made)
