"""Stores whose processes are dead are found and removed; no other is touched."""

from pathlib import Path

import pytest
from store_processes import PATIENCE_S, answer, attach_and_wait, create_and_wait, running

from jigsawrl.errors import JigsawError
from jigsawrl.store import folders
from jigsawrl.store.folders import remove_abandoned
from jigsawrl.store.store import Store


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """Where stores are looked for, apart from those of other runs on this machine."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


def test_a_store_is_abandoned_when_all_who_used_it_are_dead(parent: Path, tmp_path: Path) -> None:
    root, spill = parent / f"{folders._prefix()}1", tmp_path / "spill"
    with running(create_and_wait, root, spill) as (creator, pipe):
        assert answer(pipe) == root
        assert remove_abandoned(parent) == []
        with running(attach_and_wait, AttachThere(root)) as (user, other):
            assert answer(other) == ["large", "left"]
            creator.kill()
            creator.join(PATIENCE_S)
            assert remove_abandoned(parent) == [], "somebody still uses it"
            assert len(list(spill.iterdir())) == 1
            user.kill()
            user.join(PATIENCE_S)
    assert remove_abandoned(parent) == [root]
    assert not root.exists()
    assert not spill.exists()
    assert remove_abandoned(parent) == []


class AttachThere:
    """Travels as a path and arrives as a store, so that this process does not use the store itself."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Store.attach, (self.root,)


def test_a_new_store_takes_over_the_folders_of_a_dead_one(parent: Path, tmp_path: Path) -> None:
    old, new, spill = parent / f"{folders._prefix()}1", parent / "new", tmp_path / "spill"
    with running(create_and_wait, old, spill) as (_, pipe):
        answer(pipe)
        with pytest.raises(JigsawError, match="another store spills to"):
            Store.create(spill, 1 << 20, new)
        with pytest.raises(JigsawError, match=r"of a run that goes on \(process \d+, started 20"):
            Store.create(tmp_path / "elsewhere", 1 << 20, old)
    store = Store.create(spill, 1 << 20, new)
    store.put_bytes("large", 0, bytes(2 << 20))
    assert remove_abandoned(parent) == [old]
    assert store.get_bytes("large") == bytes(2 << 20), "the spill folder is the new store's"
    again = Store.create(tmp_path / "elsewhere", 1 << 20, old)
    assert again.names() == []
    again.destroy()
    store.destroy()
    assert list(parent.iterdir()) == []


def test_a_creator_killed_early_leaves_nothing_for_ever(parent: Path) -> None:
    (parent / f"{folders._prefix()}1").mkdir()
    (parent / f"{folders._prefix()}2").mkdir()
    (parent / f"{folders._prefix()}2" / "lock").touch()
    (parent / "jigsawrl-other-user").mkdir()
    assert [path.name[-1] for path in remove_abandoned(parent)] == ["1", "2"]
    assert [path.name for path in parent.iterdir()] == ["jigsawrl-other-user"]


def test_a_store_is_made_only_where_there_is_nothing_else(parent: Path, tmp_path: Path) -> None:
    (parent / "file").write_text("mine")
    with pytest.raises(JigsawError, match="neither an empty folder nor a store"):
        Store.create(tmp_path / "spill", 1 << 20, parent)
    with pytest.raises(JigsawError, match="Not a directory"):
        Store.create(parent / "file" / "spill", 1 << 20, tmp_path / "root")
    with pytest.raises(JigsawError, match=r"Lower the budget, or enlarge it"):
        Store.create(tmp_path / "spill", 1 << 60, tmp_path / "root")
    assert (parent / "file").read_text() == "mine"
    assert not (tmp_path / "root").exists()


def test_foreign_files_beside_spilled_ones_stay(parent: Path, tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    (spill / "notes.txt").write_text("mine")
    store = Store.create(spill, 0, parent / "root")
    store.put_bytes("a", 0, b"x")
    store.destroy()
    assert [path.name for path in spill.iterdir()] == ["notes.txt"]
