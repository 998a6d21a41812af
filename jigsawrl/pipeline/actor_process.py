"""An actor in a process of its own: calls are answered, requests are generated, outputs come when they are ready."""

from __future__ import annotations

import os
import pickle
import select
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from jigsawrl import frames, limits
from jigsawrl.engine.types import Request, RolloutBackend, SampleOutput
from jigsawrl.errors import JigsawError
from jigsawrl.liveness import GUARD, was_silent
from jigsawrl.pipeline.actor import Actor
from jigsawrl.pipeline.generating import Generating
from jigsawrl.processes import die_with_parent, ignore_interrupts
from jigsawrl.surface import option

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig

CLOSE_S = 5.0
"""Seconds that processes have to end by themselves, all of a gang together."""
KILLED_S = 5.0
"""Patience with a process that was killed."""
SENT_AT_ONCE = 1 << 15
"""Bytes that are written where the kernel says that there is room: of a socket it says so when three quarters of its
200 KB are free."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
REPORT_S, REPORT_PART = 2.0, 0.02
"""Seconds between two words about what is under way, at least, and the part of the time that saying them may take."""


def send(pipe: Connection, message: Any) -> None:
    """Tensors go by value: torch would put them into shared memory, and a kill would leave them there.

    Pickles go through such pipes only, from a process to one that it has started, or between two that it has: nobody
    else can write there. Nothing that has been in a file, in a store or in a socket with a name is ever unpickled.
    """
    pipe.send_bytes(pickle.dumps(message, protocol=5))


def receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


class ActorDied(JigsawError):
    """The process is gone; what it was at is lost."""


class ProcessHandle:
    """The other end of an actor's pipe. A death is noticed, never waited for."""

    def __init__(self, pipe: Connection, process: BaseProcess | None, rank: int) -> None:
        self.pipe = pipe
        self.process = process
        """None where somebody else looks after it."""
        self.rank = rank
        self.answer: Any = None
        """To the last call, until somebody takes it."""
        self.early: list[SampleOutput] = []
        """Outputs that came while an answer was waited for."""
        self.running: list[SampleOutput] = []
        """What the actor last said of samples that are under way."""
        self.reports = 0
        """How often it said so."""

    def start(self, method: str, *args: Any) -> None:
        self._send(("call", method, args))

    def result(self) -> Any:
        while not self.hears():
            pass
        return self.take_answer()

    def hears(self) -> bool:
        """The actor's next word, which is waited for; whether it was the answer."""
        kind, value = self._receive()
        if kind == "answer":
            self.answer = value
        else:
            self._hear(kind, value)
        return kind == "answer"

    def take_answer(self) -> Any:
        answer, self.answer = self.answer, None
        return answer

    def sources(self) -> list[Connection | int]:
        """What can be read when the actor has said something, or has died."""
        return [self.pipe] if self.process is None else [self.pipe, self.process.sentinel]

    def call(self, method: str, *args: Any) -> Any:
        self.start(method, *args)
        return self.result()

    def request(self, request: Request) -> None:
        self._send(("request", request, ()))

    def outputs(self) -> list[SampleOutput]:
        """Samples that have ended; waits for the next word of the actor."""
        self._hear(*self._receive())
        return self.take_early()

    def _hear(self, kind: str, value: list[SampleOutput]) -> None:
        if kind == "running":
            self.running, self.reports = value, self.reports + 1
        else:
            assert kind == "outputs", kind
            self.early += value

    def take_early(self) -> list[SampleOutput]:
        early, self.early = self.early, []
        return early

    def _send(self, message: tuple[str, Any, Any]) -> None:
        """Listens meanwhile: an actor may have to get rid of what it says before it reads."""
        content = memoryview(pickle.dumps(message, protocol=5))
        room = select.poll()
        room.register(self.pipe.fileno(), select.POLLIN | select.POLLOUT)
        try:
            for piece in (memoryview(frames.header(len(content))), content):
                while piece:
                    while not room.poll()[0][1] & (select.POLLOUT | select.POLLERR):
                        self._hear(*self._receive())
                    piece = piece[os.write(self.pipe.fileno(), piece[:SENT_AT_ONCE]) :]
        except (BrokenPipeError, ConnectionResetError):
            self._died()

    def _receive(self) -> tuple[str, Any]:
        try:
            kind, value = receive(self.pipe)
        except (EOFError, ConnectionResetError):
            self._died()
        if kind == "refused":
            raise JigsawError(value)
        if kind == "failed":
            raise RuntimeError(f"worker {self.rank} failed: {value}")
        return kind, value

    def _died(self) -> None:
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
        self.pipe.close()
        self.end(CLOSE_S)

    def end(self, patience: float) -> None:
        """Waits until its process has ended by itself; kills it where it does not."""
        if self.process is not None:
            self.process.join(timeout=patience)
            if self.process.is_alive():
                self.process.kill()
                self.process.join(timeout=KILLED_S)
            GUARD.forget(self.process.pid)


