"""Who shares actors with whom, and the processes of those that do.

Pipelines that train adapters on the same frozen model have one actor a worker in common: the model is there once, and
their sequences decode in one batch. What each of them learns is what it would learn alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle
from pathlib import Path

from jigsawrl.config.settings import RunConfig
from jigsawrl.config.shapes import shared_base
from jigsawrl.policies.state import Place
from jigsawrl.runtime import messages, start
from jigsawrl.runtime.family import Actors, fork_server
from jigsawrl.runtime.messages import Join, Stand, ToSharedActor
from jigsawrl.runtime.shares import Shares, Units
from jigsawrl.scheduler.layout import Layout


class Sharing:
    """All shared actors of a run. They are started when the first pipeline wants them."""

    def __init__(self, store: Path, shares: Shares) -> None:
        self.store = store
        self.shares = shares
        self.actors: dict[tuple[str, Place], SharedActors] = {}
        """By base, and by where they live."""

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
        if key in self.actors and self.actors[key].dead():
            self.actors.pop(key).kill()
        if key not in self.actors:
            alike = [each for each in all_configs if shared_base(each) == base]
            self.actors[key] = SharedActors(alike, self.store, self.shares, layout)
        return self.actors[key]

    def left(self, config: RunConfig, layout: Layout) -> None:
        """A pipeline has ended; with the last one on a base its actors do."""
        key = (shared_base(config), layout.lives)
        if key not in self.actors:
            return
        self.actors[key].let_go(config.name)
        if not self.actors[key].held:
            self.actors.pop(key).kill()

    def close(self) -> None:
        for actors in self.actors.values():
            actors.kill()
        self.actors.clear()


class SharedActors(Actors):
    """A process for each rank. They live and die together."""

    def __init__(self, configs: list[RunConfig], store: Path, shares: Shares, layout: Layout) -> None:
        base = Path(configs[0].model.path)
        super().__init__(base.name, store, shares)
        context = fork_server()
        self.controls: list[Connection] = []
        self.died: list[BaseProcess] | None = None
        """Those that had ended by themselves when the others were killed."""
        self.held: dict[str, dict[int, tuple[Units, bool]]] = {}
        """By pipeline that is here: what it is given of the worker of each process, and whether it leaves room to
        others there; of those processes in which it has something to do."""
        for rank, worker in enumerate(layout.lives):
            ours, theirs = context.Pipe()
            place = messages.Place(configs, base, shares.device(worker), rank, layout, self.gang)
            self.start_actor(rank, start.start_shared_actor, theirs, place)
            theirs.close()
            self.controls.append(ours)

    def join(self, config: RunConfig) -> list[Connection]:
        """A pipeline's ends of the pipes to its actors."""
        context = fork_server()
        pipes: list[Connection] = []
        self.let_go(config.name)  # of what it had before it came back
        self.held[config.name] = {}
        for rank, control in enumerate(self.controls):
            ours, theirs = context.Pipe()
            self._tell(rank, Join(config))
            with suppress(OSError), theirs:  # their death will be noticed
                send_handle(control, theirs.fileno(), self.pid(rank))
            pipes.append(ours)
        return pipes

    def stand(self, pipeline: str, rank: int, still: bool) -> None:
        self._tell(rank, Stand(pipeline, still))

    def let_go(self, pipeline: str) -> None:
        """A pipeline has nothing to do here any more."""
        for rank in self.held.pop(pipeline, {}):
            self.give(rank)

    def give(self, rank: int) -> None:
        """The process has what any of its pipelines has."""
        held = [each[rank] for each in self.held.values() if rank in each]
        if self.died is None and held:
            units = sorted({unit for units, _ in held for unit in units})
            yields = any(yields for _, yields in held)  # all of them are beside the same others
            self.shares.give(tuple(units), self.pid(rank), self.note(rank), yields)

    def _tell(self, rank: int, message: ToSharedActor) -> None:
        with suppress(OSError):  # their death will be noticed
            self.controls[rank].send(message)

    def dead(self) -> list[BaseProcess]:
        """Those that have ended, though nobody wanted it. Nobody is to blame for those that are killed for that."""
        if self.died is not None:
            return self.died
        return [process for process in self.processes if process.exitcode is not None]

    def kill(self) -> None:
        self.died = self.dead()
        super().kill()
        for control in self.controls:
            control.close()
