"""The interference table against what was measured, and what runs have learned of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.graph.interference import (
    CORES,
    H200,
    LEVELS,
    Felt,
    Interference,
    Occupant,
    Signature,
    at,
    best_shares,
    merely_divided,
    side_by_side,
    undisturbed,
)

SHARING: list[Signature] = ["compute", "bulk", "tail"]

MEASURED = [
    # what runs, its share, its neighbour, the neighbour's share, the speed measured on an H200
    ("tail", 6 / 16, "compute", 10 / 16, 0.78),
    ("compute", 10 / 16, "tail", 6 / 16, 0.56),
    ("tail", 4 / 16, "compute", 12 / 16, 0.71),
    ("compute", 12 / 16, "tail", 4 / 16, 0.62),
    ("bulk", 8 / 16, "compute", 8 / 16, 0.72),
    ("compute", 8 / 16, "bulk", 8 / 16, 0.51),
    ("bulk", 4 / 16, "compute", 12 / 16, 0.63),
    ("compute", 12 / 16, "bulk", 4 / 16, 0.59),
    ("tail", 0.5, "tail", 0.5, 0.68),
    ("bulk", 0.5, "bulk", 0.5, 0.67),
    ("tail", 0.5, "bulk", 0.5, 0.57),
    ("compute", 0.5, "compute", 0.5, 0.53),
]


@pytest.mark.parametrize(("kind", "share", "other", "others_share", "speed"), MEASURED)
def test_measured_pairs_come_out_as_measured(
    kind: Signature, share: float, other: Signature, others_share: float, speed: float
) -> None:
    predicted = H200.speed(Occupant(kind, share), [Occupant(other, others_share)])
    assert predicted == pytest.approx(speed, rel=0.1)


SEEN: list[tuple[Signature, list[Signature], float]] = [
    # what runs, beside what, its speed in whole runs of `gpu_multiplex.py`, by least squares over their sub-stages
    ("tail", ["bulk", "tail"], 0.48),
    ("tail", ["bulk", "bulk"], 0.55),
    ("tail", ["bulk", "bulk", "tail"], 0.35),
    ("tail", ["bulk", "tail", "tail"], 0.39),
    ("bulk", ["bulk", "tail"], 0.54),
    ("bulk", ["tail", "tail"], 0.58),
]


@pytest.mark.parametrize(("kind", "others", "speed"), SEEN)
def test_crowds_of_several_kinds_come_out_roughly_as_they_were_seen(
    kind: Signature, others: list[Signature], speed: float
) -> None:
    share = 1 / (1 + len(others))
    predicted = H200.speed(Occupant(kind, share), [Occupant(other, share) for other in others])
    assert predicted == pytest.approx(speed, rel=0.25)


def test_all_rollouts_have_what_a_training_leaves_where_they_are_not_held_to_shares() -> None:
    training, small, large = Occupant("compute", 0.75), Occupant("tail", 0.05), Occupant("tail", 0.2)
    assert H200.speed(small, [large, training]) == H200.speed(large, [small, training])
    assert H200.speed(large, [small, training]) < H200.speed(large, [small, Occupant("compute", 0.5)])
    assert H200.speed(small, [large]) == H200.speed(large, [small])
    held = replace(H200, holds_rollouts=True)
    assert held.speed(small, [large, training]) < held.speed(large, [small, training])


def test_alone_on_the_whole_worker_is_full_speed() -> None:
    for kind in SHARING:
        assert H200.speed(Occupant(kind, 1.0)) == 1.0


def test_waiting_for_tools_and_links_takes_nothing_and_loses_nothing() -> None:
    training = Occupant("compute", 1.0)
    assert H200.speed(training, [Occupant("host", 1.0), Occupant("link", 1.0)]) == 1.0
    assert H200.speed(Occupant("host", 1.0), [training]) == 1.0


def test_a_link_is_divided_among_those_who_use_it() -> None:
    link, training = Occupant("link", 1.0), Occupant("compute", 1.0)
    assert H200.speed(link, [training]) == 1.0
    assert H200.speed(link, [training, link, link]) == pytest.approx(1 / 3)
    assert side_by_side(H200, ("link", "tail", "link")) == (0.5, 1.0, 0.5)


@given(
    kind=st.sampled_from(SHARING),
    share=st.integers(1, LEVELS - 1),
    others=st.lists(st.sampled_from(SHARING), max_size=4),
)
def test_more_of_a_worker_never_makes_slower_and_more_neighbours_never_faster(
    kind: Signature, share: int, others: list[Signature]
) -> None:
    neighbours = [Occupant(other, 0.1) for other in others]
    small, large = Occupant(kind, share / LEVELS), Occupant(kind, (share + 1) / LEVELS)
    assert 0 < H200.speed(small, neighbours) <= H200.speed(large, neighbours) <= 1
    assert H200.speed(small, [*neighbours, Occupant("tail", 0.1)]) <= H200.speed(small, neighbours)


@given(factor=st.floats(0.01, 100), share=st.integers(1, LEVELS))
def test_what_runs_have_learned_of_a_crowd_is_a_factor_of_its_speed_alone(factor: float, share: int) -> None:
    tail, training = Occupant("tail", share / LEVELS), Occupant("compute", 0.75)
    table = replace(H200, learned={("tail", ("compute",)): Felt(factor, 1.0)})
    prior = H200.speed(tail, [training])
    assert table.speed(tail, [training]) == pytest.approx(min(1.0, factor * prior))
    assert table.speed(tail, [training, Occupant("host", 1.0)]) == table.speed(tail, [training])
    for others in ([], [Occupant("bulk", 0.75)], [training, training]):
        assert table.speed(tail, others) == H200.speed(tail, others)


def test_who_loses_next_to_nothing_to_a_neighbour_is_undisturbed_and_who_gains_divides_more_than_there_is() -> (
    None
):
    def cores(factor: float) -> Interference:
        return replace(CORES, learned={("compute", ("compute",)): Felt(factor, 1.0)})

    assert undisturbed(cores(0.97))
    assert merely_divided(cores(0.97))
    assert not undisturbed(cores(0.9))
    assert undisturbed(cores(1.6))
    assert not merely_divided(cores(1.6))
    assert not undisturbed(H200)


def test_a_tail_beside_training_gets_a_small_share_and_both_gain() -> None:
    tail, training = best_shares(H200, ("tail", "compute"), (1.0, 1.0))
    assert tail + training == 1
    assert tail < 0.5
    total = H200.speed(Occupant("tail", tail), [Occupant("compute", training)]) + H200.speed(
        Occupant("compute", training), [Occupant("tail", tail)]
    )
    assert total > 1.2


@given(kinds=st.lists(st.sampled_from(SHARING), min_size=1, max_size=6))
def test_shares_are_a_division_of_the_worker(kinds: list[Signature]) -> None:
    shares = best_shares(H200, tuple(kinds), (1.0,) * len(kinds))
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) > 0


@pytest.mark.parametrize("kinds", [("tail", "compute", "tail", "compute"), ("bulk", "compute", "bulk")])
def test_those_who_do_alike_have_alike_where_that_costs_next_to_nothing(kinds: tuple[Signature, ...]) -> None:
    shares = best_shares(H200, kinds, (1.0,) * len(kinds))
    assert all(len({s for k, s in zip(kinds, shares, strict=True) if k == kind}) == 1 for kind in kinds)


def test_cores_are_exactly_shared() -> None:
    assert CORES.speed(Occupant("compute", 0.5), [Occupant("tail", 0.5)]) == 0.5


def test_a_curve_is_straight_between_points_and_level_beyond() -> None:
    curve = ((0.0, 0.0), (1.0, 2.0))
    assert [at(curve, x) for x in (-1.0, 0.0, 0.25, 1.0, 3.0)] == [0.0, 0.0, 0.5, 2.0, 2.0]
