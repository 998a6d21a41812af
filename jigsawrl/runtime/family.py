"""The processes of one pipeline: a driver and an actor for each rank. They live and die together.

Where workers are in pools, those actors roll out or train, as their worker does.

All are forked from one process that has torch loaded, so a dozen of them are up in seconds and share its pages.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jigsawrl import limits, processes
from jigsawrl.liveness import GUARD, is_stopped, silent_s, was_silent
from jigsawrl.pipeline.base import base_folder
from jigsawrl.runtime import start
from jigsawrl.runtime.channel import Channel
from jigsawrl.runtime.cores import stand
from jigsawrl.store import folders, locks

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

    from jigsawrl.config import RunConfig
    from jigsawrl.config.pipelines import Homes
    from jigsawrl.runtime.shares import Shares, Units
    from jigsawrl.runtime.sharing import SharedActors
    from jigsawrl.scheduler.layout import Layout

PRELOADED = ["jigsawrl.runtime.preload"]
GRACE_S = 5.0
TRIES, PAUSE_S = 5, 0.05
"""How often a process is stopped until it holds no lock, and the seconds in which a signal arrives."""
KNOWN_S = 1.0
"""Seconds within which a death is known to the process that looks after the dead."""


class Actors:
    """Processes of actors, and the folder where they meet."""

    def __init__(self, name: str, store: Path, shares: Shares) -> None:
        self.name = name
        self.shares = shares
        self.meeting = folders.meeting(store)
        self.gang = f"file://{self.meeting}/gang"
        """Where those that train find each other."""
        self.actors: dict[int, BaseProcess] = {}
        """By number."""

    @property
    def processes(self) -> list[BaseProcess]:
        return list(self.actors.values())

    def start_actor(self, number: int, main: Callable[..., None], *args: Any) -> None:
        """`main` is told its environment, its note and its heartbeat as well."""
        beat = self.meeting / f"actor{number}"
        told = (*args, self.shares.environment, self.note(number), beat)
        self.actors[number] = self.start(f"actor/{number}", beat, main, told, daemon=True)

    def start(
        self, what: str, beat: Path, main: Callable[..., None], args: tuple[Any, ...], *, daemon: bool
    ) -> BaseProcess:
        """Starts a process, and ends it where its heartbeat stops."""
        process = fork_server().Process(target=main, args=args, name=f"{self.name}/{what}", daemon=daemon)
        processes.start(process)
        assert process.pid is not None
        GUARD.watch(process.pid, beat, silent_s())
        return process

    def note(self, number: int) -> Path:
        """Where an actor reads what it is held to."""
        return self.meeting / f"share{number}"

    def pid(self, number: int) -> int:
        pid = self.actors[number].pid
        assert pid is not None
        return pid

    def kill(self) -> None:
        """All of it, at once, whatever state it is in."""
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
        self.wait()

    def wait(self) -> None:
        """Until all have ended; who does not, is killed."""
        for process in self.processes:
            process.join(timeout=GRACE_S)
            if process.exitcode is None:
                process.kill()
                process.join(timeout=GRACE_S)
            GUARD.forget(process.pid)
        shutil.rmtree(self.meeting, ignore_errors=True)


class Family(Actors):
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
        super().__init__(config.name, store, shares)
        context = fork_server()
        self.shared = shared
        self.locks = [store / folders.LOCK, store / folders.SPILLING]
        ours, theirs = context.Pipe()
        self.line = Channel(ours)
        pipes = [] if shared is None else shared.join(config)
        self.held: dict[int, tuple[Units, bool]] = {} if shared is None else shared.held[self.name]
        """What each actor has of its worker, and whether it leaves room to others there."""
        base = base_folder(config, out)
        for number, worker in enumerate(layout.lives if shared is None else ()):
            driver_end, actor_end = context.Pipe()
            pipes.append(driver_end)
            if number in layout.gang or layout.rolls_out(number):
                place = (shares.device(worker), number, layout, self.gang)
                self.start_actor(number, start.start_actor, actor_end, config, base, *place)
            actor_end.close()
        beat = self.meeting / "driver"
        watches = (beat, os.getpid(), store / folders.BEAT, silent_s())
        told = (*watches, theirs, pipes, config, out, resume, store, homes)
        self.driver = self.start("driver", beat, start.start_driver, told, daemon=False)
        theirs.close()
        for pipe in pipes:
            pipe.close()

    @property
    def processes(self) -> list[BaseProcess]:
        return [self.driver, *super().processes]

    def hold(self, engine: int, units: Units, yields: bool = False) -> None:
        """Its actor to these units of its worker, and to leaving room to others."""
        if self.held.get(engine) == (units, yields):
            return
        self.held[engine] = units, yields
        if self.shared is not None:
            self.shared.give(engine)
        else:
            self.shares.give(units, self.pid(engine), self.note(engine), yields)

    def keep(self, engines: set[int]) -> None:
        """The others of its actors have nothing to do; where these are among others, they have what those have."""
        if self.shared is not None:
            for engine in self.held.keys() - engines:
                del self.held[engine]
                self.shared.give(engine)

    def stand(self, engine: int, still: bool) -> None:
        """Its actor stands still where it is, or goes on; one among others only leaves their batch meanwhile."""
        if self.shared is not None:
            self.shared.stand(self.name, engine, still)
        elif still:
            GUARD.pause(self.pid(engine), True)
            stop_outside_of(self.locks, self.pid(engine))
        elif engine in self.actors:
            stand(self.pid(engine), still=False)
            GUARD.pause(self.pid(engine), False)

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
        if not self._dead_actors():
            actors = [*self.actors.values(), *(self.shared.processes if self.shared is not None else [])]
            wait([each.sentinel for each in actors if each.exitcode is None], KNOWN_S)
        return self._dead_actors()

    def wait(self) -> None:
        super().wait()
        self.line.close()


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
        stand(pid, still=True)
        until = time.monotonic() + PAUSE_S
        while not is_stopped(pid) and time.monotonic() < until:
            time.sleep(PAUSE_S / 100)
        if not any(pid in locks.holders(file) for file in files):
            return
        stand(pid, still=False)
        time.sleep(PAUSE_S / 10)


def how_it_ended(process: BaseProcess) -> str:
    if (seconds := GUARD.ended(process.pid)) is not None:
        return was_silent(process.name, seconds)
    return limits.how_a_process_ended(process.name, process.exitcode)