def actor_main(
    pipe: Connection,
    config: RunConfig,
    base: Path,
    device: str,
    rank: int,
    world: int,
    meeting: str,
    settle: Callable[[], bool] = lambda: False,
    between: Callable[[], None] = lambda: None,
    says_what_runs: bool = False,
    make: Callable[[RunConfig, Path, str, int], Generating] = Actor,
    alone: bool = True,
) -> None:
    """The process: builds its actor when told so, then does as it is told until the pipe closes.

    `settle` is called before each thing it does, and `between` inside of those that take long: whoever shares its
    device may want it elsewhere. The first says whether its engine is to leave room to them. With `says_what_runs` it
    tells from time to time what it has of samples that are under way. `make` makes the actor. `alone`: whether each
    rank has a device to itself.
    """
    from jigsawrl.pipeline.workers import set_up_torch

    die_with_parent()
    ignore_interrupts()  # the loop decides when to stop
    set_up_torch(config, device)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    actor: Generating | None = None

    def perform(method: str, args: tuple[Any, ...]) -> Any:
        nonlocal actor
        if method == "ready":
            if world > 1:
                join_the_others(device, rank, world, meeting, alone)
            actor = make(config, base, device, rank)
            actor.between = between
            return None
        return getattr(actor, method)(*args)

    serve(pipe, perform, lambda: actor, settle, Reports() if says_what_runs else None)
    if actor is not None:
        actor.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def join_the_others(device: str, rank: int, world: int, meeting: str, alone: bool = True) -> None:
    """`alone`: NCCL refuses ranks that share a device."""
    dist.init_process_group(
        "nccl" if device.startswith("cuda") and alone else "gloo",
        init_method=meeting,
        rank=rank,
        world_size=world,
        timeout=COLLECTIVE_TIMEOUT,
    )


def serve(
    pipe: Connection,
    perform: Callable[[str, tuple[Any, ...]], Any],
    who: Callable[[], Generating | None],
    settle: Callable[[], bool],
    reports: Reports | None,
) -> None:
    """Messages first; while there are none, the engine generates."""

    def look(ended: list[SampleOutput]) -> bool:
        if ended:
            send(pipe, ("outputs", ended))
        return pipe.poll(0)

    while True:
        actor = who()
        busy = actor is not None and actor.engine.has_unfinished()
        try:
            while not busy or pipe.poll(0):
                kind, what, args = receive(pipe)
                if kind == "call":
                    settle()
                    send(pipe, answer_to(perform, what, args))
                    break
                assert actor is not None
                actor.engine.add_request(what)
                busy = True
            else:
                assert actor is not None
                actor.engine.yields = settle()
                if outputs := actor.engine.step(look):
                    send(pipe, ("outputs", outputs))
                if reports is not None and time.monotonic() >= reports.due:
                    reports.make(partial(send, pipe), actor.engine)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            return
        except Exception as error:
            send(pipe, ("failed", told(error)))


class Reports:
    """Of what is under way: every few seconds, and rarely enough to take a small part of the time."""

    def __init__(self) -> None:
        self.due = time.monotonic() + REPORT_S

    def make(self, say: Callable[[tuple[str, Any]], None], engine: RolloutBackend) -> None:
        began = time.monotonic()
        say(("running", engine.partials()))
        took = time.monotonic() - began
        self.due = began + max(REPORT_S, took / REPORT_PART)


def answer_to(
    perform: Callable[[str, tuple[Any, ...]], Any], method: str, args: tuple[Any, ...]
) -> tuple[str, Any]:
    try:
        return "answer", perform(method, args)
    except JigsawError as error:
        return "refused", str(error)
    except Exception as error:
        return "failed", told(error)


def told(error: Exception) -> str:
    """What went wrong, and in the lines below it where."""
    said = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {said}\n{''.join(traceback.format_exception(error))}"
