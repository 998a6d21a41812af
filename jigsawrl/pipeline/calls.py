"""Calls of actors in processes of their own: an answer is a future, and all actors are heard in one place.

    start  -->  (id, method, arguments)  -->  actor
    Call   <--  ("answer", id, value)    <--

An `Inbox` hears whichever of a pipeline's actors has something to say, first come first heard. A loop that waited for
one actor after the other would wait for ever where a later one has failed: the earlier ones wait for it, in a
collective or where they were to meet. An answer finds its call by the id; one that nobody waits for is dropped.
"""

from __future__ import annotations

import itertools
import pickle
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from jigsawrl import limits
from jigsawrl.engine.types import Request, SampleOutput
from jigsawrl.errors import JigsawError
from jigsawrl.frames import Stream
from jigsawrl.liveness import GUARD, was_silent
from jigsawrl.surface import option

CLOSE_S = 5.0
"""Seconds that processes have to end by themselves, all of a gang together."""
KILLED_S = 5.0
"""Patience with a process that was killed."""
MOST_QUEUED = 1 << 20
"""Bytes of a message that may wait in this process for an actor to read them; a larger one is sent before anything
else is done, so that there is no copy of a checkpoint for each rank at the same time."""
_IDS = itertools.count(time.time_ns())
"""Of calls. No other process has had the same ones, so an answer to somebody else's call is recognised."""

OtherSources = Mapping[int, Callable[[], object]]
"""Other sources that are listened to, by file descriptor, and what is called when they have something."""


class ActorDied(JigsawError):
    """The process is gone; what it was at is lost."""


class Inbox:
    """Where a pipeline hears its actors."""

    def __init__(self) -> None:
        self.handles: dict[int, ProcessHandle] = {}
        """By the file descriptors that can be read when an actor has said something, or has died."""
        self.poller = select.poll()

    def listen(self, source: int, handle: ProcessHandle, sends: bool = False) -> None:
        """From now on. `sends`: room to send something more to the actor is of interest too."""
        self.handles[source] = handle
        self.poller.register(source, select.POLLIN | (select.POLLOUT if sends else 0))

    def hear(self, timeout_s: float | None = None, others: OtherSources | None = None) -> None:
        """Waits until any of the actors, or anybody else, has something to say, and hears all that is there.

        A failure of any actor is raised, and kills the processes of all but those that somebody else looks after.
        """
        others = others or {}
        for source in others:
            self.poller.register(source, select.POLLIN)
        ready = [source for source, _ in self.poller.poll(None if timeout_s is None else 1000 * timeout_s)]
        for source in others:
            self.poller.unregister(source)
        failures: list[Exception] = []
        for handle in dict.fromkeys(self.handles[source] for source in ready if source in self.handles):
            try:
                handle.hear()
            except Exception as error:
                failures.append(error)
        if failures:
            for handle in self.handles.values():
                handle.kill()
            raise first_cause(failures)
        for source in ready:
            if source in others:
                others[source]()


def first_cause(failures: Sequence[Exception]) -> Exception:
    """Of those that were heard of at once: whoever lost a connection lost it to somebody who died."""
    return next((each for each in failures if isinstance(each, ActorDied)), failures[0])


@dataclass(slots=True, eq=False)
class Call:
    """The answer of one actor to one call, as soon as it is there."""

    inbox: Inbox
    id: int = field(default_factory=lambda: next(_IDS))
    done: bool = False
    answer: Any = None


def answers(calls: Sequence[Call], others: OtherSources | None = None) -> list[Any]:
    """Those to all calls, in their order; they come in any. The first failure of any actor is raised."""
    for call in calls:
        while not call.done:
            call.inbox.hear(others=others)
    return [call.answer for call in calls]


class ProcessHandle:
    """An actor in another process, which is never waited for by itself."""

    def __init__(self, pipe: Connection, process: BaseProcess | None, rank: int, inbox: Inbox) -> None:
        self.stream = Stream(pipe)
        self.process = process
        """None where somebody else looks after it."""
        self.rank = rank
        self.inbox = inbox
        """Hears the actor from the first time on that it is asked for something."""
        self.calls: dict[int, Call] = {}
        """Those that are not answered yet, by their id."""
        self.early: list[SampleOutput] = []
        """Samples that have ended, until somebody takes them."""
        self.running: list[SampleOutput] = []
        """What the actor last said of samples that are under way."""
        self.reports = 0
        """How often it said so."""
        if process is not None:
            inbox.listen(process.sentinel, self)

    def start(self, method: str, *args: Any) -> Call:
        call = Call(self.inbox)
        self.calls[call.id] = call
        self._send((call.id, method, args))
        return call

    def call(self, method: str, *args: Any) -> Any:
        return answers([self.start(method, *args)])[0]

    def request(self, request: Request) -> None:
        self._send((None, request, ()))

    def take_early(self) -> list[SampleOutput]:
        early, self.early = self.early, []
        return early

    def _send(self, message: tuple[int | None, Any, Any]) -> None:
        """Actors are heard while a large message goes: they may have to get rid of what they say before they read."""
        content = pickle.dumps(message, protocol=5)
        with suppress(OSError):  # its death will be heard of
            self.stream.put(content)
        self._listen()
        while len(content) > MOST_QUEUED and self.stream.unsent:
            self.inbox.hear()

    def _listen(self) -> None:
        self.inbox.listen(self.stream.fileno(), self, sends=bool(self.stream.unsent))

    def hear(self) -> None:
        """Takes in what the actor has said, and sends what it has room for."""
        if self.stream.unsent:
            with suppress(OSError):
                self.stream.flush()
            self._listen()
        try:
            contents = self.stream.contents()
        except (EOFError, ConnectionResetError):
            self._died()
        for content in contents:
            self._take(*pickle.loads(content))
        if not contents and self.process is not None and self.process.exitcode is not None:
            self._died()

    def _take(self, kind: str, id: int | None, value: Any) -> None:
        call = None if id is None else self.calls.pop(id, None)
        if kind == "outputs":
            self.early += value
        elif kind == "running":
            self.running, self.reports = value, self.reports + 1
        elif call is None and id is not None:
            pass  # to a call of somebody else, or of long ago
        elif kind == "refused":
            raise JigsawError(value)
        elif kind == "failed":
            raise RuntimeError(f"worker {self.rank} failed: {value}")
        elif call is not None:
            call.done, call.answer = True, value

    def _died(self) -> NoReturn:
        how = f"worker {self.rank} died: it is gone"
        if self.process is not None:
            self.process.join(timeout=10)
            silent, name = GUARD.ended(self.process.pid), f"worker {self.rank}"
            how = (
                was_silent(name, silent)
                if silent is not None
                else limits.how_a_process_ended(name, self.process.exitcode)
            )
        raise ActorDied(f"{how}\ngo on from the last checkpoint with {option('resume')}")

    def kill(self) -> None:
        """Its process, whatever it is at. It is not waited for."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        close_all([self])

    def end(self, patience: float) -> None:
        """Waits until its process has ended by itself; kills it where it does not."""
        if self.process is not None:
            self.process.join(timeout=patience)
            if self.process.is_alive():
                self.process.kill()
                self.process.join(timeout=KILLED_S)
            GUARD.forget(self.process.pid)


def close_all(handles: Iterable[ProcessHandle]) -> None:
    """They end by themselves when their pipes close; those that do not, are killed."""
    handles = list(handles)
    for handle in handles:
        handle.stream.close()
    deadline = time.monotonic() + CLOSE_S
    for handle in handles:
        handle.end(max(0.0, deadline - time.monotonic()))
