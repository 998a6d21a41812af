"""Rule 4: multiplexing never changes what is learned."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixes import CALC, STEPS, SUMS, Results, assert_nothing_is_left, events, result, run_here, write_mix

from jigsawrl.api import launch
from jigsawrl.config.runfile import validated
from jigsawrl.policies.named import POLICIES
from jigsawrl.telemetry.progress import Progress


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_pipeline_learns_the_same_alone_and_beside_another(
    policy: str, alone: Results, tmp_path: Path
) -> None:
    outcome = run_here(write_mix(tmp_path, policy, a=SUMS, b=CALC), tmp_path / "out")
    assert [(each.how, each.steps) for each in outcome.pipelines] == [("finished", STEPS)] * 2
    assert {name: result(tmp_path / "out" / name) for name in "ab"} == alone
    assert events(tmp_path / "out", "died") == []
    assert_nothing_is_left(tmp_path / "out")


@pytest.mark.slow
def test_alone_without_any_scheduler_it_learns_the_same_on_as_many_workers(
    alone: Results, tmp_path: Path
) -> None:
    """On another number of them gradients are added in another order: the claim is of as many."""
    with Progress(json=True) as progress:
        launch(validated({"name": "a", "workers": 2, **SUMS}), tmp_path / "out", False, progress)
    assert result(tmp_path / "out") == alone["a"]
