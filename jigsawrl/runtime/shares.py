"""What a worker is on this machine, and how those who share one are kept to their shares.

    a machine with a GPU    a worker is a GPU; its units are groups of multiprocessors, held by green contexts (MPS)
    any other               a worker is a set of cores; its units are those cores, held by pinning

A share is a number of a worker's units in a row, chosen anew whenever the scheduler likes. It changes when work is
done and never what comes of it, so where a machine cannot hold shares a run is slower and stays correct.

On a GPU only trainings are held to theirs, and only those of a process of their own: adapters on a base that several
pipelines share are trained beside everybody's decoding, in one process, where parts were measured to gain little
(`benchmarks/gpu_lora.py`). A rollout has all units: what is kept from the others is free for it, its
steps are graphs, which belong to the units that they were captured on, and it leaves most of a GPU idle anyway. A
decode of 16 sequences and a training so get 1.27 times as much done as by taking turns; with both held, 1.18 times.
A rollout that is not alone leaves room to the others: its kernels start later (`DecodeStep`). One that a policy
confines keeps to half of the units, with graphs of its own there; tokens are the same on any.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jigsawrl.errors import JigsawError
from jigsawrl.graph.cpu import cpu_worker
from jigsawrl.graph.hardware import DEVICE_PART, HARDWARE, Hardware
from jigsawrl.runtime.cores import part_of, pin, split_cores
from jigsawrl.runtime.family import fork_server
from jigsawrl.runtime.mps import Mps, NoMps

if TYPE_CHECKING:
    from jigsawrl.runtime.green import Parts

Device = Literal["auto", "cpu", "cuda"]
Units = tuple[int, ...]
"""Of one worker, by their numbers."""
WHOLE: Units = (0,)
"""The only unit of a GPU that cannot be divided."""
ROUNDING = 1e-9
"""By so much the sum of shares that make up a worker may differ from 1."""
NO_GAPS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Trainings give their memory back for others and take it again, and plans count on what they need. Torch would take
up to twice as much, in pieces that do not fit each other: on an H200 38 GB for 20 of a 1.5B model, in passes of 8,192
tokens."""
ALLOCATOR = *NO_GAPS, "PYTORCH_CUDA_ALLOC_CONF"
"""Where a user may have told it something; the last is its older name."""
PATIENCE_S = 120.0
"""For a look at the GPUs: torch may have to be imported first."""


@dataclass(frozen=True, slots=True)
class Sharer:
    """Somebody on a worker."""

    share: float
    rollout: bool = False
    works: bool = True
    """And does not wait for a host, or stand still."""
    base: str = ""
    """The model that it shares with others, in one process with them."""
    exact: bool = False
    """Whether what it computes has to be the same to the last bit, whatever it has of the worker."""
    confined: bool = False
    """Whether it is a rollout that keeps to half of the worker."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Sets of cores; the kernel holds every process to those that it is given."""

    workers: Sequence[Units]
    """All units of each."""
    environment: Mapping[str, str]
    """What an actor needs in its environment before it first uses its device."""
    note: str = ""
    """Why a GPU is not used, where somebody might wonder."""

    def device(self, worker: int) -> str:
        """Of an actor on this worker, as torch names it."""
        return "cpu"

    def parts(self, worker: int, those: Sequence[Sharer]) -> list[Units]:
        """The units of each of those on a worker."""
        cores = self.workers[worker]
        before = [0.0, *accumulate(each.share for each in those)]
        return [
            part_of(cores, each.share, round(start * len(cores)))
            for each, start in zip(those, before, strict=False)
        ]

    def yielding(self, those: Sequence[Sharer]) -> list[bool]:
        """Who of those on a worker is to leave room to the others: nobody, as each has cores of its own."""
        return [False] * len(those)

    def give(self, units: Units, pid: int, note: Path, yields: bool) -> None:
        """An actor has these from now on, and leaves room to others if it is to. `note` is what it looks at, where
        nobody else can hold it to them."""
        pin(pid, units)

    def broken(self) -> bool:
        """Whether all who are there have to end, for the mistake of one, before anybody can use a worker again."""
        return False

    def threads(self, units: Units) -> int:
        """Of an actor with these units."""
        return len(units)

    def hardware(self) -> Hardware:
        """A worker in numbers, for plans."""
        return cpu_worker(len(self.workers[0]), len(self.workers))

    def describe(self) -> str:
        """One sentence: what a worker is, what a share is, and what is missing."""
        said = f"a worker is {len(self.workers[0])} of this machine's cores, a share is a number of them"
        return f"{said} ({self.note})" if self.note else said


