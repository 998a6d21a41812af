"""Cases that were simulated before the scheduler core existed end about as they did: `tests/fixtures/record.py`.

That simulator knew of every sub-stage how it stood, and learned nothing but lengths. Now a policy believes what
drivers report and what was learned from them, as in a real run. So what follows from predictions may differ from case
to case, and on the whole does not.
"""

from __future__ import annotations

import sys
from math import log
from statistics import fmean

import pytest
from fixtures import simulated

from jigsawrl.policies.named import POLICIES

CASES = simulated.recorded()
UNPREDICTED = ("serial", "concurrent")
"""Policies that predict nothing."""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="sum() rounds otherwise: ties may be broken otherwise"
)
def test_recorded_cases_take_about_the_same_time(policy: str) -> None:
    cases = [case for case in CASES if case["policy"] == policy]
    assert len(cases) == simulated.PER_POLICY
    ratios = [simulated.played(case)["seconds"] / case["seconds"] for case in cases]
    if policy in UNPREDICTED:
        assert ratios == pytest.approx([1.0] * len(ratios), rel=0.005)
    assert all(0.8 < ratio < 1.2 for ratio in ratios), ratios
    assert abs(fmean(log(ratio) for ratio in ratios)) < 0.04, ratios


def test_recorded_cases_have_pools_lost_workers_and_every_kind_of_action() -> None:
    assert {case["rollout_workers"] is None for case in CASES} == {True, False}
    assert {failure[2] is None for case in CASES for failure in case["failures"]} == {True, False}
    kinds = {action[1] for case in CASES for action in case["actions"]}
    assert kinds >= {"start", "migrate", "resize", "pause", "resume", "confine"}
