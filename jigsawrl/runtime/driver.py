"""A pipeline's driver: its loop, in a process of its own, beside others under a scheduler.

The loop is the ordinary one. Before each phase its surroundings wait for the scheduler's permit, which may be there
already; what happens meanwhile is told in small messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jigsawrl.config.tasks import EpisodeTask
from jigsawrl.engine.types import Request, SampleKey, SampleOutput
from jigsawrl.errors import JigsawError
from jigsawrl.limits import cause_of
from jigsawrl.model.spec import read_spec
from jigsawrl.pipeline import kept
from jigsawrl.pipeline.actor_process import ActorDied, ProcessHandle, told
from jigsawrl.pipeline.engines import Engines
from jigsawrl.pipeline.generating import TAIL_FRACTION
from jigsawrl.pipeline.loop import run
from jigsawrl.pipeline.surroundings import Phase, Stopped, Tensors
from jigsawrl.pipeline.workers import Workers
from jigsawrl.processes import die_with_parent, ignore_interrupts
from jigsawrl.runtime.drawn import Drawn
from jigsawrl.runtime.messages import (
    Asleep,
    At,
    Began,
    Counted,
    Ends,
    FromDriver,
    Gather,
    Go,
    Load,
    Loads,
    Logged,
    Made,
    Over,
    Says,
    Sleep,
    Stop,
    ToDriver,
)
from jigsawrl.store.store import Store
from jigsawrl.telemetry.events import EventSink, Substage, now
from jigsawrl.telemetry.jsonl import encode
from jigsawrl.trainer.checkpoint import Checkpoint
from jigsawrl.underway import under_way

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig

MOST_LENGTHS = 128
"""Lengths of a step that are told; of more samples, as many quantiles."""
SOON_S = 1.5
"""News wait so long for company, at most."""
MOST_KEPT = 64
BRIEF_S = 0.2
"""What an engine is at is told if it was at the last thing for longer: nobody makes use of less."""
BACK = 2
"""Times as many samples as the tail had at most with which an engine is back in the bulk: episodes come and go."""
REMEMBER_PART = 0.05
"""Of a pipeline's time, at most, that goes to remembering its steps."""
FRESH_S = 1.0
"""For so long a pipeline goes on as it was told where nothing else could be decided: phases of milliseconds would
keep the scheduler busy."""
COUNTED_S = 10.0
"""Seconds between two messages that say how many samples are done."""
MOST_EVENTS = 256
"""Events that are told together."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a driver is started with."""

    config: RunConfig
    out: Path
    resume: bool
    store: Path
    """Where the node's store is."""


def driver_main(
    scheduler: Connection,
    actors: Sequence[Connection],
    assignment: Assignment,
    make: Callable[[Line, Sequence[Connection], Store, RunConfig], Beside] | None = None,
) -> None:
    """`make` makes the surroundings, where they are not the usual ones."""
    die_with_parent()
    ignore_interrupts()  # the scheduler decides when to stop
    line = Line(scheduler)
    config = assignment.config
    try:
        around = (make or Beside)(line, actors, Store.attach(assignment.store), config)
        try:
            with under_way(assignment.out):
                run(config, assignment.out, assignment.resume, Told(line), around)
            ends = Ends("finished")
        except KeyboardInterrupt as interrupt:
            ends = Ends("interrupted", str(interrupt))
        around.forget()
    except ActorDied as error:
        ends = Ends("died", str(error))
    except StateLost as error:
        ends = Ends("failed", str(error))
    except JigsawError as error:
        ends = Ends("failed", str(error), refused=True)
    except Exception as error:
        cause = cause_of(error, assignment.out)
        ends = Ends("failed", cause or told(error), refused=cause is not None)
    line.send(ends)


class StateLost(Exception):
    """What the store had of a pipeline that sleeps cannot be read; it goes on from what is left."""


