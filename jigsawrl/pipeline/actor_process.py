"""An actor in a process of its own: calls are answered, requests are generated, outputs come when they are ready."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from jigsawrl.engine.types import RolloutBackend, SampleOutput
from jigsawrl.errors import JigsawError
from jigsawrl.pipeline.actor import Actor
from jigsawrl.pipeline.generating import Generating
from jigsawrl.processes import die_with_parent, ignore_interrupts

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
REPORT_S, REPORT_PART = 2.0, 0.02
"""Seconds between two words about what is under way, at least, and the part of the time that saying them may take."""


Reply = tuple[str, int | None, Any]
"""What an actor says: its kind, the id of the call that it answers, if it answers one, and the rest."""


def send(pipe: Connection, message: Any) -> None:
    """Tensors go by value: torch would put them into shared memory, and a kill would leave them there.

    Pickles go through such pipes only, from a process to one that it has started, or between two that it has: nobody
    else can write there. Nothing that has been in a file, in a store or in a socket with a name is ever unpickled.
    """
    pipe.send_bytes(pickle.dumps(message, protocol=5))


def receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


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
            send(pipe, ("outputs", None, ended))
        return pipe.poll(0)

    while True:
        actor = who()
        busy = actor is not None and actor.engine.has_unfinished()
        try:
            while not busy or pipe.poll(0):
                id, what, args = receive(pipe)
                if id is not None:
                    settle()
                    send(pipe, answer_to(perform, id, what, args))
                    break
                assert actor is not None
                actor.engine.add_request(what)
                busy = True
            else:
                assert actor is not None
                actor.engine.yields = settle()
                if outputs := actor.engine.step(look):
                    send(pipe, ("outputs", None, outputs))
                if reports is not None and time.monotonic() >= reports.due:
                    reports.make(partial(send, pipe), actor.engine)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            return
        except Exception as error:
            send(pipe, ("failed", None, told(error)))


class Reports:
    """Of what is under way: every few seconds, and rarely enough to take a small part of the time."""

    def __init__(self) -> None:
        self.due = time.monotonic() + REPORT_S

    def make(self, say: Callable[[Reply], None], engine: RolloutBackend) -> None:
        began = time.monotonic()
        say(("running", None, engine.partials()))
        took = time.monotonic() - began
        self.due = began + max(REPORT_S, took / REPORT_PART)


def answer_to(
    perform: Callable[[str, tuple[Any, ...]], Any], id: int, method: str, args: tuple[Any, ...]
) -> Reply:
    try:
        return "answer", id, perform(method, args)
    except JigsawError as error:
        return "refused", id, str(error)
    except Exception as error:
        return "failed", id, told(error)


def told(error: Exception) -> str:
    """What went wrong, and in the lines below it where."""
    said = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {said}\n{''.join(traceback.format_exception(error))}"
