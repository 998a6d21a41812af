"""Files of the store that this process has written and will write again: their pages are made, and the device knows
them, which takes far longer than to write them.

To others they are files in the making, with their room; they go when their process does.
"""

from __future__ import annotations

from pathlib import Path

from jigsawrl.store.shelf import Aside

UNIT = 1 << 20
_spares: dict[Path, list[Aside]] = {}
"""By the store's folder."""


def rounded(size: int) -> int:
    """Entries of one kind differ by what is said of them; with such sizes they fit into each other's files."""
    return -(-size // UNIT) * UNIT


def keep(aside: Aside) -> None:
    _spares.setdefault(aside.shelf.folder, []).append(aside)


def take(folder: Path, size: int) -> Aside | None:
    """A file of this size, if there is one."""
    kept = [aside for aside in _spares.pop(folder, []) if aside.is_there]
    fitting = next((aside for aside in kept if aside.size == size), None)
    _spares[folder] = [aside for aside in kept if aside is not fitting]
    return fitting


def give_up(folder: Path) -> None:
    """Removes all of a store."""
    for aside in _spares.pop(folder, []):
        with aside:
            pass
