"""In the path of a process: it believes in one core more than there are. In truth that is the last one, once more."""

import os
from collections.abc import Iterable

_get, _set = os.sched_getaffinity, os.sched_setaffinity
_LAST = max(_get(0))


def _believed(pid: int) -> set[int]:
    there = _get(pid)
    return there | {_LAST + 1} if _LAST in there else there


def _meant(pid: int, cores: Iterable[int]) -> None:
    _set(pid, {min(core, _LAST) for core in cores})


os.sched_getaffinity, os.sched_setaffinity = _believed, _meant
