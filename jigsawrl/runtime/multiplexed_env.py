"""What a pipeline runs in when it is multiplexed: its phases wait for permits, and its state makes room for others.

A permit may be there already when a phase begins, or cover it without another message (`PhasePermit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jigsawrl.config.settings import RunConfig
from jigsawrl.config.tasks import EpisodeTask
from jigsawrl.errors import JigsawError
from jigsawrl.model.spec import read_spec
from jigsawrl.phases.ids import PhaseId, PhaseKind
from jigsawrl.pipeline import kept
from jigsawrl.pipeline.calls import ActorDied, Inbox, ProcessHandle
from jigsawrl.pipeline.execution_env import Stopped, Tensors
from jigsawrl.pipeline.workers import Workers
from jigsawrl.runtime.channel import SchedulerChannel
from jigsawrl.runtime.messages import Load, Seats, following
from jigsawrl.runtime.reporting import ReportedEvents
from jigsawrl.runtime.sample_journal import SampleJournal
from jigsawrl.runtime.watched_engines import WatchedEngines
from jigsawrl.scheduler.events import LoadRequest, PhaseDone, StateAsleep
from jigsawrl.store.store import Store
from jigsawrl.telemetry.events import EventSink, now
from jigsawrl.trainer.checkpoint import Checkpoint

MOST_LENGTHS = 128
"""Lengths of a step that are reported; of more samples, as many quantiles."""
REMEMBER_PART = 0.05
"""Part of a pipeline's time, at most, that goes to remembering its steps."""


class StateLost(Exception):
    """What the store had of a pipeline that sleeps cannot be read; it goes on from what is left."""


