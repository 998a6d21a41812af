"""A store is its owner's alone, whatever the umask, and whoever else may write to the folders around it."""

import os
import pickle
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from store_processes import answer, create_and_wait, running

from jigsawrl.errors import JigsawError
from jigsawrl.store import folders, heirs, locks, private
from jigsawrl.store.store import Store

ANOTHER = 12_345
"""The number of a user who is not this one."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture(params=[0o002, 0o000, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    """Where stores are looked for; as in shared memory, everybody may write to it, and a group is handed on."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm").chmod(0o3777)
    return tmp_path / "shm"


def root(shm: Path, number: int) -> Path:
    return shm / f"jigsawrl-{os.getuid()}-{number}"


def modes(folder: Path) -> dict[bool, set[int]]:
    """Of this folder and those in it (True), and of all files in them."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for path in (folder, *folder.rglob("*")):
        found[path.is_dir()].add(stat.S_IMODE(path.stat().st_mode))
    return found


def test_nobody_else_may_look_into_it(umask: None, shm: Path, tmp_path: Path) -> None:
    store = Store.create(shm / "run" / "store", 1 << 20, root(shm, 1))
    store.put_bytes("small", 0, b"x")
    store.put("again", 0, {"x": torch.ones(9)}, again=True)
    store.put_bytes("large", 0, bytes(2 << 20))
    meeting = folders.meeting(store.root)
    (meeting / "gang").write_text("where they meet")
    with store._memory.begin(64):
        for folder in (store.root, shm / "run" / "store"):
            assert modes(folder) == {True: {0o700}, False: {0o600}}
    store.destroy()


def test_what_a_kill_has_left_is_closed_before_it_is_used_again(shm: Path, tmp_path: Path) -> None:
    """A store folder of an earlier version, made under umask 002: whatever is in it may be anybody's."""
    spill = tmp_path / "run" / "store"
    (tmp_path / "run" / "a").mkdir(parents=True)
    with running(create_and_wait, root(shm, 1), spill) as (_, pipe):
        answer(pipe)
    spill.chmod(0o775)
    assert heirs.left_behind({"left": tmp_path / "run" / "a"}, shm) == []
    made = folders.make(root(shm, 2), spill, 1 << 20, kept={"large"})
    assert Store.attach(made).names() == []
    assert modes(spill) == {True: {0o700}, False: set()}
    folders.remove(made)


def left_by_a_dead_run(shm: Path, tmp_path: Path) -> dict[str, Path]:
    """Its pipelines: of one there is an entry in memory, of the other one on the disk."""
    pipelines = {name: tmp_path / "run" / name for name in ("left", "large")}
    for folder in pipelines.values():
        folder.mkdir(parents=True)
    with running(create_and_wait, root(shm, 1), tmp_path / "run" / "store") as (_, pipe):
        answer(pipe)
    return pipelines


def inherited(shm: Path, tmp_path: Path, pipelines: dict[str, Path]) -> list[str]:
    spill = tmp_path / "run" / "store"
    left = heirs.left_behind(pipelines, shm)
    made = folders.make(root(shm, 2), spill, 4 << 20, heirs.spilled_to(spill, left))
    heirs.take_over(made, left)
    store = Store.attach(made)
    names = [name for name in store.names() if store.get_bytes(name) is not None]
    store.destroy()
    return names


def test_a_dead_run_of_this_user_is_inherited(shm: Path, tmp_path: Path) -> None:
    assert inherited(shm, tmp_path, left_by_a_dead_run(shm, tmp_path)) == ["large", "left"]


