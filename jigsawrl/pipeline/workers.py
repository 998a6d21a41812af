"""The actors of one pipeline, in this process or in processes of their own, as if they were one.

    loop --> Workers --> Actor                       workers: 1, plain calls
                    +--> process 0: Actor ---+
                    +--> process 1: Actor ---+       workers: n; gradients summed by gloo or NCCL

Sequences are dealt to workers by tokens; every value comes back in the order of the batch, so the loop does not see
how many there are.
"""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from jigsawrl.errors import JigsawError
from jigsawrl.pipeline.actor import Actor, RolloutResult
from jigsawrl.processes import die_with_parent
from jigsawrl.trainer.batch import Batch, balanced_shares, flat_indices

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class Handle(Protocol):
    """Someone who carries out an actor's methods."""

    def start(self, method: str, *args: Any) -> None: ...

    def result(self) -> Any: ...

    def close(self) -> None: ...


class Workers:
    def __init__(self, handles: list[Handle]) -> None:
        self.handles = handles

    def each(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Calls a method on every worker at once, each with its own arguments."""
        for handle, args in zip(self.handles, arguments, strict=True):
            handle.start(method, *args)
        return [handle.result() for handle in self.handles]

    def all(self, method: str, *args: Any) -> Any:
        """The same call on every worker; what the first one returns."""
        return self.each(method, [args] * len(self.handles))[0]

    def first(self, method: str, *args: Any) -> Any:
        self.handles[0].start(method, *args)
        return self.handles[0].result()

    def rollout(self, prompts: list[int], step: int) -> list[RolloutResult]:
        """One result a worker."""
        shares = [prompts[i :: len(self.handles)] for i in range(len(self.handles))]
        results: list[RolloutResult] = self.each("rollout", [(share, step) for share in shares])
        return results

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
        for handle in self.handles:
            handle.close()


def start_workers(config: RunConfig, base: Path, device: str) -> Workers:
    if config.workers == 1:
        return Workers([LocalHandle(Actor(config, base, device))])
    if device == "cuda" and torch.cuda.device_count() < config.workers:
        raise JigsawError(
            f"workers: {config.workers} are asked for, but torch sees {torch.cuda.device_count()} GPUs"
        )
    meeting = tempfile.mkdtemp(prefix="jigsawrl-")
    handles: list[Handle] = []
    workers = Workers(handles)
    try:
        for rank in range(config.workers):
            place = f"cuda:{rank}" if device == "cuda" else device
            handles.append(ProcessHandle(config, base, place, rank, f"file://{meeting}/store"))
        workers.all("ready")
    except BaseException:
        workers.close()
        raise
    return workers


def set_up_torch(config: RunConfig, device: str) -> None:
    """Threads, and whatever determinism needs; once in a process."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.threads or max(1, cores // config.workers))
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=device == "cpu")


class LocalHandle:
    """An actor in this process."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.answer: Any = None

    def start(self, method: str, *args: Any) -> None:
        self.answer = getattr(self.actor, method)(*args)

    def result(self) -> Any:
        answer, self.answer = self.answer, None
        return answer

    def close(self) -> None:
        self.actor.close()


class ProcessHandle:
    """An actor in a process of its own. One call at a time; a death is noticed, never waited for."""

    def __init__(self, config: RunConfig, base: Path, device: str, rank: int, meeting: str) -> None:
        context = get_context("spawn")
        self.rank = rank
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=worker_main, args=(theirs, config, base, device, rank, meeting), daemon=True
        )
        self.process.start()
        theirs.close()

    def start(self, method: str, *args: Any) -> None:
        try:
            self.pipe.send((method, args))
        except BrokenPipeError:
            self._died()

    def result(self) -> Any:
        try:
            kind, value = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._died()
        if kind == "answer":
            return value
        if kind == "refused":
            raise JigsawError(value)
        raise RuntimeError(f"worker {self.rank} failed:\n{value}")

    def _died(self) -> None:
        self.process.join(timeout=10)
        code = self.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        raise JigsawError(f"worker {self.rank} died ({how}); go on from the last checkpoint with --resume")

    def close(self) -> None:
        self.pipe.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def worker_main(
    pipe: Connection, config: RunConfig, base: Path, device: str, rank: int, meeting: str
) -> None:
    """A worker process: builds its actor, then does as it is told until the pipe closes."""
    die_with_parent()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # the loop decides when to stop
    set_up_torch(config, device)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.startswith("cuda") else "gloo",
        init_method=meeting,
        rank=rank,
        world_size=config.workers,
        timeout=COLLECTIVE_TIMEOUT,
    )
    actor: Actor | None = None

    def perform(method: str, args: tuple[Any, ...]) -> Any:
        nonlocal actor
        if method == "ready":
            actor = Actor(config, base, device, rank)
            return None
        return getattr(actor, method)(*args)

    serve(pipe, perform)
    if actor is not None:
        actor.close()
    dist.destroy_process_group()


def serve(pipe: Connection, perform: Callable[[str, tuple[Any, ...]], Any]) -> None:
    while True:
        try:
            method, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = ("answer", perform(method, args))
        except JigsawError as error:
            answer = ("refused", str(error))
        except Exception:
            answer = ("failed", traceback.format_exc())
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return
