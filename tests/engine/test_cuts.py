"""However contexts are cut for attention, all of them are read, within the scratch space, by a chip that is busy."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.engine.cuda.cuts import ALONE, LIGHT, LIGHT_MOST, MOST_SPLITS, SLACK, Cut, cut_for
from jigsawrl.model.spec import ModelSpec, spec_from_config
from jigsawrl.model.tiny import tiny_config

PROCESSORS = 132
SMALL = spec_from_config(tiny_config(layers=2, hidden=1536, heads=12, kv_heads=2), Path("small"))
NARROW = replace(SMALL, head_dim=64, heads=24)


def cut(contexts: list[int], spec: ModelSpec = SMALL, most: int = MOST_SPLITS, streams: bool = True) -> Cut:
    return cut_for(contexts, spec, PROCESSORS, most, streams)


def parts(context: int, how: Cut) -> list[int]:
    """Their tokens, as the kernel cuts them."""
    length = max(ceil(ceil(context / how.splits) / how.tile) * how.tile, how.part)
    return [min(length, context - start) for start in range(0, context, length)]


def is_light(how: Cut) -> bool:
    """Several fit beside each other on every processor."""
    return how.streamed and (how.tile, how.stages) == LIGHT


@given(
    st.lists(st.integers(1, 32_768), min_size=1, max_size=64),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([64, 128]),
    st.sampled_from([1, 3, 16, 64, 4096]),
)
def test_every_token_is_in_a_part_and_every_part_has_its_place(contexts, kv_heads, head_dim, most):
    how = cut(contexts, replace(SMALL, kv_heads=kv_heads, head_dim=head_dim), most)
    for context in contexts:
        assert sum(parts(context, how)) == context
        assert len(parts(context, how)) <= how.splits <= most
    while how.splits % 2 == 0:
        how = replace(how, splits=how.splits // 2)
    assert how.splits == 1 or (how.splits == 3 and how.streamed), "few kinds, and what the kernels can add up"
    assert how.part % 64 == 0


@given(st.integers(1, 64), st.integers(1, 20_000), st.sampled_from([SMALL, NARROW]))
def test_even_contexts_are_all_read_at_once(batch, context, spec):
    how = cut([context] * batch, spec)
    ring = 2 * 2 * how.tile * how.stages * spec.head_dim
    fitting = min(LIGHT_MOST, (227 << 10) // ring) if how.streamed else 1
    assert len(parts(context, how)) * batch * spec.kv_heads <= max(SLACK, fitting) * PROCESSORS


@pytest.mark.parametrize("batch", [16, 32, 64, 128])
def test_a_long_context_among_short_ones_does_not_keep_the_chip_waiting(batch):
    contexts = [500 + 10 * (i % 20) for i in range(batch - 1)] + [6_000]
    how = cut(contexts)
    assert max(parts(6_000, how)) <= 512
    assert max(len(parts(context, how)) for context in contexts[:-1]) <= 3


@given(st.integers(1, 256), st.sampled_from([2, 400, 8_000]), st.randoms(use_true_random=False))
def test_a_part_has_a_processor_to_itself_only_where_there_is_one_for_each(batch, longest, rng):
    contexts = [rng.randint(1, longest) for _ in range(batch)]
    how = cut(contexts)
    programs = sum(len(parts(context, how)) for context in contexts) * SMALL.kv_heads
    if (how.streamed and not is_light(how)) or (how.tile, how.stages, how.ahead) == ALONE:
        assert programs <= SLACK * PROCESSORS
    elif is_light(how) and programs > LIGHT_MOST * PROCESSORS:
        fair = sum(contexts) * SMALL.kv_heads / PROCESSORS
        assert max(tokens for context in contexts for tokens in parts(context, how)) <= max(512, fair / 2)


@pytest.mark.parametrize("batch", [40, 48, 64])
def test_with_up_to_two_contexts_for_each_processor_as_much_is_fetched_at_once_as_it_can_hold(batch):
    """In turns, that is: 64 contexts of 16,000 tokens took a fifth longer with two of them side by side."""
    how = cut([16_000] * batch, replace(SMALL, kv_heads=4))
    assert how.splits == 1
    kilobytes = how.tile * how.stages * 2 * SMALL.head_dim * 2 >> 10
    assert 227 // 2 < kilobytes <= 227


def test_a_single_long_context_is_read_by_half_the_chip_at_least():
    assert len(parts(8_000, cut([8_000]))) * SMALL.kv_heads >= 62


def test_short_parts_that_have_a_processor_to_themselves_go_through_a_ring_and_long_ones_do_not():
    """Steps of 1.5B with 1 and 4 sequences of 1,000 tokens took 6 % and 7 % less time; those with 48 and 64, each of
    them one part, 9 % and 5 % more."""
    assert all(cut([1_000] * batch).streamed for batch in (1, 2, 4))
    assert not any(cut([4_000] * batch).streamed for batch in (48, 64))
    assert cut([4_000]).streamed
    assert not cut([1_000], streams=False).streamed, "where there is no such kernel"
    wide, narrow = cut([1_000]), cut([1_000], NARROW)
    assert wide.stages * SMALL.head_dim == narrow.stages * 64


@pytest.mark.parametrize(("batch", "context"), [(8, 4_000), (16, 4_000), (1, 16_000), (4, 16_000)])
def test_parts_that_are_a_little_too_long_for_one_ring_are_halved_and_go_through_two(batch, context):
    """Steps of 1.5B took 4, 5, 4 and 4 % less time so. Those of 0.5B, whose heads are half as wide, took 2 % less
    with 16 of 4,000 tokens, but 9 and 15 % more with 1 and 4 of 16,000."""
    how = cut([context] * batch)
    assert is_light(how)
    assert max(parts(context, how)) <= 512
    assert LIGHT_MOST * how.tile * how.stages * 2 * 128 * 2 <= 227 << 10
    narrow = cut([context] * batch, NARROW)
    assert not is_light(narrow)
    assert narrow.splits < how.splits
    assert not is_light(cut([context] * batch, streams=False))
    without = cut([context] * batch, most=how.splits // 2)
    assert not is_light(without), "where there is no room for the sums of so many"


FILLED = {
    300: {48: 4},
    500: {32: 3, 48: 4},
    1_000: {16: 6, 24: 4, 32: 6, 48: 4, 64: 3},
    2_000: {8: 12, 32: 6},
    4_000: {4: 24},
}
"""By context, then by contexts: parts of each."""


@pytest.mark.parametrize(
    ("context", "batch", "splits"), [(c, *known) for c in FILLED for known in FILLED[c].items()]
)
def test_parts_take_all_places_that_light_rings_have_or_half_of_them(context, batch, splits):
    """Steps of 1.5B took 3.7, 4.4, 1.8, 2.4, 0, 1.8, 2.7, -0.3, 1.8, 1 and 1.3 % less time than with one part, or
    with a power of two of them, the fifth being one; with adapters, 32 of 600 tokens took 4 % more, 48 and 64 of them
    3 and 0.5 % less."""
    how = cut([context] * batch)
    assert is_light(how)
    assert how.splits == splits
    programs = batch * splits * SMALL.kv_heads
    assert programs in range(int(0.96 * LIGHT_MOST / 2 * PROCESSORS), LIGHT_MOST * PROCESSORS + 1)
    assert cut([context] * batch, most=2).splits <= 2, "where there is no room for the sums of so many"


FILLED_NARROW = {
    500: {32: (3, 4), 64: (3, 2)},
    1_000: {16: (6, 4), 24: (4, 4), 32: (3, 4), 48: (4, 2), 64: (3, 2)},
    2_000: {16: (6, 4)},
    4_000: {4: (24, 4)},
}
"""Likewise: parts, and rounds in flight."""


@pytest.mark.parametrize(
    ("context", "batch", "wanted"), [(c, *known) for c in FILLED_NARROW for known in FILLED_NARROW[c].items()]
)
def test_with_heads_of_half_the_width_half_the_places_are_taken_with_twice_the_rounds(context, batch, wanted):
    """Steps of 0.5B took 7, 3, 3, 4, 2, 5, 5, 1 and 2 % less time so."""
    how = cut([context] * batch, NARROW)
    assert how.streamed
    assert (how.splits, how.stages) == wanted
    assert how.tile == LIGHT[0]


@pytest.mark.parametrize(("batch", "context"), [(4, 1_000), (8, 1_000), (16, 1_000), (1, 4_000)])
def test_short_parts_leave_room_for_the_kernels_that_come_next(batch, context):
    """Steps of 1.5B took 3, 9, 3 and 3 % less time so. With few parts they took more: 1 % with 32 of them."""
    assert is_light(cut([context] * batch))
    assert not is_light(cut([1_000]))


@pytest.mark.parametrize(
    ("batch", "context", "splits"), [(96, 1_000, 2), (96, 4_000, 2), (128, 600, 1), (160, 4_000, 1)]
)
def test_more_contexts_than_processors_are_all_begun_at_once_through_rings_beside_each_other(
    batch, context, splits
):
    """Steps of 1.5B took 3.5, 6, 1.7 and 2.8 % less time so."""
    how = cut([context] * batch)
    assert is_light(how)
    assert how.splits == splits
    assert batch * splits * SMALL.kv_heads <= LIGHT_MOST * PROCESSORS
    assert not cut([600] * 96).streamed, "short ones are better left whole"


UNEVEN = {
    "16 short": ([105 + 25 * i for i in range(16)], 128),
    "4, one long": ([2_408, 300, 400, 200], 128),
    "16, one long": ([2_192] + [105 + 25 * i for i in range(15)], 128),
    "32, two long": ([3_188, 1_500] + [105 + 13 * i for i in range(30)], 128),
    "96 short": ([105 + 4 * i for i in range(96)], 256),
    "256, ten long": ([1_800] * 10 + [105 + 1.5 * i for i in range(246)], 256),
    "48 long": ([800 + 110 * i for i in range(48)], 1024),
    "24 long": ([800 + 220 * i for i in range(24)], 512),
    "64 long": ([800 + 80 * i for i in range(64)], 512),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_contexts_go_through_rings_in_parts_that_were_measured_to_be_fastest(name):
    """Steps of 1.5B with such contexts took 0, 5, 4, 5, 2, 4, 5, 6 and 9 % less time than with two parts on a
    processor at most."""
    contexts, part = UNEVEN[name]
    how = cut([round(context) for context in contexts])
    assert how.part == part
    assert is_light(how)
    assert not is_light(cut([round(context) for context in contexts], streams=False))


def test_few_short_contexts_have_a_ring_each_that_holds_all_of_a_part():
    """A step of 1.5B with 4 of them took 4 % less time than through light ones."""
    how = cut([100, 200, 300, 490])
    assert how.streamed
    assert not is_light(how)
    assert how.tile * how.stages >= how.part == 128
