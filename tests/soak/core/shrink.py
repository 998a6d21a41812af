"""Makes a program shorter for as long as the same goes wrong in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from soak.core.driver import Wrong
from soak.core.program import Program
from soak.core.world import World

from jigsawrl.scheduler.invariants import InvariantViolated

STEPS = 5
"""Place of a pipeline's number of steps in the step of a program that lets it join."""


def what_goes_wrong(program: Program) -> str:
    """In a word, the same for what is the same; nothing if nothing does."""
    try:
        World(program).run()
    except InvariantViolated as error:
        return f"invariant {error.number}"
    except Wrong as wrong:
        return wrong.about
    except Exception as error:
        return type(error).__name__
    return ""


def shrunk(program: Program, seconds: float = 20.0) -> Program:
    """The shortest that is found in this time, by leaving out steps, parts of the longest first."""
    wrong, until = what_goes_wrong(program), time.monotonic() + seconds
    shorter: Program | None = program
    while shorter is not None:
        program = shorter
        shorter = next((each for each in _shorter(program, until) if what_goes_wrong(each) == wrong), None)
    return program


def _shorter(program: Program, until: float) -> Iterator[Program]:
    steps, size = program.steps, len(program.steps)
    while size >= 1:
        for first in range(0, len(steps), size):
            if time.monotonic() > until:
                return
            yield replace(program, steps=[*steps[:first], *steps[first + size :]])
        size //= 2
    for number, step in enumerate(steps):
        if time.monotonic() > until:
            return
        for simple in _simpler(step):
            yield replace(program, steps=[*steps[:number], simple, *steps[number + 1 :]])


def _simpler(step: list) -> Iterator[list]:
    if step[1] == "join" and step[STEPS] > 1:
        yield [*step[:STEPS], step[STEPS] - 1, *step[STEPS + 1 :]]
    if step[1] == "join" and step[4] != "synchronous":
        yield [*step[:4], "synchronous", *step[STEPS:]]
