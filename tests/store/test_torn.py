"""Whatever has happened to an entry's file: it is what was put, or it is as if it had never been put."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jigsawrl.store import layout
from jigsawrl.store.names import Key
from jigsawrl.store.shelf import CHECKED_BYTES
from jigsawrl.store.store import Entry, Store

CASES = 60
"""Of each kind of entry."""
TENSORS = {"a": torch.arange(700.0), "b": torch.ones(3, 5, dtype=torch.bfloat16), "c": torch.tensor(4)}
META = {"cursor": 3, "more": ["x", None]}


def put_small(store: Store) -> None:
    store.put("entry", 1, TENSORS, META)


def put_bytes(store: Store) -> None:
    store.put_bytes("entry", 1, bytes(range(256)) * 9)


def put_on_disk(store: Store) -> None:
    """Larger than the budget."""
    store.put("entry", 1, {**TENSORS, "large": torch.ones(1 << 19)}, META)


def put_again(store: Store) -> None:
    """As a device's state, which has no checksum."""
    store.put("entry", 1, TENSORS, META, again=True)


KINDS: list[Callable[[Store], None]] = [put_small, put_bytes, put_on_disk]


def file_of(store: Store) -> Path:
    (found,) = [
        path for path in (*store.root.iterdir(), *store._disk.folder.iterdir()) if "entry@" in path.name
    ]
    return found


def torn(content: bytes, chance: random.Random) -> bytes:
    """Cut, lengthened, or with other bytes somewhere; often where the header is."""
    place = chance.randrange(chance.choice([16, 400, len(content)]))
    junk = chance.randbytes(chance.randrange(1, 40))
    return chance.choice(
        [
            content[:place],
            content[:place] + junk + content[place + len(junk) :],
            content[:place] + junk + content[place:],
            content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :],
            content[:place] + bytes(len(content) - place),
            junk,
            b"",
        ]
    )


def same(entry: Entry | None, expected: Entry | None) -> bool:
    if entry is None or expected is None:
        return entry is expected
    alike = entry.tensors.keys() == expected.tensors.keys() and entry.meta == expected.meta
    return alike and all(torch.equal(entry.tensors[key], each) for key, each in expected.tensors.items())


@pytest.mark.parametrize("put", KINDS)
def test_what_is_torn_is_as_if_it_were_not_there(put: Callable[[Store], None], make_store: Any) -> None:
    store, chance = make_store(1 << 20), random.Random(put.__name__)
    for case in range(CASES):
        put(store)
        path = file_of(store)
        content, whole = path.read_bytes(), store.get("entry")
        path = file_of(store)
        changed = torn(content, chance)
        path.unlink()
        path.write_bytes(changed)
        found = store.get("entry")
        assert found is None or same(found, whole), case
        if changed[: len(content)] != content:
            assert found is None
            assert store.names() == [], "what cannot be read is removed"
        assert store.usage().entries <= 1
        put(store)
        assert same(store.get("entry"), whole)


def test_an_older_version_is_the_newest_where_the_newest_is_torn(store: Store) -> None:
    store.put("a", 1, TENSORS, {"step": 1}, keep=2)
    store.put("a", 2, TENSORS, {"step": 2}, keep=2)
    (newest,) = store.root.glob("a@2@*")
    os.truncate(newest, newest.stat().st_size - 1)
    found = store.get("a")
    assert found is not None
    assert (found.version, found.meta) == (1, {"step": 1})
    assert store.versions("a") == [1]


def test_what_is_torn_on_the_disk_does_not_come_back(make_store: Any) -> None:
    store: Store = make_store(1 << 20)
    store.put("old", 0, {"x": torch.ones(1 << 17)})
    store.put("new", 0, {"x": torch.ones(1 << 17)})
    (spilled,) = store._disk.folder.glob("old@*")
    content = bytearray(spilled.read_bytes())
    content[-5] ^= 1
    spilled.write_bytes(content)
    store.drop("new")
    assert store.get("old") is None
    assert store.usage().entries == 0


def test_what_is_torn_in_memory_does_not_get_a_good_checksum_on_the_disk(make_store: Any) -> None:
    store: Store = make_store(1 << 20)
    store.put("old", 0, {"x": torch.ones(1 << 17)})
    (file,) = store.root.glob("old@*")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    store.put("new", 0, {"x": torch.ones(1 << 17)})
    assert store.names() == ["new"]


