"""What a dead run remembered of a pipeline is there for the run that goes on with it, and for nobody else."""

import fcntl
import os
import shutil
import signal
import sys
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from store_processes import PATIENCE_S, answer, running

from jigsawrl.store import folders, heirs, locks
from jigsawrl.store.store import Store

SMALL, LARGE = b"small", bytes(2 << 20)


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    """Where stores are looked for, apart from those of other runs on this machine."""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def old(shm: Path, tmp_path: Path) -> Path:
    """The store of a run of a and b that was killed; of a, one entry was spilled."""
    for name in ("a", "b"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
        link(tmp_path / "old", tmp_path, name)
    with running(remember_and_wait, root(shm, 1), tmp_path / "old" / "store") as (_, pipe):
        assert answer(pipe) == {"a/weights": 7, "a/optimizer": 7, "b/weights": 3}
        assert heirs.left_behind(jobs(tmp_path, "ab"), shm) == [], "its run is alive"
    return root(shm, 1)


def remember_and_wait(pipe: Connection, root: Path, spill: Path) -> None:
    store = Store.create(spill, 1 << 20, root)
    store.put_bytes("a/weights", 7, SMALL)
    store.put_bytes("a/optimizer", 7, LARGE)
    store.put_bytes("b/weights", 3, SMALL)
    pipe.send({name: store.versions(name)[-1] for name in ("a/weights", "a/optimizer", "b/weights")})
    pipe.recv()


def link(run: Path, folder: Path, name: str) -> None:
    run.mkdir(exist_ok=True)
    (run / name).symlink_to(folder / "jobs" / name)


def root(shm: Path, number: int) -> Path:
    return shm / f"{folders._prefix()}{number}"


def jobs(folder: Path, names: str) -> dict[str, Path]:
    return {name: folder / "jobs" / name for name in names}


def heir(shm: Path, number: int, spill: Path, pipelines: dict[str, Path], budget: int = 1 << 20) -> Store:
    """The store of a run that goes on with these."""
    left = heirs.left_behind(pipelines, shm)
    folders.remove_abandoned(shm)
    store = Store.attach(folders.make(root(shm, number), spill, budget, heirs.spilled_to(spill, left)))
    heirs.take_over(store.root, left)
    return store


def take_and_die_at(pipe: Connection, moment: int, *arguments: Any) -> None:
    """Killed just before the given time that a file gets another name, or is removed."""
    calls = 0

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal calls
        calls += event in {"os.rename", "os.remove"}
        if calls > moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)
    heir(*arguments)
    pipe.send("there")
    pipe.recv()


def held(store: Store) -> dict[str, tuple[int, bytes | None]]:
    return {name: (store.versions(name)[-1], store.get_bytes(name)) for name in store.names()}


def test_it_goes_to_the_run_that_goes_on_in_the_pipelines_folder_and_the_rest_is_removed(
    old: Path, shm: Path, tmp_path: Path
) -> None:
    store = heir(shm, 2, tmp_path / "new" / "store", jobs(tmp_path, "a"))
    assert held(store) == {"a/weights": (7, SMALL), "a/optimizer": (7, LARGE)}
    assert store.usage().spilled_bytes > len(LARGE), "what was on the disk stays there"
    assert not old.exists()
    assert not (tmp_path / "old" / "store").exists()
    store.destroy()
    assert list(shm.iterdir()) == []


def test_who_resumes_in_the_same_folder_has_also_what_was_spilled_there(
    old: Path, shm: Path, tmp_path: Path
) -> None:
    store = heir(shm, 2, tmp_path / "old" / "store", jobs(tmp_path, "ab"))
    everything = {"a/weights": (7, SMALL), "a/optimizer": (7, LARGE), "b/weights": (3, SMALL)}
    assert held(store) == everything
    assert not old.exists()
    store.destroy()


def test_two_runs_share_what_is_left_if_somebody_keeps_it_from_being_removed(
    old: Path, shm: Path, tmp_path: Path
) -> None:
    keeper = os.open(old, os.O_RDONLY)
    assert locks.try_lock(keeper, fcntl.LOCK_SH)
    first = heir(shm, 2, tmp_path / "first" / "store", jobs(tmp_path, "a"))
    second = heir(shm, 3, tmp_path / "second" / "store", jobs(tmp_path, "b"))
    assert held(first) == {"a/weights": (7, SMALL), "a/optimizer": (7, LARGE)}
    assert held(second) == {"b/weights": (3, SMALL)}
    assert not list(old.glob("*.safetensors"))
    os.close(keeper)
    assert folders.remove_abandoned(shm) == [old]
    for store in (first, second):
        store.destroy()


def test_what_the_memory_has_no_room_for_goes_to_the_disk(old: Path, shm: Path, tmp_path: Path) -> None:
    store = heir(shm, 2, tmp_path / "new" / "store", jobs(tmp_path, "ab"), budget=0)
    assert held(store)["b/weights"] == (3, SMALL)
    assert store.usage().memory_bytes == 0
    assert store.usage().entries == 3
    store.destroy()


@pytest.mark.parametrize("moment", range(0, 12, 2))
def test_whoever_is_killed_while_taking_over_the_next_one_has_all(
    moment: int, old: Path, shm: Path, tmp_path: Path
) -> None:
    link(tmp_path / "new", tmp_path, "a")
    given = (shm, 2, tmp_path / "new" / "store", jobs(tmp_path, "a"))
    with running(take_and_die_at, moment, *given) as (process, pipe):
        wait([process.sentinel, pipe], PATIENCE_S)
    link(tmp_path / "next", tmp_path, "a")
    store = heir(shm, 3, tmp_path / "next" / "store", jobs(tmp_path, "a"))
    assert held(store) == {"a/weights": (7, SMALL), "a/optimizer": (7, LARGE)}
    store.destroy()


def test_what_was_spilled_is_of_no_use_where_the_memory_is_lost(old: Path, shm: Path, tmp_path: Path) -> None:
    shutil.rmtree(old)  # as when the machine was switched off
    store = heir(shm, 2, tmp_path / "old" / "store", jobs(tmp_path, "ab"))
    assert store.names() == []
    store.destroy()


def test_a_pipeline_of_the_same_name_in_another_folder_gets_nothing(
    old: Path, shm: Path, tmp_path: Path
) -> None:
    (tmp_path / "other" / "a").mkdir(parents=True)
    store = heir(shm, 2, tmp_path / "other" / "store", {"a": tmp_path / "other" / "a"})
    assert store.names() == []
    assert not old.exists()
    store.destroy()
