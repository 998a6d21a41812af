"""Who sleeps to make room, and who waits for it instead: what a scheduler decides, without processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph.planning import WORKER, job

from jigsawrl.graph.interference import H200
from jigsawrl.graph.outlook import Outlook
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.state import Action, Start, Swap, Wait
from jigsawrl.runtime.memory import AGAIN, FIRST
from jigsawrl.runtime.messages import Began, Loads, Over
from jigsawrl.runtime.mind import Due, Gone, Held, Mind

STEPS = 4


def foreseen(name: str) -> Outlook:
    """Of a pipeline whose actors keep all of their state, and that needs as much again to train."""
    made = job(name, parameters=3e9)
    shape = replace(made.shape, whole=True, old_logprobs=False, cache_tokens=1000, micro_batch_tokens=300_000)
    return Outlook(shape, made.costs, WORKER, made.forecast)


SIZES = foreseen("a").memory(1, 1, 1)
LIMIT = SIZES.training + SIZES.awake + (SIZES.training + SIZES.awake) / 2
"""Bytes that two may train in, or one while two others are awake: not two while a third is."""


def three() -> Mind:
    """A trains, and b and c are at their rollouts."""
    mind = Mind(POLICIES["concurrent"], H200, 1, LIMIT, units=16)
    for name in "abc":
        mind.join(name, foreseen(name))
        mind.hear(name, Loads())
    mind.decide()
    for name in "abc":
        mind.hear(name, Began(STEPS, 0))
    mind.decide()
    rolled_out(mind, "a", 10.0)
    assert started(mind.decide()) == ["a"]
    assert mind.runs("a") == ("training", 1)
    return mind


def rolled_out(mind: Mind, name: str, now: float) -> None:
    mind.world.advance(now)
    mind.hear(name, Over("rollout", 1, (now,), 1, (200,) * 128))


def trained(mind: Mind, name: str, now: float) -> None:
    mind.world.advance(now)
    mind.hear(name, Over("training", 1, (1.0,), 1))


def started(actions: list[Action]) -> list[str]:
    return [action.pipeline for action in actions if isinstance(action, Start)]


def waits(actions: list[Action]) -> list[float]:
    return [action.until for action in actions if isinstance(action, Wait)]


def asleep(actions: list[Action]) -> list[str]:
    return [action.pipeline for action in actions if isinstance(action, Swap) and action.out]


def left_of(mind: Mind, name: str) -> float:
    (lane,) = mind.world.pipelines[name].lanes
    return mind.world.lanes.seconds_left(mind.world.lanes.lanes[lane])


def paused_third(mind: Mind) -> None:
    """C has nothing to do for a while, by somebody's wish, and keeps its state."""
    mind.hear("c", Held(wait=True))
    rolled_out(mind, "c", mind.world.lanes.now)
    assert started(mind.decide()) == []


def soon(mind: Mind) -> float:
    """When a's training has less to go than the first sleep of another takes."""
    return mind.world.lanes.now + left_of(mind, "a") - SIZES.awake / FIRST / 2


def test_nobody_is_put_to_sleep_for_room_that_comes_sooner_by_itself() -> None:
    mind = three()
    paused_third(mind)
    asked = soon(mind)
    rolled_out(mind, "b", asked)
    actions = mind.decide()
    assert (started(actions), asleep(actions)) == ([], [])
    assert waits(actions) == pytest.approx([asked + SIZES.awake / FIRST])
    assert mind.world.pipelines["b"].status == "ready"
    trained(mind, "a", asked + 1.0)
    actions = mind.decide()
    assert sorted(started(actions)) == ["a", "b"]
    assert (asleep(actions), waits(actions)) == ([], [])


def test_what_takes_longer_than_a_sleep_is_not_waited_for() -> None:
    mind = three()
    paused_third(mind)
    assert left_of(mind, "a") > SIZES.awake / FIRST
    rolled_out(mind, "b", mind.world.lanes.now)
    actions = mind.decide()
    assert (started(actions), asleep(actions), waits(actions)) == (["b"], ["c"], [])


def test_who_was_asleep_before_falls_asleep_sooner_than_room_comes() -> None:
    mind = three()
    paused_third(mind)
    (memory,) = mind.rooms.memories
    memory.slept.add("c")
    rolled_out(mind, "b", soon(mind))
    assert left_of(mind, "a") > SIZES.awake / AGAIN
    actions = mind.decide()
    assert (started(actions), asleep(actions)) == (["b"], ["c"])


def test_nobody_waits_for_room_longer_than_a_sleep_would_have_taken() -> None:
    mind = three()
    paused_third(mind)
    rolled_out(mind, "b", soon(mind))
    (until,) = waits(mind.decide())
    mind.world.advance(until)  # a's training goes on and on
    mind.hear("", Due())
    actions = mind.decide()
    assert (started(actions), asleep(actions)) == (["b"], ["c"])


def test_meanwhile_another_takes_the_room_that_there_is() -> None:
    mind = three()
    rolled_out(mind, "c", mind.world.lanes.now)
    mind.decide()
    asked = soon(mind)
    mind.world.advance(asked)
    mind.world.drop("c")  # its training is over as well
    mind.hear("c", Over("training", 1, (1.0,), 1))
    rolled_out(mind, "b", asked)
    actions = mind.decide()
    assert (started(actions), asleep(actions)) == (["c"], [])
    assert mind.runs("c") == ("rollout", 2)


def test_one_that_comes_again_with_new_processes_has_never_slept() -> None:
    mind = three()
    (memory,) = mind.rooms.memories
    memory.sleeps("c")
    assert memory.seconds(["c"]) == SIZES.awake / AGAIN
    mind.hear("c", Gone())
    assert memory.seconds(["c"]) == SIZES.awake / FIRST
