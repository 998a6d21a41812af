"""Many processes use one store, and some of them die in it."""

import itertools
import os
import random
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from store_processes import (
    LENGTH,
    PATIENCE_S,
    answer,
    hold_lock,
    is_whole,
    map_and_measure,
    publish_without_end,
    put_and_die_at,
    put_many,
    read_when_told,
    running,
    version_tensors,
    watch,
)

from jigsawrl.errors import JigsawError
from jigsawrl.liveness import Guard
from jigsawrl.store import folders
from jigsawrl.store.store import Store

MakeStore = Callable[..., Store]
ONE_ENTRY = LENGTH * 8 + LENGTH // 2 * 4 + 4096


def test_what_one_process_publishes_three_others_read(store: Store) -> None:
    with ExitStack() as stack:
        pipes = [stack.enter_context(running(read_when_told, store))[1] for _ in range(3)]
        for version in (None, 1, 2):
            if version is not None:
                store.put("a/weights", version, version_tensors(version), {"version": version})
            for pipe in pipes:
                pipe.send("a/weights")
            assert [answer(pipe) for pipe in pipes] == [version] * 3


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="the kernel tells no proportional share"
)
def test_readers_share_the_memory(store: Store) -> None:
    store.put("large", 0, {"x": torch.ones(32 << 20, dtype=torch.uint8)})
    with ExitStack() as stack:
        pipes = [stack.enter_context(running(map_and_measure, store, "large"))[1] for _ in range(3)]
        assert [answer(pipe) for pipe in pipes] == [32 << 20] * 3
        for pipe in pipes:
            pipe.send("all have mapped it")
        shares = [answer(pipe) for pipe in pipes]
    assert 0.95 * 32 < sum(shares) / 1024 < 1.05 * 32, shares
    assert max(shares) / 1024 < 0.4 * 32


def test_writers_killed_at_random_moments_leave_only_whole_versions(make_store: MakeStore) -> None:
    """The budget has room for two entries and a half, so that kills hit spilling and coming back as well."""
    store = make_store(ONE_ENTRY * 5 // 2)
    rng = random.Random(0)
    published = 0
    with ExitStack() as stack:
        readers = [stack.enter_context(running(watch, store, "w"))[1] for _ in range(2)]
        assert [answer(pipe) for pipe in readers] == ["ready"] * 2
        for _ in range(20):
            with running(publish_without_end, store, "w", published + 1) as (writer, pipe):
                published = answer(pipe)
                writer.join(rng.uniform(0, 0.05))
                os.kill(writer.pid or 0, signal.SIGKILL)
                writer.join(PATIENCE_S)
            seen = is_whole(store, "w")
            assert seen is not None
            assert seen >= published
            published = seen
            assert store.usage().memory_bytes <= store.budget_bytes
        for pipe in readers:
            pipe.send("stop")
        for pipe in readers:
            reads, rose = answer(pipe)
            assert (reads > 0, rose) == (True, True)
    store.put("w", published + 1, version_tensors(published + 1), {"version": published + 1})
    assert store.versions("w") == [published + 1]
    assert litter(store) == []


@pytest.mark.parametrize("version", [1, 2], ids=["replacing", "adding"])
@pytest.mark.parametrize(
    "budget",
    [8 * ONE_ENTRY, ONE_ENTRY * 3 // 2, ONE_ENTRY],
    ids=["in memory", "spilling", "straight to the disk"],
)
def test_a_kill_before_any_call_of_a_put_is_seen_as_all_or_nothing(
    make_store: MakeStore, budget: int, version: int
) -> None:
    store = make_store(budget)
    took_effect = []
    for moment in itertools.count():
        store.drop("x")
        store.put("x", 1, version_tensors(1), {"version": 1})
        with running(put_and_die_at, store, version, moment) as (writer, _):
            writer.join(PATIENCE_S)
            code = writer.exitcode
        seen, entry = is_whole(store, "x"), store.get("x")
        assert entry is not None
        took_effect.append("by" in entry.tensors)
        assert seen == (version if took_effect[-1] else 1)
        assert store.usage().memory_bytes <= budget
        assert litter(store) == []
        assert len(files(store, "x@*")) == len(store.versions("x"))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert moment > 10, "it was killed at that many moments"
    assert took_effect == sorted(took_effect), "before one call nothing, from then on all of it"
    assert took_effect[-1]


def test_writers_at_once_stay_within_the_budget(make_store: MakeStore) -> None:
    store = make_store(ONE_ENTRY * 7 // 2)
    with ExitStack() as stack:
        pipes = [stack.enter_context(running(put_many, store, writer, 12))[1] for writer in range(3)]
        for pipe in pipes:
            pipe.send("go")
        assert 0 < max(answer(pipe) for pipe in pipes) <= store.budget_bytes
    assert len(store.names()) == 9
    for name in store.names():
        assert is_whole(store, name) is not None


def test_waiting_for_a_lock_that_is_never_let_go_ends_with_an_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "lock_timeout_s", lambda: 0.05)
    with running(hold_lock, store.root / folders.LOCK) as (holder, pipe):
        assert answer(pipe) == "held"
        what = rf"has been locked by another process for 0.05 s: process {holder.pid} "
        with pytest.raises(JigsawError, match=what):
            store.names()
        holder.kill()
        holder.join(PATIENCE_S)
        assert store.names() == []


def test_a_stopped_process_that_holds_the_lock_is_ended_and_whoever_waits_goes_on(store: Store) -> None:
    with running(hold_lock, store.root / folders.LOCK, store.root / folders.BEAT) as (holder, pipe):
        assert answer(pipe) == "held"
        os.kill(holder.pid or 0, signal.SIGSTOP)
        guard = Guard()
        guard.watch(holder.pid or 0, store.root / folders.BEAT, 3.0)
        assert store.names() == []
        assert guard.ended(holder.pid) == 3.0
        holder.join(PATIENCE_S)
        assert holder.exitcode == -signal.SIGKILL


def files(store: Store, pattern: str) -> list[Path]:
    return [*store.root.glob(pattern), *store._disk.folder.glob(pattern)]


def litter(store: Store) -> list[Path]:
    store.usage()  # whoever counts clears away
    return files(store, ".writing-*")
