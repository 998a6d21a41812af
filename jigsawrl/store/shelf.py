"""A folder of entries, and the files in it that are still being written."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from jigsawrl.errors import JigsawError
from jigsawrl.store import pinned
from jigsawrl.store.locks import try_lock, unlock
from jigsawrl.store.names import Key, file_prefix, key_of, pipeline_of

if TYPE_CHECKING:
    from jigsawrl.store.layout import Layout

_ASIDE = ".writing-"
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_AT_ONCE = 1 << 30  # Linux writes at most 2 GiB in one call
_COPY_CHUNK = 1 << 22


def chunks_of(descriptor: int) -> Iterator[memoryview]:
    while chunk := os.read(descriptor, _COPY_CHUNK):
        yield memoryview(chunk)


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
        self._path: Path | None = shelf.folder / f"{_ASIDE}{os.getpid()}-{time.monotonic_ns()}@{size}"
        self._descriptor = old if old is not None else os.open(self._path, _NEW, 0o600)
        try_lock(self._descriptor)

    @classmethod
    def of(cls, shelf: Shelf, key: Key) -> Aside | None:
        """The file of an entry, which is none from now on. None: somebody reads it."""
        descriptor = os.open(shelf.path(key), os.O_RDWR)
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
            self.copy(file.chunks())

    def copy(self, chunks: Iterable[memoryview]) -> None:
        with self.shelf.explained():
            for chunk in chunks:
                while chunk:
                    chunk = chunk[os.write(self._descriptor, chunk[:_MOST_AT_ONCE]) :]
            if self.shelf.is_disk:
                os.fsync(self._descriptor)

    def publish(self, key: Key) -> None:
        assert self._path is not None
        now = time.time_ns()
        os.utime(self._descriptor, ns=(now, now))
        os.rename(self._path, self.shelf.path(key))
        self._path = None
        unlock(self._descriptor)  # whoever reads it locks it too

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

    def entries(self, name: str) -> list[Key]:
        """The entries of one name, which is far quicker than a survey where there are many."""
        prefix = file_prefix(name)
        found = (key_of(name) for name in os.listdir(self.folder) if name.startswith(prefix))
        return [key for key in found if key]

    def survey(self) -> tuple[list[Key], int]:
        """All entries, and the bytes that files in the making will take. Litter of dead writers is cleared away."""
        keys, reserved = [], 0
        for name in os.listdir(self.folder):
            if name.startswith(_ASIDE):
                reserved += self._reserved(name)
            elif key := key_of(name):
                keys.append(key)
        return keys, reserved

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

    def holds(self, key: Key) -> bool:
        return self.path(key).exists()

    def remove(self, key: Key) -> None:
        """Takes the name away; whoever has the entry mapped keeps its pages until done with them."""
        with suppress(FileNotFoundError):
            pinned.forget(self.path(key).stat())
            self.path(key).unlink()

    def last_used(self, key: Key) -> int:
        return self.path(key).stat().st_mtime_ns

    def touch(self, key: Key) -> None:
        now = time.time_ns()
        os.utime(self.path(key), ns=(now, now))

    def clear(self, kept: Collection[str] = ()) -> None:
        """Deletes every file of a store, and nothing else; entries of the pipelines in `kept` stay."""
        for name in os.listdir(self.folder):
            key = key_of(name)
            if name.startswith(_ASIDE) or (key and pipeline_of(key) not in kept):
                (self.folder / name).unlink(missing_ok=True)

    def _reserved(self, name: str) -> int:
        path = self.folder / name
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return 0  # its writer gave up
        try:
            if not try_lock(descriptor):
                return room_for(int(name.rpartition("@")[2]))
            path.unlink(missing_ok=True)
            return 0
        finally:
            os.close(descriptor)
