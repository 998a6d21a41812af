"""The processes of one pipeline: a driver and an actor for each rank. They live and die together.

Where workers are in pools, those actors roll out or train, as their worker does.

All are forked from one process that has torch loaded, so a dozen of them are up in seconds and share its pages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from jigsawrl import limits, processes
from jigsawrl.liveness import GUARD, is_stopped, silent_s, was_silent
from jigsawrl.pipeline.base import base_folder
from jigsawrl.runtime.alive import Alive
from jigsawrl.runtime.channel import Channel
from jigsawrl.runtime.cores import go_on, stop
from jigsawrl.store import folders, locks

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

    from jigsawrl.config import RunConfig
    from jigsawrl.config.pipelines import Homes
    from jigsawrl.runtime.layout import Layout
    from jigsawrl.runtime.shares import Shares, Units
    from jigsawrl.runtime.sharing import SharedActors

PRELOADED = ["jigsawrl.runtime.preload"]
GRACE_S = 5.0
TRIES, PAUSE_S = 5, 0.05
"""How often a process is stopped until it holds no lock, and the seconds in which a signal arrives."""
KNOWN_S = 1.0
"""Seconds within which a death is known to the process that looks after the dead."""


class Family:
    """Started at once. `line` goes to the driver. With `shared` its actors are in others' processes; with `homes`
    each runs one phase only, and there is none on other workers."""

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        resume: bool,
        store: Path,
        shares: Shares,
        layout: Layout,
        shared: SharedActors | None = None,
        homes: Homes | None = None,
    ) -> None:
        # Heavy modules belong into the children.
        from jigsawrl.runtime.start import start_actor, start_driver
        from jigsawrl.runtime.start_pools import start_driver_of_pools, start_pool_actor

        context = fork_server()
        self.name = config.name
        self.shares = shares
        self.shared = shared
        self.locks = [store / folders.LOCK, store / folders.SPILLING]
        self.meeting = folders.meeting(store)
        ours, theirs = context.Pipe()
        self.line = Channel(ours)
        pipes: list[Connection] = []
        self.actors: dict[int, BaseProcess] = {}
        """By number."""
        self.held: dict[int, tuple[Units, bool]] = {}
        """What each actor has of its worker, and whether it leaves room to others there."""
        base = base_folder(config, out)
        if shared is not None:
            pipes = shared.join(config)
        needed = range(len(layout.lives)) if homes is None else {*homes.rollout, *homes.training}
        for number, worker in enumerate(layout.lives if shared is None else ()):
            driver_end, actor_end = context.Pipe()
            pipes.append(driver_end)
            if number not in needed:
                actor_end.close()
                continue
            place = (shares.device(worker), number, layout, f"file://{self.meeting}/gang")
            notes = (self.note(number), self.beat(number))
            arguments = (actor_end, config, base, *place, shares.environment, *notes)
            actor = context.Process(
                target=start_actor if homes is None else partial(start_pool_actor, homes),
                args=arguments,
                name=f"{self.name}/actor/{number}",
                daemon=True,
            )
            processes.start(actor)
            guard(actor, self.beat(number))
            actor_end.close()
            self.actors[number] = actor
        beat = self.meeting / "driver"
        alive = Alive(beat, os.getpid(), store / folders.BEAT, silent_s())
        self.driver = context.Process(
            target=start_driver if homes is None else partial(start_driver_of_pools, homes),
            args=(theirs, pipes, config, out, resume, store, alive),
            name=f"{self.name}/driver",
            daemon=False,
        )
        processes.start(self.driver)
        guard(self.driver, beat)
        theirs.close()
        for pipe in pipes:
            pipe.close()

    @property
    def sentinels(self) -> list[int]:
        return [process.sentinel for process in self.processes]

    @property
    def processes(self) -> list[BaseProcess]:
        return [self.driver, *self.actors.values()]

    def hold(self, engine: int, units: Units, yields: bool = False) -> None:
        """Its actor to these units of its worker, and to leaving room to others."""
        if self.held.get(engine) == (units, yields):
            return
        self.held[engine] = units, yields
        if self.shared is not None:
            self.shared.hold(self.name, engine, units, yields)
        else:
            self.shares.give(units, self.pid(engine), self.note(engine), yields)

    def keep(self, engines: set[int]) -> None:
        """The others of its actors have nothing to do; where these are among others, they have what those have."""
        if self.shared is not None:
            for engine in self.held.keys() - engines:
                del self.held[engine]
                self.shared.let_go(self.name, engine)

    def stand(self, engine: int) -> None:
        """Its actor stands still where it is; one among others only leaves their batch."""
        if self.shared is not None:
            self.shared.stand(self.name, engine, still=True)
        else:
            GUARD.pause(self.pid(engine), True)
            stop_outside_of(self.locks, self.pid(engine))

    def go_on(self, engine: int) -> None:
        if self.shared is not None:
            self.shared.stand(self.name, engine, still=False)
        elif engine in self.actors:
            go_on(self.pid(engine))
            GUARD.pause(self.pid(engine), False)

    def note(self, engine: int) -> Path:
        """Where its actor reads what it is held to."""
        return self.meeting / f"share{engine}"

    def beat(self, engine: int) -> Path:
        """Where its actor shows that it is alive."""
        return self.meeting / f"actor{engine}"

    def pid(self, engine: int) -> int:
        pid = self.actors[engine].pid
        assert pid is not None
        return pid

    def dead(self) -> list[BaseProcess]:
        """Those that ended though nobody told them to."""
        killed = self._dead_actors()
        return killed if self.driver.exitcode is None else [self.driver, *killed]

    def _dead_actors(self) -> list[BaseProcess]:
        """An actor that its driver lets go of ends with 0, while the driver may have something to do still."""
        shared = self.shared.dead() if self.shared is not None else []
        return [*shared, *(actor for actor in self.actors.values() if actor.exitcode not in (None, 0))]

    def dead_actors(self) -> list[BaseProcess]:
        """Where its driver has said that one is dead: it may know a moment before this process does."""
        if not (dead := self._dead_actors()):
            actors = [*self.actors.values(), *(self.shared.processes if self.shared is not None else [])]
            wait([each.sentinel for each in actors if each.exitcode is None], KNOWN_S)
            dead = self._dead_actors()
        return dead

    def kill(self) -> None:
        """All of it, at once, whatever state it is in."""
        for process in self.processes:
            if process.pid is not None and process.exitcode is None:
                process.kill()
        self.wait()

    def wait(self) -> None:
        """Until all have ended; who does not, is killed."""
        for process in self.processes:
            process.join(timeout=GRACE_S)
            if process.exitcode is None:
                if process.pid is not None:
                    go_on(process.pid)
                process.kill()
                process.join(timeout=GRACE_S)
            GUARD.forget(process.pid)
        self.line.close()
        for left in self.meeting.glob("*"):
            left.unlink(missing_ok=True)
        self.meeting.rmdir()


def prepare_for(models: Iterable[str]) -> None:
    """Those that processes will read; before the first of them is started."""
    PRELOADED[:] = dict.fromkeys([*PRELOADED, *processes.needed_for(models)])


def fork_server() -> ForkServerContext:
    """Where processes are started from."""
    return processes.fork_server(PRELOADED)


def stop_outside_of(files: Iterable[Path], pid: int) -> None:
    """It stands still where it is, but for where it has locked one of these files: others would wait for it, and
    whoever lets it go on may be among them. Where it takes long there, it goes on."""
    for _ in range(TRIES):
        stop(pid)
        until = time.monotonic() + PAUSE_S
        while not is_stopped(pid) and time.monotonic() < until:
            time.sleep(PAUSE_S / 100)
        if not any(pid in locks.holders(file) for file in files):
            return
        go_on(pid)
        time.sleep(PAUSE_S / 10)


def guard(process: BaseProcess, beat: Path) -> None:
    """Ends it where its heartbeat stops."""
    assert process.pid is not None
    GUARD.watch(process.pid, beat, silent_s())


def how_it_ended(process: BaseProcess) -> str:
    if (seconds := GUARD.ended(process.pid)) is not None:
        return was_silent(process.name, seconds)
    return limits.how_a_process_ended(process.name, process.exitcode)
