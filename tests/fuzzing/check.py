"""Judges one case of a target: accepted, refused in a clear message, or a failure."""

from __future__ import annotations

import random
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jigsawrl.errors import JigsawError

Case = Callable[[], object]
Target = Callable[[random.Random, Path], Case]

CPU_SECONDS = 30.0
"""Of one case at most, far above what any takes. CPU time, so that a busy machine changes nothing."""
SECONDS = 600.0
"""Of one case at most, waiting included: long enough for a machine that is busy with much else."""
LONGEST_LINE = 2000


class TooLong(BaseException):
    """A case that takes too long; no `except Exception` on its way swallows it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a case ended; `why` holds the message of a refusal, or what is wrong."""

    ended: Literal["accepted", "refused", "failed"]
    why: str = ""


def judge(target: Target, seed: str, folder: Path) -> Verdict:
    """Runs the case of this seed in an empty folder."""
    try:
        with limited():
            target(generator(target, seed), folder)()
    except JigsawError as error:
        problem = message_problem(str(error))
        return (
            Verdict("failed", f"{problem}: {str(error)[:2000]!r}")
            if problem
            else Verdict("refused", str(error))
        )
    except TooLong as error:
        return Verdict("failed", f"took too long\n{''.join(traceback.format_tb(error.__traceback__)[-8:])}")
    except (Exception, SystemExit):
        return Verdict("failed", traceback.format_exc(limit=-8))
    return Verdict("accepted")


def generator(target: Target, seed: str) -> random.Random:
    """The randomness of a case: the same for the same target and seed, on every machine."""
    return random.Random(f"{target.__name__} {seed}")


def message_problem(message: str) -> str | None:
    """What is wrong with a message; None where it has one to three readable lines."""
    lines = message.split("\n")
    if not 1 <= len(lines) <= 3:
        return f"the message has {len(lines)} lines"
    if any(not line.strip() for line in lines):
        return "the message has an empty line"
    if max(map(len, lines)) > LONGEST_LINE:
        return "the message has an endless line"
    if any(not (char.isprintable() or char == "\n") for char in message):
        return "the message holds control characters"
    return None


@contextmanager
def limited() -> Iterator[None]:
    """TooLong is raised where what is inside takes longer than a case may."""

    watching = True

    def stop(number: int, frame: Any) -> None:
        nonlocal watching
        if watching:
            watching = False
            raise TooLong

    timers = (
        (signal.ITIMER_PROF, signal.SIGPROF, CPU_SECONDS),
        (signal.ITIMER_REAL, signal.SIGALRM, SECONDS),
    )
    before = [signal.signal(number, stop) for _, number, _ in timers]
    try:
        try:
            for timer, _, seconds in timers:
                signal.setitimer(timer, seconds)
            yield
        finally:
            watching = False
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
