"""The surroundings of a pipeline whose rollouts and trainings are in pools of their own.

    permit for a rollout:   load (wake_up, take the newest weights)   run   release
    permit for a training:  load (wake_up)   run   weights cross to the other pool, once   release

Whoever does not run may be told to sleep, while the other side of the pipeline runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from jigsawrl.pipeline.actor_process import ProcessHandle
from jigsawrl.pipeline.gang import answers
from jigsawrl.pipeline.surroundings import Phase
from jigsawrl.pipeline.workers import Workers
from jigsawrl.runtime.driver import Beside, Line, ToldEvents, as_state_lost
from jigsawrl.store.store import Store
from jigsawrl.telemetry.events import Substage, now

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig
    from jigsawrl.config.pipelines import Homes

OF_ENGINES = frozenset({"decoding", "end_rollout", "longest_sequence"})
"""What the rollout side is asked for; the training side for all else."""


class PooledWorkers(Workers):
    """Those who train, to the loop; what only engines know, theirs say."""

    def __init__(self, around: InPools) -> None:
        super().__init__(around.team("training"), around.engines)
        self.around = around

    def who(self, method: str) -> Sequence[ProcessHandle]:
        if method == "ready":
            return [*self.around.team("rollout"), *self.around.team("training")]
        return self.around.team("rollout" if method in OF_ENGINES else "training")

    def each(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Listens to the scheduler meanwhile: the other side may have to sleep."""
        handles = self.who(method)
        for handle, args in zip(handles, arguments, strict=True):
            handle.start(method, *args)
        line = self.around.line
        return answers(handles, {line.pipe: line.receive})

    def every(self, method: str, *args: Any) -> list[Any]:
        if method == "sync_weights":
            self.around.cross(*args)
            return [None]
        return super().every(method, *args)


class PooledEvents(ToldEvents):
    """Of the workers that take part: those of the phase, or whoever else something is told of. A worker is told of by
    its number among them."""

    around: InPools

    def record(
        self,
        substage: Substage,
        *,
        pipeline: str,
        step: int,
        t0: float,
        t1: float,
        worker: int = 0,
        **fields: Any,
    ) -> None:
        team = self.around.seated
        if "workers" in fields:
            worker, fields["workers"] = team[0], list(team)
        elif worker < len(team):
            worker = team[worker]
        else:
            return
        if substage == "sync":
            fields |= self.around.crossed
        super().record(substage, pipeline=pipeline, step=step, t0=t0, t1=t1, worker=worker, **fields)


class InPools(Beside):
    def __init__(
        self, homes: Homes, line: Line, actors: Sequence[Connection], store: Store, config: RunConfig
    ) -> None:
        self.homes = homes
        super().__init__(line, actors, store, config)
        self.told = PooledEvents(line, self)
        self.at: Phase | None = None
        """The phase that runs."""
        self.step = 0
        self.seated: Sequence[int] = range(len(actors))
        """Actors that events are told of."""
        self.version = 0
        """Of the weights that crossed last."""
        self.crossed: dict[str, Any] = {}
        """How they did."""
        line.on_sleep = self._sleep_beside

    def team(self, phase: Phase | None) -> Sequence[ProcessHandle]:
        home = self.homes.rollout if phase == "rollout" else self.homes.training
        return [self.handles[worker] for worker in home]

    def _gang(self) -> Workers:
        return PooledWorkers(self)

    @contextmanager
    def phase(self, phase: Phase, step: int) -> Iterator[None]:
        self.step = step
        with super().phase(phase, step), self._seated(phase):
            self.at = phase
            yield
            self.at = None

    @contextmanager
    def _seated(self, phase: Phase | None) -> Iterator[None]:
        before, self.seated = self.seated, [handle.rank for handle in self.team(phase)]
        yield
        self.seated = before

    def listen(self, until: float) -> None:
        """To the scheduler, until the time has come."""
        while (left := until - now()) > 0:
            if self.line.pipe.poll(left):
                self.line.receive()

    # Weights

    def cross(self, version: int) -> None:
        """The weights as they are now go to the other side. In a phase that takes as long as the link does."""
        began, link = now(), self.homes.link
        size = self.gang.first("publish_weights", self.store.root, self.name, version)
        if link is not None and self.at is not None:
            self.listen(began + 8 * size / (link * 1e9))
        self.version = version
        self.crossed = {"verb": "cross", "bytes": size, "link": link}

    # Permits

    def _wake(self, phase: Phase, step: int) -> None:
        super()._wake(phase, step)
        if phase == "rollout":
            with as_state_lost():
                self._log_swap("take_weights", phase, step, self._taken)

    def _taken(self) -> int:
        team = Workers(self.team("rollout"), self.engines)
        size: int = team.all("take_weights", self.store.root, self.name, self.version)
        return size

    def _sleep_beside(self) -> None:
        """What was told to sleep does, if it is the side that does not run while the other does."""
        if self.at is not None:
            for phase in self.line.sleepy - {self.at, None}:
                self._sleep(phase, self.step)

    def _swap(self, verb: Literal["sleep", "wake_up"], phase: Phase | None, step: int) -> None:
        team = Workers(self.team(phase), self.engines)
        self._log_swap(verb, phase, step, lambda: team.all(verb, self.store.root, self.name).bytes)

    def _log_swap(self, verb: str, phase: Phase | None, step: int, swap: Callable[[], int]) -> None:
        began = now()
        size = swap()
        fields: dict[str, Any] = {"verb": verb, "bytes": size, "workers": []}
        with self._seated(phase):
            self.told.record("swap", pipeline=self.name, step=step, t0=began, t1=now(), **fields)