class Line:
    """To the scheduler and back. Where the scheduler is gone, so is the driver."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.stopping = False
        self.sleepy: set[Phase | None] = set()
        """Actors that were told to sleep, by their phase, whoever heard it: that waits until a phase has ended."""
        self.on_sleep: Callable[[], None] = lambda: None
        """Called when some are told to."""
        self.go: Go | None = None
        """Permit for the next phase."""
        self.kept: list[FromDriver] = []
        self.sent = now()

    def send(self, message: FromDriver) -> None:
        """At once, with what was kept before it."""
        messages = (*self.kept, message)
        self.kept.clear()
        self.sent = now()
        try:
            self.pipe.send(messages)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)

    def later(self, message: FromDriver) -> None:
        """With the next one that is sent, or soon: it is news, but nobody waits for it."""
        self.kept.append(message)
        self.catch_up()

    def catch_up(self) -> None:
        """What was kept goes, if it was kept for long or there is much of it."""
        if self.kept and (now() - self.sent > SOON_S or len(self.kept) > MOST_KEPT):
            self.send(self.kept.pop())

    def receive(self) -> ToDriver:
        try:
            message: ToDriver = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            os._exit(1)
        self.stopping = self.stopping or isinstance(message, Stop)
        self.go = message if isinstance(message, Go) else self.go
        if isinstance(message, Sleep):
            self.sleepy.add(message.phase)
            self.on_sleep()
        return message

    def waiting(self) -> bool:
        return self.pipe.poll(0)


class Told:
    """Progress, shown by the scheduler's process."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.counted = 0.0
        """When the scheduler was last told how many samples are done, and in which step."""
        self.counted_step = 0

    def start(self, name: str, total_steps: int, done: int = 0) -> None:
        self.line.send(Began(total_steps, done))

    def update(self, name: str, step: int, values: Mapping[str, float]) -> None:
        self.line.later(Made(step, dict(values)))

    def message(self, text: str) -> None:
        self.line.send(Says(text))

    def doing(self, name: str, step: int, what: str, done: int = 0, of: int = 0) -> None:
        """The scheduler knows what it is at, but not how many samples are done."""
        if of and (now() - self.counted > COUNTED_S or (done == of and step == self.counted_step)):
            self.counted, self.counted_step = now(), step
            self.line.send(Counted(step, done, of))