class MultiplexedEnv:
    """The environment of a pipeline whose phases may run on any of its workers."""

    def __init__(
        self, channel: SchedulerChannel, actors: Sequence[Connection], store: Store, config: RunConfig
    ) -> None:
        self.channel = channel
        inbox = Inbox()
        self.handles = [ProcessHandle(pipe, None, rank, inbox) for rank, pipe in enumerate(actors)]
        self.store = store
        self.config = config
        self.journal = SampleJournal(store, config.name)
        self.engines = WatchedEngines(
            self.handles, inbox, channel, isinstance(config.task, EpisodeTask), self.journal
        )
        self.gang = self.workers_of("training")
        self.where = tuple(range(len(actors)))
        """The worker that each actor is on."""
        self.reported = ReportedEvents(channel, self)
        self.asleep: set[PhaseKind | None] = set()
        """Actors that sleep, by their phase; None: those of both."""
        self.remembered, self.remembering = float("-inf"), 0.0
        """When a step was last remembered, and the seconds that it took."""
        self.trained = False
        """Whether this phase computed gradients."""
        self.at: PhaseId | None = None
        """The phase that runs."""
        self.waited = 0.0
        """Seconds of this phase in which no engine had anything to do but wait for tools."""

    def team(self, phase: PhaseKind | None) -> Sequence[ProcessHandle]:
        """The actors that run a phase."""
        return self.handles

    def workers_of(self, phase: PhaseKind | None) -> Workers:
        return Workers(self.team(phase), self.engines)

    def workers(self, config: RunConfig, base: Path, device: str) -> Workers:
        self.channel.send(LoadRequest())
        while not isinstance(self.channel.receive(), Load):
            pass  # whoever wants it to stop is heard before the first phase
        self.gang.all("ready")
        self.journal.vocabulary = read_spec(base).vocab_size
        return self.gang

    def events(self, out: Path) -> EventSink:
        return self.reported

    @contextmanager
    def phase(self, phase: PhaseKind, step: int) -> Iterator[None]:
        id, seats = PhaseId(self.config.name, phase, step), self._seats(phase, step)
        assert self.channel.permit is not None
        self.engines.begin(seats.engines, self.channel.permit.prompt)
        self.where = seats.where
        self.waited, self.trained = 0.0, False
        team = self.workers_of(phase)
        # With other threads some products differ in their last bits.
        threads = [
            1 if self.config.deterministic else seats.threads[handle.rank] for handle in self.team(phase)
        ]
        before = team.each("busy_seconds", [(each,) for each in threads])
        self.at = id
        yield
        self.at = None
        after = team.every("busy_seconds")
        self.engines.forget_episodes()
        self.reported.close()
        self.channel.seats = self._covered(id)
        over = PhaseDone(
            phase,
            step,
            busy=tuple((b - a) / n for a, b, n in zip(before, after, threads, strict=True)),
            engines=len(seats.engines),
            lengths=reported_lengths(list(self.engines.lengths.values())),
            turns=self.engines.turns / max(1, len(self.engines.lengths)),
            tool_seconds=self.waited,
            went_on=None if self.channel.seats is None else now(),
            empty=phase == "training" and not self.trained,
        )
        (self.channel.send if over.went_on is None else self.channel.later)(over)
        if phase == "training":
            self.journal.forget(id._replace(kind="rollout"))

    def _covered(self, ended: PhaseId) -> Seats | None:
        """Where the phase after this one may run at once, if its permit covers it and nobody has said anything."""
        channel, phase = self.channel, following(ended)
        if channel.permit is None or channel.waiting() or phase.index > self.config.steps:
            return None
        return channel.permit.seats_for(phase, now() - channel.permitted)

    def _seats(self, phase: PhaseKind, step: int) -> Seats:
        """Waits for a permit where the last one does not cover the phase; the state may make room meanwhile."""
        channel = self.channel
        while True:
            for each in list(channel.sleepy):
                self._sleep(each, step)
            if channel.stopping and phase == "rollout":
                self._wake("training", step)  # to be saved
                raise Stopped
            if channel.seats is not None:
                seats, channel.seats = channel.seats, None
                self._wake(phase, step)
                return seats
            channel.receive()

    def _sleep(self, phase: PhaseKind | None, step: int) -> None:
        self._swap("sleep", phase, step)
        self.asleep.add(phase)
        self.channel.sleepy.discard(phase)
        self.channel.send(StateAsleep(phase))

    def _wake(self, phase: PhaseKind, step: int) -> None:
        for each in self.asleep & {phase, None}:
            with as_state_lost():
                self._swap("wake_up", each, step)
            self.asleep.discard(each)

    def _swap(self, verb: Literal["sleep", "wake_up"], phase: PhaseKind | None, step: int) -> None:
        with self.reported.span("swap", pipeline=self.config.name, step=step, verb=verb) as found:
            found["bytes"] = self.gang.all(verb, self.store.root, self.config.name).bytes

    def stopping(self) -> AbstractContextManager[Callable[[], bool]]:
        return nullcontext(self._stopping)

    def _stopping(self) -> bool:
        while self.channel.waiting():
            self.channel.receive()
        return self.channel.stopping

    def remember(self, step: int, workers: Workers, state: dict[str, Any]) -> Callable[[], Tensors]:
        """An actor puts the step into the store; from there it is read, and written to disk.

        Where that takes long for so short a step, some steps are left out: a death then costs a few of them.
        """
        began = now()
        if began - self.remembered < self.remembering / REMEMBER_PART:
            return lambda: workers.first("save_state")
        workers.first("publish", self.store.root, self.config.name, step, state)
        self.remembered, self.remembering = now(), now() - began

        def saved() -> Tensors:
            found = self.recall()
            return found.tensors if found is not None and found.step == step else workers.first("save_state")

        return saved

    def recall(self) -> Checkpoint | None:
        return kept.recall(self.store, self.config.name)

    def forget(self) -> None:
        """Drops all that the store has of the pipeline: it is on the disk."""
        for each in self.store.names(f"{self.config.name}/"):
            self.store.drop(each)


@contextmanager
def as_state_lost() -> Iterator[None]:
    """Raises StateLost where an actor refuses to wake up: it has not found its state."""
    try:
        yield
    except ActorDied:
        raise
    except JigsawError as error:
        raise StateLost(str(error)) from error


def reported_lengths(lengths: list[int]) -> tuple[int, ...]:
    """The lengths as they are; of too many, quantiles from the shortest to the longest."""
    if len(lengths) <= MOST_LENGTHS:
        return tuple(lengths)
    places = np.linspace(0, len(lengths) - 1, MOST_LENGTHS).round().astype(int)
    return tuple(np.sort(lengths)[places].tolist())
