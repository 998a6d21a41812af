"""What the machine, or the container, lets a run have: memory, processes, room on the disk; and errors that say that
it had no more of it."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from jigsawrl.errors import JigsawError
from jigsawrl.surface import option

OUT_OF_MEMORY = "memory ran out"
LESS_MEMORY = (
    "Lower rollout.max_num_seqs (samples in flight), rollout.kv_cache_tokens (the engine's memory) or "
    "trainer.micro_batch_tokens,\nrun fewer pipelines or workers at once, or give it more memory"
)
FORK_SERVER_GONE = 255
"""The exit code that a process seems to have when the process that had forked it is gone."""
FEW_PROCESSES = 200
"""Fewer than this may be too few for a small run on a machine with many cores, which starts threads for each."""
RECENT_S = 10.0
"""Seconds for which a kill for want of memory explains deaths: several processes may die of one."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_WORDS = tuple(os.strerror(each) for each in DISK_ERRORS)
MEMORY_WORDS = ("Cannot allocate memory", "can't allocate memory", "MemoryError")
PROCESS_WORDS = ("can't start new thread", "Resource temporarily unavailable")
NO_LIMIT = 1 << 60
"""Larger figures of a cgroup mean that there is none."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How much of something there is, and who says so."""

    amount: int
    source: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Reads what the kernel says, below these two folders. What it does not say is None or 0."""

    cgroups: Path = Path("/sys/fs/cgroup")
    proc: Path = Path("/proc")

    def memory(self) -> Limit | None:
        """The least of what this process's cgroups and the machine give it."""
        found = []
        for folder in self._folders("memory"):
            for name in ("memory.max", "memory.limit_in_bytes"):
                if (bytes_ := _number(folder / name)) is not None:
                    found.append(Limit(bytes_, "the memory limit of the container (its cgroup)"))
        for line in _lines(self.proc / "meminfo"):
            if line.startswith("MemTotal:"):
                found.append(Limit(int(line.split()[1]) << 10, "the memory of this machine"))
        return min(found, key=lambda limit: limit.amount, default=None)

    def memory_kills(self) -> int:
        """How many processes the kernel has killed for want of memory, in this cgroup or else on the machine."""
        for folder in self._folders("memory")[:1]:
            for name in ("memory.events", "memory.oom_control"):
                if (kills := _counted(folder / name, "oom_kill")) is not None:
                    return kills
        return _counted(self.proc / "vmstat", "oom_kill") or 0

    def processes(self) -> Limit | None:
        """The least of the limits on processes and threads."""
        found = []
        for folder in self._folders("pids"):
            if (most := _number(folder / "pids.max")) is not None:
                found.append(Limit(most, "pids.max of the container (Docker: --pids-limit)"))
        most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if most != resource.RLIM_INFINITY and os.getuid() != 0:
            found.append(Limit(most, "of this user, threads included; raise it with `ulimit -u`"))
        return min(found, key=lambda limit: limit.amount, default=None)

    def _folders(self, controller: str) -> list[Path]:
        """Of this process's cgroup and those around it, the innermost first. Within a container its own cgroup may be
        the outermost that can be seen, whatever its path is called."""
        for line in _lines(self.proc / "self" / "cgroup"):
            number, controllers, path = [*line.split(":", 2), "", ""][:3]
            if number == "0" and not controllers and (self.cgroups / "cgroup.controllers").exists():
                root = self.cgroups
            elif controller in controllers.split(","):
                root = self.cgroups / controller
            else:
                continue
            inner = root / path.lstrip("/")
            return [each for each in (inner, *inner.parents) if each.is_dir() and each.is_relative_to(root)]
        return []


class MemoryKills:
    """Notices when the kernel kills for want of memory."""

    def __init__(self, machine: Machine | None = None) -> None:
        self.machine = machine or Machine()
        self.count = self.machine.memory_kills()
        self.rose = float("-inf")

    def recent(self) -> bool:
        """Whether it has just killed: since the last look, or a moment ago."""
        count = self.machine.memory_kills()
        if count > self.count:
            self.rose = time.monotonic()
        self.count = count
        return time.monotonic() - self.rose < RECENT_S


