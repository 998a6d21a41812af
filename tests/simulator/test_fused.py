"""Pipelines on one frozen base decode in one batch: they hardly disturb each other."""

from __future__ import annotations

import pytest
from graph.planning import WORKER, job
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.graph.interference import FUSED, H200, Interference, speeds_with_fused
from jigsawrl.policies.named import POLICIES
from jigsawrl.simulator.simulation import Simulation

FOUR = ("a", "b", "c", "d")


def makespan(base: str, policy: str = "jigsaw") -> float:
    jobs = [job(name, prompts=4, median=1500.0, seed=number, base=base) for number, name in enumerate(FOUR)]
    return Simulation(POLICIES[policy], jobs, WORKER, 1, H200).run().seconds


@pytest.mark.parametrize("policy", ["jigsaw", "concurrent"])
def test_rollouts_on_one_base_are_done_sooner_than_on_their_own(policy: str) -> None:
    assert makespan("shared", policy) < 0.85 * makespan("", policy)


def even(mix: tuple[float, ...]) -> list[float]:
    return [1 / len(mix)] * len(mix)


@given(st.lists(st.sampled_from(["", "x", "y"]), min_size=1, max_size=6))
def test_those_of_one_base_count_as_one(bases: list[str]) -> None:
    speeds = speeds_with_fused([1.0] * len(bases), bases, lambda batch: batch[0], even)
    others = len({base or n for n, base in enumerate(bases)})
    for base, speed in zip(bases, speeds, strict=True):
        mates = bases.count(base) - 1 if base else 0
        assert speed == pytest.approx(FUSED**mates / others)


def test_one_that_shares_with_nobody_is_as_if_nothing_were_shared() -> None:
    table: Interference = H200
    alone = [job("a", base="mine"), job("b", seed=1, base="other")]
    apart = [job("a"), job("b", seed=1)]
    found = [Simulation(POLICIES["jigsaw"], each, WORKER, 2, table).run().seconds for each in (alone, apart)]
    assert found[0] == found[1]
