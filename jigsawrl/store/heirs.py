"""What the store of a dead run still holds of a pipeline goes to the store of the run that goes on with it.

The store of a run spills into the run's folder, beside the folders of its pipelines, or links to them. So whoever
goes on in a pipeline's folder finds what was remembered of it, whichever run that was in.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jigsawrl.store import folders, locks, private
from jigsawrl.store.names import Key, pipeline_of
from jigsawrl.store.shelf import Shelf, chunks_of, room_for


@dataclass(frozen=True, slots=True)
class Left:
    """The store of a dead run, and the pipelines of it that go on."""

    root: Path
    spill: Path
    pipelines: frozenset[str]


def left_behind(pipelines: Mapping[str, Path], parent: Path | None = None) -> list[Left]:
    """Of all dead runs that some of these were in, by name and folder. This process uses it from now on.

    Nothing is taken from a folder that another user has, or may have put something into. Nor is it after the machine
    was switched off: what was in memory is lost, and what was not, for its folder is on a disk, may be torn.
    """
    found = []
    for root, record in folders.stores(parent):
        spill = Path(record.spill)
        names = [name for name, folder in pipelines.items() if _is_same(spill.parent / name, folder)]
        if not names or record.format != folders.FORMAT or record.boot != folders.this_boot():
            continue
        if not private.is_private_folder(root) or not private.is_private_folder(spill):
            continue
        left = Left(root, spill, frozenset(names))
        if _is_dead(left) and locks.use(root):
            found.append(left)
    return found


def spilled_to(spill: Path, left: Sequence[Left]) -> frozenset[str]:
    """Pipelines some of which may be in this folder already."""
    return frozenset().union(*(each.pipelines for each in left if _is_same(each.spill, spill)))


def take_over(store: Path, left: Sequence[Left]) -> None:
    """All that dead runs remembered of their pipelines goes to this store; what else they left, goes.

    Nothing is copied, but to the disk where the memory is full. Who is killed here leaves every entry in one of them.
    """
    for each in left:
        with suppress(FileNotFoundError), folders.lock_of(each.root):
            _take_over(store, each)
        locks.stop_using(each.root)
        folders.remove_if_abandoned(each.root)


def _take_over(store: Path, left: Left) -> None:
    own = folders.record_of(store)
    assert own is not None
    remembered, spilled = Shelf(left.root), Shelf(left.spill, is_disk=True)
    memory, disk = Shelf(store), Shelf(Path(own.spill), True, own.spill_owner)
    if not _is_same(spilled.folder, disk.folder):  # else it is in its place already
        for key in _entries(spilled, left.pipelines):
            _give(key, spilled, disk, store)
    for key in _entries(remembered, left.pipelines):
        with folders.lock_of(store):
            fits = _used(memory) + room_for(key.size) <= own.budget_bytes
        _give(key, remembered, memory if fits else disk, store)


def _give(key: Key, source: Shelf, target: Shelf, store: Path) -> None:
    """An entry gets its name in this store; it is copied where it is on another file system."""
    if not (source.is_disk or target.is_disk) or (source.is_disk and target.is_disk):
        with suppress(OSError), folders.lock_of(store):
            os.rename(source.path(key), target.path(key))
            return
    with folders.lock_of(store):
        copy = target.begin(key.size)
    with copy:
        try:
            descriptor = source.open(key)
        except FileNotFoundError:
            return  # it is no file of this user
        try:
            copy.copy(chunks_of(descriptor))
        finally:
            os.close(descriptor)
        if copy.has_all_of(key):
            with folders.lock_of(store):
                copy.publish(key._replace(checksum=copy.checksum_kept))
    source.remove(key)


def _entries(shelf: Shelf, names: Collection[str]) -> list[Key]:
    keys, _ = shelf.survey()
    return [key for key in keys if pipeline_of(key) in names]


def _used(memory: Shelf) -> int:
    keys, reserved = memory.survey()
    return reserved + sum(room_for(key.size) for key in keys)


def _is_same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        return os.path.samefile(one, other)
    return False


def _is_dead(left: Left) -> bool:
    """Nobody of its run is there; one at a time looks, for others would take that for use."""
    with suppress(FileNotFoundError), folders.lock_of(left.root), locks.if_unused(left.spill) as unused:
        return unused
    return False