@dataclass(frozen=True, slots=True)
class Gpu:
    """One, as it was found."""

    name: str
    sms: int
    memory: int
    """Bytes."""
    units: int = 1
    """That it can be divided into."""
    ratio: float = 1.0
    """Times as long on a quarter of them as on all, measured."""
    undivided: str = ""
    """Why it cannot be divided."""
    taken: int = 0
    """Bytes that others had when it was looked at."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """Whole GPUs; an actor looks at its note before each thing it does, and works on the units written there. What
    can be asked of them is what can be asked of `Cores`."""

    found: Sequence[Gpu]
    environment: Mapping[str, str]
    without_mps: str = ""
    """Why MPS is not used."""
    mps: Mps | None = None

    @property
    def workers(self) -> Sequence[Units]:
        """Without MPS processes take turns, and whoever kept to a part would leave the rest idle in his turn."""
        return [WHOLE if self.without_mps else tuple(range(gpu.units)) for gpu in self.found]

    def device(self, worker: int) -> str:
        return f"cuda:{worker}"

    def parts(self, worker: int, those: Sequence[Sharer]) -> list[Units]:
        """Equal shares are not held: a GPU divides itself as evenly, and matrix products lose much by an odd part.
        Whoever is confined has the first half, away from trainings, whose shares are most often the largest.

        Who waits has the share of a time when others were there. Nobody is held who has to be exact: matrix products
        may be summed in another order on fewer units. Nor is anybody where pipelines train beside the decoding of
        all, in one process.
        """
        units = self.workers[worker]
        shares = [each.share for each in those if each.works]
        parts = iter(divided(units, shares) if len(set(shares)) > 1 else [units] * len(shares))
        found: list[Units] = []
        for each in those:
            part = next(parts) if each.works else units
            if each.rollout:
                part = half(units) if each.confined and len(shares) > each.works else units
            found.append(units if each.exact or each.base else part)
        return found

    def yielding(self, those: Sequence[Sharer]) -> list[bool]:
        """Whoever is not alone; trainings have nothing to leave. Without MPS everyone is alone, in his turn."""
        if self.without_mps:
            return [False] * len(those)
        # Those on one model are one process.
        at_work = {each.base or which for which, each in enumerate(those) if each.works}
        return [bool(at_work - {each.base or which}) for which, each in enumerate(those)]

    def give(self, units: Units, pid: int, note: Path, yields: bool) -> None:
        write_note(note, () if units in self.workers else units, yields)

    def broken(self) -> bool:
        return self.mps is not None and self.mps.is_broken()

    def threads(self, units: Units) -> int:
        return 1

    def hardware(self) -> Hardware:
        """That of its name, or of the most alike; memory is this machine's."""
        gpu = self.found[0]
        named = [each for name, each in HARDWARE.items() if name in gpu.name.lower()]
        known = max(named, key=lambda each: len(each.name), default=HARDWARE["a100"])
        host = cpu_worker(1, len(self.found)).host_bytes
        return replace(known, device_bytes=DEVICE_PART * gpu.memory, host_bytes=host)

    def describe(self) -> str:
        gpu = self.found[0]
        which = "GPU 0" if len(self.found) == 1 else f"one of {len(self.found)} GPUs"
        said = f"a worker is {which} ({gpu.name}, {gpu.sms} SMs{self._crowded()}); "
        if self.without_mps:
            return f"{said}shares are not held, and those on it take turns (no MPS: {self.without_mps})"
        if gpu.undivided:
            return f"{said}shares are not held, and those on it mix as they come, under MPS ({gpu.undivided})"
        return (
            f"{said}a training's share is a green context, in steps of {gpu.sms // gpu.units} SMs, under MPS "
            f"(checked: a quarter takes {gpu.ratio:.1f} times as long as all)"
        )

    def _crowded(self) -> str:
        """What to do where others have more of a GPU's memory than plans leave to them."""
        gpu = max(self.found, key=lambda each: each.taken)
        if gpu.taken <= (1 - DEVICE_PART) * gpu.memory:
            return ""
        left = max(1.0, (DEVICE_PART * gpu.memory - gpu.taken) / 1e9)
        return f"; others have {gpu.taken / 1e9:.0f} GB of its memory, and memory: {left:.0f} would leave it to them"


Shares = Cores | Gpus
"""A machine's workers, and the means to divide them."""


