"""Costs fit what was measured, and are never absurd."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.graph.cost import Costs, DecodeCost, LinearCost
from jigsawrl.graph.fitting import fit_decode, fit_linear, linear_prior, nonnegative
from jigsawrl.graph.hardware import HARDWARE, hardware_named
from jigsawrl.graph.known_models import model_named

H100 = HARDWARE["h100"]
QWEN = model_named("qwen3-4b", "")


def pass_seconds(cost: DecodeCost, sequences: float, length: float) -> float:
    return cost.a + cost.b * sequences + cost.c * sequences * length


def costs() -> Costs:
    return Costs(
        model=QWEN,
        hardware=H100,
        gpus=4,
        tp=4,
        decoding=DecodeCost(4e-3, 13e-6, 10e-9, 0.05),
        prefilling=LinearCost(8e-3, 6e-6, 1e-10),
        logprob=LinearCost(5, 8e-6, 1e-10),
        ref=LinearCost(7, 8e-6, 1e-10),
        grad=LinearCost(0, 3e-5, 4e-10),
        optim=15.0,
        sync=2.0,
        errors={"gen": 0.05},
    )


def test_passes_with_warm_up_outliers_give_their_coefficients():
    rng = np.random.default_rng(0)
    batch = rng.integers(1, 800, 2000).astype(float)
    length = rng.uniform(100, 6000, 2000)
    seconds = (4e-3 + 12e-6 * batch + 11e-9 * batch * length) * rng.lognormal(0, 0.05, 2000)
    seconds[:100] *= rng.uniform(3, 300, 100)
    fitted = fit_decode(batch, length, seconds, DecodeCost(2e-3, 5e-6, 5e-9))
    assert fitted.a == pytest.approx(4e-3, rel=0.1)
    assert fitted.b == pytest.approx(12e-6, rel=0.1)
    assert fitted.c == pytest.approx(11e-9, rel=0.1)
    assert 0.03 < fitted.error < 0.1


def test_two_steps_of_nearly_the_same_size_do_not_give_an_absurd_line():
    prior = linear_prior(QWEN, H100, 4, 1, 0.35, 6.0)
    tokens, lengths = np.array([1.40e6, 1.41e6]), np.array([1400.0, 1410.0])
    fitted = fit_linear(prior, tokens, lengths, np.array([17.0, 15.0]))
    assert fitted.seconds(1.4e6, 1400) == pytest.approx(16, rel=0.1)
    assert fitted.seconds(2.8e6, 2800) < 2.4 * fitted.seconds(1.4e6, 1400)
    assert fitted.seconds(0, 0) < 16


def test_no_measurement_leaves_the_prior():
    prior, none = linear_prior(QWEN, H100, 4, 1, 0.35, 6.0), np.zeros(0)
    assert fit_linear(prior, none, none, none) == prior
    assert fit_decode(none, none, none, DecodeCost(1, 2, 3)) == DecodeCost(1, 2, 3)


@given(st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=3, max_size=12))
def test_no_coefficient_is_ever_negative(rows):
    table = np.array(rows)
    assert (nonnegative(table[:, :3], table[:, 3]) >= 0).all()


def test_the_knee_is_where_half_of_a_pass_is_fixed():
    decode = DecodeCost(4e-3, 13e-6, 10e-9)
    knee = decode.knee(1000)
    assert pass_seconds(decode, knee, 1000) == pytest.approx(2 * decode.a, rel=0.01)
    assert decode.knee(8000) < knee


def test_wider_training_divides_tokens_but_not_what_is_fixed():
    four, eight = (
        costs().token_pass_seconds("logprob", 1e6, 1000, 4),
        costs().token_pass_seconds("logprob", 1e6, 1000, 8),
    )
    assert eight - 5 == pytest.approx((four - 5) / 2)
    assert costs().optim_seconds(8) == 7.5


def test_state_kept_on_hosts_is_fetched_by_every_worker_in_part():
    offloaded = replace(costs(), offloaded=True)
    assert costs().swapped("ref", 4) == costs().swapped("optim", 4) == 0
    assert offloaded.swapped("ref", 4) == 7
    assert offloaded.swapped("ref", 8) == 3.5
    assert 14.9 < offloaded.swapped("optim", 4) < 15
    four, eight = (
        offloaded.token_pass_seconds("logprob", 1e6, 1000, 4),
        offloaded.token_pass_seconds("logprob", 1e6, 1000, 8),
    )
    assert eight == pytest.approx(four / 2)


def test_one_worker_decodes_as_the_roofline_says():
    alone = costs().decode(1)
    reading = QWEN.weight_bytes / (H100.memory_bandwidth * 0.9)
    assert alone.a == pytest.approx(1.3e-3 + reading)
    assert (alone.b, alone.c) == pytest.approx((4 * 13e-6, 4 * 10e-9))
    assert alone.a > costs().decode(2).a > 0
    assert alone.error > costs().decoding.error


def test_other_hardware_is_slower_where_it_has_less_and_says_that_it_was_derived():
    here, there = costs(), costs().on(hardware_named("H20"))
    assert there.derived
    assert not here.derived
    assert "roofline" in there.source
    assert there.token_pass_seconds("grad", 1e6, 1000, 4) == pytest.approx(
        here.token_pass_seconds("grad", 1e6, 1000, 4) * 989 / 148
    )
    assert pass_seconds(there.decode(4), 1, 4000) < pass_seconds(here.decode(4), 1, 4000)
    assert there.decode(4).b > here.decode(4).b
    assert here.on(H100) is here


def test_a_larger_model_costs_more_everywhere():
    small, large = costs(), costs().of(model_named("qwen3-32b", ""))
    assert pass_seconds(large.decode(4), 16, 1000) > pass_seconds(small.decode(4), 16, 1000)
    assert large.token_pass_seconds("grad", 1e6, 1000, 4) > 5 * small.token_pass_seconds("grad", 1e6, 1000, 4)
    assert large.kv_tokens is None
    assert large.derived
