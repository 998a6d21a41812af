"""Entries that are put again and again get the same pages, and nobody ever sees another's numbers in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from jigsawrl.store.store import Store

SIZE = 1 << 20


def numbers(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((SIZE // 4 - 1000,), float(value))}


def put(store: Store, version: int, name: str = "a") -> None:
    """With something said of it that is longer every time."""
    store.put(name, version, numbers(version), {"said": "word " * version}, again=True)


def file_of(store: Store) -> int:
    (path,) = (path for path in Path(store.root).iterdir() if path.name.startswith("a@"))
    return path.stat().st_ino


def value_in(store: Store, version: int | None = None) -> float:
    entry = store.get("a", version)
    assert entry is not None
    assert entry.meta["said"] == "word " * entry.version
    assert entry.tensors["x"].unique().numel() == 1
    return float(entry.tensors["x"][0])


def test_two_files_take_turns(store: Store) -> None:
    files = []
    for version in range(6):
        put(store, version)
        files.append(file_of(store))
        assert value_in(store) == version
        assert store.versions("a") == [version]
    assert files == [*files[:2]] * 3
    assert files[0] != files[1]


def test_one_that_is_dropped_to_be_put_again_is_never_there_twice(store: Store) -> None:
    put(store, 0)
    before, used = file_of(store), store.usage().memory_bytes
    for _ in range(3):
        store.drop("a", again=True)
        assert store.get("a") is None
        assert store.usage().memory_bytes == used, "its room is still its own"
        put(store, 0)
        assert (file_of(store), store.usage().memory_bytes) == (before, used)


def test_what_somebody_reads_stays_as_it_is(store: Store) -> None:
    put(store, 0)
    reader = store.get("a")
    assert reader is not None
    seen = reader.tensors["x"]
    del reader
    for version in range(1, 5):
        put(store, version)
    assert torch.equal(seen, numbers(0)["x"])
    del seen
    put(store, 5)
    assert value_in(store) == 5


def test_where_room_is_short_pages_go_at_once(make_store: Callable[..., Store]) -> None:
    store = make_store(2 * SIZE + SIZE // 2)
    for version in range(3):
        put(store, version)
        assert store.usage().memory_bytes == SIZE, "less than a quarter was free while it was replaced"
    store.put("b", 0, numbers(7))
    assert store.usage().spilled_bytes == 0


def test_other_sizes_get_files_of_their_own(store: Store) -> None:
    put(store, 0)
    store.drop("a", again=True)
    store.put("a", 1, {"x": torch.ones(SIZE)}, {"said": "word "}, again=True)
    assert value_in(store) == 1
    put(store, 2)
    assert value_in(store) == 2


def test_they_go_with_the_store(make_store: Callable[..., Store]) -> None:
    store = make_store()
    put(store, 0)
    store.drop("a", again=True)
    store.destroy()
    assert not Path(store.root).exists()
