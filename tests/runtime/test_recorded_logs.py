"""Runs that were recorded by an earlier version of the code can still be replayed: `tests/fixtures/record.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures import logs

from jigsawrl.telemetry.logreader import read_run

TOGETHER = (
    "jigsaw started one of the phases that had waited for long at a time, and starts all of them together"
)
IN_TURNS = "in pools whose workers are merely divided, phases take turns under jigsaw where that ends sooner"
EARLIER_WAIT = (
    "a wait that ends at once is none, and shares add up to one at most: the policy of the test keeps to that"
)
EXPECTED_DIFFERENCES: dict[str, tuple[int, str]] = {
    "jigsaw": (1, TOGETHER),
    "jigsaw-asked": (1, TOGETHER),
    "jigsaw-of-four": (4, TOGETHER),
    "jigsaw-as-on-h200s": (1, TOGETHER),
    "learned-as-on-h200s": (1, TOGETHER),
    "jigsaw-with-two-cores-a-worker": (4, TOGETHER),
    "tails-migrated": (1, TOGETHER),
    "rollouts-gathered": (3, EARLIER_WAIT),
    "auto-continue-on-one-core": (1, TOGETHER),
    "driver-killed": (1, TOGETHER),
    "actor-killed": (1, TOGETHER),
    "worker-broken": (1, TOGETHER),
    "nothing-to-train-on": (1, TOGETHER),
    "tight-memory-driver-killed": (1, TOGETHER),
    "pools-jigsaw": (6, IN_TURNS),
    "pools-actor-killed": (2, IN_TURNS),
    "all-paused-now-and-then": (5, EARLIER_WAIT),
    "shared-lora-actor-killed": (2, TOGETHER),
    "told-while-running": (1, TOGETHER),
    "resumed-with-fewer-workers": (2, TOGETHER),
    "two-ranks": (1, TOGETHER),
    "two-ranks-on-one-worker": (1, TOGETHER),
}
"""Decisions of recorded runs that the code of today takes otherwise, on purpose: how many, and why."""


def test_every_recorded_run_is_listed_and_every_listed_one_recorded() -> None:
    packed = {path.name.removesuffix(".tar.gz") for path in logs.FOLDER.iterdir()}
    assert packed == logs.HOLDS.keys()
    assert EXPECTED_DIFFERENCES.keys() <= packed


@pytest.mark.parametrize("name", logs.HOLDS)
def test_a_recorded_run_replays_with_the_decisions_that_were_taken(name: str, tmp_path: Path) -> None:
    if logs.sums_differ(name, tmp_path):
        pytest.skip("from Python 3.12 on sum() rounds otherwise: ties may be broken otherwise")
    decisions = logs.replay(name, tmp_path)
    taken = [each for each in logs.events_of(tmp_path) if each["event"] == "action"]
    assert sum(len(each.was) for each in decisions) == len(taken) > 0
    others = [each for each in decisions if not each.same]
    assert len(others) == EXPECTED_DIFFERENCES.get(name, (0, ""))[0], others[:1]


@pytest.mark.parametrize("name", logs.HOLDS)
def test_a_recorded_run_shows_what_its_name_says_and_can_be_read(name: str, tmp_path: Path) -> None:
    run = logs.unpack(name, tmp_path)
    log = logs.events_of(tmp_path)
    assert logs.HOLDS[name](log)
    actions = [each["action"] for each in log if each["event"] == "action"]
    assert read_run(run).actions.total() == len(actions)


@pytest.mark.parametrize("name", [name for name in logs.HOLDS if name not in EXPECTED_DIFFERENCES])
def test_phases_of_a_recorded_run_are_predicted_to_take_what_they_were(name: str, tmp_path: Path) -> None:
    if logs.sums_differ(name, tmp_path):
        pytest.skip("from Python 3.12 on sum() rounds otherwise")
    now = logs.replayed_predictions(name, tmp_path)
    before = logs.logged_predictions(logs.events_of(tmp_path))
    assert now.keys() == before.keys()
    for phase, seconds in before.items():
        assert now[phase] == pytest.approx(seconds, rel=1e-9), phase
