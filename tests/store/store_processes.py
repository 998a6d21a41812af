"""Processes that use one store. They are forked from a server that has torch loaded, so that each starts at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from jigsawrl.liveness import Heartbeat
from jigsawrl.store.locks import locked
from jigsawrl.store.store import Store

PATIENCE_S = 60.0
LENGTH = 20_000
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "pytest", "hypothesis", "jigsawrl.store"])


@contextmanager
def running(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process with one end of a pipe; it is gone when the block is left."""
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(PATIENCE_S)
        ours.close()


def answer(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE_S), "the other process says nothing"
    return pipe.recv()


def version_tensors(version: int) -> dict[str, torch.Tensor]:
    """Tensors of which every element tells the version they are of."""
    return {"a": torch.full((LENGTH,), version), "b": torch.full((LENGTH // 2,), float(version))}


def is_whole(store: Store, name: str) -> int | None:
    """The version that is there now, every element of which has been looked at."""
    entry = store.get(name)
    if entry is None:
        return None
    assert entry.meta == {"version": entry.version}
    for key, tensor in version_tensors(entry.version).items():
        assert torch.equal(entry.tensors[key], tensor)
    return entry.version


def read_when_told(pipe: Connection, store: Store) -> None:
    while (name := pipe.recv()) is not None:
        pipe.send(is_whole(store, name))


def watch(pipe: Connection, store: Store, name: str) -> None:
    """Reads until told to stop, then says how often, and whether versions only ever rose."""
    reads, last, rose = 0, -1, True
    pipe.send("ready")
    while not pipe.poll():
        version = is_whole(store, name)
        if version is not None:
            rose = rose and version >= last
            last = version
            reads += 1
    pipe.send((reads, rose))


def publish_without_end(pipe: Connection, store: Store, name: str, version: int) -> None:
    while True:
        store.put(name, version, version_tensors(version), {"version": version}, keep=2)
        pipe.send(version)
        version += 1


def put_many(pipe: Connection, store: Store, writer: int, count: int) -> None:
    """Puts under names of its own; looks at the usage after each, and says the largest memory seen."""
    most = 0
    pipe.recv()
    for version in range(count):
        store.put(f"writer-{writer}/{version % 3}", version, version_tensors(version), {"version": version})
        most = max(most, store.usage().memory_bytes)
    pipe.send(most)


def put_and_die_at(pipe: Connection, store: Store, version: int, moment: int) -> None:
    """Puts a version of "x", and is killed just before the given one of its calls to the operating system."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls > moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(descriptor: int, data: Any, really: Callable[[int, Any], int] = os.write) -> int:
        count()
        return really(descriptor, data)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in {"open", "os.remove", "os.rename", "os.utime", "os.listdir", "fcntl.flock"}:
            count()

    tensors = {**version_tensors(version), "by": torch.ones(4096)}
    os.write = write
    sys.addaudithook(hear)
    store.put("x", version, tensors, {"version": version})
    os._exit(0)


def map_and_measure(pipe: Connection, store: Store, name: str) -> None:
    """Maps an entry and reads all of it; says how much memory is its share, before it and while all have it."""
    before = proportional_kilobytes()
    entry = store.get(name)
    assert entry is not None
    total = sum(int(tensor.sum()) for tensor in entry.tensors.values())
    pipe.send(total)
    pipe.recv()
    pipe.send(proportional_kilobytes() - before)
    pipe.recv()


def proportional_kilobytes() -> int:
    """The shared memory that this process maps, each page divided by the number of processes that map it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem:"))


def create_and_wait(pipe: Connection, root: Path | None, spill: Path) -> None:
    store = Store.create(spill, 1 << 20, root)
    store.put_bytes("left", 0, b"behind")
    store.put_bytes("large", 0, bytes(2 << 20))
    pipe.send(store.root)
    pipe.recv()


def attach_and_wait(pipe: Connection, store: Store) -> None:
    pipe.send(store.names())
    pipe.recv()


def hold_lock(pipe: Connection, path: Path, beat: Path | None = None) -> None:
    if beat is not None:
        Heartbeat(beat)
    with locked(path, 1.0):
        pipe.send("held")
        pipe.recv()