_kills: list[MemoryKills] = []


def watch_memory(machine: Machine | None = None) -> None:
    """From now on kills are noticed; what was before is none of this run's."""
    _kills[:] = [MemoryKills(machine)]


def how_a_process_ended(name: str, code: int | None) -> str:
    """A line or more: by which signal, or with which exit code; and where memory ran out, how much there is."""
    if code == FORK_SERVER_GONE:
        said = f"{name} ended with the process from which all are forked, which was killed"
    elif code is not None and code < 0:
        said = f"{name} was ended by {signal.Signals(-code).name}"
    else:
        said = f"{name} ended with exit code {code}"
    if code in (-signal.SIGKILL, FORK_SERVER_GONE) and _kills and _kills[0].recent():
        return f"{said}: {out_of_memory(_kills[0].machine)}"
    if code not in (0, -signal.SIGKILL) and (limit := Machine().processes()) and limit.amount < FEW_PROCESSES:
        return f"{said}, maybe for want of processes or threads: there may be {limit.amount}, {limit.source}"
    return said


def out_of_memory(machine: Machine | None = None) -> str:
    limit = (machine or Machine()).memory()
    there = f"; there are {_size(limit.amount)}, {limit.source}" if limit else ""
    return f"{OUT_OF_MEMORY}{there}\n{LESS_MEMORY}"


def cause_of(error: BaseException, out: Path | None = None) -> str | None:
    """What the machine has too little of, where an error comes of that: a line, and what to do. `out`: the run."""
    cause: BaseException | None = error
    while cause is not None:
        said = (str(cause).strip().splitlines() or [""])[0]
        number = cause.errno if isinstance(cause, OSError) else None
        if number in DISK_ERRORS or any(words in said for words in DISK_WORDS):
            return full_disk(said, out)
        if number in (errno.EMFILE, errno.ENFILE):
            return (
                f"too many files are open: {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} may be at a time\n"
                "raise the limit with `ulimit -n`"
            )
        if number == errno.ENOMEM or isinstance(cause, MemoryError) or any(w in said for w in MEMORY_WORDS):
            return out_of_memory()
        if number == errno.EAGAIN or any(words in said for words in PROCESS_WORDS):
            return no_more_processes(said)
        cause = cause.__cause__
    return None


@contextmanager
def explained(out: Path) -> Iterator[None]:
    """An error inside that comes of too little of something is a JigsawError that says so."""
    try:
        yield
    except JigsawError:
        raise
    except Exception as error:
        if (cause := cause_of(error, out)) is None:
            raise
        raise JigsawError(cause) from error


def full_disk(said: str, out: Path | None) -> str:
    what = f"{out} cannot be written" if out else "a file cannot be written"
    return (
        f"the disk is full: {what} ({said})\n"
        f"make room; what was saved is kept, and {option('resume')} goes on from there"
    )


def cannot_start(error: Exception) -> str:
    """A process, by the one that forks them: that may have ended itself, which shows as an end of file."""
    if isinstance(error, EOFError | ConnectionError):
        if _kills and _kills[0].recent():
            return f"the process that forks all others was killed: {out_of_memory(_kills[0].machine)}"
        return no_more_processes("the process that forks them has ended")
    return cause_of(error) or f"another process cannot be started: {error}"


def cause_in(said: str) -> str | None:
    """As `cause_of`, of what another process says of its error: where it had no process or thread more to start."""
    return no_more_processes(said) if any(words in said for words in PROCESS_WORDS) else None


def no_more_processes(said: str) -> str:
    limit = Machine().processes()
    why = (
        f"there may be {limit.amount}, {limit.source}"
        if limit
        else f"{said}; look at `ulimit -u` and pids.max"
    )
    return (
        f"another process or thread cannot be started: {why}\na run needs a few for each worker and pipeline"
    )


def _size(amount: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:,.0f} {unit}"
        amount /= 1024
    return f"{amount:,.1f} GiB"


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().splitlines()
    return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    found = int(lines[0]) if lines and lines[0].isdigit() else None
    return found if found is not None and found < NO_LIMIT else None


def _counted(path: Path, name: str) -> int | None:
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None