def test_large_entries_have_a_checksum_on_the_disk_only(make_store: Any) -> None:
    """In memory it would take as long as a quarter of writing them."""
    store: Store = make_store(64 << 20)
    large = {"x": torch.zeros(CHECKED_BYTES, dtype=torch.uint8)}
    store.put("a", 0, large)
    store.put("b", 0, large, checked=True)
    store.put("c", 0, {"x": torch.zeros(60 << 20, dtype=torch.uint8)})
    checked = {
        path.name.partition("@")[0]: path.name.count("@") == 4 for path in store._disk.folder.iterdir()
    }
    assert checked == {"a": True, "b": True}
    assert [path.name.count("@") for path in store.root.glob("c@*")] == [3]
    store.drop("c")
    assert store.get("a") is not None
    assert [path.name.count("@") for path in store.root.glob("a@*")] == [3], "it has been looked at"


def test_whatever_a_header_says_nothing_is_raised(store: Store) -> None:
    """Entries without a checksum, as those of a device are."""
    chance = random.Random(0)
    for _ in range(400):
        store.put("entry", 1, TENSORS, META, again=True)
        path = file_of(store)
        content = bytearray(path.read_bytes())
        place = chance.randrange(420)
        content[place : place + 4] = chance.choice(
            [b"null", b"9999", b"-1,0", b'"":{', b"[[[[", chance.randbytes(4)]
        )
        path.unlink()
        path.write_bytes(content)
        found = store.get("entry")
        assert found is None or all(tensor.sum() is not None for tensor in found.tensors.values())


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b"{}",
        b"null",
        b'{"__metadata__": {"meta": "[]"}}',
        b'{"__metadata__": {"meta": "{}"}, "x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"__metadata__": {"meta": "{}"}, "x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99999]}}',
        b'{"__metadata__": {"meta": "{}"}, "x": {"dtype": "F32", "shape": [0, 9e99], "data_offsets": [0, 0]}}',
        b'{"__metadata__": {"meta": "{}"}, "x": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"__metadata__": {"meta": "{}"}, "x": {"dtype": "F32", "shape": [1, [1]], "data_offsets": [0, 4]}}',
        b'{"__metadata__": {"meta": "{}"}, "x": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}}',
        b'{"__metadata__": {"meta": "{}"}, "x": {"dtype": "F32", "shape": [], "data_offsets": null}}',
        b'{"__metadata__": {"meta": "{}"}, "x": {"dtype": "PICKLE", "shape": [], "data_offsets": [0, 4]}}',
        b'{"__metadata__": {"meta": "{}"}, "x": {"dtype": "F32", "shape": [0, 99999999999999999999], '
        b'"data_offsets": [0, 0]}}',
    ],
)
def test_a_header_that_somebody_has_thought_of(header: bytes, store: Store) -> None:
    content = layout._LENGTH.pack(len(header)) + header + bytes(64)
    (store.root / Key("entry", 1, 1, len(content)).file_name).write_bytes(content)
    assert store.get("entry") is None


def test_what_is_no_file_is_no_entry(store: Store, tmp_path: Path) -> None:
    """And nobody waits for it: reading a pipe would."""
    store.put("elsewhere", 1, TENSORS, META)
    (elsewhere,) = store.root.glob("elsewhere@*")
    shutil.move(elsewhere, tmp_path / "elsewhere")
    size = (tmp_path / "elsewhere").stat().st_size
    (store.root / Key("link", 1, 1, size).file_name).symlink_to(tmp_path / "elsewhere")
    (store.root / Key("folder", 1, 1, size).file_name).mkdir()
    os.mkfifo(store.root / Key("pipe", 1, 1, size).file_name)
    os.mkfifo(store.root / ".writing-1-1@64")
    (store.root / ".writing-nonsense").touch()
    assert store.names() == []
    assert store.get("link") is None
    for name in ("link", "folder", "pipe"):
        assert store.get(name) is None
    for name in (
        "x@٣@1@64.safetensors",
        "x@007@1@64.safetensors",
        "x@1@1.safetensors",
        "+@1@1@64.safetensors",
    ):
        (store.root / name).touch()
    (store.root / f"x@{10**40}@1@64.safetensors").touch()
    assert store.get("x") is None
    store.put("x", 1, TENSORS, META)
    assert store.get("x") is not None
