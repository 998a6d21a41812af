"""The store: entries by name and version, in memory while they fit and on the disk when they do not."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jigsawrl.errors import JigsawError
from jigsawrl.store import folders, layout, locks, names, pinned, spares
from jigsawrl.store.names import Key
from jigsawrl.store.shelf import Aside, Shelf, checksum_of, chunks_of, room_for

SPILL_TIMEOUT_S = 600.0
SPARES_PART = 0.75
"""Of the budget: where more is in use, files that go are not kept to be written again."""
_BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Entry:
    """A version as it was put. The tensors are the store's own pages: read them, and copy what is to be changed."""

    name: str
    version: int
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store holds now. Memory counts whole pages, and what is being written; it never exceeds the budget."""

    memory_bytes: int
    spilled_bytes: int
    entries: int


class _Place(NamedTuple):
    key: Key
    shelf: Shelf


@dataclass(frozen=True, slots=True)
class _Stock:
    """All that is there, by name and version, and the memory that files in the making will take."""

    places: dict[tuple[str, int], _Place]
    reserved: int

    def versions(self, name: str) -> list[int]:
        return sorted(version for at, version in self.places if at == name)

    def on(self, shelf: Shelf) -> list[Key]:
        return [place.key for place in self.places.values() if place.shelf is shelf]


class Store:
    """A handle, cheap and picklable: any number of processes and threads use one store through handles like it."""

    def __init__(self, root: Path, record: folders.Record) -> None:
        self.root = root
        self.budget_bytes = record.budget_bytes
        self._memory = Shelf(root)
        self._disk = Shelf(Path(record.spill), True, record.spill_owner)

    @classmethod
    def create(cls, spill: Path, budget_bytes: int, root: Path | None = None) -> Store:
        """A new store. Without `root` it is in /dev/shm; `spill` is a folder that no other store spills to."""
        if budget_bytes < 0:
            raise ValueError(f"a budget of {budget_bytes} bytes")
        return cls.attach(folders.make(root, spill, budget_bytes))

    @classmethod
    def attach(cls, root: Path) -> Store:
        """The store that another process created there."""
        root = root.absolute()
        return cls(root, folders.read(root))

    def __reduce__(self) -> tuple[Callable[[Path], Store], tuple[Path]]:
        return Store.attach, (self.root,)

    def destroy(self) -> None:
        """Removes everything; what is mapped stays readable. Doing it again changes nothing."""
        folders.remove(self.root)
        spares.give_up(self.root)
        pinned.forget_removed()

    def put(
        self,
        name: str,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        meta: Mapping[str, Any] | None = None,
        keep: int = 1,
        again: bool = False,
        checked: bool = False,
    ) -> None:
        """Publishes a version, all of it at once, and drops all but the `keep` highest versions of the name.

        Publishing a version again replaces it. Tensors may be on any device, strided, or share memory: their values
        are stored, each on its own. `meta` is JSON. The caller does not change the tensors meanwhile.

        `again`: this process puts entries of about this size again and again, and reads them. So the pages of one
        that goes are kept for the next, if nobody reads them and there is room; a device copies its tensors itself.

        `checked`: it gets a checksum however large it is. Others have one where they are small, or on the disk.
        """
        names.check(name, version)
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least one version must be kept")
        file = layout.plan(tensors, meta or {}, checked)
        size = spares.rounded(file.size) if again else file.size
        spare = spares.take(self.root, size) if again else None
        try:
            self._write(name, version, file, keep, spare or self._reserve(size), again)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            with self._lock():  # others fill the shared memory, so that the budget cannot be used up
                aside = self._disk.begin(file.size)
            self._write(name, version, file, keep, aside)

    def get(self, name: str, version: int | None = None) -> Entry | None:
        """A version, or the newest one; None where there is none. It is mapped, not copied, also from the disk.

        What was spilled comes back into memory where there is room for it. What cannot be read, for it is torn, has
        another checksum or is no entry at all, is removed: it is as if it had never been put.
        """
        while (found := self._map(name, version)) is not None:
            place, storage = found
            if place.shelf is self._disk and self._bring_back(place.key):
                place, storage = self._map(name, place.key.version) or found
            try:
                if place.key.checksum and checksum_of(layout.bytes_of(storage)) != place.key.checksum:
                    raise layout.Unreadable("its checksum is another one")
                tensors, meta = layout.unpack(storage)
            except layout.Unreadable:
                self._discard(place)
                continue
            return Entry(name, place.key.version, tensors, meta)
        return None

    def put_bytes(
        self, name: str, version: int, data: bytes, meta: Mapping[str, Any] | None = None, keep: int = 1
    ) -> None:
        """Like `put`, for what is not tensors."""
        tensor = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8)
        )
        self.put(name, version, {_BYTES: tensor}, meta, keep, checked=True)

    def get_bytes(self, name: str, version: int | None = None) -> bytes | None:
        entry = self.get(name, version)
        tensor = None if entry is None else entry.tensors.get(_BYTES)
        return None if tensor is None or tensor.dtype != torch.uint8 else tensor.numpy().tobytes()

    def versions(self, name: str) -> list[int]:
        """The versions of a name, oldest first."""
        with self._lock():
            return self._stock_of(name).versions(name)

    def names(self, prefix: str = "") -> list[str]:
        with self._lock():
            return sorted({name for name, _ in self._stock().places if name.startswith(prefix)})

    def drop(self, name: str, version: int | None = None, again: bool = False) -> None:
        """Removes a version, or all of them. Where there is none, nothing happens.

        `again`: one of that size will be put soon, with the same pages.
        """
        with self._lock():
            for place in self._stock_of(name).places.values():
                if version in (None, place.key.version):
                    self._remove(place, again)

    def usage(self) -> Usage:
        with self._lock():
            stock = self._stock()
        spilled = sum(key.size for key in stock.on(self._disk))
        return Usage(self._used(stock), spilled, len(stock.places))

    def _write(
        self, name: str, version: int, file: layout.Layout, keep: int, aside: Aside, again: bool = False
    ) -> None:
        with aside:
            aside.write(file, again)
            with self._lock():
                roomy = again and self._used(self._stock()) <= SPARES_PART * self.budget_bytes
                stock = self._stock_of(name)
                key = Key(name, version, time.monotonic_ns(), aside.size, aside.checksum)
                aside.publish(key)
                doomed = [place for place in (stock.places.get((name, version)),) if place]
                stock.places[name, version] = _Place(key, aside.shelf)
                doomed += [stock.places[name, old] for old in stock.versions(name)[:-keep]]
                for place in doomed:
                    self._remove(place, roomy)

    def _remove(self, place: _Place, again: bool) -> None:
        """With `again`, its file is kept to be written once more, if nobody reads it."""
        spare = Aside.of(place.shelf, place.key) if again and place.shelf is self._memory else None
        if spare is None:
            place.shelf.remove(place.key)
        else:
            spares.keep(spare)

    def _reserve(self, size: int) -> Aside:
        """A file that may grow to this size: in memory if need be after others were spilled, else on the disk."""
        with self._lock():
            stock = self._stock()
            if len(stock.places) >= names.MAX_ENTRIES:
                raise JigsawError(
                    f"the store in {self.root} has {names.MAX_ENTRIES:,} entries, which is its limit\n"
                    "Drop what is not needed any more"
                )
            if not self._fits(size, stock):
                spares.give_up(self.root)
                stock = self._stock()
            if self._fits(size, stock):
                return self._memory.begin(size)
            if room_for(size) > self.budget_bytes:
                return self._disk.begin(size)
        with self._locked(folders.SPILLING, max(SPILL_TIMEOUT_S, folders.lock_timeout_s())):
            return self._make_room(size)

    def _make_room(self, size: int) -> Aside:
        """Spills the least recently used entries one by one. Rather than wait for other writers, it goes to disk."""
        deadline = time.monotonic() + SPILL_TIMEOUT_S
        while True:
            with self._lock():
                stock = self._stock()
                if self._fits(size, stock):
                    return self._memory.begin(size)
                if room_for(size) > self.budget_bytes - stock.reserved or time.monotonic() > deadline:
                    return self._disk.begin(size)
                oldest = min(stock.on(self._memory), key=self._memory.last_used)
                copy = self._disk.begin(oldest.size)
            self._move(oldest, self._memory, copy)

    def _bring_back(self, key: Key) -> bool:
        with self._lock():
            if not self._fits(key.size, self._stock()):
                return False
            copy = self._memory.begin(key.size)
        with suppress(OSError):  # it can be read from where it is
            self._move(key, self._disk, copy)
            return True
        return False

    def _move(self, key: Key, source: Shelf, copy: Aside) -> None:
        """Copies an entry to the other shelf, then gives it its name there before it loses it here. One that is torn
        only loses it."""
        with copy:
            try:
                descriptor = source.open(key)
            except FileNotFoundError:
                with self._lock():
                    source.remove(key)  # if it was not dropped meanwhile, it is no file of ours
                return
            try:
                copy.copy(chunks_of(descriptor))
            finally:
                os.close(descriptor)
            with self._lock():
                if source.holds(key):
                    if copy.has_all_of(key):
                        copy.publish(key._replace(checksum=copy.checksum_kept))
                    source.remove(key)

    def _discard(self, place: _Place) -> None:
        with self._lock():
            place.shelf.remove(place.key)

    def _map(self, name: str, version: int | None) -> tuple[_Place, torch.UntypedStorage] | None:
        with self._lock():
            stock = self._stock_of(name)
            wanted = reversed(stock.versions(name)) if version is None else [version]
            for place in filter(None, (stock.places.get((name, each)) for each in wanted)):
                path = place.shelf.path(place.key)
                try:
                    storage = pinned.open_pinned(path)
                    if storage is None:
                        storage = layout.open_mapped(path, place.key.size, place.shelf.owner)
                except (FileNotFoundError, ValueError):  # it is shorter than it was, or no file of ours
                    place.shelf.remove(place.key)
                    continue
                place.shelf.touch(place.key)
                return place, storage
            return None

    def _stock(self) -> _Stock:
        spilled, _ = self._disk.survey()
        in_memory, reserved = self._memory.survey()
        return _Stock(self._places(in_memory, spilled), reserved)

    def _stock_of(self, name: str) -> _Stock:
        return _Stock(self._places(self._memory.entries(name), self._disk.entries(name)), 0)

    def _places(self, in_memory: list[Key], spilled: list[Key]) -> dict[tuple[str, int], _Place]:
        """Where everything is. Mends what a kill left: a version in two editions, or an entry in both places."""
        places: dict[tuple[str, int], _Place] = {}
        for shelf, keys in ((self._memory, in_memory), (self._disk, spilled)):
            for key in keys:
                known = places.get((key.name, key.version))
                if known is not None and known.key.edition >= key.edition:
                    shelf.remove(key)
                    continue
                if known is not None:
                    known.shelf.remove(known.key)
                places[key.name, key.version] = _Place(key, shelf)
        return places

    def _fits(self, size: int, stock: _Stock) -> bool:
        return self._used(stock) + room_for(size) <= self.budget_bytes

    def _used(self, stock: _Stock) -> int:
        return stock.reserved + sum(room_for(key.size) for key in stock.on(self._memory))

    def _lock(self) -> AbstractContextManager[None]:
        return self._locked(folders.LOCK, folders.lock_timeout_s())

    @contextmanager
    def _locked(self, name: str, timeout_s: float) -> Iterator[None]:
        try:
            with locks.locked(self.root / name, timeout_s):
                yield
        except FileNotFoundError as error:
            raise JigsawError(
                f"the store in {self.root} is gone ({error.filename}): its run has ended, or its folder was deleted"
            ) from error
