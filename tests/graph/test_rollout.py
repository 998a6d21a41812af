"""A rollout's seconds follow from its lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cost import H100, QWEN, costs, pass_seconds

from jigsawrl.graph.cost import DecodeCost
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.outlook import Outlook
from jigsawrl.graph.rollout import decode_passes, rollout_seconds
from jigsawrl.graph.shape import PipelineShape

DECODE = DecodeCost(4e-3, 13e-6, 10e-9)

lengths_ = st.lists(st.integers(1, 400), min_size=1, max_size=40)


def by_hand(lengths: list[int], prompt: float) -> float:
    """Pass after pass."""
    seconds = 0.0
    for t in range(max(lengths)):
        active = sum(1 for each in lengths if each > t)
        seconds += pass_seconds(DECODE, active, prompt + t + 0.5)
    return seconds


@given(lengths_, st.integers(0, 500))
def test_all_at_once_is_the_sum_of_its_passes(lengths, prompt):
    passes = decode_passes(DECODE, np.array(lengths, float), prompt, None, 400)
    assert passes.seconds == pytest.approx(by_hand(lengths, prompt))
    assert passes.count == max(lengths)


@given(lengths_, st.integers(0, 500), st.integers(1, 20_000))
def test_a_small_cache_runs_every_token_and_never_makes_it_fewer_passes(lengths, prompt, held):
    free = decode_passes(DECODE, np.array(lengths, float), prompt, None, 400)
    tight = decode_passes(DECODE, np.array(lengths, float), prompt, held, 400)
    assert tight.count >= free.count - 1e-6
    assert tight.count <= sum(lengths) + 1e-6
    assert tight.entered >= len(lengths)
    assert tight.seconds >= 0.999 * free.seconds - DECODE.c * sum(lengths) * (prompt + 400)


def test_a_cache_for_one_sequence_runs_them_one_after_another():
    passes = decode_passes(DECODE, np.array([100.0, 200.0, 50.0]), 10, 1.0, 400)
    assert passes.count == 350
    assert passes.entered == 3


def test_sequences_that_outgrow_the_cache_give_way_and_come_again():
    passes = decode_passes(DECODE, np.full(64, 4000.0), 100, 64 * 1500, 4000)
    assert passes.entered > 64
    assert passes.count > 4000


def test_one_straggler_makes_a_rollout_long():
    usual = rollout_seconds(costs(), np.full(256, 200.0), 100, 4, 8000)
    straggling = rollout_seconds(costs(), np.array([200.0] * 255 + [8000.0]), 100, 4, 8000)
    assert straggling > usual + 7800 * DECODE.a


def test_tools_make_the_batch_wait_after_every_turn_but_the_last():
    at_once = rollout_seconds(costs(), np.full(64, 300.0), 100, 4, 8000, turns=3)
    waiting = rollout_seconds(costs(), np.full(64, 300.0), 100, 4, 8000, turns=3, tool_seconds=20)
    assert waiting == pytest.approx(at_once + 40, abs=0.5)


def test_more_engines_share_the_sequences():
    shape = PipelineShape("a", QWEN, 1024, 1, 100, 8000)
    outlook, lengths = Outlook(shape, costs(), H100, Forecast((), 8000)), np.full(1024, 500.0)
    (one,), four = outlook.engines(lengths, 1, 4), outlook.engines(lengths, 4, 4)
    assert max(each.seconds for each in four) < one.seconds / 2


def test_a_fixed_part_is_added_once():
    plain = rollout_seconds(costs(), np.array([10.0]), 5, 4, 10)
    fixed = rollout_seconds(replace(costs(), rollout_fixed_seconds=3.0), np.array([10.0]), 5, 4, 10)
    assert fixed == pytest.approx(plain + 3)
