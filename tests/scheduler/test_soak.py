"""About a minute of `make soak` for the scheduler core, and what the soak has found before."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak.core.__main__ import report, soaked
from soak.core.program import ANYTHING, FAULTS, draw_program, read_program
from soak.core.shrink import what_goes_wrong
from soak.core.world import COUNTED

SECONDS = 50.0
"""With its start, and the last worlds, a minute."""
WORLDS = 1100
"""Of each process at most, so that fast machines test no more than was tested before: `make soak` goes on."""
EVENTS = 100_000 / (2 * 60)
"""That change something, in a second of a core at least: 100,000 in a minute on two."""
SELDOM = {
    "covered": {"jigsaw", "concurrent", ANYTHING},
    "action Migrate": {"jigsaw", ANYTHING},
    "action Pause": {"jigsaw", "rlix", ANYTHING},
    "action Resume": {"jigsaw", "rlix", ANYTHING},
    "action Resize": {"jigsaw", "concurrent", "rollout-mux", "greedy", ANYTHING},
    "action Confine": {ANYTHING},
    "action Wait": {ANYTHING},
}
"""What only some policies bring about."""
HAPPENS = (
    "clock on",
    "clock back",
    "join",
    "message twice",
    "late message of processes that are gone",
    "lost message",
)


def enough(events: int) -> int:
    """How often everything happens under every policy at least, where there is the time for it."""
    return min(100, events // 3000)


FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))


@pytest.mark.slow
@pytest.mark.alone
def test_whatever_happens_all_invariants_hold_and_all_work_ends() -> None:
    found = soaked(SECONDS, seed=36, most=WORLDS)
    print(report(found))
    assert not found.wrong, found.wrong
    assert found.changes / found.seconds >= EVENTS, report(found)
    for policy, seen in found.seen.items():
        few = {
            what: seen[what] for what in (*COUNTED, *FAULTS, *HAPPENS) if seen[what] < enough(found.changes)
        }
        assert not few, f"{policy} has seen too little of {few}"
        missing = {what for what, policies in SELDOM.items() if policy in policies and not seen[what]}
        assert not missing or found.changes < 100_000, f"{policy} has never seen {missing}"


@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.stem)
def test_what_was_found_once_stays_mended(file: Path) -> None:
    assert not what_goes_wrong(read_program(file.read_text()))


def test_a_program_is_read_as_it_was_written() -> None:
    for seed in range(20):
        program = draw_program(seed)
        assert read_program(program.written()) == program
