"""The processes of one pipeline: a driver and an actor for each rank. They live and die together.

Where workers are in pools, those actors roll out or train, as their worker does.

All are forked from one process that has torch loaded, so a dozen of them are up in seconds and share its pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from jigsawrl import limits, processes
from jigsawrl.pipeline.base import base_folder
from jigsawrl.runtime.cores import go_on, stop
from jigsawrl.store import folders

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

    from jigsawrl.config import RunConfig
    from jigsawrl.config.pipelines import Homes
    from jigsawrl.runtime.layout import Layout
    from jigsawrl.runtime.shares import Shares, Units
    from jigsawrl.runtime.sharing import SharedActors

PRELOADED = ["jigsawrl.runtime.preload"]
GRACE_S = 5.0


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
        self.meeting = folders.meeting(store)
        self.line, theirs = context.Pipe()
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
            arguments = (actor_end, config, base, *place, shares.environment, self.note(number))
            actor = context.Process(
                target=start_actor if homes is None else partial(start_pool_actor, homes),
                args=arguments,
                name=f"{self.name}/actor/{number}",
                daemon=True,
            )
            processes.start(actor)
            actor_end.close()
            self.actors[number] = actor
        self.driver = context.Process(
            target=start_driver if homes is None else partial(start_driver_of_pools, homes),
            args=(theirs, pipes, config, out, resume, store),
            name=f"{self.name}/driver",
            daemon=False,
        )
        processes.start(self.driver)
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
            stop(self.pid(engine))

    def go_on(self, engine: int) -> None:
        if self.shared is not None:
            self.shared.stand(self.name, engine, still=False)
        elif engine in self.actors:
            go_on(self.pid(engine))

    def note(self, engine: int) -> Path:
        """Where its actor reads what it is held to."""
        return self.meeting / f"share{engine}"

    def pid(self, engine: int) -> int:
        pid = self.actors[engine].pid
        assert pid is not None
        return pid

    def dead(self) -> list[BaseProcess]:
        """Those that ended though nobody told them to. An actor that its driver lets go of ends with 0, while the
        driver may have something to do still."""
        shared = self.shared.processes if self.shared is not None else []
        killed = [actor for actor in (*shared, *self.actors.values()) if actor.exitcode not in (None, 0)]
        return killed if self.driver.exitcode is None else [self.driver, *killed]

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


def how_it_ended(process: BaseProcess) -> str:
    return limits.how_a_process_ended(process.name, process.exitcode)
