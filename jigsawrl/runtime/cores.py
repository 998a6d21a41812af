"""Workers of a CPU machine: sets of cores, and processes pinned to them.

A share is a number of a worker's cores. Where a worker has but one, those on it take turns, as the kernel has it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress

from jigsawrl.errors import JigsawError


def split_cores(workers: int) -> list[tuple[int, ...]]:
    """The cores of each worker, as evenly as can be; a JigsawError if there are not enough."""
    cores = sorted(os.sched_getaffinity(0))
    if workers > len(cores):
        raise JigsawError(
            f"workers: {workers} are asked for, and there are {len(cores)} cores; set workers to at most that"
        )
    size = len(cores) // workers
    return [tuple(cores[i * size : (i + 1) * size]) for i in range(workers)]


def pin(pid: int, cores: Iterable[int]) -> None:
    """Every thread of a process to these cores; nothing where it is gone."""
    chosen = set(cores)
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                os.sched_setaffinity(int(task), chosen)


class Threads:
    """A pinned process's side: as many threads as it has cores, at most `most`, from the next thing on.

    More than that wait for each other in turns: a small forward with two threads on one core took 67 times as long.
    """

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self) -> bool:
        """Nobody needs room that its engine would have to leave."""
        self.adapt()
        return False

    def adapt(self) -> None:
        import torch

        threads = min(len(os.sched_getaffinity(0)), self.most)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)


def part_of(cores: Sequence[int], share: float, offset: int) -> tuple[int, ...]:
    """A share of a worker's cores, at least one; `offset` cores are somebody else's."""
    count = max(1, round(share * len(cores)))
    start = min(offset, len(cores) - count)
    return tuple(cores[start : start + count])


def stand(pid: int, still: bool) -> None:
    """It stands still where it is, or goes on."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP if still else signal.SIGCONT)
