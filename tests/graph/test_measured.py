"""From what was measured of sharing a GPU to the table that policies divide it by."""

from __future__ import annotations

import pytest
from test_cost import pass_seconds

from jigsawrl.graph.gpu import gpu_costs
from jigsawrl.graph.hardware import hardware_named
from jigsawrl.graph.interference import (
    H200,
    LEVELS,
    Interference,
    Occupant,
    Signature,
    best_shares,
    side_by_side,
)
from jigsawrl.graph.interference_file import table_in, table_out
from jigsawrl.graph.measured import ALL, Measured, Side, crowds, sizes, table_from
from jigsawrl.graph.shape import ModelShape

TAIL, BULK, PREFILL, WHOLE = ("tail", ALL), ("bulk", ALL), ("prefill", ALL), ("compute", ALL)


def held(level: int) -> Side:
    return "compute", level


MEASURED: Measured = {
    (TAIL,): (1.0,),
    (BULK,): (1.0,),
    (WHOLE,): (1.0,),
    (held(4),): (0.40,),
    (held(8),): (0.74,),
    (held(10),): (0.82,),
    (held(12),): (0.88,),
    (held(14),): (0.81,),
    (TAIL, held(8)): (0.82, 0.51),
    (TAIL, held(10)): (0.78, 0.56),
    (TAIL, held(12)): (0.71, 0.62),
    (TAIL, held(14)): (0.65, 0.63),
    (TAIL, WHOLE): (0.51, 0.70),
    (BULK, held(8)): (0.72, 0.51),
    (BULK, held(10)): (0.66, 0.57),
    (BULK, held(12)): (0.63, 0.59),
    (BULK, held(14)): (0.56, 0.63),
    (BULK, WHOLE): (0.48, 0.71),
    (TAIL, TAIL): (0.68, 0.68),
    (BULK, BULK): (0.67, 0.67),
    (TAIL, BULK): (0.57, 0.74),
    (WHOLE, WHOLE): (0.54, 0.52),
    (PREFILL,): (1.0,),
    (PREFILL, held(8)): (0.60, 0.45),
    (PREFILL, held(10)): (0.56, 0.50),
    (PREFILL, held(12)): (0.52, 0.53),
    (PREFILL, held(14)): (0.50, 0.54),
    (PREFILL, WHOLE): (0.48, 0.55),
    (TAIL, PREFILL): (0.45, 0.70),
    (BULK, PREFILL): (0.50, 0.65),
    (PREFILL, PREFILL): (0.53, 0.53),
    (TAIL, PREFILL, held(10)): (0.40, 0.40, 0.40),
    (TAIL, BULK, held(10)): (0.40, 0.53, 0.52),
    (TAIL, WHOLE, WHOLE): (0.41, 0.46, 0.47),
    (BULK, WHOLE, WHOLE): (0.37, 0.45, 0.45),
    (TAIL, TAIL, TAIL, TAIL): (0.45, 0.45, 0.45, 0.45),
    (BULK, BULK, BULK, BULK): (0.36, 0.36, 0.36, 0.36),
    (TAIL, BULK, BULK, BULK): (0.33, 0.42, 0.42, 0.42),
    (BULK, TAIL, TAIL, TAIL): (0.42, 0.42, 0.42, 0.42),
    (TAIL, TAIL, TAIL, held(10)): (0.41, 0.41, 0.41, 0.50),
    (BULK, BULK, BULK, held(10)): (0.30, 0.30, 0.30, 0.45),
}
"""One H200, a model of 1.5B, the last six from a probe with 0.5B; those of prefill are made up."""


@pytest.fixture(scope="module")
def table() -> Interference:
    return table_from(MEASURED, "h200", "a test")


def speeds(table: Interference, *there: tuple[Signature, float]) -> list[float]:
    crowd = [Occupant(*each) for each in there]
    return [table.speed(one, crowd[:i] + crowd[i + 1 :]) for i, one in enumerate(crowd)]


def test_all_that_is_to_be_measured_makes_a_table():
    assert set(crowds(4, divisible=True)) == set(MEASURED)


