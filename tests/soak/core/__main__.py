"""Worlds drawn from a seed, one after the other, in two processes, until the time is over.

    PYTHONPATH=tests python -m soak.core --minutes 1 --seed 7

In each, drivers, actors and workers die and return, messages come late, twice, out of order between senders or never,
clocks jump, and pipelines of every kind are submitted, paused, resumed and cancelled, under any policy. What goes
wrong is shown with its seed and as the shortest program that was found in which the same goes wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from soak.core.program import draw_program
from soak.core.shrink import shrunk, what_goes_wrong
from soak.core.world import COUNTED, World

PROCESSES = 2
APART = 1_000_000_000
"""Between the seeds of the first world of two soaks."""


@dataclass(slots=True)
class Found:
    """What a process has seen."""

    worlds: int = 0
    seconds: float = 0.0
    """Of a core."""
    seen: dict[str, Counter[str]] = field(default_factory=dict)
    """By policy, how often."""
    wrong: str = ""

    @property
    def changes(self) -> int:
        """Events that changed something."""
        return sum(count for seen in self.seen.values() for what, count in seen.items() if what in COUNTED)

    def add(self, other: Found) -> None:
        self.worlds += other.worlds
        self.seconds += other.seconds
        self.wrong = self.wrong or other.wrong
        for policy, seen in other.seen.items():
            self.seen.setdefault(policy, Counter()).update(seen)


def soak(first: int, until: float, most: int) -> Found:
    """Every second world from this seed on, this many at most."""
    found, began = Found(), time.process_time()
    while time.time() < until and found.worlds < most and not found.wrong:
        program = draw_program(first + PROCESSES * found.worlds)
        world = World(program)
        try:
            world.run()
        except Exception as error:
            wrong = what_goes_wrong(program)
            short = shrunk(program)
            found.wrong = (
                f"seed {program.seed}: {type(error).__name__}: {error}\n"
                f"{wrong or 'not when it is run again'}; {len(short.steps)} steps are enough:\n{short.written()}"
            )
        found.worlds += 1
        found.seen.setdefault(program.policy, Counter()).update(world.seen)
    found.seconds = time.process_time() - began
    return found


def soaked(seconds: float, seed: int, most: int = sys.maxsize) -> Found:
    """What all processes have seen in this time, their start included; each of this many worlds at most."""
    until = time.time() + seconds
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        each = pool.starmap(soak, [(APART * seed + number, until, most) for number in range(PROCESSES)])
    total = Found()
    for found in each:
        total.add(found)
    return total


def report(found: Found) -> str:
    total: Counter[str] = sum(found.seen.values(), Counter())
    lines = [
        f"{found.worlds} worlds, {found.changes} events that changed something, {found.seconds:.0f} s of a core"
    ]
    for what, count in sorted(total.items()):
        least, policy = min((seen[what], name) for name, seen in found.seen.items())
        lines.append(f"{count:9}  {what} (at least {least} with {policy})")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(f"worlds, seed {given.seed}, {given.minutes:g} minutes", flush=True)
    found = soaked(60 * given.minutes, given.seed)
    print(report(found))
    if found.wrong:
        print(found.wrong)
    print(f"again: PYTHONPATH=tests python -m soak.core --minutes {given.minutes:g} --seed {given.seed}")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
