"""The search for the cheapest choice of sets that takes every row once."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.cluster.cover import Column, cheaper

ROWS = 6
"""The last one need not be taken."""


def columns(draw: st.DrawFn) -> list[Column]:
    masks = draw(st.lists(st.integers(1, 2 ** (ROWS - 1) - 1), max_size=9))
    alone = [1 << row for row in range(ROWS - 1)]
    seats = [draw(st.booleans()) for _ in masks]
    sets = [*alone, *(mask | seat << (ROWS - 1) for mask, seat in zip(masks, seats, strict=True))]
    return [Column(mask, float(draw(st.integers(1, 30)))) for mask in sets]


def cheapest(some: list[Column]) -> float:
    """By looking at every choice."""
    musts = 2 ** (ROWS - 1) - 1
    return min(
        sum(each.cost for each in choice)
        for count in range(1, ROWS)
        for choice in combinations(some, count)
        if sum(each.mask.bit_count() for each in choice) == _union(choice).bit_count()
        and _union(choice) & musts == musts
    )


def _union(choice: tuple[Column, ...]) -> int:
    taken = 0
    for each in choice:
        taken |= each.mask
    return taken


@settings(max_examples=60, deadline=None)
@given(st.composite(columns)())
def test_no_choice_is_cheaper_than_the_one_that_is_found(some: list[Column]) -> None:
    best = cheapest(some)
    chosen = cheaper(some, ROWS - 1, ROWS, best + 0.5, 10_000)
    assert chosen is not None
    assert sum(some[k].cost for k in chosen) == best
    masks = [some[k].mask for k in chosen]
    assert sum(mask.bit_count() for mask in masks) == _union(tuple(some[k] for k in chosen)).bit_count()


@settings(max_examples=30, deadline=None)
@given(st.composite(columns)())
def test_nothing_is_found_where_nothing_is_cheaper(some: list[Column]) -> None:
    assert cheaper(some, ROWS - 1, ROWS, cheapest(some), 10_000) is None