def test_nothing_is_inherited_from_before_the_machine_was_switched_off(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store on a disk outlives that, and its files may be torn."""
    pipelines = left_by_a_dead_run(shm, tmp_path)
    monkeypatch.setattr(folders, "this_boot", lambda: "another")
    assert inherited(shm, tmp_path, pipelines) == []
    assert folders.remove_abandoned(shm) == [root(shm, 1)]


@needs_root
def test_what_another_user_has_is_neither_inherited_nor_removed(shm: Path, tmp_path: Path) -> None:
    pipelines = left_by_a_dead_run(shm, tmp_path)
    os.chown(root(shm, 1), ANOTHER, ANOTHER)
    assert list(folders.stores(shm)) == []
    assert folders.remove_abandoned(shm) == []
    assert heirs.left_behind(pipelines, shm) == []
    assert (root(shm, 1) / "store.json").exists()


@needs_root
def test_a_file_of_another_user_in_a_store_is_no_entry(shm: Path, tmp_path: Path) -> None:
    pipelines = left_by_a_dead_run(shm, tmp_path)
    for file in root(shm, 1).glob("left@*"):
        os.chown(file, ANOTHER, ANOTHER)
    assert inherited(shm, tmp_path, pipelines) == ["large"]


@needs_root
def test_a_folder_that_another_user_has_put_into_its_place_holds_no_entries(
    shm: Path, tmp_path: Path
) -> None:
    """Whoever may write to the run's folder may give the spill folder another name, and make one himself."""
    store = Store.create(tmp_path / "run" / "store", 1 << 20, root(shm, 1))
    store.put_bytes("large", 0, bytes(2 << 20))
    spill = tmp_path / "run" / "store"
    shutil.copytree(spill, tmp_path / "theirs")
    for path in (tmp_path / "theirs", *(tmp_path / "theirs").iterdir()):
        os.chown(path, ANOTHER, ANOTHER)
    assert store.get_bytes("large") is not None
    spill.rename(tmp_path / "run" / "ours")
    (tmp_path / "theirs").rename(spill)
    assert store.get_bytes("large") is None
    store.destroy()


@needs_root
def test_on_a_drive_that_shows_one_owner_for_all_files_a_run_can_spill(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As network drives do with root."""
    made, run = private.new_file, tmp_path / "run"

    def squashed(path: Path) -> int:
        descriptor = made(path)
        if path.is_relative_to(run):
            os.fchown(descriptor, ANOTHER, ANOTHER)
            os.chown(path.parent, ANOTHER, ANOTHER)
        return descriptor

    monkeypatch.setattr(private, "new_file", squashed)
    for number in (1, 2):  # the first one is as if killed
        store = Store.create(run / "store", 1 << 20, root(shm, number))
        assert store.names() == []
        store.put_bytes("large", 0, bytes(2 << 20))
        assert store.get_bytes("large") == bytes(2 << 20)
        for folder in (store.root, run / "store"):
            locks.stop_using(folder)
    store.destroy()


@needs_root
def test_nothing_is_spilled_to_a_folder_of_another_user(shm: Path, tmp_path: Path) -> None:
    spill = tmp_path / "run" / "store"
    spill.mkdir(parents=True)
    (spill / "theirs").touch()
    os.chown(spill, ANOTHER, ANOTHER)
    made = folders.make(root(shm, 1), spill, 1 << 20)
    assert modes(spill) == {True: {0o700}, False: set()}
    aside = tmp_path / "run" / "store.not-ours-1"
    assert [path.name for path in aside.iterdir()] == ["theirs"]
    assert aside.stat().st_uid == ANOTHER
    folders.remove(made)


def test_nothing_is_spilled_or_removed_through_a_link(shm: Path, tmp_path: Path) -> None:
    """Whoever may write to the run's folder may put a link there, to what this user has elsewhere."""
    elsewhere = Store.create(tmp_path / "elsewhere", 0, root(shm, 1))
    elsewhere.put_bytes("precious", 0, b"x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "store").symlink_to(tmp_path / "elsewhere")
    made = folders.make(root(shm, 2), tmp_path / "run" / "store", 0)
    Store.attach(made).put_bytes("mine", 0, b"x")
    folders.remove(made)
    assert elsewhere.names() == ["precious"]
    assert elsewhere.get_bytes("precious") == b"x"
    elsewhere.destroy()


def test_a_link_that_cannot_be_moved_away_is_refused(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not yours")

    (tmp_path / "store").symlink_to(tmp_path)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(JigsawError, match=r"is a link.*\nRemove it, or choose another run folder"):
        folders.make(root(shm, 1), tmp_path / "store", 1 << 20)
    assert list(shm.iterdir()) == []


def test_a_record_that_makes_no_sense_is_none(shm: Path, tmp_path: Path) -> None:
    made = folders.make(root(shm, 1), tmp_path / "spill", 1 << 20)
    whole = (made / "store.json").read_bytes()
    wrong = [b"", b"[" * 60_000, b"null", b"{}", pickle.dumps({}), whole[:-9], whole + b"}" * 70_000]
    wrong += [whole.replace(b'"format": 2', b'"format": ' + each) for each in (b'"2"', b"9" * 5000, b"[]")]
    wrong += [whole.replace(b'"spill": "/', b'"spill": "./')]
    for content in wrong:
        (made / "store.json").write_bytes(content)
        assert folders.record_of(made) is None
        with pytest.raises(JigsawError, match="there is no store"):
            Store.attach(made)
    (made / "store.json").unlink()
    os.mkfifo(made / "store.json")
    assert folders.record_of(made) is None
    folders.remove(made)
