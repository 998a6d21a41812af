"""CPU threads that follow the load: as many as there are cores which other processes leave free.

The threads of one process wait for each other after every operator. Where another process runs on the core of one of
them, all wait until the kernel lets that thread go on, which takes milliseconds, hundreds of times in a pass. Beside
four busy processes on two cores a model of 10M parameters generated 290 tokens a second with one thread, 170 with
two, and fewer than 10 with two that spin while they wait, which is what libgomp's threads do if nobody tells them
otherwise (`jigsawrl/processes.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig

WINDOW_S = 0.5
"""Shortest time over which the load is measured; the kernel counts in hundredths of a second."""
STAT = Path("/proc/stat")
WAITING = (3, 4)
"""Columns of a core's line in /proc/stat that count time without work: idle, and idle while a disk was busy."""
COUNTED = 8
"""Columns of that line that add up to the time; guests, which come after them, are counted in the first two."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds since some moment in the past; those of cores are summed over the cores that this process may use."""

    cores: int
    total: float
    idle: float
    own: float
    """Of this process, on whichever cores."""


def read_cpu_times() -> CpuTimes | None:
    """None where the kernel does not tell."""
    usable = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    columns: list[list[int]] = []
    with suppress(OSError, ValueError):
        for line in STAT.read_text().splitlines():
            name, *ticks = line.split()
            if name in usable:
                columns.append([int(each) for each in ticks[:COUNTED]])
    if len(columns) < len(usable) or any(len(each) < COUNTED for each in columns):
        return None
    second = os.sysconf("SC_CLK_TCK")
    return CpuTimes(
        cores=len(columns),
        total=sum(map(sum, columns)) / second,
        idle=sum(each[column] for each in columns for column in WAITING) / second,
        own=time.process_time(),
    )


def free_cores(before: CpuTimes, after: CpuTimes) -> float | None:
    """Cores that this process had or could have had between two readings; None where no time has passed."""
    total = after.total - before.total
    if total <= 0 or before.cores != after.cores:
        return None
    mine = (after.idle - before.idle) + (after.own - before.own)
    return after.cores * min(1.0, mine / total)


class LoadAwareThreads:
    """Sets torch's threads in this process to the number of free cores, at least one and at most `most`.

    Whoever computes calls `adapt` between two passes; most calls return at once.
    """

    def __init__(self, most: int, read: Callable[[], CpuTimes | None]) -> None:
        self.most = most
        self.read = read
        self.before = read()
        self.due = time.monotonic() + WINDOW_S

    def adapt(self) -> None:
        if self.most == 1 or self.before is None or time.monotonic() < self.due:
            return
        now = self.read()
        free = None if now is None else free_cores(self.before, now)
        if free is not None:
            threads = max(1, min(self.most, round(free)))
            if threads != torch.get_num_threads():
                torch.set_num_threads(threads)
        self.before, self.due = now or self.before, time.monotonic() + WINDOW_S

    def __call__(self) -> bool:
        """Between two things that an actor's process does; no other actor needs room that its engine would leave."""
        self.adapt()
        return False


def load_aware_threads(config: RunConfig, device: str) -> LoadAwareThreads | None:
    """Those of an actor that is alone on its worker; None where their number is fixed, or where a GPU computes."""
    fixed = config.thread_limit is not None or config.rollout.backend != "jigsaw"
    return None if fixed or device != "cpu" else LoadAwareThreads(most_threads(config), read_cpu_times)


def most_threads(config: RunConfig) -> int:
    """Threads of each of a run's ranks where they have this process's cores to themselves."""
    return config.thread_limit or max(1, len(os.sched_getaffinity(0)) // max(config.workers, config.gang))
