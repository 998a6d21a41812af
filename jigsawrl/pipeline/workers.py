"""The actors of one pipeline, in this process or in processes of their own, as if they were one.

    loop --> Workers --> Actor                       ranks: 1, plain calls
                    +--> process 0: Actor ---+
                    +--> process 1: Actor ---+       ranks: n; gradients summed by gloo or NCCL

Where there are fewer workers than ranks, ranks share them, and as many as workers have an engine. Sequences are dealt
to ranks by tokens; every value comes back in the order of the batch, so the loop does not see how many there are.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from jigsawrl import temporary
from jigsawrl.engine.types import Generation
from jigsawrl.errors import JigsawError
from jigsawrl.liveness import GUARD, silent_s
from jigsawrl.model.cpu import make_bfloat16_safe
from jigsawrl.pipeline.actor import Actor
from jigsawrl.pipeline.actor_process import actor_main
from jigsawrl.pipeline.calls import Call, Inbox, OtherSources, ProcessHandle, answers, close_all
from jigsawrl.pipeline.engines import Engines
from jigsawrl.pipeline.pooled import TrainingActor
from jigsawrl.pipeline.threads import load_aware_threads, most_threads
from jigsawrl.processes import fork_server, needed_for, show_alive, show_as, start
from jigsawrl.trainer.batch import Batch, balanced_shares, flat_indices

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from jigsawrl.config import RunConfig

PRELOADED = ("jigsawrl.pipeline.preload",)


class Handle(Protocol):
    """Someone who carries out an actor's methods."""

    def start(self, method: str, *args: Any) -> Call: ...

    def close(self) -> None: ...


class Workers:
    """`engine` is that of all of them; `meeting` the folder in which they found each other, if they needed one."""

    def __init__(self, handles: Sequence[Handle], engine: Generation, meeting: Path | None = None) -> None:
        self.handles = handles
        self.engine = engine
        self.meeting = meeting
        self.others: OtherSources = {}
        """Who else is listened to while workers are waited for."""

    def who(self, method: str) -> Sequence[Handle]:
        """Those who carry it out."""
        return self.handles

    def each(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Calls a method on every worker at once, each with its own arguments."""
        calls = [
            handle.start(method, *args) for handle, args in zip(self.who(method), arguments, strict=True)
        ]
        return answers(calls, self.others)

    def every(self, method: str, *args: Any) -> list[Any]:
        """The same call on every worker; what each one returns."""
        return self.each(method, [args] * len(self.who(method)))

    def all(self, method: str, *args: Any) -> Any:
        """The same call on every worker; what the first one returns."""
        return self.every(method, *args)[0]

    def first(self, method: str, *args: Any) -> Any:
        return answers([self.who(method)[0].start(method, *args)], self.others)[0]

    def evaluate(self, method: str, batch: Batch) -> Tensor:
        """A flat value [T] of the whole batch."""
        shares = self._shares(batch)
        pieces = self.each(method, [(batch.select(share),) for share in shares])
        lengths = batch.lengths
        out = torch.zeros(int(lengths.sum()))
        for share, piece in zip(shares, pieces, strict=True):
            out[flat_indices(lengths, share)] = piece
        return out

    def forward_backward(self, method: str, batch: Batch) -> dict[str, float]:
        """Gradients of the whole batch; metrics are sums and are added."""
        sums: dict[str, float] = {}
        for part in self.each(method, [(batch.select(share),) for share in self._shares(batch)]):
            for name, value in part.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def _shares(self, batch: Batch) -> list[list[int]]:
        return balanced_shares([len(t) for t in batch.tokens], len(self.handles))

    def close(self) -> None:
        close_all(handle for handle in self.handles if isinstance(handle, ProcessHandle))
        for handle in self.handles:
            if not isinstance(handle, ProcessHandle):
                handle.close()
        self.engine.close()
        if self.meeting is not None:
            shutil.rmtree(self.meeting, ignore_errors=True)


def start_workers(config: RunConfig, base: Path, device: str) -> Workers:
    if config.gang == 1:
        actor = Actor(config, base, device)
        if (threads := load_aware_threads(config, device)) is not None:
            actor.between = actor.after_pass = threads.adapt
        return Workers([LocalHandle(actor)], actor.engine)
    if device == "cuda" and torch.cuda.device_count() < config.workers:
        raise JigsawError(
            f"workers: {config.workers} are asked for, but torch sees {torch.cuda.device_count()} GPUs"
        )
    folder = Path(tempfile.mkdtemp(prefix="meeting-", dir=temporary.folder()))
    handles: list[ProcessHandle] = []
    inbox = Inbox()
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        undo.callback(lambda: close_all(handles))
        for rank in range(config.gang):
            handles.append(start_actor(config, base, device, rank, folder, inbox))
        workers = Workers(handles, Engines(handles[: config.workers], inbox), folder)
        undo.callback(workers.engine.close)
        workers.all("ready")
        undo.pop_all()
    return workers


def start_actor(
    config: RunConfig, base: Path, device: str, rank: int, folder: Path, inbox: Inbox
) -> ProcessHandle:
    context = fork_server([*PRELOADED, *needed_for([config.model.path])])
    ours, theirs = context.Pipe()
    place = f"cuda:{rank % config.workers}" if device == "cuda" else device
    beat = folder / f"actor{rank}"
    arguments = (theirs, config, base, place, rank, config.gang, f"file://{folder}/store")
    process = context.Process(target=actor_in, args=(temporary.environment(), beat, *arguments), daemon=True)
    start(process)
    assert process.pid is not None
    GUARD.watch(process.pid, beat, silent_s())
    theirs.close()
    return ProcessHandle(ours, process, rank, inbox)


def actor_in(
    environment: Mapping[str, str],
    beat: Path,
    pipe: Connection,
    config: RunConfig,
    base: Path,
    device: str,
    rank: int,
    world: int,
    meeting: str,
) -> None:
    """Where it is forked from, the environment is that of the first run in this process."""
    os.environ.clear()
    os.environ.update(environment)
    show_alive(beat)
    show_as(f"actor{rank}:{config.name}")
    threads = load_aware_threads(config, device)
    ways: dict[str, Any] = {} if threads is None else {"settle": threads, "between": threads.adapt}
    make, alone = Actor if rank < config.workers else TrainingActor, config.gang <= config.workers
    actor_main(pipe, config, base, device, rank, world, meeting, **ways, make=make, alone=alone)


def set_up_torch(config: RunConfig, device: str) -> None:
    """Threads, and whatever the numbers and determinism need; once in a process."""
    if device == "cpu" and config.model.dtype == "bfloat16":
        make_bfloat16_safe()
    torch.set_num_threads(most_threads(config))
    if device.startswith("cuda"):
        torch.backends.cuda.enable_cudnn_sdp(
            False
        )  # it plans anew for every length: 60 to 90 ms, seen on an H200
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # The same as `use_deterministic_algorithms`, which would import the compiler, a second in every process.
        torch.set_deterministic_debug_mode("warn" if device == "cpu" else "error")


class LocalHandle:
    """An actor in this process."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.inbox = Inbox()

    def start(self, method: str, *args: Any) -> Call:
        return Call(self.inbox, done=True, answer=getattr(self.actor, method)(*args))

    def close(self) -> None:
        """The engine is closed with the others."""
