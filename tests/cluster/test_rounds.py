"""Inside a group: the forms by which it is planned, against orders rolled forward, and the round-robin theorem."""

from __future__ import annotations

import itertools

import pytest
from cluster_world import play, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.cluster.group_turns import GroupTurns
from jigsawrl.cluster.rounds import jobs_of, judged, keeps, ready_seconds
from jigsawrl.phases.rounds import Turn, cycle, round_seconds, unsaturated
from jigsawrl.phases.turns import AS_READY, ROLLOUT, ROUND_ROBIN, PhasedJob

SECONDS = st.integers(10, 600)
PHASES = st.tuples(SECONDS, SECONDS)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[Turn], list[tuple[int, ...]], bool]:
    phases = draw(st.lists(PHASES, min_size=2, max_size=4))
    nodes = draw(st.integers(1, 3))
    shared = draw(st.booleans())
    turns = [turn(f"job {k}", float(r), float(t)) for k, (r, t) in enumerate(phases)]
    return turns, [(draw(st.integers(0, nodes - 1)),) for _ in turns], shared


@settings(max_examples=60)
@given(groups())
def test_a_round_takes_the_longest_job_or_the_busiest_node(group):
    turns, places, shared = group
    if shared:
        places = [(0,) for _ in turns]
    expected = round_seconds(turns, places, shared)
    for seconds in play(turns, places, shared, "round-robin").values():
        assert seconds <= expected * 1.001


@settings(max_examples=60)
@given(groups())
def test_as_ready_nobody_takes_longer_than_the_bound(group):
    turns, places, shared = group
    if shared:
        places = [(0,) for _ in turns]
    played = play(turns, places, shared, "as-ready")
    for mine, bound in zip(turns, ready_seconds(turns, places, shared), strict=True):
        assert mine.step * 0.999 <= played[mine.name] <= bound * 1.03


@settings(max_examples=60)
@given(groups(), st.floats(1.0, 3.0))
def test_the_test_of_limits_agrees_with_the_bounds(group, slowdown):
    turns, places, shared = group
    limited = [turn(t.name, t.rollout, t.training, limit=slowdown * t.step) for t in turns]
    whole = round_seconds(limited, places, shared)
    ready = ready_seconds(limited, places, shared)
    both = whole <= min(t.limit for t in limited) or all(
        s <= t.limit for s, t in zip(ready, limited, strict=True)
    )
    near = any(abs(s / t.limit - 1) < 1e-6 for s in (whole, *ready) for t in limited)
    assert near or keeps(limited, places, shared) == both


def use_of(order: tuple[int, ...], turns: list[Turn]) -> float:
    """Busy part of both pools when jobs run in this cyclic order on one rollout node and one training node.

    The order names jobs as often as they run in a cycle; a node waits rather than let someone overtake.
    """
    rollout_free = training_free = 0.0
    ready = [0.0] * len(turns)
    ends = []
    for _ in range(30):
        for k in order:
            start = max(rollout_free, ready[k])
            rollout_free = start + turns[k].rollout
            training = max(training_free, rollout_free)
            training_free = ready[k] = training + turns[k].training
        ends.append(training_free)
    period = (ends[-1] - ends[9]) / (len(ends) - 10)
    return sum(turns[k].step for k in order) / period


@settings(max_examples=60)
@given(st.lists(PHASES, min_size=2, max_size=3), st.data())
def test_no_other_cyclic_schedule_of_an_unsaturated_group_beats_round_robin(phases, data):
    """The paper's theorem, by trying all orders, with every job once in a cycle and with any one of them twice."""
    long = float(sum(max(each) for each in phases))
    turns = [turn("long", long, long), *(turn(f"{k}", float(r), float(t)) for k, (r, t) in enumerate(phases))]
    assert unsaturated(turns, [(0,)] * len(turns), shared=False)
    round_robin = sum(each.step for each in turns) / cycle(turns)
    jobs = tuple(range(len(turns)))
    assert use_of(jobs, turns) == pytest.approx(round_robin)
    for again in ((), (data.draw(st.sampled_from(jobs)),)):
        for order in set(itertools.permutations((*jobs, *again))):
            if order[0] == 0:  # a cycle has no beginning
                assert use_of(order, turns) <= round_robin * (1 + 1e-9)