def test_batches_of_all_sizes_are_measured_alone_and_in_the_pairs_that_count():
    assert list(sizes((TAIL,))) == list(sizes((BULK, WHOLE))) == list(sizes((TAIL, BULK))) == [0, 1, 2]
    assert list(sizes((BULK, held(10)))) == [0, 1, 2]
    for crowd in ((PREFILL,), (WHOLE,), (TAIL, held(12)), (TAIL, BULK, held(10)), (PREFILL, WHOLE)):
        assert list(sizes(crowd)) == [1]


@pytest.mark.parametrize("kind", ["tail", "prefill"])
@pytest.mark.parametrize("level", [8, 10, 12, 14])
def test_a_rollout_beside_a_training_is_as_fast_as_it_was_measured(table, level, kind):
    rolled, trained = speeds(table, (kind, 1 - level / LEVELS), ("compute", level / LEVELS))
    assert rolled == pytest.approx(MEASURED[(kind, ALL), held(level)][0], rel=0.02)
    assert trained == pytest.approx(MEASURED[(kind, ALL), held(level)][1], rel=0.15)


def test_where_prefill_was_not_measured_it_is_arithmetic():
    for others in ([], [("tail", 0.5)], [("prefill", 0.25), ("compute", 0.25)]):
        as_compute = [("compute" if kind == "prefill" else kind, share) for kind, share in others]
        assert speeds(H200, ("prefill", 0.5), *others) == speeds(H200, ("compute", 0.5), *as_compute)


@pytest.mark.parametrize("kind", ["tail", "bulk"])
@pytest.mark.parametrize("count", [2, 4])
def test_rollouts_side_by_side_are_as_fast_as_they_were_measured(table, kind, count):
    found = speeds(table, *[(kind, 1 / count)] * count)
    assert found == pytest.approx(MEASURED[((kind, ALL),) * count])


def test_what_three_rollouts_beside_a_training_felt_is_known(table):
    tails = [("tail", 0.125)] * 3
    assert speeds(table, *tails, ("compute", 10 / LEVELS)) == pytest.approx([0.41, 0.41, 0.41, 0.50])


def test_a_training_beside_tails_is_given_most_of_the_gpu_but_not_all(table):
    shares = best_shares(table, ("compute", "tail", "tail", "tail"), (1.0,) * 4)
    assert 0.5 <= shares[0] <= 0.75
    assert sum(side_by_side(table, ("compute", "tail", "tail", "tail"))) > 1.6


def test_eight_rollouts_get_little_more_done_than_four(table):
    four, eight = (sum(speeds(table, *[("tail", 1 / count)] * count)) for count in (4, 8))
    assert four < eight < 1.2 * four


def test_a_gpu_that_cannot_be_divided_has_a_table_as_well():
    few = {key: MEASURED[key] for key in crowds(4, divisible=False) if key in MEASURED}
    table = table_from(few | {(TAIL, BULK, WHOLE): (0.4, 0.5, 0.5)}, "a100", "a test")
    assert speeds(table, ("tail", 0.5), ("compute", 1.0))[0] < 0.51


def test_a_table_is_the_same_after_it_was_written_and_read(table):
    again = table_in(table_out(table), "a test")
    assert (again.alone, again.beside) == (table.alone, table.beside)
    assert set(again.learned) == set(table.learned)


def test_costs_that_nobody_has_measured_here_are_near_those_of_an_h200():
    small, large = ModelShape("0.5B", 0.494e9, 24, 896, 2, 64), ModelShape("1.5B", 1.54e9, 28, 1536, 2, 128)
    for model, one, many, gradients in ((small, 0.63e-3, 1.24e-3, 81e-3), (large, 1.42e-3, 2.03e-3, 180e-3)):
        costs = gpu_costs(model, hardware_named("h200"), 1)
        assert pass_seconds(costs.decoding, 1, 1000) == pytest.approx(one, rel=0.35)
        assert pass_seconds(costs.decoding, 64, 1000) == pytest.approx(many, rel=0.35)
        assert costs.token_pass_seconds("grad", 8192, 1024, 1) == pytest.approx(gradients, rel=0.5)
    for model, sequences, tokens, seconds in ((small, 64, 948, 7e-3), (large, 128, 1899, 18e-3)):
        costs = gpu_costs(model, hardware_named("h200"), 1)
        assert costs.prefill_seconds(tokens, 119, 1, sequences) == pytest.approx(seconds, rel=0.5)
