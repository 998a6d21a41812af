"""By need: whose step must be done first goes first, and nodes are kept free for those who cannot wait."""

from __future__ import annotations

import random

from cluster_world import play, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.cluster.group_turns import GroupTurns
from jigsawrl.cluster.rounds import by_need_seconds, jobs_of, likely
from jigsawrl.phases.rounds import Places, Turn
from jigsawrl.phases.turns import BY_NEED

LENGTHS = (158.0, 247.0, 349.0, 431.0, 676.0, 1448.0)


def some_group(rng: random.Random) -> tuple[list[Turn], Places]:
    """Jobs of unlike lengths that may be slowed down by unlike factors, and have room for that."""
    while True:
        count = rng.randint(2, 4)
        turns = []
        for k in range(count):
            step = rng.choice(LENGTHS) * rng.uniform(0.9, 1.1)
            rollout = step * rng.choice((0.5, 0.75))
            turns.append(
                turn(f"{k}", rollout, step - rollout, 0.85 * rollout, limit=rng.uniform(1.02, 2) * step)
            )
        places = [(rng.randrange(count),) for _ in turns]
        used = {node: number for number, node in enumerate(sorted({node for (node,) in places}))}
        places = [(used[node],) for (node,) in places]
        parts = [sum(t.training / t.limit for t in turns)]
        parts += [
            sum(t.hold / t.limit for t, (mine,) in zip(turns, places, strict=True) if mine == node)
            for node in used.values()
        ]
        if max(parts) < 0.95:
            return turns, places


def worst(turns: list[Turn], seconds: dict[str, float]) -> float:
    return max(seconds[each.name] / each.limit for each in turns)


def test_a_node_is_kept_free_for_who_comes_soon_and_cannot_wait():
    """The other's trainings would often be in the way."""
    turns = [turn("tight", 1000, 100, limit=1120), turn("loose", 100, 400, limit=900)]
    places = [(0,), (1,)]
    assert worst(turns, play(turns, places, False, "as-ready", rng=random.Random(0))) > 1.05
    assert worst(turns, play(turns, places, False, "by-need", rng=random.Random(0))) <= 1.0


def test_who_may_be_slowed_down_less_goes_first():
    turns = [turn("tight", 300, 100, limit=440), *(turn(f"{k}", 200, 100, limit=900) for k in range(3))]
    places = [(k,) for k in range(4)]
    ready = play(turns, places, False, "as-ready", rng=random.Random(0))
    by_need = play(turns, places, False, "by-need", rng=random.Random(0))
    assert by_need["tight"] <= 440 < ready["tight"]


def test_what_is_foreseen_is_what_happens():
    """With other durations than those that are foreseen, and for longer."""
    rng = random.Random(0)
    kept = first_come = 0
    for _ in range(120):
        turns, places = some_group(rng)
        planned = by_need_seconds(turns, places, False)
        if max(s / t.limit for s, t in zip(planned, turns, strict=True)) <= 1:
            kept += 1
            assert worst(turns, play(turns, places, False, "by-need", 40, random.Random(1))) < 1.06
            first_come += worst(turns, play(turns, places, False, "as-ready", 40, random.Random(1))) < 1.02
    assert kept > 40
    assert kept > 1.3 * first_come  # groups that would not do, first come, first served


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.booleans())
def test_everyone_goes_on_even_where_limits_cannot_be_kept(seed, shared):
    rng = random.Random(seed)
    turns, places = some_group(rng)
    tight = [turn(t.name, t.rollout, t.training, t.hold, limit=1.05 * t.step) for t in turns]
    nodes = [(0,)] * len(tight)
    seconds = play(tight, nodes if shared else places, shared, "by-need", rounds=6)
    assert max(seconds.values()) < 20 * sum(t.step for t in tight)


def test_the_order_that_keeps_all_limits_is_planned_and_the_faster_one_if_both_do():
    round_robin = [turn("a", 100, 100, limit=204), turn("b", 100, 100, limit=204)]
    assert likely(round_robin, [(0,), (0,)], shared=False).order == "round-robin"
    unlike = [turn("long", 1000, 300, limit=1450), turn("short", 100, 50, limit=250)]
    assert likely(unlike, [(0,), (1,)], shared=False).order == "by-need"


@given(st.lists(st.sampled_from("abc"), min_size=30, max_size=30), st.sets(st.integers(0, 200)))
def test_who_goes_next_does_not_depend_on_how_often_the_same_jobs_are_seated(ends, moments):
    turns = [turn("a", 100, 50, limit=170), turn("b", 60, 60, limit=200), turn("c", 30, 90, limit=240)]

    def started(again: set[int]) -> list[tuple[str, int]]:
        group, log = GroupTurns(), []
        for moment in range(len(ends) + 1):
            now = 10.0 * moment
            if moment == 0 or moment in again:
                group.seat(BY_NEED, jobs_of(turns, [(0,)] * 3, False, now), now)
            if moment:
                running = [job.name for job in group.jobs.values() if job.ends is not None]
                wish = ends[moment - 1]
                group.end(wish if wish in running else min(running), now)
            log += [(job.name, job.phase) for job in group.start(now)]
        return log

    assert started(moments) == started(set())