def half(units: Units) -> Units:
    """What a confined rollout keeps to."""
    return units[: max(1, len(units) // 2)]


def divided(units: Units, shares: Sequence[float]) -> list[Units]:
    """Runs of units, each at least one. Those of shares that sum to at most 1 have no unit in common.

    The smallest come first, so that the same shares get the same units whoever came when: a CUDA graph belongs to the
    units on which it was captured. Shares that sum to more, or are more than the units, overlap: not all of them are
    at work at the same time.
    """
    count, many = len(units), len(shares)
    order = sorted(range(many), key=lambda which: shares[which])
    ends = dict(zip(order, accumulate(shares[which] for which in order), strict=True))
    if sum(shares) > 1 + ROUNDING or many > count:
        return [
            part_of(units, share, round((ends[which] - share) * count)) for which, share in enumerate(shares)
        ]
    parts: dict[int, Units] = {}
    start = 0
    for place, which in enumerate(order, start=1):
        cut = min(max(start + 1, round(ends[which] * count)), count - (many - place))
        parts[which], start = units[start:cut], cut
    return [parts[which] for which in range(many)]


@contextmanager
def shares_here(workers: int, device: Device) -> Iterator[Shares]:
    """Those of this machine. What is started for them ends with this."""
    if device == "cpu" or (device == "auto" and not has_gpu_driver()):
        yield Cores(split_cores(workers), {})
        return
    with ExitStack() as ending:
        try:
            found: Shares = _gpus(workers, ending)
        except NoGpu as error:
            if device == "cuda":
                raise JigsawError(
                    f"device: cuda is asked for, but {error}; set device: cpu or auto"
                ) from None
            found = Cores(split_cores(workers), {}, f"no GPU is used: {error}")
        yield found


class NoGpu(Exception):
    """None that torch can use; the reason, in one line."""


def has_gpu_driver() -> bool:
    """Whether there may be a GPU; cheap, and without touching one."""
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return True
    return False


def _gpus(workers: int, ending: ExitStack) -> Gpus:
    """Looked at as an actor would see them, and under MPS if that goes."""
    try:
        mps = Mps()
        ending.callback(mps.close)
        found = look(mps.environment)
        if not mps.servers():
            raise NoMps("nobody became its client")
    except (NoMps, NoGpu) as error:
        ending.close()
        return Gpus(_enough(look({}), workers), without_gaps(), str(error))
    return Gpus(_enough(found, workers), {**mps.environment, **without_gaps()}, mps=mps)


def without_gaps() -> Mapping[str, str]:
    """Whoever has told torch's allocator something himself knows better."""
    return {} if any(name in os.environ for name in ALLOCATOR) else NO_GAPS


def _enough(found: Sequence[Gpu], workers: int) -> Sequence[Gpu]:
    if len(found) < workers:
        raise JigsawError(
            f"workers: {workers} are asked for, and there are {len(found)} GPUs; set workers to at most that"
        )
    return found[:workers]


@contextmanager
def aside(main: Callable[..., None], *args: Any, name: str) -> Iterator[Connection]:
    """The pipe to a process, its first argument, that is there while this is open. This one touches no GPU."""
    context = fork_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(theirs, *args), name=name, daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join(PATIENCE_S)
        ours.close()


def look(environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs, seen by a process with this environment."""
    with aside(looks, dict(environment), name="looks") as pipe:
        try:
            answer: list[Gpu] | str = pipe.recv() if pipe.poll(PATIENCE_S) else "it does not answer"
        except EOFError:
            answer = "whoever looked at it died"
    if isinstance(answer, str):
        raise NoGpu(answer)
    return answer


def looks(pipe: Connection, environment: Mapping[str, str]) -> None:
    """The process that does."""
    os.environ.update(environment)
    import torch

    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        pipe.send([_seen(device) for device in range(count)] or "torch sees no GPU")
    except RuntimeError as error:
        pipe.send(str(error).splitlines()[0])


def _seen(device: int) -> Gpu:
    import torch

    from jigsawrl.runtime.green import CLEARLY, NoParts, Parts, quarter_ratio

    about = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    gpu = Gpu(about.name, about.multi_processor_count, about.total_memory, taken=total - free)
    try:
        parts = Parts(device)
        ratio = quarter_ratio(parts)
    except NoParts as error:
        return replace(gpu, undivided=str(error))
    if ratio < CLEARLY:
        return replace(gpu, ratio=ratio, undivided=f"a quarter is as good as all: {ratio:.2f} times the time")
    return replace(gpu, units=parts.units, ratio=ratio)


NOTE = struct.Struct("=HHI")
"""The first unit, and how many, zeros: all; whether it leaves room to others."""


def write_note(note: Path, units: Units, yields: bool = False) -> None:
    """No units stand for all."""
    with os.fdopen(os.open(note, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(NOTE.pack(units[0] if units else 0, len(units), yields))


PAYS = 1.5
"""Times as many units, or as few, for which a training moves between two of its micro-batches: what it had of memory
is given back and taken again."""


class Follower:
    """An actor's side: keeps what it does on the units that its note names, from the next thing on, and says whether
    its decode steps are to leave room to others."""

    def __init__(self, note: Path, device: int) -> None:
        with os.fdopen(os.open(note, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.truncate(NOTE.size)
            self.page = mmap.mmap(file.fileno(), NOTE.size, access=mmap.ACCESS_READ)
        self.device = device
        self.at = 0, 0
        """The first unit that it is on, and how many; as in its note."""
        self.parts: Parts | None = None

    def __call__(self) -> bool:
        """Before each call and each step of an engine: costs a look at eight bytes where nothing has changed."""
        first, count, yields = NOTE.unpack(self.page[:])
        if (first, count) != self.at:
            if self.parts is None:
                from jigsawrl.runtime.green import parts_of

                self.parts = parts_of(self.device)
            self.parts.move_to(range(first, first + count) if count else range(self.parts.units))
            self.at = first, count
        return bool(yields)

    def where_it_pays(self) -> None:
        """Between the micro-batches of one call."""
        if self.parts is not None:
            _, count, _ = NOTE.unpack(self.page[:])
            now, then = self.at[1] or self.parts.units, count or self.parts.units
            if max(now, then) < PAYS * min(now, then):
                return
        self()
