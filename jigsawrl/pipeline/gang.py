"""What several workers answer, heard in whatever order they say it: the first failure ends all of them.

Whoever waits for one worker after the other waits for ever where a later one has failed: the earlier ones wait for
it, in a collective or where they were to meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from jigsawrl.pipeline.actor_process import CLOSE_S, ActorDied, ProcessHandle


def answers(
    handles: Sequence[ProcessHandle], beside: Mapping[Connection, Callable[[], object]] | None = None
) -> list[Any]:
    """What each of them answers, in their order. Raises the first failure, and kills the processes of all before, but
    for those that somebody else looks after.

    `beside`: others that are listened to meanwhile, and what is called when they say something.
    """
    beside = beside or {}
    left = list(handles)
    while left:
        sources = [source for handle in left for source in handle.sources()]
        ready = wait([*sources, *beside])
        failures: list[Exception] = []
        for handle in list(left):
            if any(source in ready for source in handle.sources()):
                try:
                    if handle.hears():
                        left.remove(handle)
                except Exception as error:
                    failures.append(error)
        if failures:
            for handle in handles:
                handle.kill()
            raise first_cause(failures)
        for other in ready:
            if other in beside:
                beside[other]()  # type: ignore[index]
    return [handle.take_answer() for handle in handles]


def first_cause(failures: Sequence[Exception]) -> Exception:
    """Of those that were heard of at once: whoever lost a connection lost it to somebody who died."""
    return next((each for each in failures if isinstance(each, ActorDied)), failures[0])


def close_all(handles: Iterable[ProcessHandle]) -> None:
    """They end by themselves when their pipes close; those that do not, are killed."""
    handles = list(handles)
    for handle in handles:
        handle.pipe.close()
    deadline = time.monotonic() + CLOSE_S
    for handle in handles:
        handle.end(max(0.0, deadline - time.monotonic()))
