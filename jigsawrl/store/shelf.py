"""A folder of entries, and the files in it that are still being written."""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from jigsawrl.errors import JigsawError
from jigsawrl.store import pinned, private
from jigsawrl.store.locks import try_lock, unlock
from jigsawrl.store.names import Key, file_prefix, key_of, pipeline_of

if TYPE_CHECKING:
    from jigsawrl.store.layout import Layout

CHECKED_BYTES = 16 << 20
"""Up to this size an entry has a checksum in memory too: CRC-32 at 1 to 7 GB/s takes 16 ms at most. For larger ones
it would add a quarter to the time in which they are written, and what is in memory is not torn by a kill."""
_ASIDE = ".writing-"
_ASIDE_SIZE = re.compile(r"\.writing-[0-9]+-[0-9]+@([0-9]{1,18})")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_AT_ONCE = 1 << 30  # Linux writes at most 2 GiB in one call
_COPY_CHUNK = 1 << 22


def chunks_of(descriptor: int) -> Iterator[memoryview]:
    while chunk := os.read(descriptor, _COPY_CHUNK):
        yield memoryview(chunk)


class Checksum:
    """CRC-32 of bytes that come in pieces: it shows what a disk or a power cut has torn, and not what is forged."""

    def __init__(self) -> None:
        self._value = 0

    def add(self, chunk: memoryview) -> None:
        self._value = zlib.crc32(chunk, self._value)

    def __str__(self) -> str:
        return f"{self._value:08x}"


def checksum_of(content: memoryview) -> str:
    checksum = Checksum()
    checksum.add(content)
    return str(checksum)


