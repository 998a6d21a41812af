"""A batch that decodes: the curve against passes counted one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.graph.cost import DecodeCost
from jigsawrl.graph.decode import DecodeCurve

COST = DecodeCost(a=4e-3, b=1.3e-5, c=1e-8)

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=40)


def by_hand(remaining: list[int], context: float, passes: float) -> float:
    seconds = 0.0
    for t in range(int(passes)):
        active = [r for r in remaining if r > t]
        seconds += COST.a + COST.b * len(active) + COST.c * sum(context + t + 0.5 for _ in active)
    return seconds


@given(remaining=lengths)
def test_its_time_is_the_sum_of_its_passes(remaining: list[int]) -> None:
    curve = DecodeCurve.of(np.array(remaining, float), np.full(len(remaining), 100.0), COST)
    assert curve.total == pytest.approx(by_hand(remaining, 100.0, max(remaining)))
    assert curve.tokens == sum(remaining)


@given(remaining=lengths, part=st.floats(0, 1))
def test_stopping_and_going_on_takes_as_long(remaining: list[int], part: float) -> None:
    curve = DecodeCurve.of(np.array(remaining, float), np.full(len(remaining), 50.0), COST)
    stop = round(part * max(remaining))
    left, behind = curve.after(stop)
    rest = DecodeCurve.of(left, behind, COST)
    assert by_hand(remaining, 50.0, stop) + rest.total == pytest.approx(curve.total)
    assert len(left) == curve.active_at(stop)


@given(remaining=lengths, seconds=st.floats(0, 2))
def test_time_and_passes_are_two_views_of_one_thing(remaining: list[int], seconds: float) -> None:
    curve = DecodeCurve.of(np.array(remaining, float), np.full(len(remaining), 50.0), COST)
    within = min(seconds, curve.total)
    assert curve.seconds_at(curve.passes_at(within)) == pytest.approx(within, abs=1e-9)


def test_the_tail_starts_where_the_fixed_cost_outweighs_the_rest() -> None:
    rng = np.random.default_rng(0)
    curve = DecodeCurve.of(np.ceil(rng.lognormal(6, 1, 1024)), np.full(1024, 300.0), COST)
    start = curve.tail_start()
    active = curve.active_at(start)
    assert 0 < start < curve.remaining[-1]
    assert 64 < active < 256, "the papers find 128 of 1,024"
    context = float((curve.context[curve.remaining > start] + start).mean())
    assert active == pytest.approx(COST.knee(context), rel=0.1)


def test_a_small_batch_is_a_tail_from_its_first_token() -> None:
    assert DecodeCurve.of(np.full(8, 100.0), np.full(8, 10.0), COST).tail_start() == 0.0
