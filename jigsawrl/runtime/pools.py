"""The environment of a pipeline whose rollouts and trainings are in pools of their own.

    permit for a rollout:   load (wake_up, take the newest weights)   run   release
    permit for a training:  load (wake_up)   run   weights cross to the other pool, once   release

Whoever does not run may be told to sleep, while the other side of the pipeline runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from jigsawrl.config.pipelines import Homes
from jigsawrl.config.settings import RunConfig
from jigsawrl.phases.ids import PhaseKind
from jigsawrl.pipeline.calls import ProcessHandle
from jigsawrl.pipeline.workers import Workers
from jigsawrl.runtime.channel import SchedulerChannel
from jigsawrl.runtime.multiplexed_env import MultiplexedEnv, as_state_lost
from jigsawrl.runtime.reporting import ReportedEvents
from jigsawrl.store.store import Store
from jigsawrl.telemetry.events import Substage, now

OF_ENGINES = frozenset({"decoding", "end_rollout", "longest_sequence"})
"""What the rollout side is asked for; the training side for all else."""


class PooledWorkers(Workers):
    """Those who train, to the loop; what only engines know, theirs say."""

    def __init__(self, env: PooledEnv) -> None:
        super().__init__(env.team("training"), env.engines)
        self.env = env
        # The other side may have to sleep.
        self.others = {env.channel.pipe.fileno(): env.channel.receive}

    def who(self, method: str) -> Sequence[ProcessHandle]:
        if method == "ready":
            return [*self.env.team("rollout"), *self.env.team("training")]
        return self.env.team("rollout" if method in OF_ENGINES else "training")

    def every(self, method: str, *args: Any) -> list[Any]:
        if method == "sync_weights":
            self.env.cross(*args)
            return [None]
        return super().every(method, *args)


class PooledEvents(ReportedEvents):
    """Of the workers that take part: those of the phase, or whoever else something is told of. A worker is told of by
    its number among them."""

    env: PooledEnv

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
        env = self.env
        team = [each.rank for each in (env.team(env.at.kind) if env.at else env.handles)]
        if "workers" in fields:
            worker, fields["workers"] = team[0], team
        elif worker < len(team):
            worker = team[worker]
        else:
            return
        if substage == "sync":
            fields |= env.crossed
        super().record(substage, pipeline=pipeline, step=step, t0=t0, t1=t1, worker=worker, **fields)


class PooledEnv(MultiplexedEnv):
    def __init__(
        self,
        homes: Homes,
        channel: SchedulerChannel,
        actors: Sequence[Connection],
        store: Store,
        config: RunConfig,
    ) -> None:
        self.homes = homes
        super().__init__(channel, actors, store, config)
        self.gang = PooledWorkers(self)
        self.reported = PooledEvents(channel, self)
        self.version = 0
        """Of the weights that crossed last."""
        self.crossed: dict[str, Any] = {}
        """How they did."""
        channel.on_sleep = self._sleep_beside

    def team(self, phase: PhaseKind | None) -> Sequence[ProcessHandle]:
        home = self.homes.rollout if phase == "rollout" else self.homes.training
        return [self.handles[worker] for worker in home]

    # Weights

    def cross(self, version: int) -> None:
        """The weights as they are now go to the other side. In a phase that takes as long as the link does."""
        began, link = now(), self.homes.link
        size = self.gang.first("publish_weights", self.store.root, self.config.name, version)
        if link is not None and self.at is not None:
            until = began + 8 * size / (link * 1e9)
            while (left := until - now()) > 0:
                if self.channel.pipe.poll(left):
                    self.channel.receive()
        self.version = version
        self.crossed = {"verb": "cross", "bytes": size, "link": link}

    # Permits

    def _wake(self, phase: PhaseKind, step: int) -> None:
        super()._wake(phase, step)
        if phase == "rollout":
            with as_state_lost():
                self._swap("take_weights", phase, step, self.version)

    def _sleep_beside(self) -> None:
        """What was told to sleep does, if it is the side that does not run while the other does."""
        if self.at is not None:
            for phase in self.channel.sleepy - {self.at.kind, None}:
                self._sleep(phase, self.at.index)

    def _swap(self, verb: str, phase: PhaseKind | None, step: int, *version: int) -> None:
        """The actors of one phase do so, perhaps while the others work."""
        began = now()
        moved = self.workers_of(phase).all(verb, self.store.root, self.config.name, *version)
        size = moved if isinstance(moved, int) else moved.bytes
        team = [handle.rank for handle in self.team(phase)]
        # Not as the phase's workers: these may be the others.
        ReportedEvents.record(
            self.reported,
            "swap",
            pipeline=self.config.name,
            step=step,
            t0=began,
            t1=now(),
            worker=team[0],
            verb=verb,
            bytes=size,
            workers=team,
        )