def test_two_short_jobs_twice_each_can_beat_round_robin():
    """Which the theorem's proof does not look at: their second runs overlap."""
    turns = [turn("long", 74, 74), turn("a", 10, 37), turn("b", 37, 10)]
    assert unsaturated(turns, [(0,)] * 3, shared=False)
    assert use_of((0, 1, 2), turns) == pytest.approx(242 / 148)
    assert use_of((0, 2, 1, 2, 1), turns) == pytest.approx(336 / 205)


def test_two_balanced_jobs_fill_each_others_gaps():
    turns = [turn("a", 100, 100, limit=210), turn("b", 100, 100, limit=210)]
    verdict = judged(turns, [(0,), (0,)], shared=False)
    assert (verdict.order, verdict.seconds) == ("round-robin", (200.0, 200.0))


def test_a_short_job_goes_round_more_often_than_a_long_one():
    turns = [turn("long", 1000, 200, limit=1500), turn("short", 100, 50, limit=200)]
    verdict = judged(turns, [(0,), (1,)], shared=False)
    assert verdict.order == "as-ready"
    assert verdict.seconds[0] == 1250
    assert 150 < verdict.seconds[1] < 190
    assert not keeps(turns, [(0,), (0,)], shared=False)


def test_a_tail_lets_the_next_rollout_start():
    whole = [turn("a", 100, 20), turn("b", 100, 20)]
    tails = [turn("a", 100, 20, hold=60), turn("b", 100, 20, hold=60)]
    assert round_seconds(whole, [(0,), (0,)], shared=False) == 200
    assert round_seconds(tails, [(0,), (0,)], shared=False) == 120
    assert play(tails, [(0,), (0,)], False, "round-robin") == {"a": 120, "b": 120}


def seated(names: str) -> list[PhasedJob]:
    """On one rollout node and one training node."""
    return jobs_of([turn(name, 100, 20, hold=60) for name in names], [(0,)] * len(names), False, 0.0)


def starts(group: GroupTurns) -> list[tuple[str, int]]:
    return [(job.name, job.phase) for job in group.start(0.0)]


def test_first_come_is_first_served_and_turns_are_kept():
    for order, first in ((AS_READY, "b"), (ROUND_ROBIN, "a")):
        a, b = seated("ab")
        group = GroupTurns()
        group.seat(order, [b], 0.0)
        group.seat(order, [a, b], 0.0)
        assert starts(group) == [(first, ROLLOUT)]


def test_rounds_go_on_when_a_job_joins_in_the_middle():
    group = GroupTurns()
    group.seat(ROUND_ROBIN, seated("ab"), 0.0)
    assert starts(group) == [("a", ROLLOUT)]
    group.jobs["a"].held = 0  # its tail goes on without the node
    assert starts(group) == [("b", ROLLOUT)]
    group.seat(ROUND_ROBIN, seated("abc"), 0.0)
    assert starts(group) == []
    group.end("b", 0.0)
    assert starts(group) == [("c", ROLLOUT)], "and not the training of b: that of a is before"


@given(st.lists(st.sampled_from("abc"), min_size=30, max_size=30), st.sets(st.integers(0, 200)))
def test_whose_turn_it_is_does_not_depend_on_how_often_the_same_jobs_are_seated(
    ends: list[str], moments: set[int]
) -> None:
    """Whoever is ready goes on at once; the phases that run end in any order."""

    def started(again: set[int]) -> list[tuple[str, int]]:
        group = GroupTurns()
        group.seat(ROUND_ROBIN, seated("abc"), 0.0)
        log = starts(group)
        for moment, wish in enumerate(ends):
            if moment in again:
                group.seat(ROUND_ROBIN, seated("abc"), 0.0)
            running = [job.name for job in group.jobs.values() if job.ends is not None]
            group.end(wish if wish in running else min(running), 0.0)
            log += starts(group)
        return log

    assert started(moments) == started(set())
