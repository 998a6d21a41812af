"""Who shares actors with whom, and the processes of those that do.

Pipelines that train adapters on the same frozen model have one actor a worker in common: the model is there once, and
their sequences decode in one batch. What each of them learns is what it would learn alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import TYPE_CHECKING

from jigsawrl import processes
from jigsawrl.config.shapes import shared_base
from jigsawrl.liveness import GUARD
from jigsawrl.policies.state import Place
from jigsawrl.runtime import messages
from jigsawrl.runtime.family import GRACE_S, fork_server, guard
from jigsawrl.runtime.messages import Join, Stand, ToSharedActor
from jigsawrl.store import folders

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig
    from jigsawrl.runtime.layout import Layout
    from jigsawrl.runtime.shares import Shares, Units


class Sharing:
    """All shared actors of a run. They are started when the first pipeline wants them."""

    def __init__(self, store: Path, shares: Shares) -> None:
        self.store = store
        self.shares = shares
        self.actors: dict[tuple[str, Place], SharedActors] = {}
        """By base, and by where they live."""
        self.users: dict[tuple[str, Place], set[str]] = {}

    def actors_for(
        self, config: RunConfig, layout: Layout, all_configs: Iterable[RunConfig]
    ) -> SharedActors | None:
        """Those that this pipeline is to use; new ones where some of the old have died.

        `all_configs` are those of all pipelines that have their actors where it has its own.
        """
        base = shared_base(config)
        if not base:
            return None
        key = (base, layout.lives)
        known = self.actors.get(key)
        if known is not None and known.dead():
            known.kill()
            known = None
        if known is None:
            alike = [each for each in all_configs if shared_base(each) == base]
            known = self.actors[key] = SharedActors(alike, self.store, self.shares, layout)
        self.users.setdefault(key, set()).add(config.name)
        return known

    def left(self, config: RunConfig, layout: Layout) -> None:
        """A pipeline has ended; with the last one on a base its actors do."""
        key = (shared_base(config), layout.lives)
        if key not in self.users:
            return
        self.users[key].discard(config.name)
        for rank in range(len(self.actors[key].processes)):
            self.actors[key].let_go(config.name, rank)
        if not self.users[key]:
            self.actors.pop(key).kill()
            del self.users[key]

    def close(self) -> None:
        for actors in self.actors.values():
            actors.kill()
        self.actors.clear()
        self.users.clear()


@dataclass(slots=True)
class Held:
    """What the pipelines of one process are given of its worker."""

    by: dict[str, tuple[Units, bool]] = field(default_factory=dict)
    """Units, and whether to leave room to others: of each that has something to do."""

    @property
    def units(self) -> Units:
        """Of all of them."""
        return tuple(sorted({unit for units, _ in self.by.values() for unit in units}))

    @property
    def yields(self) -> bool:
        """All of them have the same company."""
        return any(yields for _, yields in self.by.values())


class SharedActors:
    """A process for each rank. They live and die together."""

    def __init__(self, configs: list[RunConfig], store: Path, shares: Shares, layout: Layout) -> None:
        from jigsawrl.runtime.start import start_shared_actor

        context = fork_server()
        self.shares = shares
        self.meeting = folders.meeting(store)
        self.controls: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self.killed = False
        self.died: list[BaseProcess] = []
        self.held: list[Held] = []
        """Of each process."""
        base = Path(configs[0].model.path)
        for rank, worker in enumerate(layout.lives):
            ours, theirs = context.Pipe()
            meeting = f"file://{self.meeting}/gang"
            place = messages.Place(configs, base, shares.device(worker), rank, layout, meeting)
            process = context.Process(
                target=start_shared_actor,
                args=(theirs, place, shares.environment, self._note(rank), self._beat(rank)),
                name=f"{base.name}/actor/{rank}",
                daemon=True,
            )
            processes.start(process)
            guard(process, self._beat(rank))
            theirs.close()
            self.controls.append(ours)
            self.processes.append(process)
            self.held.append(Held())

    def join(self, config: RunConfig) -> list[Connection]:
        """A pipeline's ends of the pipes to its actors."""
        context = fork_server()
        pipes: list[Connection] = []
        for rank, control in enumerate(self.controls):
            self.let_go(config.name, rank)  # of what it had before it came back
            ours, theirs = context.Pipe()
            self._tell(rank, Join(config))
            with suppress(OSError), theirs:  # their death will be noticed
                send_handle(control, theirs.fileno(), self.processes[rank].pid)
            pipes.append(ours)
        return pipes

    def stand(self, pipeline: str, rank: int, still: bool) -> None:
        self._tell(rank, Stand(pipeline, still))

    def hold(self, pipeline: str, rank: int, units: Units, yields: bool) -> None:
        """The process has what any of its pipelines has."""
        self.held[rank].by[pipeline] = units, yields
        self._give(rank)

    def let_go(self, pipeline: str, rank: int) -> None:
        """A pipeline has nothing to do there."""
        if self.held[rank].by.pop(pipeline, None) is not None:
            self._give(rank)

    def _give(self, rank: int) -> None:
        pid, held = self.processes[rank].pid, self.held[rank]
        if pid is not None and not self.killed and held.by:
            self.shares.give(held.units, pid, self._note(rank), held.yields)

    def _tell(self, rank: int, message: ToSharedActor) -> None:
        with suppress(OSError):  # their death will be noticed
            self.controls[rank].send(message)

    def _note(self, rank: int) -> Path:
        return self.meeting / f"share{rank}"

    def _beat(self, rank: int) -> Path:
        return self.meeting / f"actor{rank}"

    def dead(self) -> list[BaseProcess]:
        """Those that have ended, though nobody wanted it. Nobody is to blame for those that are killed for that."""
        if not self.killed:
            self.died = [process for process in self.processes if process.exitcode is not None]
        return self.died

    def kill(self) -> None:
        self.dead()
        self.killed = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(timeout=GRACE_S)
            GUARD.forget(process.pid)
        for control in self.controls:
            control.close()
        for left in self.meeting.glob("*"):
            left.unlink(missing_ok=True)
        self.meeting.rmdir()