class ToldEvents(EventSink):
    """Events, written by the scheduler's process. Workers have their numbers there."""

    def __init__(self, line: Line, around: Beside) -> None:
        self.line = line
        self.around = around
        self.kept: list[bytes] = []
        """Lines."""
        self.said: Substage | None = None

    @contextmanager
    def span(
        self, substage: Substage, *, pipeline: str, step: int, worker: int = 0, **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """What all actors are at together is told when it begins, too."""
        if substage == "grad":
            self.around.trained = True
        if substage != self.said:
            self.said = substage
            self.line.later(At(-1, substage, 0))
        with super().span(substage, pipeline=pipeline, step=step, worker=worker, **fields) as found:
            yield found

    def emit(self, event: str, **fields: Any) -> None:
        self.kept.append(encode({"t": round(now(), 6), "event": event, **fields}))
        self.close()

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
        if substage == "tool" and worker == self.around.team("rollout")[0].rank:
            self.around.waited += t1 - t0
        where = self.around.where
        if worker >= len(where):  # a worker without a rank
            return
        if "workers" in fields:
            fields["workers"] = sorted({where[each] for each in fields["workers"] if each < len(where)})
        times = {"t": round(now(), 6), "t0": round(t0, 6), "t1": round(t1, 6)}
        which = {"substage": substage, "pipeline": pipeline, "step": step, "worker": where[worker]}
        self.kept.append(encode({"event": "substage"} | which | times | fields))
        if len(self.kept) >= MOST_EVENTS:
            self.close()

    def close(self) -> None:
        if self.kept:
            self.line.later(Logged(b"".join(self.kept)))
            self.kept.clear()


class WatchedEngines(Engines):
    """Engines that say how far they are, and that listen to the scheduler while they generate."""

    def __init__(self, handles: Sequence[ProcessHandle], line: Line, returning: bool, drawn: Drawn) -> None:
        super().__init__(handles)
        self.line = line
        self.drawn = drawn
        self.asked: dict[SampleKey, Request] = {}
        """What is to be drawn, by sample."""
        self.known: list[SampleOutput] = []
        """Samples that were drawn before this process began."""
        self.reports = 0
        """Of the engines, that were kept."""
        self.returning = returning
        """Whether an engine without samples may get some again: episodes come back from their tools."""
        self.prompt = True
        """Whether what the engines are at is told at once."""
        self.most = [0] * len(handles)
        self.said: list[Substage | None] = [None] * len(handles)
        self.since = [0.0] * len(handles)
        """When each was said."""
        self.watched = (line.pipe,)
        self.lengths: dict[SampleKey, int] = {}
        """Tokens of every sample of the phase, all turns together."""
        self.turns = 0
        """Of all samples."""

    def begin(self, engines: Sequence[int], prompt: bool) -> None:
        self.open = list(engines)
        self.prompt = prompt
        self.lengths.clear()
        self.turns = 0
        self.most = [0] * len(self.handles)
        self.said = [None] * len(self.handles)
        self.since = [now()] * len(self.handles)
        self.drawn.begin()

    def add_request(self, request: Request) -> None:
        known, requests = self.drawn.answered(request)
        self.known += known
        for each in requests:
            self.asked.update(dict.fromkeys(each.keys, each))
            super().add_request(each)

    def has_unfinished(self) -> bool:
        return bool(self.known) or super().has_unfinished()

    def step(self) -> list[SampleOutput]:
        self._say()
        self.line.catch_up()
        outputs, self.known = self.known, []
        outputs = outputs or self._drawn()
        self.turns += len(outputs)
        for output in outputs:
            made = self.lengths.get(output.key, 0)
            self.lengths[output.key] = made + len(output.generated.token_ids)
        self._say()
        return outputs

    def _drawn(self) -> list[SampleOutput]:
        """By the engines, at last."""
        outputs = super().step()
        while self.line.waiting():
            message = self.line.receive()
            if isinstance(message, Gather):
                outputs += self.gather(message.engines)
        for output in outputs:
            self.drawn.note(self.asked.pop(output.key), output)
        if self.drawn.is_due():
            self._keep()
        return outputs

    def _keep(self) -> None:
        """What ended since the last time, and what is under way if anything was said of it since."""
        reports = sum(handle.reports for handle in self.handles)
        said = [each for handle in self.handles for each in handle.running if each.key in self.asked]
        news, self.reports = reports > self.reports, reports
        self.drawn.keep([(self.asked[each.key], each) for each in said] if news else [])

    def _say(self) -> None:
        for engine in range(len(self.handles)):
            samples = len(self.requests[engine])
            self.most[engine] = max(self.most[engine], samples)
            few = self.most[engine] * TAIL_FRACTION * (BACK if self.said[engine] == "tail" else 1)
            at: Substage | None = "decode" if samples > few else "tail"
            if samples == 0:
                at = "tool" if self.returning and engine in self.open else None
            brief = now() - self.since[engine] < BRIEF_S
            if at != self.said[engine] and self.most[engine] and not brief:
                self.said[engine], self.since[engine] = at, now()
                (self.line.send if self.prompt else self.line.later)(At(engine, at, samples))


class Beside:
    """The surroundings of a pipeline among others."""

    def __init__(self, line: Line, actors: Sequence[Connection], store: Store, config: RunConfig) -> None:
        self.line = line
        self.handles = [ProcessHandle(pipe, None, rank) for rank, pipe in enumerate(actors)]
        self.store = store
        self.name = config.name
        episodes = isinstance(config.task, EpisodeTask)
        self.drawn = Drawn(store, config.name)
        self.engines = WatchedEngines(self.handles, line, episodes, self.drawn)
        self.gang = self._gang()
        self.deterministic = config.deterministic
        self.where = tuple(range(len(actors)))
        """The worker that each actor is on."""
        self.told = ToldEvents(line, self)
        self.asleep: set[Phase | None] = set()
        """Actors that sleep, by their phase; None: those of both."""
        self.remembered, self.remembering = float("-inf"), 0.0
        """When a step was last remembered, and the seconds that it took."""
        self.steps = config.steps
        self.asked = 0.0
        """When the scheduler was last waited for."""
        self.last_rollout = Go((), (), ())
        """Its permit."""
        self.trained = False
        """Whether this phase computed gradients."""
        self.waited = 0.0
        """Seconds of this phase in which no engine had anything to do but wait for tools."""

    def team(self, phase: Phase | None) -> Sequence[ProcessHandle]:
        """The actors that run a phase."""
        return self.handles

    def _gang(self) -> Workers:
        return Workers(self.team("training"), self.engines)

    def workers(self, config: RunConfig, base: Path, device: str) -> Workers:
        self.line.send(Loads())
        while not isinstance(self.line.receive(), Load):
            pass  # whoever wants it to stop is heard before the first phase
        self.gang.all("ready")
        self.drawn.vocabulary = read_spec(base).vocab_size
        return self.gang

    def events(self, out: Path) -> EventSink:
        return self.told

    @contextmanager
    def phase(self, phase: Phase, step: int) -> Iterator[None]:
        go = self._permit(phase, step)
        self.engines.begin(go.engines, go.prompt)
        self.where = go.where
        self.waited, self.trained = 0.0, False
        # With other threads some products differ in their last bits.
        team = Workers(self.team(phase), self.engines)
        threads = [1 if self.deterministic else go.threads[handle.rank] for handle in self.team(phase)]
        before = team.each("busy_seconds", [(each,) for each in threads])
        yield
        after = team.every("busy_seconds")
        busy = tuple((b - a) / n for a, b, n in zip(before, after, threads, strict=True))
        self.engines.forget_episodes()
        self.told.close()
        turns = self.engines.turns / max(1, len(self.engines.lengths))
        lengths = told_lengths(list(self.engines.lengths.values()))
        follows = self._next_permit(go, step)
        went_on = now() if follows is not None else None
        empty = phase == "training" and not self.trained
        over = Over(phase, step, busy, len(go.engines), lengths, turns, self.waited, went_on, empty)
        if follows is None:
            self.line.send(over)
        else:
            self.line.go = follows
            self.line.later(over)

    def _next_permit(self, go: Go, step: int) -> Go | None:
        """For the phase after this one, where it needs no asking and nobody wants anything: the training after a
        rollout, and the next step for as long as what was decided is fresh."""
        if self.line.waiting():
            return None
        if go.training is not None:
            return go.training
        fresh = now() - self.asked < FRESH_S
        return self.last_rollout if fresh and self.last_rollout.training and step < self.steps else None

    def _permit(self, phase: Phase, step: int) -> Go:
        """Waits for it, where it is not there already; the state may have to make room meanwhile."""
        line = self.line
        while True:
            for each in list(line.sleepy):
                self._sleep(each, step)
            if line.stopping and phase == "rollout":
                self._wake("training", step)  # to be saved
                raise Stopped
            if line.go is not None:
                go, line.go = line.go, None
                self._wake(phase, step)
                if phase == "rollout":
                    self.last_rollout = go
                return go
            line.receive()
            self.asked = now()

    def _sleep(self, phase: Phase | None, step: int) -> None:
        self._swap("sleep", phase, step)
        self.asleep.add(phase)
        self.line.sleepy.discard(phase)
        self.line.send(Asleep(phase))

    def _wake(self, phase: Phase, step: int) -> None:
        for each in self.asleep & {phase, None}:
            with as_state_lost():
                self._swap("wake_up", each, step)
            self.asleep.discard(each)

    def _swap(self, verb: Literal["sleep", "wake_up"], phase: Phase | None, step: int) -> None:
        with self.told.span("swap", pipeline=self.name, step=step, verb=verb) as found:
            found["bytes"] = self.gang.all(verb, self.store.root, self.name).bytes

    def stopping(self) -> AbstractContextManager[Callable[[], bool]]:
        return nullcontext(self._stopping)

    def _stopping(self) -> bool:
        while self.line.waiting():
            self.line.receive()
        return self.line.stopping

    def remember(self, step: int, workers: Workers, state: dict[str, Any]) -> Callable[[], Tensors]:
        """An actor puts it into the store; from there it is read, and written to disk.

        Where that takes long for so short a step, some steps are left out: a death then costs a few of them.
        """
        self.drawn.forget()
        began = now()
        if began - self.remembered < self.remembering / REMEMBER_PART:
            return lambda: workers.first("save_state")
        workers.first("publish", self.store.root, self.name, step, state)
        self.remembered, self.remembering = now(), now() - began

        def saved() -> Tensors:
            found = self.recall()
            is_there = found is not None and found.step == step
            return found.tensors if found is not None and is_there else workers.first("save_state")

        return saved

    def recall(self) -> Checkpoint | None:
        return kept.recall(self.store, self.name)

    def forget(self) -> None:
        """All is on the disk: the room in the store is others'."""
        for each in self.store.names(f"{self.name}/"):
            self.store.drop(each)


@contextmanager
def as_state_lost() -> Iterator[None]:
    """An actor that refuses to wake up has not found its state."""
    try:
        yield
    except ActorDied:
        raise
    except JigsawError as error:
        raise StateLost(str(error)) from error


def told_lengths(lengths: list[int]) -> tuple[int, ...]:
    """As they are, or so many of them at equal distances from the shortest to the longest."""
    if len(lengths) <= MOST_LENGTHS:
        return tuple(lengths)
    places = np.linspace(0, len(lengths) - 1, MOST_LENGTHS).round().astype(int)
    return tuple(np.sort(lengths)[places].tolist())