def room_for(size: int) -> int:
    """What a file of this size takes: memory is given out in whole pages."""
    return -(-size // _PAGE) * _PAGE


class Aside:
    """A file in the making, which gets a name that others look for when it is whole.

    It holds a lock on itself, which its writer's death lets go: so litter is told from work. Leaving the `with` block
    without having published it deletes it.
    """

    def __init__(self, shelf: Shelf, size: int, old: int | None = None) -> None:
        """`old`: the descriptor of a file that gets this name, locked."""
        self.shelf = shelf
        self.size = size
        self.checksum = ""
        """Of all that was written; empty where it was not asked for."""
        self._path: Path | None = shelf.folder / f"{_ASIDE}{os.getpid()}-{time.monotonic_ns()}@{size}"
        self._descriptor = old if old is not None else private.new_file(self._path)
        try_lock(self._descriptor)

    @classmethod
    def of(cls, shelf: Shelf, key: Key) -> Aside | None:
        """The file of an entry, which is none from now on. None: somebody reads it."""
        descriptor = shelf.open(key, os.O_RDWR)
        if not try_lock(descriptor):
            os.close(descriptor)
            return None
        aside = cls(shelf, key.size, descriptor)
        assert aside._path is not None
        os.rename(shelf.path(key), aside._path)
        return aside

    def write(self, file: Layout, again: bool = False) -> None:
        """Writes the whole content, by the device itself where it is worth it to tell it of the pages.

        A disk that is full or broken says so here, not after the original is gone.
        """
        if again:
            os.ftruncate(self._descriptor, self.size)
        by_device = again and not self.shelf.is_disk and any(tensor.is_cuda for tensor in file.tensors)
        if not by_device or not pinned.write(self._descriptor, self.size, file.header, file.tensors):
            rest = memoryview(bytes(self.size - file.size if self.shelf.is_disk else 0))
            checked = file.checked or self.size <= CHECKED_BYTES
            self.copy(chain(file.chunks(), [rest]), checked and not again)

    def copy(self, chunks: Iterable[memoryview], checked: bool = True) -> None:
        """What is on the disk always has a checksum."""
        checksum = Checksum() if checked or self.shelf.is_disk else None
        with self.shelf.explained():
            for chunk in chunks:
                if checksum is not None:
                    checksum.add(chunk)
                while chunk:
                    chunk = chunk[os.write(self._descriptor, chunk[:_MOST_AT_ONCE]) :]
            if self.shelf.is_disk:
                os.fsync(self._descriptor)
        self.checksum = "" if checksum is None else str(checksum)

    def publish(self, key: Key) -> None:
        assert self._path is not None
        now = time.time_ns()
        os.utime(self._descriptor, ns=(now, now))
        os.rename(self._path, self.shelf.path(key))
        self._path = None
        unlock(self._descriptor)  # whoever reads it locks it too

    def has_all_of(self, key: Key) -> bool:
        """Whether what was copied from an entry is all of it, and what was put."""
        return os.fstat(self._descriptor).st_size == key.size and key.checksum in ("", self.checksum)

    @property
    def checksum_kept(self) -> str:
        """As its name says it: large entries are read for it on the disk only."""
        return self.checksum if self.shelf.is_disk or self.size <= CHECKED_BYTES else ""

    @property
    def is_there(self) -> bool:
        """Nobody has removed it with the whole store."""
        return os.fstat(self._descriptor).st_nlink > 0

    def __enter__(self) -> Aside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is not None:
            pinned.forget(os.fstat(self._descriptor))
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class Shelf:
    """One place for entries: the node's memory, or the disk. All its methods want the store's lock."""

    folder: Path
    is_disk: bool = False
    owner: int | None = None
    """The number under which its file system shows this user; None: the usual one."""

    def entries(self, name: str) -> list[Key]:
        """The entries of one name, which is far quicker than a survey where there are many."""
        prefix = file_prefix(name)
        found = (key_of(name) for name in self._files() if name.startswith(prefix))
        return [key for key in found if key]

    def survey(self) -> tuple[list[Key], int]:
        """All entries, and the bytes that files in the making will take. Litter of dead writers is cleared away."""
        keys, reserved = [], 0
        for name in self._files():
            if name.startswith(_ASIDE):
                reserved += self._reserved(name)
            elif key := key_of(name):
                keys.append(key)
        return keys, reserved

    def _files(self) -> list[str]:
        """Links, folders and pipes are no entries, whatever they are called."""
        with os.scandir(self.folder) as found:
            return [entry.name for entry in found if entry.is_file(follow_symlinks=False)]

    def begin(self, size: int) -> Aside:
        with self.explained():
            return Aside(self, size)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns what goes wrong with the disk into something that a user can mend."""
        try:
            yield
        except OSError as error:
            if not self.is_disk:
                raise
            raise JigsawError(
                f"the store's memory is full, and it cannot spill to {self.folder}: {error.strerror}\n"
                "All that it held is still there. Free disk space there, give it a larger budget, or drop entries"
            ) from error

    def path(self, key: Key) -> Path:
        return self.folder / key.file_name

    def open(self, key: Key, flags: int = os.O_RDONLY) -> int:
        """A descriptor of an entry's file; a FileNotFoundError where there is none that this user has made."""
        return private.open_file(self.path(key), flags, self.owner)

    def holds(self, key: Key) -> bool:
        return os.path.lexists(self.path(key))

    def remove(self, key: Key) -> None:
        """Takes the name away; whoever has the entry mapped keeps its pages until done with them."""
        with suppress(FileNotFoundError, IsADirectoryError):
            pinned.forget(self.path(key).lstat())
            self.path(key).unlink()

    def last_used(self, key: Key) -> int:
        return self.path(key).lstat().st_mtime_ns

    def touch(self, key: Key) -> None:
        now = time.time_ns()
        os.utime(self.path(key), ns=(now, now), follow_symlinks=False)

    def clear(self, kept: Collection[str] = ()) -> None:
        """Deletes every file of a store, and nothing else; entries of the pipelines in `kept` stay."""
        for name in os.listdir(self.folder):
            key = key_of(name)
            if name.startswith(_ASIDE) or (key and pipeline_of(key) not in kept):
                with suppress(FileNotFoundError, IsADirectoryError):
                    (self.folder / name).unlink()

    def _reserved(self, name: str) -> int:
        path, size = self.folder / name, _ASIDE_SIZE.fullmatch(name)
        try:
            descriptor = private.open_file(path, owner=self.owner)
        except FileNotFoundError:
            return 0  # its writer gave up, or it is none of ours
        try:
            if size is not None and not try_lock(descriptor):
                return room_for(int(size[1]))
            path.unlink(missing_ok=True)
            return 0
        finally:
            os.close(descriptor)
